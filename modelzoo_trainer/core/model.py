"""The model: built, moved to the device, called, and set to training or evaluation mode."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy
from typing_extensions import override

from modelzoo_trainer import checkpointing
from modelzoo_trainer.base.constraints import Call
from modelzoo_trainer.callback import CoreCallback, Loader, Outputs, StateDict
from modelzoo_trainer.checkpointing.state_json import bare_names, uncompiled
from modelzoo_trainer.core.parts.model_call import ModelCalls
from modelzoo_trainer.core.parts.shared_weights import with_shared
from modelzoo_trainer.core.parts.training_mode import in_evaluation_mode, set_training_mode
from modelzoo_trainer.core.parts.unread_weights import are_loaded_unread, builds_without_values
from modelzoo_trainer.errors import (
    OF_ANOTHER_RUN,
    ONLY_WHAT_FITS,
    CheckpointError,
    CheckpointMismatch,
    ConfigError,
)
from modelzoo_trainer.hooks.interceptors import Interceptable, event

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.model")

ModelFactory = Callable[[], Module]


class ModelCallback(CoreCallback, Interceptable):
    """Own `trainer.model` and `trainer.compiled_model`, and how the model is called.

    Args:
        model: A module, or a callable without arguments that returns one. If it has an attribute
            `makes`, a class of this package with `builds_without_values`, initial values are drawn
            where they belong: by each rank for its shards, on the device.
        call_model: "batch", "kwargs" or "args"; None = by its signature, see `ModelCalls`.

    State: `model`, the state dict with the names of the uncompiled module.

    Raises:
        ConfigError: If an argument is invalid.
    """

    def __init__(self, model: Module | ModelFactory | None, call_model: Call | None = None) -> None:
        if not isinstance(model, Module) and not callable(model):
            given = "None" if model is None else repr(model)
            raise ConfigError(
                f"model got {given}. Pass a torch.nn.Module, or a callable that returns one."
            )
        self.model: Module | ModelFactory = model
        self.was_object = isinstance(model, Module)
        """Whether a module was given, which may have trained weights."""
        self.calls = ModelCalls(call_model)
        self._replaced: list[Callable[[], AbstractContextManager[None]]] = []

    def change(self, change: Callable[[Module], Module], *, needs_values: bool = True) -> None:
        """Register a function that modifies the model when it is built; called in `pre_setup`.

        Args:
            change: Gets the model, and returns the model to use.
            needs_values: Whether it needs the values of weights, or makes new weights.
        """
        makes = None if needs_values else getattr(self.model, "makes", None)
        self.model = _Changed(self.model, change, makes)

    # ---- weights that are only used, not trained

    @contextmanager
    def replaced(self, trained: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Context manager in which the model has other weights than those that are trained.

        `trained`: returns the context in which it has the trained ones, for a checkpoint.
        """
        self._replaced.append(trained)
        try:
            yield
        finally:
            self._replaced.remove(trained)

    @contextmanager
    def trained_weights(self) -> Iterator[None]:
        """Context manager in which the model has the weights that are trained."""
        replaced, self._replaced = self._replaced, []
        try:
            with ExitStack() as stack:
                for trained in reversed(replaced):
                    stack.enter_context(trained())
                yield
        finally:
            self._replaced = replaced

    # ---- hooks

    @event("create-model")
    def create_model(self) -> Module:
        """Return the given module, or the result of the callable."""
        return self.model if isinstance(self.model, Module) else self.model()

    @override
    def setup(self, trainer: Trainer) -> None:
        backend = trainer.backend
        if isinstance(self.model, Module):
            model = self.create_model()
        else:
            can_wait = builds_without_values(self)
            values = backend.initial_values
            with backend.building(), values.left_out() if can_wait else nullcontext():
                model = self.create_model()
        if not isinstance(model, Module):
            raise ConfigError(f"model: the callable returned {model!r}. Return a torch.nn.Module.")
        trainer.model = model
        if trainer.checkpoint.will_load(trainer) and are_loaded_unread(trainer):
            backend.initial_values.loaded = model.state_dict().keys()
        trainer.compiled_model = backend.prepare_model(model)
        if getattr(model, "weights_folder", None) is not None:
            _load_folder(trainer, model)
        if trainer.logging.start_times is not None:
            trainer.logging.start_times.end_phase("model")

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        # Frees parameters that a call of a sharded model has gathered. The optimizer does not have
        # these, and a state dict that only the main process makes would free them there alone.
        with trainer.backend.inference():
            self.calls.begin_training()
        stack.enter_context(self.calls.requests.in_run(trainer))

    @override
    def on_train_start(
        self,
        trainer: Trainer,
        model: Module,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        set_training_mode(model)

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        self.calls.begin_validation()
        stack.enter_context(self.calls.requests.in_run(trainer))
        stack.enter_context(in_evaluation_mode(trainer.model))
        trainer.backend.comm.broadcast_buffers(trainer.model)

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, path: Path | None) -> None:
        if path is None:
            trainer.backend.initial_values.draw_rest()

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        trainer.backend.initial_values.draw_rest()
        state = {uncompiled(name): value for name, value in trainer.model.state_dict().items()}
        state_dict["model"] = trainer.backend.state_view(state)

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if "model" not in state_dict:
            trainer.backend.initial_values.draw_rest()
            return
        strict = not trainer.checkpoint.disable_strict_checkpoint_loading
        own = trainer.model.state_dict()
        entries = state_dict["model"]
        complete = getattr(trainer.model, "complete_state", None)
        if complete is not None:  # a model that begins with the weights of a part of it
            entries = complete({uncompiled(name): value for name, value in entries.items()})
        found, is_resumed = _renamed(own, entries), "global_step" in state_dict
        if not is_resumed:  # files of weights may have shared ones once
            found = with_shared(own, found)
        if strict:
            hints = getattr(trainer.model, "hints_for_missing", {})
            _check_names(own, found, hints, is_resumed=is_resumed)
        else:
            found = _fitting(own, found)
        _load(trainer, found, own, strict=strict)


