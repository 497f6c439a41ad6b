"""Additional optimizers and modules: attributes of the trainer or of its model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback, Loader, StateDict
from modelzoo_trainer.checkpointing.state_json import uncompiled
from modelzoo_trainer.core.parts.optimizer_facts import check_shapes
from modelzoo_trainer.core.precision import parameters_of
from modelzoo_trainer.core.schedulers import like_own, plain_state
from modelzoo_trainer.errors import OF_ANOTHER_RUN, ONLY_MODEL, CheckpointMismatch, ConfigError
from modelzoo_trainer.optim import Scheduler

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.checkpoint")

_KINDS: Final = (Optimizer, LRScheduler, Scheduler)
_WATCHED_STEPS: Final = 10  # a hook on all optimizers costs some microseconds a step


class Attributes(dict[type, tuple[bool, Callable[[Any], Iterable[Any]] | None]]):
    """Find the attributes of objects that have some types.

    Each type that is met is judged once: whether an object of it is one of those, and how its items
    are read if it is a list, a tuple or a mapping.

    Args:
        kinds: The types.
    """

    def __init__(self, *kinds: type) -> None:
        self._kinds = kinds

    def __missing__(self, kind: type) -> tuple[bool, Callable[[Any], Iterable[Any]] | None]:
        items: Callable[[Any], Iterable[Any]] | None = None
        if issubclass(kind, Mapping):
            items = methodcaller("items")
        elif issubclass(kind, (list, tuple)):
            items = enumerate
        self[kind] = issubclass(kind, self._kinds), items
        return self[kind]

    def of(self, owner: Any) -> list[tuple[str, Any]]:
        """Return the attributes of an object, and items of collections, with their names."""
        found = []
        for name, value in vars(owner).items():
            is_one, items_of = self[value.__class__]
            if is_one:
                found.append((name, value))
            if items_of is not None and value:
                for key, item in items_of(value):
                    if self[item.__class__][0]:
                        found.append((f"{name}.{key}", item))
        return found


class AttributeStates(CoreCallback):
    """Save additional objects that a trainer subclass trains: a second optimizer, a discriminator.

    These are optimizers, schedulers and modules that are attributes of the trainer, unless they
    are part of the model or named in `trainer.unsaved_attributes`; optimizers and schedulers that
    are attributes of the model or its submodules; and items of lists, tuples and dicts there. They
    are found by name when a checkpoint is written or loaded, so create them in the constructor. A
    frozen module whose state contains more than tensors is skipped with a warning. Any other
    optimizer that steps within `training_step` is reported once, in the first steps of a fit.

    State: `attributes`, if there are any: class and state dict by name.

    Raises:
        ConfigError: At the start of a fit, if `unsaved_attributes` is a string.
    """

    def __init__(self) -> None:
        self._left_out: set[str] = set()
        self._handle: RemovableHandle | None = None
        self._num_left = _WATCHED_STEPS

    # ---- checkpoints

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        states = {}
        for name, part in saved_parts(trainer).items():
            state = plain_state(part.state_dict())
            if not is_frozen(part) or (state and _is_of_tensors(state)):
                states[name] = {"kind": type(part).__name__, "state": state}
            elif state:
                self._warn_of_left_out(name)
        if states:
            state_dict["attributes"] = trainer.backend.state_view(states)

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        states, found = state_dict.get("attributes", {}), parts_beside(trainer)
        for name in states.keys() - found.keys():
            log.warning(
                "The checkpoint has state of trainer.%s, but this trainer has no such attribute. "
                "Create it in the constructor, or its state is lost.",
                name,
            )
        for name, part in _saved_of(found, trainer).items():
            if name in states:
                _load(trainer, name, part, states[name])
            elif not {"optimizer", "optimizers"}.isdisjoint(state_dict) and not is_frozen(
                part
            ):  # not a checkpoint of weights only
                log.warning(
                    "The checkpoint has no state of trainer.%s; it starts from scratch.", name
                )

    def _warn_of_left_out(self, name: str) -> None:
        if name not in self._left_out:
            self._left_out.add(name)
            log.warning(
                "trainer.%s (a frozen module) is not saved in checkpoints, because its state_dict "
                "has values other than tensors. A resumed run uses the module as the constructor "
                "creates it. If it never changes, add %r to unsaved_attributes.",
                name,
                name.partition(".")[0],
            )

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        names = trainer.unsaved_attributes
        if isinstance(names, str):
            raise ConfigError(
                f"unsaved_attributes must be a tuple of names, got {names!r}. Write ({names!r},)."
            )
        for name in names:
            if name not in vars(trainer):
                log.warning(
                    "unsaved_attributes contains %r, but the trainer has no such attribute. "
                    "Correct the name, or remove it.",
                    name,
                )

    # ---- optimizers that are not saved

    @override
    def on_enter_train(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        loop: Any,
        loop_idx: int,
    ) -> None:
        if not self._num_left:
            return
        known: WeakSet[Optimizer] = WeakSet(trainer.optimizers.values())

        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if optimizer not in known and trainer.data.is_pending:
                known.add(optimizer)
                _judge(trainer, optimizer)

        self._handle = register_optimizer_step_post_hook(stepped)
        stack.callback(self._stop_watching)

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        self._num_left -= 1
        if not self._num_left:
            self._stop_watching()
            self.idle_hooks = frozenset({"on_step_boundary"})
            trainer.rebuild_hooks()

    def _stop_watching(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


def parts_beside(trainer: Trainer) -> dict[str, Any]:
    """Return the additional stateful objects of a trainer by name; see `AttributeStates`.

    The trainer has been set up. Every call looks at all attributes, because nothing reports that
    an attribute has another value, or that a list has a new item.

    Cost: About 3 us for each module.
    """
    of_model = list(trainer.model.named_modules(prefix="model"))
    known = [trainer.compiled_model, *trainer.schedulers, *trainer.all_callbacks]
    known += [*trainer.optimizers.values(), *(module for _, module in of_model)]
    seen = set(map(id, known))
    outside = [one for one in Attributes(Module, *_KINDS).of(trainer) if id(one[1]) not in seen]
    found: dict[str, Any] = _modules_of(trainer, outside)
    stateful = [one for one in outside if isinstance(one[1], _KINDS)]
    attributes = Attributes(*_KINDS)
    for name, module in (*of_model, *_named_modules(found)):
        stateful += [(f"{uncompiled(name)}.{key}", part) for key, part in attributes.of(module)]
    for name, part in stateful:
        if id(part) not in seen:
            seen.add(id(part))
            found[name] = part
    return found


def _modules_of(trainer: Trainer, parts: list[tuple[str, Any]]) -> dict[str, Module]:
    """Return the modules with parameters or buffers outside of the model, by name."""
    modules = [(name, part) for name, part in parts if isinstance(part, Module)]
    tensors = set(map(id, _tensors_of(trainer.model))) if modules else set()
    found: dict[str, Module] = {}
    for name, module in modules:
        own = set(map(id, _tensors_of(module)))
        if not own <= tensors:
            tensors |= own
            found[name] = module
    return found


def _named_modules(owners: Mapping[str, Module]) -> Iterator[tuple[str, Module]]:
    for name, owner in owners.items():
        yield from owner.named_modules(prefix=name)


def _tensors_of(module: Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def saved_parts(trainer: Trainer) -> dict[str, Any]:
    """Return the `parts_beside` that checkpoints contain."""
    return _saved_of(parts_beside(trainer), trainer)


def _saved_of(parts: dict[str, Any], trainer: Trainer) -> dict[str, Any]:
    unsaved = trainer.unsaved_attributes
    return {name: part for name, part in parts.items() if name.partition(".")[0] not in unsaved}


def is_frozen(part: Any) -> bool:
    """Return whether it is a module without trainable parameters."""
    return isinstance(part, Module) and not any(param.requires_grad for param in part.parameters())


def _is_of_tensors(state: Mapping[str, Any]) -> bool:
    return all(isinstance(value, Tensor) and not value.is_meta for value in state.values())


def parameters_beside(trainer: Trainer) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters of the modules and of the optimizers of `parts_beside`."""
    of_modules: list[Tensor] = []
    of_optimizers: list[Tensor] = []
    for part in parts_beside(trainer).values():
        if isinstance(part, Module):
            of_modules += part.parameters()
        elif isinstance(part, Optimizer):
            of_optimizers += parameters_of(part)
    return of_modules, of_optimizers


