"""Hook declarations, validation of listeners, and dispatch to several listeners."""

import difflib
import enum
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeVar

from modelzoo_trainer.errors import HookError, StopTraining
from modelzoo_trainer.hooks.foreign import INSTEAD, MEANING

HookFn = Callable[..., None]
_F = TypeVar("_F", bound=HookFn)

# Similarity (difflib ratio) from which an undeclared name counts as a misspelt hook. Measured on
# pairs: 'on_train_batch_edn' 0.94, 'on_fit_strat' 0.92; a different event such as
# 'on_test_start' (0.81 of 'on_train_start') is not affected.
NEAR_MISS: Final = 0.9
# Words in the hook names of other libraries, and the words used here.
_OUR_WORDS: Final = {
    "begin": "start",
    "complete": "end",
    "completed": "end",
    "done": "end",
    "finish": "end",
    "finished": "end",
    "post": "after",
    "pre": "before",
}
_NEAR_WORD: Final = 0.85  # 'begins' of 'begin' 0.91, 'finsh' of 'finish' 0.91
# Methods with other prefixes are custom ones and never count as misspelt hooks.
_HOOKLIKE: Final = ("on_", "pre", "post", "run_val")


class Phase(enum.Enum):
    """Where a hook is called, and therefore what it may do."""

    RUN = "run"  # around a run or a stage: no restrictions
    BATCH = "batch"  # on the host, between two steps
    STEP = "step"  # inside the traced step: no host read, no I/O, no branch on a value


@dataclass(frozen=True, slots=True, kw_only=True)
class HookSpec:
    """A declared hook."""

    name: str
    phase: Phase
    parameters: tuple[str, ...]  # the names after `self`, in order
    default: HookFn  # the method as declared; a class that inherits it is not called
    doc: str  # first paragraph of the declaration's docstring


HOOKS: Final[dict[str, HookSpec]] = {}


def hook(phase: Phase) -> Callable[[_F], _F]:
    """Mark a method as the declaration of a hook.

    Args:
        phase: Where the hook is called.

    Returns:
        A decorator that returns the method itself. The class that defines it registers it
        (`register_hooks`).
    """

    def mark(method: _F) -> _F:
        method.__hook_phase__ = phase  # type: ignore[attr-defined]  # read by register_hooks
        return method

    return mark


def register_hooks(cls: type) -> None:
    """Add the hooks that `cls` itself declares to `HOOKS`.

    Raises:
        HookError: If another class has already declared the same name with other parameters.
    """
    for name, method in vars(cls).items():
        phase = getattr(method, "__hook_phase__", None)
        if phase is None:
            continue
        parameters = tuple(inspect.signature(method).parameters)[1:]
        known = HOOKS.get(name)
        if known is not None and known.parameters != parameters:
            raise HookError(
                f"{cls.__name__}.{name} declares ({', '.join(parameters)}), but the hook is "
                f"already declared with ({', '.join(known.parameters)}). Use another name."
            )
        doc = inspect.cleandoc(method.__doc__ or "").split("\n\n")[0]
        HOOKS[name] = HookSpec(
            name=name, phase=phase, parameters=parameters, default=method, doc=doc
        )


