"""All callbacks of a run, called as if they were one."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final

from modelzoo_trainer.callback import Callback, CoreCallback, hook_names
from modelzoo_trainer.errors import HookError
from modelzoo_trainer.hooks import HOOKS, HookFn, fan_out, fan_out_all, near_miss

# Everybody is told, whatever one of them raises.
_ALL_RUN: Final = frozenset(
    {"finalize", "on_fit_exception", "on_train_exception", "on_validate_exception"}
)
Event = Callable[..., None]


class HookTable(Callback):
    """The composite: each hook calls the callbacks that override it, in order.

    A hook that nobody overrides is one and the same empty function, which stays in the
    processor's caches.

    Args:
        callbacks: In the order in which they are called.
        is_log_step: Whether to include hooks that are for log steps only.
        rehearses: Include those of them that belong to the traced step in any case, so that
            what a log step records is recorded, though nothing is logged.
    """

    def __init__(
        self,
        callbacks: Iterable[Any] = (),
        *,
        is_log_step: bool = True,
        rehearses: bool = False,
    ) -> None:
        self.callbacks: Final = tuple(callbacks)
        self._events: dict[str, Event | None] = {}
        listeners: dict[str, list[HookFn]] = {}
        for callback in self.callbacks:
            for name in hook_names(callback, is_log_step=is_log_step, rehearses=rehearses):
                listeners.setdefault(name, []).append(getattr(callback, name))
        for name in HOOKS:
            calls = listeners.get(name)
            if calls is None:
                fire: HookFn = _nobody
            else:
                fire = self._fire(name, calls)
            setattr(self, name, fire)

    def _fire(self, name: str, calls: list[HookFn]) -> HookFn:
        if name in _ALL_RUN:
            return fan_out_all(name, calls)
        [*_, last] = calls
        if len(calls) == 1 and isinstance(getattr(last, "__self__", None), CoreCallback):
            return last  # asks for no stop by raising
        return fan_out(calls)

    def call(self, trainer: Any, name: str, *args: Any, **kwargs: Any) -> None:
        """Fire a hook by its name.

        Args:
            trainer: Goes first to a declared hook, and to a listener of an undeclared event
                whose first parameter is called `trainer`.
            name: A declared hook, or any event of one's own.
            args: Passed as they are.
            kwargs: For an undeclared event, each listener gets those that it names.

        Raises:
            HookError: If nobody listens and the name is nearly that of a declared hook, or a
                listener requires a parameter that the call does not give.
        """
        declared = HOOKS.get(name)
        if declared is not None:
            first = (trainer,) if "trainer" in declared.parameters[:1] else ()
            fire = getattr(self, name, _nobody)
            fire(*first, *_ordered(name, declared.parameters[len(first) :], args, kwargs))
            return
        if name not in self._events:
            self._events[name] = self._listeners_of(name)
        event = self._events[name]
        if event is not None:
            event(trainer, args, kwargs)

    def _listeners_of(self, name: str) -> Event | None:
        calls = []
        for callback in self.callbacks:
            method = getattr(callback, name, None)
            if callable(method):
                calls.append(_filtered(type(callback).__name__, name, method))
        if calls:
            return fan_out(calls)
        meant = near_miss(name)
        if meant is not None:
            raise HookError(f"{name!r} is not a hook. Did you mean {meant!r}?")
        return None


def _ordered(
    name: str, parameters: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments of a declared hook in their order."""
    if not kwargs and len(args) == len(parameters):
        return args
    given = dict(zip(parameters, args, strict=False)) | kwargs
    if len(args) + len(kwargs) != len(parameters) or given.keys() != set(parameters):
        passed = ", ".join([*map(repr, args), *kwargs])
        raise HookError(f"call({name!r}) got ({passed}), but takes ({', '.join(parameters)}).")
    return tuple(given[key] for key in parameters)


def _nobody(*args: Any) -> None:
    """Do nothing: the hook that no callback overrides."""


def _filtered(owner: str, name: str, method: HookFn) -> Event:
    """Return `method` as a function of (trainer, args, kwargs) that passes on what it names."""
    parameters = inspect.signature(method).parameters
    names = list(parameters)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    trainer_first = names[:1] == ["trainer"]
    required = {
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }

    def call(trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positional = (trainer, *args) if trainer_first else args
        given = names[: len(positional)]
        wanted = (
            kwargs
            if takes_all
            else {k: v for k, v in kwargs.items() if k in parameters and k not in given}
        )
        missing = required - set(given) - wanted.keys()
        if missing:
            raise HookError(
                f"{owner}.{name} requires {min(missing)!r}, but the call passes "
                f"({', '.join([*map(repr, args), *kwargs])})."
            )
        method(*positional, **wanted)

    return call
