"""A method of one object with functions around it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial, update_wrapper
from threading import get_ident
from typing import Any, Final, Protocol

from modelzoo_trainer.errors import StopTraining
from modelzoo_trainer.interceptors.functions import (
    CALLED,
    AnyFunction,
    Function,
    PostFunction,
    PreFunction,
)

FUNCTIONS: Final = "_advice_functions"
"""Where an object keeps its functions, if it has any."""


class Owner(Protocol):
    """An object whose methods have functions around them."""

    def handle_stop(self, stop: StopTraining, attribute: str) -> None:
        """Do what a `StopTraining` asks for that a function has raised."""


class Parameters:
    """The parameters of a bound method: what a call means by name."""

    def __init__(self, method: AnyFunction) -> None:
        self._signature = inspect.signature(method)
        found = self._signature.parameters.values()
        self._is_plain = all(p.kind is p.POSITIONAL_OR_KEYWORD for p in found)
        self._names = [p.name for p in found]
        self._known = frozenset(self._names)
        self._defaults = {p.name: p.default for p in found if p.default is not p.empty}

    def rewritten(
        self,
        rewrite: Callable[[dict[str, Any]], None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call as `rewrite` leaves them, defaults included."""
        if self._is_plain:  # a fraction of the time that `bind` takes
            given = dict(zip(self._names, args, strict=False))
            arguments = self._defaults | given | kwargs
            is_whole = len(given) == len(args) and arguments.keys() == self._known
            if is_whole and given.keys().isdisjoint(kwargs):
                rewrite(arguments)
                return (), arguments
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        rewrite(bound.arguments)
        return bound.args, bound.kwargs


class AdvisedMethod:
    """A method of one object, with the functions around it.

    A call inside a call of the same method is part of that: functions are called for the
    outermost.
    """

    def __init__(self, owner: Owner, attribute: str) -> None:
        self.owner = owner
        self.replaced = vars(owner).get(attribute)
        """What the object had among its own attributes before."""
        self.plain: AnyFunction = getattr(owner, attribute)
        self.attribute = attribute
        self.pre: tuple[PreFunction, ...] = ()
        self.post: tuple[PostFunction, ...] = ()
        self._inside: set[int] = set()
        self._parameters = Parameters(self.plain)
        update_wrapper(self, self.plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the functions before, the method, and the functions after."""
        thread = get_ident()
        if thread in self._inside:
            return self.plain(*args, **kwargs)
        self._inside.add(thread)
        try:
            if self.pre:
                rewrite = partial(before, self.owner, self.pre)
                args, kwargs = self._parameters.rewritten(rewrite, args, kwargs)
            result = self.plain(*args, **kwargs)
            return after(self.owner, self.post, result) if self.post else result
        finally:
            self._inside.discard(thread)


def begin(owner: Owner, attribute: str) -> None:
    """Call the functions before an event that is no call of its method, but a time."""
    advised = vars(owner).get(attribute)
    if isinstance(advised, AdvisedMethod):
        before(owner, advised.pre, {})


def end(owner: Owner, attribute: str) -> None:
    """Call the functions after an event that is no call of its method, but a time."""
    advised = vars(owner).get(attribute)
    if isinstance(advised, AdvisedMethod):
        after(owner, advised.post, None)


def before(owner: Owner, functions: Iterable[PreFunction], arguments: dict[str, Any]) -> None:
    """Call the functions before a method, in order; they rewrite the arguments."""
    token = CALLED.set(CALLED.get())
    try:
        for function in functions:
            _guarded(owner, function, function.rewrite, arguments)
    finally:
        CALLED.reset(token)


def after(owner: Owner, functions: Iterable[PostFunction], result: Any) -> Any:
    """Call the functions after a method, in order, and return the result as they leave it."""
    token = CALLED.set(CALLED.get())
    try:
        for function in functions:
            result = _guarded(owner, function, function.result, result)
    finally:
        CALLED.reset(token)
    return result


def _guarded(owner: Owner, function: Function, call: Callable[[Any, Any], Any], value: Any) -> Any:
    try:
        return call(owner, value)
    except StopTraining as stop:
        owner.handle_stop(stop, function.attribute)
        return value
    except BaseException as error:
        error.add_note(f"raised in {function.label}")
        raise


def functions_of(owner: Owner) -> list[Function]:
    """Return the functions of an object, in order; that list is not to be changed."""
    found: list[Function] = vars(owner).get(FUNCTIONS, [])
    return found


def install(owner: Owner, functions: list[Function]) -> None:
    """Make these the functions of an object: its methods with functions, the others without."""
    own = vars(owner)
    wanted = {function.attribute for function in functions}
    for name, value in list(own.items()):
        if isinstance(value, AdvisedMethod) and name not in wanted:
            del own[name]
            if value.replaced is not None:
                own[name] = value.replaced
    for name in wanted:
        if not isinstance(own.get(name), AdvisedMethod):
            own[name] = AdvisedMethod(owner, name)
        mine = [function for function in functions if function.attribute == name]
        own[name].pre = tuple(known for known in mine if isinstance(known, PreFunction))
        own[name].post = tuple(known for known in mine if isinstance(known, PostFunction))
    if functions:
        own[FUNCTIONS] = functions
    else:
        own.pop(FUNCTIONS, None)