def near_miss(name: str) -> str | None:
    """Return the declared hook that `name` is probably a misspelling of, or None."""
    if name in HOOKS or not name.startswith(_HOOKLIKE):
        return None
    return nearest(name, HOOKS)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the name that `name` is a misspelling or a synonym of, or None."""
    ours = {_in_our_words(other): other for other in known}
    words = _in_our_words(name)
    if words in ours:
        return ours[words]
    near = difflib.get_close_matches(name, ours.values(), n=1, cutoff=NEAR_MISS)
    if near:
        return near[0]
    near = difflib.get_close_matches(words, ours, n=1, cutoff=NEAR_MISS)
    return ours[near[0]] if near else None


def _in_our_words(name: str) -> str:
    return "_".join(map(_our_word, name.split("_")))


@lru_cache(maxsize=512)
def _our_word(word: str) -> str:
    near = difflib.get_close_matches(word, _OUR_WORDS, n=1, cutoff=_NEAR_WORD)
    return _OUR_WORDS[near[0]] if near else word


def check_listener(owner: str, methods: Mapping[str, Any]) -> None:
    """Check the names and parameters of methods, with `self` first, that may be hooks.

    Raises:
        HookError: If a name is a near miss of a hook or a hook of another trainer, or a hook has
            other parameters than it is called with.
    """
    for name, method in methods.items():
        if not callable(method):
            continue
        declared = HOOKS.get(name)
        if declared is None:
            _check_name(owner, name)
        elif method is not declared.default:
            _check_parameters(owner, declared, method)


def _check_name(owner: str, name: str) -> None:
    foreign = INSTEAD.get(name)
    if foreign is not None:
        instead = f"Instead, define {_shown(foreign)}."
        if foreign == "on_validate_end":
            instead = (
                f"To read the metrics of the validation, define {_shown('on_metrics')}. For "
                f"anything else, define {_shown(foreign)}, where they are not available yet."
            )
        raise HookError(
            f"{owner}.{name} is not a hook: it is a hook of another trainer, and is never called "
            f"here. {instead} For a custom event, use another name."
        )
    meant = near_miss(name)
    if meant is not None:
        raise HookError(f"{owner}.{name} is not a hook. Did you mean {meant!r}?")


def _shown(hook_name: str) -> str:
    takes = ", ".join(("self", *HOOKS[hook_name].parameters))
    return f"{hook_name!r}: def {hook_name}({takes})"


def _check_parameters(owner: str, declared: HookSpec, method: HookFn) -> None:
    signature = inspect.signature(method)
    try:
        bound = signature.bind(None, *declared.parameters)
    except TypeError:
        fits = False
    else:
        named = [
            (name, value) for name, value in bound.arguments.items() if isinstance(value, str)
        ]  # without `self`, and what a `*args` takes
        fits = all(_may_be_called(name, value, declared) for name, value in named)
    if not fits:
        takes = ", ".join(list(signature.parameters)[1:])
        passes = ", ".join(declared.parameters)
        raise HookError(f"{owner}.{declared.name} takes ({takes}), but the hook passes ({passes}).")


def _may_be_called(name: str, passed: str, declared: HookSpec) -> bool:
    """Return whether a parameter that gets the argument `passed` may have a name.

    The name of another argument, here or in another trainer, would be misleading.
    """
    if name == passed:
        return True
    return name not in declared.parameters and passed in MEANING.get(name, (passed,))


def fan_out(calls: Sequence[HookFn], on_stop: Callable[[StopTraining], None]) -> HookFn:
    """Return one function that calls every listener, in order.

    An exception propagates, and `note_origin` later finds its callback. `StopTraining` is a request
    and does not: `on_stop` is called with it, and the remaining listeners are called.
    """
    if len(calls) == 1:
        [only] = calls

        def fire_one(*args: Any) -> None:
            try:
                only(*args)
            except StopTraining as stop:
                on_stop(stop)

        return fire_one
    every = tuple(calls)

    def fire(*args: Any) -> None:
        for listener in every:
            try:
                listener(*args)
            except StopTraining as stop:  # a try block without an exception is free
                on_stop(stop)

    return fire


def note_origin(error: BaseException, callbacks: Iterable[Any], step: int | None) -> None:
    """Add to an exception which callback's hook raised it. Idempotent."""
    actors = [getattr(callback, "__wrapped__", callback) for callback in callbacks]
    known = {id(actor): type(actor).__name__ for actor in actors}
    at = "" if step is None else f" at global_step {step}"
    trace = error.__traceback__
    origin = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_argcount:
            owner = trace.tb_frame.f_locals.get(code.co_varnames[0])
            if id(owner) in known and (code.co_name in HOOKS or code.co_name.startswith("on_")):
                origin = f"raised in {known[id(owner)]}.{code.co_name}"
        trace = trace.tb_next
    noted = getattr(error, "__notes__", [])
    if origin and not any(note.startswith(origin) for note in noted):
        error.add_note(origin + at)


def fan_out_all(name: str, calls: Sequence[HookFn]) -> HookFn:
    """Return a function that calls every listener, even if an earlier one has failed.

    If the last argument is an exception, failures become notes on it; otherwise the first failure
    is raised after all have been called.
    """
    every = tuple(calls)

    def fire(*args: Any) -> None:
        original = args[-1] if args and isinstance(args[-1], BaseException) else None
        failures: list[Exception] = []
        for listener in every:
            try:
                listener(*args)
            except Exception as error:  # noqa: BLE001  # the first error must win
                owner = type(getattr(listener, "__self__", listener)).__name__
                error.add_note(f"raised in {owner}.{name}")
                failures.append(error)
        if original is None and failures:
            raise failures[0]
        for failure in failures:
            original.add_note(  # type: ignore[union-attr]  # not None if there are failures here
                f"{failure.__notes__[-1]} too: {type(failure).__name__}: {failure}"
            )

    return fire


def instance_of(kind: type) -> str:
    """Return a call of a class, with its required arguments: `SaveBest(metric=...)`."""
    try:
        params = list(inspect.signature(kind).parameters.values())
    except (TypeError, ValueError):
        params = []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in params if p.default is p.empty and p.kind not in variadic]
    return f"{kind.__name__}({', '.join(f'{name}=...' for name in needed)})"
