"""Callbacks in a loop of one's own: the dispatcher of hooks, without a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from torch.nn import Module

from modelzoo_trainer.callback import Callback, CoreCallback
from modelzoo_trainer.callback_list import named
from modelzoo_trainer.core.states import load_states
from modelzoo_trainer.errors import HookError, StopTraining, suggest
from modelzoo_trainer.hooks.global_callbacks import global_callbacks, watch_global_callbacks
from modelzoo_trainer.hooks.keyword_calls import KeywordCall, listener_of
from modelzoo_trainer.hooks.model_hooks import ModelHooks, unwrapped
from modelzoo_trainer.hooks.spec import HOOKS, nearest
from modelzoo_trainer.plugins import plugin_callbacks


class HooksHandle:
    """What takes an added callback out of its `Hooks` again."""

    def __init__(self, hooks: Hooks, callback: Any) -> None:
        self._hooks = hooks
        self._callback = callback

    def remove(self) -> None:
        """Take the callback out; a second call does nothing."""
        self._hooks.remove_callback(self._callback)


class Hooks:
    """The callbacks of a loop that the user writes: it calls what they define, by any name.

    They are called in the order: the user's as given, those of plug-ins, global ones, models. A
    callback may be any object; one that has no method of a name, or None there, is passed over.
    Each gets the keyword arguments that it names, and all positional ones. So a `Callback` whose
    hook takes `trainer` gets what the loop passes under that name, and refuses a call without it.

    Args:
        callbacks: One, or an iterable of them, which is copied; None = none.
        events: The names that the loop calls, or the one: another name in a call, or a method that
            is nearly called like one of them, is an error then. None = any name.
        plugins: Whether those that installed packages bring take part.
        use_global: Whether those registered by `register_global_callback` take part.

    Raises:
        HookError: If a callback is a class, one of a trainer's core or one that needs a trainer
            (`CheckLoss`, `EarlyStopping` and others), or misspells an event.

    Example:
        >>> class Losses:
        ...     def on_train_batch_end(self, loss):
        ...         print("loss", loss)
        >>> hooks = Hooks(Losses())
        >>> hooks.call("on_train_batch_end", loss=2.5, batch_idx=0)
        loss 2.5
    """

    def __init__(
        self,
        callbacks: Iterable[Any] | Any = None,
        *,
        events: Iterable[str] | str | None = None,
        plugins: bool = True,
        use_global: bool = True,
    ) -> None:
        self.events = None if events is None else frozenset(_listed(events))
        self._use_global = use_global
        self._calls: dict[str, tuple[KeywordCall, ...]] = {}
        self._models: list[ModelHooks] = []
        self._own: list[Any] = []
        for callback in _listed(callbacks):
            self._include(callback)
        if plugins:
            for callback in plugin_callbacks(self._checked):
                self._include(callback)
        watch_global_callbacks(self)

    def call(self, hook_name: str, /, *args: Any, **kwargs: Any) -> None:
        """Call everybody who has a method of a name, in order.

        Whatever one of them returns is dropped. An exception goes through, and the rest is not
        called; but `StopTraining` is raised when everybody was called.

        Args:
            hook_name: Any name.
            args: Passed to all as they are.
            kwargs: Each gets those that it names.

        Raises:
            HookError: If somebody's parameters are not given, or the name is none of `events`.
            StopTraining: If somebody asks for the end of the loop.
        """
        calls = self._calls.get(hook_name)
        if calls is None:
            calls = self._calls[hook_name] = self._listeners_of(hook_name)
        asked: StopTraining | None = None
        for call in calls:
            try:
                call(args, kwargs)
            except StopTraining as stop:
                asked = asked or stop
            except BaseException as error:
                error.add_note(f"raised in {call.title}")
                raise
        if asked is not None:
            raise asked

    def add_callback(self, callback: Any) -> HooksHandle:
        """Add a callback after those that were given; it takes part from the next call on.

        Args:
            callback: Any object.

        Returns:
            A handle whose `remove` takes it out again.

        Raises:
            HookError: If it is a class or one of a trainer's core, or misspells an event.
        """
        self._include(callback)
        return HooksHandle(self, callback)

    def remove_callback(self, callback: Any) -> None:
        """Take a callback or a model out; nothing happens if it is not here."""
        self._own = [known for known in self._own if known is not callback]
        self._models = [known for known in self._models if not _holds(known, callback)]
        self.rebuild_hooks()

    def add_model(self, model: Module) -> None:
        """Have the methods of a model whose names begin with `on_` called, after all callbacks.

        Args:
            model: The module, also one that is wrapped by DistributedDataParallel or compiled; a
                second time nothing happens.
        """
        if not any(_holds(known, model) for known in self._models):
            self._models.append(ModelHooks(model))
            self.rebuild_hooks()

    @property
    def callbacks(self) -> tuple[Any, ...]:
        """The callbacks in the order in which they are called, without models."""
        everybody = [*self._own, *(global_callbacks() if self._use_global else ())]
        return tuple({id(callback): callback for callback in everybody}.values())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.callbacks)

    def rebuild_hooks(self) -> None:
        """Forget who listens to what: it is found out anew."""
        self._calls = {}

    # ---- state

    def stateful_callbacks(self) -> list[tuple[str, Any]]:
        """Return those with `state_dict` and `load_state_dict`, with their names in the state."""
        return [
            (name, callback)
            for name, callback in named(self.callbacks).items()
            if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all callbacks that have one, by class name."""
        return {name: callback.state_dict() for name, callback in self.stateful_callbacks()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give callbacks their states back; warn of those without one, and of states left over.

        Args:
            state_dict: What `state_dict` returned.
        """
        load_states(cast("Any", self), state_dict, strict=True)

    # ---- who listens

    def _include(self, callback: Any) -> None:
        [callback] = self._checked([callback])
        if not any(callback is known for known in self._own):
            self._own.append(callback)
            self.rebuild_hooks()

    def _checked(self, callbacks: list[Any]) -> list[Any]:
        for callback in callbacks:
            kind = type(callback).__name__
            if isinstance(callback, type):
                raise HookError(
                    f"Hooks got the class {callback.__name__}. Pass an instance: "
                    f"{callback.__name__}()."
                )
            if isinstance(callback, (str, tuple, list, Mapping)):
                raise HookError(
                    f"Hooks got {callback!r}, a {kind}. Pass objects with methods; pairs, for "
                    f"functions around methods, are for a Trainer."
                )
            if isinstance(callback, CoreCallback):
                raise HookError(f"Hooks got a {kind}, which does its work in a Trainer alone.")
            if isinstance(callback, Callback) and callback.needs_trainer:
                raise HookError(
                    f"Hooks got a {kind}, which would do nothing in a loop of one's own: it needs "
                    f"the steps of a Trainer. Pass it to Trainer(callbacks=...)."
                )
            self._check_names(callback, kind)
        return callbacks

    def _check_names(self, callback: Any, kind: str) -> None:
        events = self.events or ()
        for name in dir(type(callback)) if events else ():
            if name in events or name in HOOKS or name.startswith("_"):
                continue
            near = nearest(name, events)
            if near is not None:
                raise HookError(f"{kind}.{name} is no event of this loop. Did you mean {near!r}?")

    def _listeners_of(self, name: str) -> tuple[KeywordCall, ...]:
        if self.events is not None and name not in self.events:
            raise HookError(f"{name!r} is no event of this loop. {suggest(name, self.events)}")
        own = [callback for callback in self.callbacks if _overrides(callback, name)]
        models = [known for known in self._models if not any(_holds(known, cb) for cb in own)]
        found = (listener_of(callback, name) for callback in [*own, *models])
        return tuple(listener for listener in found if listener is not None)


def _listed(callbacks: Iterable[Any] | Any) -> list[Any]:
    if callbacks is None:
        return []
    if isinstance(callbacks, Iterable) and not isinstance(callbacks, (str, Mapping, Module)):
        return list(callbacks)
    return [callbacks]


def _overrides(callback: Any, name: str) -> bool:
    """Return whether a callback has its own method for a hook, and not the declared one."""
    declared = HOOKS.get(name)
    if declared is None or not isinstance(callback, Callback):
        return True
    return getattr(type(callback), name, declared.default) is not declared.default


def _holds(known: ModelHooks, model: Any) -> bool:
    return isinstance(model, Module) and known.__wrapped__ is unwrapped(model)
