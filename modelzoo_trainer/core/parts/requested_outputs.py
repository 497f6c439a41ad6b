"""Outputs that a model computes only on request, such as the logits of a language model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from torch.nn import Module

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.hooks.interceptors import split_pair

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

_OPTIONAL: Final = "optional_outputs"
# What a subclass may override, or intercept, to read the outputs of the model.
_METHODS: Final = ("forward", "compute_loss", "backward", "training_step", "validation_step")
_EVENTS: Final = ("forward", "loss", "backward", "step", "validation-step")


class RequestedOutputs:
    """Set the attribute `requested_outputs` of a model to what is read in a run.

    A model without the attribute `optional_outputs` computes all outputs in any case.
    """

    def __init__(self) -> None:
        self._given: tuple[str, ...] = ()
        self._depth = 0
        self._known: tuple[Any, bool] | None = None
        self._is_checked = False

    @contextmanager
    def in_run(self, trainer: Trainer) -> Iterator[None]:
        """Context manager of a fit or a validation, also inside another one."""
        model = _bare(trainer.model)
        if self._depth == 0:
            self._is_checked = False
        if not hasattr(model, _OPTIONAL):
            yield
            return
        before = model.requested_outputs
        if self._depth == 0:
            self._given = tuple(before or ())
        self._depth += 1
        self._known = None
        try:
            self.update(trainer)
            yield
        finally:
            self._depth -= 1
            self._known = None
            model.requested_outputs = before

    def update(self, trainer: Trainer) -> None:
        """Request what is read, if that may have changed."""
        is_predicting = trainer.predicting.is_active
        hooks = trainer.callbacks.log_hooks  # another one if callbacks have changed
        known = self._known
        if not self._depth or (known and known[0] is hooks and known[1] == is_predicting):
            return
        self._known = hooks, is_predicting
        model = _bare(trainer.model)
        if is_predicting or _reads_all(trainer):
            names = set(model.optional_outputs)
        else:
            names = {*self._given, *readers_of(trainer)}
        model.requested_outputs = tuple(sorted(names))

    def check(self, trainer: Trainer, raw: Any) -> None:
        """Check once in a run that the model returned what callbacks read.

        Raises:
            ConfigError: If not.
        """
        if self._is_checked or (trainer.is_fitting and trainer.val_iterator is not None):
            return
        self._is_checked = True
        if not isinstance(raw, Mapping) or trainer.predicting.is_active:
            return
        for name, reader in readers_of(trainer).items():
            if name not in raw:
                raise ConfigError(
                    f"{reader} reads outputs[{name!r}] (its attribute reads_outputs), but "
                    f"{type(_bare(trainer.model)).__name__} returned {', '.join(map(str, raw))}. "
                    f"Remove {reader}, or use a model that returns {name!r}."
                )


def readers_of(trainer: Trainer) -> dict[str, str]:
    """Return the names of outputs that are declared to be read, with the class that reads each."""
    readers = [trainer, *trainer.all_callbacks]
    return {
        name: type(one).__name__
        for one in reversed(readers)
        for name in _names(getattr(one, "reads_outputs", None))
    }


def note_missing_output(error: BaseException, trainer: Trainer) -> None:
    """Add to a `KeyError` of an output that was not requested how to request it."""
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    if not isinstance(name, str):
        return
    for path, module in _bare(trainer.model).named_modules():
        if name not in getattr(module, _OPTIONAL, ()):
            continue
        kind, inner = type(module).__name__, f"trainer.model.{path}".rstrip(".")
        note = (
            f"{kind} computes the output {name!r} only on request, as it may need much memory. "
            f"Set the class attribute reads_outputs = ({name!r},) of the callback, or of the "
            f"subclass of Trainer, that reads it; in other code "
            f"{inner}.requested_outputs = ({name!r},)."
        )
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        return


def _names(given: str | Iterable[str] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


def _reads_all(trainer: Trainer) -> bool:
    """Return whether code that is not a callback may read any output.

    That is a subclass with a method, or an interceptor, that gets the outputs, unless its
    `reads_outputs` says what it reads.
    """
    if trainer.reads_outputs is not None:
        return False
    bases = type(trainer).__mro__
    first = next(base for base in reversed(bases) if _METHODS[0] in vars(base))  # `Trainer`
    others = [vars(trainer), *(vars(base) for base in bases[: bases.index(first)])]
    if any(name in own for own in others for name in _METHODS):
        return True
    pairs = [*type(trainer).own_pairs(), *trainer.interceptors.pairs]
    return any(split_pair(pair, "callbacks")[1] in _EVENTS for pair in pairs)


def _bare(model: Module) -> Any:
    return getattr(model, "_orig_mod", model)
