"""How the model is called: model(batch), model(**batch) or model(*batch)."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from torch import Tensor
from torch.nn import Module

from modelzoo_trainer.base.constraints import Call
from modelzoo_trainer.callback import Batch
from modelzoo_trainer.core.parts.requested_outputs import RequestedOutputs
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.model")

TEXTS: Final[Mapping[Call, str]] = {
    "batch": "model(batch)",
    "kwargs": "model(**batch)",
    "args": "model(*batch)",
}
_MAPPINGS: Final = re.compile(r"\b(?:dict|\w*Dict|\w*Mapping|\w*Batch|\w*BatchEncoding)\b")
_POSITIONAL: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
_OF_UNIONS: Final = frozenset({"None", "NoneType", "Optional", "Union"})
# What a module raises if it was called with wrong arguments.
_OF_ANOTHER_TYPE: Final = (AttributeError, IndexError, KeyError, TypeError, ValueError)


class ModelCalls:
    """Decide at the first batch of a dataloader how the model is called.

    If `model(batch)` works it is used, unless the parameters of `forward` are named like the keys
    of the batch; see `call_for`. A model that was trained with keywords also gets another batch
    as keywords, such as one without labels.

    Args:
        given: The user's choice; None = by the signature of the model's forward.

    Raises:
        ConfigError: If it is invalid.
    """

    def __init__(self, given: Call | None = None) -> None:
        if given is not None and given not in TEXTS:
            raise ConfigError(
                f"call_model must be "
                f"{', '.join(f'{name!r} for {text}' for name, text in TEXTS.items())}, or None to "
                f"follow the signature of the model's forward; got {given!r}."
            )
        self.given = given
        self._train: Call | None = None
        self._val: Call | None = None
        self._logged: set[Call] = set()
        self.requests = RequestedOutputs()

    def begin_training(self) -> None:
        """Decide again at the next training batch."""
        self._train = None

    def begin_validation(self) -> None:
        """Decide again at the next validation batch: its format may differ."""
        self._val = None

    def __call__(
        self, trainer: Trainer, batch: Batch, args: list[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Call the model and return its output.

        Args:
            trainer: The trainer.
            batch: The batch from the dataloader.
            args: The batch, or what `on_before_forward` has replaced it with; a single batch is
                unpacked if that was decided.
            kwargs: Empty, or set by `on_before_forward`.

        Raises:
            ConfigError: If the model cannot be called as chosen.
        """
        self.requests.update(trainer)
        call = self._train if trainer.val_iterator is None else self._val
        if call is None:
            call = self._decide(trainer, batch)
            if self.given and len(args) == 1 and args[0] is batch and not kwargs:
                _check(call, trainer.model, batch)
        if call != "batch":
            if len(args) == 1 and not kwargs and type(args[0]) is type(batch):
                args, kwargs = _unpacked(call, args[0])
            else:  # a callback has changed the arguments
                call = "batch"
        try:
            raw = trainer.compiled_model(*args, **kwargs)
        except Exception as error:
            is_of_hook = call == "batch" and (len(args) != 1 or kwargs)
            _note_call(trainer, error, batch, "hook" if is_of_hook else call)
            raise
        self.requests.check(trainer, raw)
        return raw

    def _decide(self, trainer: Trainer, batch: Batch) -> Call:
        is_training = trainer.val_iterator is None
        call = self.given or call_for(
            signature_of(trainer.model),
            batch,
            prefers_keywords=not is_training and self._train == "kwargs",
        )
        text = TEXTS[call]
        if is_training:
            self._train = call
        else:
            self._val = call
        if is_training or not trainer.is_fitting or trainer.model_call is None:
            trainer.model_call = text
        if call != "batch" and call not in self._logged:
            self._logged.add(call)
            why = "call_model" if self.given else f"the signature of {_name(trainer.model)}.forward"
            log.info("Calling the model as %s, according to %s.", text, why)
        return call


def signature_of(model: Module) -> inspect.Signature | None:
    """Return the signature of a model's forward, uncompiled; None = not known."""
    model = getattr(model, "_orig_mod", model)
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return None