def like_of_attributes(trainer: Trainer) -> dict[str, Any]:
    """Return tensors with the sharding of the state's tensors, by the same names."""
    return {
        name: {"state": part.state_dict()}
        if isinstance(part, Module)
        else {"state": {"state": dict(enumerate(parameters_of(part)))}}
        for name, part in saved_parts(trainer).items()
        if isinstance(part, (Module, Optimizer))
    }


def _load(trainer: Trainer, name: str, part: Any, saved: Mapping[str, Any]) -> None:
    own, kind, state = type(part).__name__, saved["kind"], saved["state"]
    if kind != own:
        raise CheckpointMismatch(
            f"trainer.{name} is a {own}, but the checkpoint has the state of a {kind}. "
            f"Use a {kind}. {OF_ANOTHER_RUN} {ONLY_MODEL}"
        )
    if isinstance(part, Optimizer):
        is_alone = trainer.backend.comm.world_size == 1
        check_shapes(part, state, None, f"trainer.{name}", is_alone=is_alone)
    elif isinstance(part, Module):
        state = trainer.backend.for_loading(state, part.state_dict())
    else:
        state = like_own(part.state_dict(), state)
    try:
        part.load_state_dict(state)
    except (ValueError, RuntimeError) as error:
        if is_frozen(part):
            log.warning(
                "The checkpoint's state of trainer.%s does not fit, so it was not loaded: %s",
                name,
                error,
            )
            return
        raise CheckpointMismatch(
            f"the checkpoint's state of trainer.{name} does not fit: {error}"
        ) from None


