"""Dispatch of hooks to all callbacks of a run."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, Final, Self

from modelzoo_trainer.callback import Callback, CoreCallback, hook_names
from modelzoo_trainer.errors import HookError, StopTraining
from modelzoo_trainer.hooks.keyword_calls import KeywordCall, listener_of
from modelzoo_trainer.hooks.spec import HOOKS, HookFn, fan_out, fan_out_all, near_miss

# All listeners of these are called, even if one raises.
_ALL_RUN: Final = frozenset(
    {"finalize", "on_fit_exception", "on_train_exception", "on_validate_exception"}
)
Event = Callable[..., None]


class HookTable(Callback, keeps_arguments=False):
    """Call, for each hook, the callbacks that override it, in order.

    Hooks that no callback overrides share one empty function.

    Args:
        callbacks: In the order in which they are called.
        on_stop: Called with a `StopTraining` that a hook has raised; None = it is raised.
    """

    def __init__(
        self,
        callbacks: Iterable[Any] = (),
        *,
        on_stop: Callable[[StopTraining], None] | None = None,
    ) -> None:
        self.callbacks: Final = tuple(callbacks)
        self._on_stop = _raised if on_stop is None else on_stop
        self._events: dict[str, Event | None] = {}
        self._listeners: dict[str, list[tuple[Any, HookFn]]] = {name: [] for name in HOOKS}
        for callback in self.callbacks:
            for name in hook_names(callback):
                self._listeners[name].append((callback, getattr(callback, name)))
        for name in self._listeners:
            setattr(self, name, self._fire(name))

    def off_log_steps(self, *, rehearses: bool = False) -> Self:
        """Return a copy without the hooks that callbacks have for log steps only.

        Args:
            rehearses: Whether to keep such hooks of the traced step, so that the graph of log steps
                is traced, though nothing is logged.
        """
        table = copy.copy(self)
        table._events = {}
        table._listeners = dict(self._listeners)
        for callback in self.callbacks:
            left_out = self._listeners.keys() & getattr(callback, "log_step_hooks", ())
            if left_out:
                left_out.difference_update(
                    hook_names(callback, is_log_step=False, rehearses=rehearses)
                )
            for name in left_out:
                others = [one for one in table._listeners[name] if one[0] is not callback]
                table._listeners[name] = others
                setattr(table, name, table._fire(name))
        return table

    def _fire(self, name: str) -> HookFn:
        """Return the function that calls the listeners of a hook."""
        calls = [listener for _, listener in self._listeners[name]]
        if not calls:
            return _nobody
        if name in _ALL_RUN:
            return fan_out_all(name, calls)
        [*_, last] = calls
        if len(calls) == 1 and isinstance(getattr(last, "__self__", None), CoreCallback):
            return last  # never raises StopTraining
        return fan_out(calls, self._on_stop)

    def call(self, trainer: Any, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Call a hook by its name.

        Args:
            trainer: Passed first to a declared hook, and to a listener of an undeclared event whose
                first parameter is called `trainer`.
            name: A declared hook, or any custom event.
            args: Passed unchanged.
            kwargs: For an undeclared event, each listener gets those that it names.

        Raises:
            HookError: If there is no listener and the name is nearly a declared hook, or the
                arguments do not fit a listener.
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
        found = [listener_of(callback, name) for callback in self.callbacks]
        calls = [_with_trainer(listener) for listener in found if listener is not None]
        if calls:
            return fan_out(calls, self._on_stop)
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


def _raised(stop: StopTraining) -> None:
    raise stop


def _nobody(*args: Any) -> None:
    """Do nothing, for a hook that no callback overrides."""


def _with_trainer(listener: KeywordCall) -> Event:
    """Return a listener as a function of (trainer, args, kwargs)."""
    if not listener.takes_trainer:
        return lambda trainer, args, kwargs: listener(args, kwargs)

    def call(trainer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        others = {name: value for name, value in kwargs.items() if name != "trainer"}
        listener((trainer, *args), others)

    return call