def call_for(
    signature: inspect.Signature | None, batch: Batch, *, prefers_keywords: bool = False
) -> Call:
    """Return how a forward of this signature is called with a batch.

    * `kwargs`, if the batch is a mapping whose keys are arguments of forward, and forward cannot
      be called with one argument; or if it can, but all keys (at least two) are names of its
      parameters, including the first one. A single key suffices if its parameter is annotated as
      a tensor and there are others. With `prefers_keywords`, if forward accepts its keys.
    * `args`, if the batch is a tuple or list with as many items (at least two) as forward requires.
    * `batch` otherwise.
    """
    if signature is None:
        return "batch"
    if isinstance(batch, Mapping):
        has_names = prefers_keywords and _names_parameters(signature, batch)
        return "kwargs" if has_names or _asks_for_keywords(signature, batch) else "batch"
    if isinstance(batch, (tuple, list)) and _asks_for_positions(signature, batch):
        return "args"
    return "batch"


def _asks_for_keywords(signature: inspect.Signature, batch: Mapping[Any, Any]) -> bool:
    if not batch or not all(isinstance(key, str) for key in batch):
        return False
    if not _binds(signature, **dict.fromkeys(batch)):
        return False
    if not _binds(signature, None):
        return True
    named = _named(signature)
    first = next(iter(signature.parameters.values()))
    if first.name not in batch or not batch.keys() <= named:
        return False
    if len(batch) == 1:
        return len(named) > 1 and _is_tensor(first.annotation)
    return not _MAPPINGS.search(_text(first.annotation))


