"""Callbacks in a custom training loop: hook dispatch without a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.nn import Module

from modelzoo_trainer.callback import Callback, CoreCallback
from modelzoo_trainer.errors import HookError, StopTraining, suggest
from modelzoo_trainer.hooks.global_callbacks import global_callbacks, watch_global_callbacks
from modelzoo_trainer.hooks.keyword_calls import KeywordCall, listener_of
from modelzoo_trainer.hooks.model_hooks import ModelHooks, unwrapped
from modelzoo_trainer.hooks.order import named
from modelzoo_trainer.hooks.plugins import plugin_callbacks
from modelzoo_trainer.hooks.spec import HOOKS, instance_of, nearest
from modelzoo_trainer.hooks.states import load_states


class HooksHandle:
    """Handle that removes an added callback from its `Hooks`."""

    def __init__(self, hooks: Hooks, callback: Any) -> None:
        self._hooks = hooks
        self._callback = callback

    def remove(self) -> None:
        """Remove the callback. Idempotent."""
        self._hooks.remove_callback(self._callback)


class Hooks:
    """Call callbacks from a custom training loop, by any hook name.

    Callbacks are called in this order: given ones, plugins, global ones, models. A
    callback may be any object; it is skipped if it has no such method. Each gets the keyword
    arguments that it names, and all positional ones. So a `Callback` whose hook takes `trainer`
    gets what the loop passes under that name, and a call without it raises.

    Args:
        callbacks: One or an iterable of them, which is copied; None = none.
        events: One or more names that the loop calls. If given, a call of another name, or a method
            whose name is a near miss of one of them, raises. None = any name.
        plugins: Whether to include the callbacks of installed plugins.
        use_global: Whether to include callbacks of `register_global_callback`.

    Raises:
        HookError: If a callback is a class, a core callback of the trainer or one that requires a
            trainer (`CheckLoss`, `EarlyStopping` and others), or misspells an event.

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
        """Call every callback that has a method of this name, in order.

        Return values are ignored. An exception propagates at once, without calling the remaining
        callbacks; `StopTraining` is raised after all have been called.

        Args:
            hook_name: Any name.
            args: Passed to all callbacks.
            kwargs: Each callback gets those that it names.

        Raises:
            HookError: If a required parameter is not given, or the name is not one of `events`.
            StopTraining: If a callback requests the end of the loop.
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
        """Add a callback after those that exist; it is called from the next call on.

        Args:
            callback: Any object.

        Returns:
            A handle whose `remove` removes it.

        Raises:
            HookError: If it is a class or a core callback of the trainer, or misspells an event.
        """
        self._include(callback)
        return HooksHandle(self, callback)

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback or a model. Idempotent."""
        self._own = [known for known in self._own if known is not callback]
        self._models = [known for known in self._models if not _holds(known, callback)]
        self.rebuild_hooks()

    def add_model(self, model: Module) -> None:
        """Add the methods of a model whose names begin with `on_`, called after all callbacks.

        Args:
            model: The module, also one that is compiled or wrapped by DistributedDataParallel.
                Adding it twice has no effect.
        """
        if not any(_holds(known, model) for known in self._models):
            self._models.append(ModelHooks(model))
            self.rebuild_hooks()

    @property
    def callbacks(self) -> tuple[Any, ...]:
        """The callbacks in the order in which they are called, without models."""
        callbacks = [*self._own, *(global_callbacks() if self._use_global else ())]
        return tuple({id(callback): callback for callback in callbacks}.values())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.callbacks)

    def rebuild_hooks(self) -> None:
        """Clear the cache of listeners."""
        self._calls = {}

    # ---- state

    def stateful_callbacks(self) -> list[tuple[str, Any]]:
        """Return callbacks that have a state, with their names in the state dict."""
        return [
            (name, callback)
            for name, callback in named(self.callbacks).items()
            if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all callbacks that have one, by class name."""
        return {name: callback.state_dict() for name, callback in self.stateful_callbacks()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the states of callbacks; warn about missing and unused states.

        Args:
            state_dict: What `state_dict` returned.
        """
        load_states(dict(self.stateful_callbacks()), state_dict, strict=True)

    # ---- listeners

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
                    f"{instance_of(callback)}."
                )
            if isinstance(callback, (str, tuple, list, Mapping)):
                raise HookError(
                    f"Hooks requires objects with methods, got {callback!r}, a {kind}. Pairs of "
                    f"an event and a function work only with a Trainer."
                )
            if isinstance(callback, CoreCallback):
                raise HookError(
                    f"{kind} works only with a Trainer. Pass it to Trainer(callbacks=[...]), not "
                    f"to Hooks."
                )
            if isinstance(callback, Callback) and callback.needs_trainer:
                raise HookError(
                    f"{kind} works only with a Trainer, because it requires the trainer's steps. "
                    f"Pass it to Trainer(callbacks=[...]), not to Hooks."
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
                raise HookError(
                    f"{kind}.{name} is not an event of this loop. Did you mean {near!r}?"
                )

    def _listeners_of(self, name: str) -> tuple[KeywordCall, ...]:
        if self.events is not None and name not in self.events:
            raise HookError(f"{name!r} is not an event of this loop. {suggest(name, self.events)}")
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
    """Return whether a callback overrides a hook."""
    declared = HOOKS.get(name)
    if declared is None or not isinstance(callback, Callback):
        return True
    return getattr(type(callback), name, declared.default) is not declared.default


def _holds(known: ModelHooks, model: Any) -> bool:
    return isinstance(model, Module) and known.__wrapped__ is unwrapped(model)