def _load_folder(trainer: Trainer, model: Any) -> None:
    """Load the weights of a model that was built on `meta` for them, one tensor at a time."""
    if not trainer.backend.caps.holds_values:
        return
    try:
        weights = checkpointing.open_weights(model.weights_folder)
    except CheckpointError as error:
        raise ConfigError(f"pretrained_model_name_or_path: {error}") from error
    found = checkpointing.lazy_state(weights)
    _load(trainer, model.pretrained_state(found), model.state_dict(), strict=True)


def _load(
    trainer: Trainer, found: Mapping[str, Any], own: Mapping[str, Any], *, strict: bool
) -> None:
    """Copy entries into the model; `own`: its state, whose entries may be among them."""
    values = trainer.backend.initial_values
    values.draw_rest([name for name in own if name not in found])
    state = trainer.backend.for_loading(found, own)
    try:
        trainer.model.load_state_dict(state, strict=strict)
    except RuntimeError:
        _raise_failure(state)
        raise
    values.note_loaded(found.keys())


@dataclass(frozen=True, slots=True)
class _Changed:
    """Makes a model and changes it; `makes`: the class, if it may be built without values."""

    given: Module | ModelFactory
    change: Callable[[Module], Module]
    makes: Any

    def __call__(self) -> Module:
        model = self.given if isinstance(self.given, Module) else self.given()
        return self.change(model) if isinstance(model, Module) else model  # `setup` raises


def _renamed(own: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's state with the model's names, whichever of the two is wrapped."""
    names = bare_names(own)
    return {names.get(bare, name): found[name] for bare, name in bare_names(found).items()}


def _fitting(own: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a checkpoint that match the model; log the rest."""
    fitting = {
        name: value
        for name, value in found.items()
        if name in own and _shape_of(own[name]) in (_shape_of(value), ...)
    }
    if found and not fitting:
        raise CheckpointMismatch(
            f"No entry of the checkpoint's model fits the model of this run: the checkpoint has "
            f"{_some(found)}, this run has {_some(own)}. Use the original model, or rename the "
            f"entries in preprocess_checkpoint. {OF_ANOTHER_RUN}"
        )
    for why, names in (
        ("the model has no such entries", set(found) - set(own)),
        ("the checkpoint has no such entries", set(own) - set(found)),
        ("the shapes differ", (set(found) & set(own)) - set(fitting)),
    ):
        if names:
            log.warning("Not loaded, because %s: %s.", why, ", ".join(sorted(names)))
    return fitting


def _raise_failure(state: Mapping[str, Any]) -> None:
    """Raise the error of the first tensor that could not be read from its file, if any."""
    for value in state.values():
        failure = getattr(value, "failure", None)
        if failure is not None:
            raise failure from None


def _shape_of(value: Any) -> Any:
    """Return the shape of a tensor, or Ellipsis for a lazy one."""
    return ... if is_lazy(value) else getattr(value, "shape", None)


def _some(state: Mapping[str, Any]) -> str:
    """Describe the first entries of a state."""
    names = [f"{name} {tuple(value.shape)}" for name, value in state.items() if _is_sized(value)]
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "") or "no tensor"