def _named(signature: inspect.Signature) -> set[str]:
    """Return the names of the parameters that may be given by keyword."""
    params = signature.parameters.values()
    return {p.name for p in params if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _names_parameters(signature: inspect.Signature, batch: Mapping[Any, Any]) -> bool:
    """Return whether the keys of a batch are parameters with which forward can be called."""
    is_text = all(isinstance(key, str) for key in batch)
    return (
        is_text
        and bool(batch)
        and batch.keys() <= _named(signature)
        and _binds(signature, **dict.fromkeys(batch))
    )


def _surplus_of(model: Module, batch: Batch) -> list[str]:
    """Return the keys that forward does not take, of a batch with others that it does."""
    signature = signature_of(model)
    if signature is None or not isinstance(batch, Mapping):
        return []
    is_open = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    named = _named(signature)
    if is_open or len(named) < 2 or not batch.keys() & named:
        return []
    return [str(key) for key in batch if key not in named]


def _how_to_drop(model: Module, surplus: list[str]) -> str:
    keys, are = ("key", "is") if len(surplus) == 1 else ("keys", "are")
    return (
        f"The {keys} {_first(map(repr, surplus))} {are} not a parameter of {_name(model)}.forward: "
        f"drop the {keys} in the dataset or the collate function, or give forward **kwargs."
    )


def _asks_for_positions(signature: inspect.Signature, batch: Sequence[Any]) -> bool:
    params = signature.parameters.values()
    num_required = sum(p.default is p.empty and p.kind in _POSITIONAL for p in params)
    return len(batch) == num_required > 1 and _binds(signature, *batch)


def _binds(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _text(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _is_tensor(annotation: Any) -> bool:
    """Return whether an annotation is a tensor, optional or not."""
    words = {word.rpartition(".")[2] for word in re.findall(r"[\w.]+", _text(annotation))}
    kinds = words - _OF_UNIONS
    return bool(kinds) and all(kind.endswith("Tensor") for kind in kinds)


def _unpacked(call: Call, batch: Batch) -> tuple[list[Any], dict[str, Any]]:
    """Return a batch as arguments."""
    if call == "args" and not isinstance(batch, Mapping):
        return list(batch) if isinstance(batch, (tuple, list)) else [batch], {}
    if (
        call == "kwargs"
        and isinstance(batch, Mapping)
        and all(isinstance(key, str) for key in batch)
    ):
        return [], dict(batch)
    fits = "a tuple or list" if call == "args" else "a mapping with names of parameters as keys"
    raise ConfigError(
        f"The model is called as {TEXTS[call]}, but this batch is {_described(batch)}. Make each "
        f"batch {fits}, or set another call_model."
    )


def _check(call: Call, model: Module, batch: Batch) -> None:
    """Raise a `ConfigError` if a model's forward does not accept the chosen call."""
    args, kwargs = ([batch], {}) if call == "batch" else _unpacked(call, batch)
    signature = signature_of(model)
    if signature is not None and not _binds(signature, *args, **kwargs):
        surplus = _surplus_of(model, batch) if call == "kwargs" else []
        advice = (
            _how_to_drop(model, surplus) if surplus else "Choose another call_model, or omit it."
        )
        raise ConfigError(
            f"call_model {call!r} means {TEXTS[call]}, but {_name(model)}.forward takes "
            f"{signature}, and this batch is {_described(batch)}. {advice}"
        )


# ---- notes on errors

_HOW: Final = "the model was called "
_LABELS: Final = frozenset({"label", "labels", "target", "targets", "y"})


def _note_call(
    trainer: Trainer, error: Exception, batch: Batch, call: Call | Literal["hook"]
) -> None:
    """Add to an error how the model was called, and at the first batch what else may be meant."""
    if any(note.startswith(_HOW) for note in getattr(error, "__notes__", ())):
        return
    how = "with arguments of on_before_forward" if call == "hook" else f"as {TEXTS[call]}"
    note = f"{_HOW}{how}; the batch is {_described(batch)}."
    of_train, of_val = trainer.data, trainer.val_iterator
    is_first = (of_train.num_batches if of_val is None else of_val.num_yielded) <= 1
    is_container = isinstance(batch, (Mapping, tuple, list))
    if call != "hook" and is_first and is_container and isinstance(error, _OF_ANOTHER_TYPE):
        note += _advice(trainer.model, batch, call)
    error.add_note(note)


def _advice(model: Module, batch: Batch, call: Call) -> str:
    """Return which other call the signature of forward allows; "" if none."""
    surplus = _surplus_of(model, batch)
    if surplus:
        return f" {_how_to_drop(model, surplus)}"
    signature = signature_of(model)
    if call != "batch":
        if signature is not None and not _binds(signature, batch):
            return ""
        return " If it expects the whole batch as one argument, set call_model='batch'."
    wrap = f"wrap it in a module that calls it: {_call_in_words(signature, batch)}"
    other: Call = "kwargs" if isinstance(batch, Mapping) else "args"
    if signature is None or _accepts(signature, batch, other):
        return (
            f" If it expects something else, set call_model={other!r} for {TEXTS[other]}, or "
            f"{wrap}."
        )
    return f" If it expects only a part of the batch, {wrap}."


def _accepts(signature: inspect.Signature, batch: Batch, call: Call) -> bool:
    try:
        args, kwargs = _unpacked(call, batch)
    except ConfigError:
        return False
    return _binds(signature, *args, **kwargs)


def _call_in_words(signature: inspect.Signature | None, batch: Batch) -> str:
    """Return a call with the parts of a batch that forward requires."""
    params = [] if signature is None else list(signature.parameters.values())
    required = [p.name for p in params if p.default is p.empty and p.kind in _POSITIONAL]
    names = required or [p.name for p in params[:1]] or [""]
    if len(names) > len(batch):
        return "self.model(...)"
    if not isinstance(batch, Mapping):
        return f"self.model({', '.join(f'batch[{idx}]' for idx in range(len(names)))})"
    others = [key for key in batch if key not in names]
    others.sort(key=lambda key: (not isinstance(batch[key], Tensor), key in _LABELS))
    keys = [name if name in batch else others.pop(0) for name in names]
    return f"self.model({', '.join(f'batch[{key!r}]' for key in keys)})"


def _described(batch: Batch) -> str:
    kind = type(batch).__name__
    if isinstance(batch, Mapping):
        items = (f"{key!r}: {_in_words(value)}" for key, value in batch.items())
        return f"a {kind} of {_first(items)}" if batch else f"an empty {kind}"
    if isinstance(batch, (tuple, list)):
        return f"a {kind} of {_first(map(_in_words, batch))}" if batch else f"an empty {kind}"
    return f"a {_in_words(batch)}"


def _first(texts: Iterable[str], most: int = 8) -> str:
    found = list(texts)
    return ", ".join(found[:most]) + (", ..." if len(found) > most else "")


def _in_words(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} {tuple(value.shape)}" if isinstance(value, Tensor) else kind


def _name(model: Module) -> str:
    return type(getattr(model, "_orig_mod", model)).__name__
