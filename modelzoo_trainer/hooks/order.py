"""The callbacks of a trainer: their order, names and hook tables."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn

from torch.nn import Module

from modelzoo_trainer.base.devices import LIMIT_BATCHES, from_environment
from modelzoo_trainer.base.exports import load
from modelzoo_trainer.callback import CoreCallback, check_callback
from modelzoo_trainer.errors import ConfigError, HookError, StopTraining
from modelzoo_trainer.hooks.global_callbacks import global_callbacks
from modelzoo_trainer.hooks.interceptors import Pair, is_pair
from modelzoo_trainer.hooks.logger import Logger
from modelzoo_trainer.hooks.model_hooks import ModelHooks, model_hooks
from modelzoo_trainer.hooks.plugins import plugin_callbacks
from modelzoo_trainer.hooks.table import HookTable

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

_CHECK: Final = "modelzoo_trainer.callbacks.check_loss:CheckLoss"
_CONSOLE: Final = "modelzoo_trainer.loggers.progress:ProgressLogger"
_LIMIT: Final = "modelzoo_trainer.callbacks.limit_batches:limit_of_environment"


class NotCopied:
    """Base class of what belongs to one trainer: refuses to be copied or pickled."""

    def _refuse_copy(self, *args: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}: a trainer, its callbacks and its files belong together and "
            f"cannot be copied or pickled. Write a function that creates a Trainer, and call it "
            f"again, in a new process inside that process. For a copy of the weights, use "
            f"copy.deepcopy(trainer.model)."
        )

    __copy__ = __deepcopy__ = __reduce_ex__ = _refuse_copy


class CallbackList(NotCopied, Mapping[str, Any]):
    """The callbacks of a trainer by name, in the order in which they are called.

    Modify it only by `trainer.add_callback` and `trainer.remove_callback`. Global callbacks and the
    hooks of the model are called after those in it, and are not accessible by name.

    Args:
        core: The core callbacks by name.
        callbacks: The user's; loggers among them are moved to the loggers.
        loggers: Called after the user's callbacks.
        check_loss: Whether to add `CheckLoss()` unless another callback handles bad losses.
        shows_progress: Whether to add `ProgressLogger()` unless another callback shows progress.
        on_stop: Called with a `StopTraining` that a hook has raised.
    """

    def __init__(
        self,
        core: Mapping[str, CoreCallback],
        callbacks: Any,
        loggers: Any,
        *,
        check_loss: bool,
        shows_progress: bool,
        on_stop: Callable[[StopTraining], None],
    ) -> None:
        self.core = dict(core)
        self._on_stop = on_stop
        own = checked_callbacks(callbacks)
        self._default_check = _make_default_check(check_loss)
        installed = [*plugin_callbacks(checked_callbacks), *_limit_of_environment()]
        if self._default_check is not None:
            installed.insert(0, self._default_check)
        own += [callback for callback in installed if not any(callback is cb for cb in own)]
        self.user = [callback for callback in own if not isinstance(callback, Logger)]
        self._loggers = [callback for callback in own if isinstance(callback, Logger)]
        for other in checked_callbacks(loggers, "loggers"):
            self._append(other)
        console = self._take_default_console()
        self._default_console = console if shows_progress else None
        if self._default_console is None and shows_progress:
            self._default_console = _make_default_console()
        self._model_hooks: list[ModelHooks] = []
        self.rebuild()

    # ---- by name

    def __getitem__(self, name: str) -> Any:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._by_name!r})"

    def __setitem__(self, name: str, callback: Any) -> None:
        raise TypeError(
            f"trainer.callbacks[{name!r}] cannot be assigned. Use trainer.add_callback(callback)."
        )

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "trainer.callbacks cannot be changed. Use trainer.add_callback(callback) or "
            "trainer.remove_callback(callback)."
        )

    __delitem__ = __ior__ = clear = move_to_end = pop = popitem = setdefault = update = _refuse

    if not TYPE_CHECKING:  # else a checker would accept any attribute name

        def __getattr__(self, name: str) -> Any:
            if name in ("append", "extend", "insert"):
                raise AttributeError(
                    f"trainer.callbacks is not a list and has no {name}. Use "
                    f"trainer.add_callback(callback), also for an interceptor such as "
                    f"('post-loss', f)."
                )
            if name == "remove":
                raise AttributeError(
                    "trainer.callbacks is not a list and has no remove. Use "
                    "trainer.remove_callback(callback)."
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def copy(self) -> dict[str, Any]:
        """Return the callbacks by name in a new dictionary."""
        return dict(self._by_name)

    def name_of(self, callback: Any) -> str:
        """Return the name of a callback.

        Raises:
            ValueError: If it is not one of these callbacks.
        """
        for name, known in self.items():
            if known is callback:
                return name
        raise ValueError(f"{callback!r} is not a callback of this trainer.")

    # ---- hook tables

    def rebuild(self) -> None:
        """Rebuild the hook tables: core, user's, loggers, global, the model's."""
        user = self._without_second_check()
        self.loggers: list[Logger] = [*self._loggers, *self._console_if_alone()]
        core = list(self.core.values())
        self._by_name = {**self.core, **named([*user, *self.loggers])}
        ordered = [*core, *user, *self.loggers, *global_callbacks()]
        known = set(map(id, ordered))
        ordered += [own for own in self._model_hooks if id(own.__wrapped__) not in known]
        self.all = tuple({id(callback): callback for callback in ordered}.values())
        self.log_hooks = HookTable(self.all, on_stop=self._on_stop)
        self.quiet_hooks = self.log_hooks.off_log_steps()

    @property
    def rehearsal_hooks(self) -> HookTable:
        """The hooks off log steps, plus the traced step's for log steps; a new table."""
        return self.log_hooks.off_log_steps(rehearses=True)

    def _without_second_check(self) -> list[Any]:
        """Return the user's callbacks, with the default `CheckLoss` only if nothing replaces it."""
        default = self._default_check
        if default is None:
            return self.user
        others = [callback for callback in self.user if callback is not default]
        given = (*others, *global_callbacks())
        return others if any(map(_handles_bad_losses, given)) else self.user

    def _take_default_console(self) -> Logger | None:
        """Take the `ProgressLogger` that a file has by default out of the given loggers."""
        defaults = [one for one in self._loggers if one.is_default]
        self._loggers = [one for one in self._loggers if one not in defaults]
        return defaults[0] if defaults else None

    def _console_if_alone(self) -> list[Logger]:
        """Return the default `ProgressLogger`, in a list, only if nothing else shows a run."""
        if self._default_console is None:
            return []
        others = (*self.user, *self._loggers, *global_callbacks())
        return [] if any(map(_shows_progress, others)) else [self._default_console]

    # ---- changes, each followed by `rebuild`

    def _append(self, callback: Any) -> bool:
        group: list[Any] = self._loggers if isinstance(callback, Logger) else self.user
        if any(callback is known for known in group):
            return False
        group.append(callback)
        return True

    def add(self, callback: Any) -> tuple[Any, bool]:
        """Add a callback after others of its kind.

        Returns:
            The callback, and whether it is new.

        Raises:
            HookError: If it is invalid.
        """
        [added] = checked_callbacks([callback])
        return added, self._append(added)

    def remove_object(self, callback: Any) -> None:
        """Remove a callback or logger. Idempotent."""
        self.user = [known for known in self.user if known is not callback]
        self._loggers = [known for known in self._loggers if known is not callback]
        if callback is self._default_console:
            self._default_console = None

    def include_model_hooks(self, model: Module) -> None:
        """Add the hooks that the model itself defines, called last, unless it is a callback."""
        found = model_hooks(model)
        self._model_hooks = [] if found is None else [found]

    # ---- state

    def stateful(self) -> list[tuple[str, Any]]:
        """Return the callbacks that have a state, with their names in a checkpoint.

        The default `CheckLoss` is excluded: its state affects nothing, and checkpoints are the same
        with and without it.
        """
        left_out = {id(self._default_check), *map(id, self.core.values())}
        own = [callback for callback in self.all if id(callback) not in left_out]
        return [
            (name, callback)
            for name, callback in named(own).items()
            if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")
        ]

    @property
    def stateless_names(self) -> list[str]:
        """Names of callbacks whose state a checkpoint may have, but not this run's checkpoints.

        That is the default `CheckLoss`, whose state a run from a file saves.
        """
        default = self._default_check
        is_active = any(callback is default for callback in self.all)
        return [type(default).__name__] if is_active else []