def _is_sized(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_lazy(value)


def to_outputs(raw: Any) -> Outputs:
    """Return a model's output as a mapping that callbacks may change.

    `raw` is a tensor with one element (the loss), another tensor (`output`), a pair (loss, logits),
    or a mapping.

    Raises:
        ConfigError: If it is none of these.
    """
    if type(raw) is dict:
        return raw
    if isinstance(raw, Tensor):
        return {"loss" if raw.numel() == 1 else "output": raw}
    if isinstance(raw, Mapping):
        return dict(raw)
    if isinstance(raw, (tuple, list)) and len(raw) == 2:
        return {"loss": raw[0], "logits": raw[1]}
    size = f" of length {len(raw)}" if isinstance(raw, (tuple, list)) else ""
    raise ConfigError(
        f"The model returned a {type(raw).__name__}{size}. Return the loss, (loss, logits), or a "
        f"dict with 'loss'."
    )


def refuse_lost_loss(outputs: Outputs, owner: type) -> None:
    """Raise a `ValueError` if `compute_loss` returned None although the model has a loss."""
    if outputs.get("loss") is not None:
        raise ValueError(
            f"{owner.__name__}.compute_loss returned None. Return the loss tensor; to keep the "
            f"model's own loss, return outputs['loss']."
        )


def require_loss(trainer: Trainer, outputs: Outputs) -> None:
    """Raise a `ConfigError` if the model's output has no loss to train on."""
    problem = problem_of_loss(trainer, outputs)
    if problem is not None:
        raise problem


def problem_of_loss(trainer: Trainer, outputs: Outputs) -> ConfigError | None:
    """Return the error if the model's output has no loss to train on, else None."""
    loss = outputs.get("loss")
    name = type(trainer.model).__name__
    if isinstance(loss, Tensor) and loss.numel() == 1:
        if not loss.requires_grad:
            return ConfigError(_without_gradient(trainer.model, name))
        return None
    alone = outputs.get("output")
    if loss is None and isinstance(alone, Tensor):
        returned = (
            "(loss, logits) or a dict with 'loss', for example from a module that wraps this one"
            if trainer.is_from_file
            else "(loss, logits), a dict with 'loss', or override compute_loss"
        )
        return ConfigError(
            f"{name} returned a tensor of shape {tuple(alone.shape)}, which is not a loss. If "
            f"these are losses, return their mean(); otherwise return {returned}."
        )
    if loss is None:
        return ConfigError(
            f"{name} returned no 'loss' to train on (it returned: "
            f"{', '.join(outputs) or 'nothing'}). Return the loss, (loss, logits), or a dict with "
            f"'loss'."
        )
    if isinstance(loss, Tensor):
        second = outputs.get("logits")
        is_swapped = isinstance(second, Tensor) and second.numel() == 1
        if is_swapped:
            return ConfigError(
                f"{name} returned a 'loss' of shape {tuple(loss.shape)} and 'logits' with one "
                f"element; they seem to be swapped. Return (loss, logits), not (logits, loss)."
            )
        return ConfigError(
            f"{name} returned a 'loss' of shape {tuple(loss.shape)}; it must be a tensor with one "
            f"element. Reduce it, for example with loss.mean()."
        )
    return ConfigError(
        f"{name} returned a 'loss' of {loss!r}; it must be a tensor with one element."
    )


def _without_gradient(model: Module, name: str) -> str:
    """Return why a loss does not require a gradient."""
    params = list(model.parameters())
    if not any(param.requires_grad for param in params):
        return (
            f"the model is frozen: none of the {len(params)} parameters of {name} requires a "
            f"gradient. Set requires_grad=True on those to train, or call trainer.validate."
        )
    return (
        f"the loss of {name} does not require a gradient (it is detached), although the model has "
        f"trainable parameters. Compute it from the model's output without detach(), item(), "
        f"torch.no_grad() or a new torch.tensor(...)."
    )


def _check_names(
    expected: Mapping[str, Any],
    found: Mapping[str, Any],
    hints: Mapping[str, str],
    *,
    is_resumed: bool,
) -> None:
    """Check the names and shapes, and when resuming the types, of a state.

    `hints`: What to do if an entry of this name is missing.
    """
    missing = [name for name in expected if name not in found]
    rows = [f"  missing      {name}" + hints.get(name, "") for name in missing]
    rows += [f"  unexpected   {name}" for name in found if name not in expected]
    rows += [
        f"  other shape  {name}: {tuple(found[name].shape)}, the model has {tuple(value.shape)}"
        for name, value in expected.items()
        if _is_sized(value) and name in found and found[name].shape != value.shape
    ]
    if is_resumed:  # only weights may be loaded in another type
        rows += [
            f"  other type   {name}: {found[name].dtype}, the model has {value.dtype}"
            for name, value in expected.items()
            if _is_sized(value) and name in found and found[name].dtype != value.dtype
        ]
    if rows:
        raise CheckpointMismatch(
            "The checkpoint's model does not fit the model of this run:\n"
            + "\n".join(rows)
            + f"\nUse the original model. {OF_ANOTHER_RUN} {ONLY_WHAT_FITS}"
        )