def _judge(trainer: Trainer, optimizer: Optimizer) -> None:
    """Warn about an optimizer that has stepped but whose state is not saved."""
    if any(optimizer is part for part in parts_beside(trainer).values()):
        return
    if any(optimizer is one for one in optimizers_of(dict(trainer.stateful_callbacks()).values())):
        return
    params = parameters_of(optimizer)
    for outer in trainer.optimizers.values():
        if not {id(param) for param in parameters_of(outer)}.issuperset(map(id, params)):
            continue
        is_plain = getattr(outer.state_dict, "__func__", None) is Optimizer.state_dict
        saves_more = not is_plain or getattr(outer, "_optimizer_state_dict_post_hooks", None)
        if not saves_more and not optimizer.state.keys() <= outer.state.keys():
            log.warning(
                "%s steps within %s, but the state_dict of %s does not contain the state of %s. "
                "A resumed run will not reproduce this one, unless a callback saves that state. "
                "Define state_dict and load_state_dict of %s.",
                type(optimizer).__name__,
                type(outer).__name__,
                type(outer).__name__,
                type(optimizer).__name__,
                type(outer).__name__,
            )
        return
    log.warning(
        "%s steps within training_step, but is not an attribute of the trainer or its model. Its "
        "state (of %d parameters) is not saved, so a resumed run will not reproduce this one. "
        "Assign the optimizer to an attribute in the constructor, such as self.d_optimizer.",
        type(optimizer).__name__,
        len(params),
    )


def optimizers_of(owners: Iterable[Any]) -> list[Optimizer]:
    """Return the optimizers that are attributes of objects, or items of collections there."""
    attributes = Attributes(Optimizer)
    found = (attributes.of(owner) for owner in owners if hasattr(owner, "__dict__"))
    return [optimizer for parts in found for _, optimizer in parts]