class CallbackHandle:
    """Removes an added callback from its trainer."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove = remove

    def remove(self) -> None:
        """Remove the callback. Idempotent."""
        self._remove()


def add_callback(trainer: Trainer, callback: Any) -> CallbackHandle:
    """Add a callback, logger or pair to a trainer; see `Trainer.add_callback`."""
    if is_pair(callback):
        added = trainer.interceptors.add(callback)
        try:
            trainer.rebuild_hooks()
        except ConfigError:
            _keep_pairs(trainer, lambda known: known is not added)
            raise
        return CallbackHandle(lambda: _keep_pairs(trainer, lambda known: known is not added))
    added, is_new = trainer.callbacks.add(callback)
    if is_new:
        trainer.rebuild_hooks()
        alone = HookTable([added], on_stop=trainer.early_exit.request_stop)
        for hook in (alone.pre_setup, alone.setup, alone.post_setup):
            hook(trainer)
    return CallbackHandle(lambda: trainer.remove_callback(added))


def remove_callback(trainer: Trainer, callback: Any) -> None:
    """Remove a callback, logger or pair from a trainer. Idempotent."""
    if is_pair(callback):
        _keep_pairs(trainer, lambda known: known != callback)
    else:
        trainer.callbacks.remove_object(callback)
        trainer.rebuild_hooks()


def _keep_pairs(trainer: Trainer, wanted: Callable[[Pair], bool]) -> None:
    trainer.interceptors.keep(wanted)
    trainer.rebuild_hooks()


def _make_default_check(check_loss: bool) -> Any:
    """Return a `CheckLoss`, or None if it is disabled.

    Raises:
        ConfigError: If `check_loss` is not a bool.
    """
    if not isinstance(check_loss, bool):
        raise ConfigError(
            f"check_loss is {check_loss!r}; it must be True or False. For other settings, pass "
            f"callbacks=[CheckLoss(...)]."
        )
    return load(_CHECK)() if check_loss else None


def _make_default_console() -> Logger:
    console: Logger = load(_CONSOLE)()
    console.is_default = True
    return console


def _limit_of_environment() -> list[Any]:
    """Return the callback for the batch limit of the environment, if any, in a list."""
    return list(load(_LIMIT)()) if from_environment(LIMIT_BATCHES) else []


def _handles_bad_losses(callback: Any) -> bool:
    return getattr(callback, "handles_bad_losses", False) is True


def _shows_progress(callback: Any) -> bool:
    return getattr(callback, "shows_progress", False) is True


def checked_callbacks(callbacks: Iterable[Any] | Any, where: str = "callbacks") -> list[Any]:
    """Return a list of the callbacks that a user gave.

    Args:
        callbacks: An iterable of callbacks, or a single one.
        where: Name of the argument, for messages.

    Returns:
        A copy; an object that was given twice is included once, with a warning.

    Raises:
        HookError: If one is not a callback, or is a core callback.
    """
    if isinstance(callbacks, Iterable) and not isinstance(callbacks, (str, Mapping)):
        given = list(callbacks)
    else:
        given = [callbacks]
    checked: list[Any] = []
    for callback in given:
        if isinstance(callback, CoreCallback):
            kind = type(callback).__name__
            raise HookError(
                f"{where} got a {kind}, which is a core callback. Pass it by its own "
                f"argument (loop, checkpoint, logging, precision, autorestart)."
            )
        check_callback(callback, where)
        if any(callback is known for known in checked):
            warnings.warn(
                f"{where}: the same {type(callback).__name__} object was given twice; it runs "
                f"once.",
                stacklevel=4,
            )
            continue
        checked.append(callback)
    return checked


def named(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return callbacks by class name; repeated ones get `_2`, `_3`, ..."""
    names: dict[str, Any] = {}
    for callback in callbacks:
        name = kind = type(callback).__name__
        number = 1
        while name in names:
            number += 1
            name = f"{kind}_{number}"
        names[name] = callback
    return names
