"""Print the callbacks that each hook calls, in order; found from classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from torch.nn import Module

from modelzoo_trainer.callback import Callback, CoreCallback, hook_names
from modelzoo_trainer.callbacks import GlobalFlags, ScopedTrainFlags, ScopedValidateFlags
from modelzoo_trainer.config.components import Component
from modelzoo_trainer.config.names import Unshipped
from modelzoo_trainer.config.plan import TrainerPlan
from modelzoo_trainer.config.printout.components import packed
from modelzoo_trainer.core.parts.core_callbacks import core_callbacks
from modelzoo_trainer.hooks.global_callbacks import global_callbacks
from modelzoo_trainer.hooks.logger import Logger
from modelzoo_trainer.hooks.spec import HOOKS
from modelzoo_trainer.zoo.callbacks.csx_flags import MICRO_BATCH_SIZE, micro_batch_size


class MicroBatchSizes(NamedTuple):
    """Largest number of samples per forward pass; None = the whole batch."""

    train: int | None
    validate: int | None


def micro_batch_sizes(plan: TrainerPlan) -> MicroBatchSizes:
    """Return the sizes that the flags of a plan set; scoped flags override global ones."""
    return MicroBatchSizes(_size(plan, ScopedTrainFlags), _size(plan, ScopedValidateFlags))


def _size(plan: TrainerPlan, scoped: type) -> int | None:
    callbacks = plan.init.get("callbacks", ())
    given = [one for kind in (GlobalFlags, scoped) for one in callbacks if one.target is kind]
    sizes = [micro_batch_size(one.arguments) for one in given if MICRO_BATCH_SIZE in one.arguments]
    return sizes[-1] if sizes else None


GROUPS: Final = ("core", "user", "loggers", "global")

_SECTIONS: Final = (
    *("autorestart", "precision", "loop", "logging", "checkpoint"),
    "object_store",
)


def hook_order(plan: TrainerPlan) -> str:
    """Return the callbacks of every hook that has some, in the order in which they are called.

    Neither the user's classes nor a model or backend are built. Core callbacks are, as their hooks
    depend on their arguments, which they only store.
    """
    table: dict[str, dict[str, list[str]]] = {name: {} for name in HOOKS}
    for group, callback, name in _listeners(plan):
        table[name].setdefault(group, []).append(_name(callback, name))
    lines = [
        "Hooks and the callbacks that each calls, in order; (log) = only at steps that are logged"
    ]
    for name, groups in table.items():
        if groups:
            lines.append(f"  {name}")
        for group in GROUPS:
            lines += packed(groups.get(group, ()), 4, f"{group + ':':9}")
    lines += _unknown(plan)
    return "\n".join(lines)


def listens(target: Any, name: str) -> bool:
    """Return whether a class has a method for a hook.

    `target`: a class; a function's result is not known.
    """
    if not isinstance(target, type):
        return False
    declared = HOOKS[name].default
    if issubclass(target, Callback):
        return getattr(target, name, declared) is not declared
    return callable(getattr(target, name, None))


def _listeners(plan: TrainerPlan) -> Iterator[tuple[str, Any, str]]:
    """Yield group, callback (the class, unless core or global) and hook."""
    for callback in _core(plan):
        yield from (("core", callback, name) for name in hook_names(callback))
    user, loggers = _of_file(plan)
    for group, targets in (("user", user), ("loggers", loggers)):
        for target in targets:
            yield from ((group, target, name) for name in HOOKS if listens(target, name))
    for callback in global_callbacks():
        yield from (("global", callback, name) for name in hook_names(callback))


def _core(plan: TrainerPlan) -> Iterable[CoreCallback]:
    made: dict[str, Any] = {key: _section(plan.init.get(key)) for key in _SECTIONS}
    injected = dict.fromkeys(("backend", "device", "optimizer", "schedulers", "seed"))
    sparsity = plan.init.get("sparsity")
    made["sparsity"] = None if sparsity is None else sparsity.make()
    core = core_callbacks({**made, **injected, "model": Module})  # which is never called
    if micro_batch_sizes(plan).train is not None:
        for name in ("grad_accum", "loss_accum"):
            core[name].activate()  # type: ignore[attr-defined]  # these two have it
    return core.values()


def _section(component: Component | None) -> CoreCallback | None:
    """Return the core callback that a section describes; None for the default one."""
    target = None if component is None else component.target
    if not (isinstance(target, type) and issubclass(target, CoreCallback)):
        return None
    assert component is not None  # it has a target
    made: CoreCallback = component.make()
    return made


def _of_file(plan: TrainerPlan) -> tuple[list[Any], list[Any]]:
    """Return the classes of callbacks and of loggers; a logger may be among the callbacks."""
    targets = {
        key: [component.target for component in plan.init.get(key, ())]
        + [type(default) for default in plan.defaults.get(key, ())]
        for key in ("callbacks", "loggers")
    }
    own = targets["callbacks"]
    user = [target for target in own if not _is_logger(target)]
    return user, [target for target in own if _is_logger(target)] + targets["loggers"]


def _is_logger(target: Any) -> bool:
    return isinstance(target, type) and issubclass(target, Logger)


def _name(callback: Any, hook: str) -> str:
    name: str = callback.__name__ if isinstance(callback, type) else type(callback).__name__
    is_for_log = hook in getattr(callback, "log_step_hooks", ())
    return f"{name} (log)" if is_for_log else name


def _unknown(plan: TrainerPlan) -> list[str]:
    """Return lines on callbacks whose hooks are not known."""
    user, loggers = _of_file(plan)
    lines = []
    for target in [*user, *loggers]:
        if isinstance(target, Unshipped):
            lines.append(f"  {target.name}: not part of this package; its hooks are unknown")
        elif not isinstance(target, type):
            lines.append(f"  {target.__name__}: a function; the hooks of its result are unknown")
    return lines
