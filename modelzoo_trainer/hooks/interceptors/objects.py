"""Objects with interceptors, and the wrapper of an intercepted method."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, MutableSequence
from functools import partial, update_wrapper, wraps
from threading import get_ident
from types import new_class
from typing import Any, Final, Protocol, Self, overload

from typing_extensions import override

from modelzoo_trainer.errors import ConfigError, StopTraining
from modelzoo_trainer.hooks.interceptors.classes import class_pairs, events_of, take_list
from modelzoo_trainer.hooks.interceptors.functions import (
    CALLED,
    INIT,
    AnyFunction,
    Function,
    Method,
    Pair,
    PostFunction,
    PreFunction,
    split_pair,
    unknown_event,
)

FUNCTIONS: Final = "_interceptor_functions"
"""Instance attribute of the list of functions, if any."""


class Owner(Protocol):
    """An object whose methods are intercepted."""

    def handle_stop(self, stop: StopTraining, attribute: str) -> None:
        """Handle a `StopTraining` that a function has raised."""


class Parameters:
    """The parameters of a bound method."""

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
        """Return the arguments of a call after `rewrite`, with defaults."""
        if self._is_plain:  # much faster than `bind`
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


class InterceptedMethod:
    """A method of an object, with the functions before and after it.

    A nested call of the same method does not run the functions again.
    """

    def __init__(self, owner: Owner, attribute: str) -> None:
        self.owner = owner
        self.replaced = vars(owner).get(attribute)
        """The instance attribute of this name before, if any."""
        self.plain: AnyFunction = getattr(owner, attribute)
        self.attribute = attribute
        self.pre: tuple[PreFunction, ...] = ()
        self.post: tuple[PostFunction, ...] = ()
        self._inside: set[int] = set()
        self._parameters = Parameters(self.plain)
        update_wrapper(self, self.plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the pre-functions, the method, and the post-functions."""
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
    """Call the pre-functions of an event that is a point in time instead of a method call."""
    intercepted = vars(owner).get(attribute)
    if isinstance(intercepted, InterceptedMethod):
        before(owner, intercepted.pre, {})


def end(owner: Owner, attribute: str) -> None:
    """Call the post-functions of an event that is a point in time instead of a method call."""
    intercepted = vars(owner).get(attribute)
    if isinstance(intercepted, InterceptedMethod):
        after(owner, intercepted.post, None)


def before(owner: Owner, functions: Iterable[PreFunction], arguments: dict[str, Any]) -> None:
    """Call the pre-functions in order; they rewrite the arguments."""
    token = CALLED.set(CALLED.get())
    try:
        for function in functions:
            _guarded(owner, function, function.rewrite, arguments)
    finally:
        CALLED.reset(token)


def after(owner: Owner, functions: Iterable[PostFunction], result: Any) -> Any:
    """Call the post-functions in order, and return the result."""
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
    """Return the functions of an object, in order; do not modify the list."""
    found: list[Function] = vars(owner).get(FUNCTIONS, [])
    return found


def install(owner: Owner, functions: list[Function]) -> None:
    """Set the functions of an object: wrap the methods that have any, unwrap the others."""
    own = vars(owner)
    wanted = {function.attribute for function in functions}
    for name, value in list(own.items()):
        if isinstance(value, InterceptedMethod) and name not in wanted:
            del own[name]
            if value.replaced is not None:
                own[name] = value.replaced
    for name in wanted:
        if not isinstance(own.get(name), InterceptedMethod):
            own[name] = InterceptedMethod(owner, name)
        mine = [function for function in functions if function.attribute == name]
        own[name].pre = tuple(known for known in mine if isinstance(known, PreFunction))
        own[name].post = tuple(known for known in mine if isinstance(known, PostFunction))
    if functions:
        own[FUNCTIONS] = functions
    else:
        own.pop(FUNCTIONS, None)


_PREPARED: Final = "_interceptor_prepared"


class FunctionHandle:
    """Handle that removes an added function."""

    def __init__(self, owner: InterceptableMethods, function: Function) -> None:
        self._owner = owner
        self._function = function

    def remove(self) -> None:
        """Remove the function. Idempotent."""
        functions = functions_of(self._owner)
        if any(known is self._function for known in functions):
            install(self._owner, [known for known in functions if known is not self._function])


class InterceptableMethods:
    """Base class of objects with interceptors.

    Functions come from the classes, base first, each with its list `callbacks` and then its methods
    `pre_EVENT_callback` and `post_EVENT_callback`, and then from the object. Inherited functions
    are not repeated.

    Raises:
        ConfigError: When an object is created, if a function is invalid.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        events_of(cls)
        take_list(cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create the object, with the functions of its classes in place before `__init__`."""
        cls.check_call(args, kwargs)
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(
                f"{cls.__name__}() takes no constructor arguments; got {[*args, *kwargs]}."
            )
        made: Callable[..., Self] = super().__new__
        self = made(cls) if made is object.__new__ else made(cls, *args, **kwargs)
        pairs = self.own_pairs()
        if pairs:
            functions = [self.checked(pair) for pair in pairs]
            install(self, [known for known in functions if known.method.event != INIT])
            if any(known.method.event == INIT for known in functions):
                _prepare_init(cls)
        return self

    @classmethod
    def check_call(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check the arguments of the constructor before anything is created; no-op by default."""

    @classmethod
    def own_pairs(cls) -> tuple[Pair, ...]:
        """Return the functions of the classes that are for the object itself: all."""
        return class_pairs(cls)

    @classmethod
    def events(cls) -> tuple[str, ...]:
        """Return the names of all events except the constructor's."""
        return tuple(sorted(events_of(cls)))

    @classmethod
    def with_functions(cls, *pairs: Pair) -> type[Self]:
        """Return a subclass with more functions, which are in place when the constructor begins.

        Args:
            pairs: Such as `("post-load", f)`.
        """
        names = {
            "callbacks": list(pairs),
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
        }
        return new_class(cls.__name__, (cls,), exec_body=lambda own: own.update(names))

    def add_function(self, event: str, function: AnyFunction) -> FunctionHandle:
        """Add a function to this object only, after the existing ones.

        Args:
            event: Such as "pre-step" or "post-step".
            function: Takes the object and some arguments of the method, or its result.

        Returns:
            A handle whose `remove` removes it.

        Raises:
            ConfigError: If there is no such event, or the function does not fit it.
        """
        added = self.checked((event, function))
        if added.method.event == INIT:
            raise ConfigError(
                f"{added.label}: added too late, because the object already exists. Add the pair "
                f"(event, function) to the class attribute 'callbacks' of {type(self).__name__}, "
                f"or use {type(self).__name__}.with_functions(...)."
            )
        install(self, [*functions_of(self), added])
        return FunctionHandle(self, added)

    def add_pair_once(self, pair: Pair) -> None:
        """Add a function after the existing ones, unless the same pair was added already.

        Raises:
            ConfigError: If there is no such event, or the function does not fit it.
        """
        functions = functions_of(self)
        if not any(known.pair is pair for known in functions):
            install(self, [*functions, self.checked(pair)])

    def drop_pairs(self, pairs: Iterable[Pair]) -> None:
        """Remove functions that were added as these same pairs."""
        dropped = set(map(id, pairs))
        functions = functions_of(self)
        kept = [known for known in functions if id(known.pair) not in dropped]
        if len(kept) < len(functions):
            install(self, kept)

    def checked(self, pair: Pair) -> Function:
        """Return a validated function of this object's events.

        Raises:
            ConfigError: If there is no such event, or the function does not fit it.
        """
        cls = type(self)
        side, name, _ = split_pair(pair, cls.__name__)
        methods = {INIT: "__init__", **events_of(cls)}
        if name not in methods:
            raise unknown_event(cls.__name__, pair[0], methods)
        method = Method.of(cls, name, methods[name])
        return (PreFunction if side == "pre" else PostFunction)(pair, method)

    def handle_stop(self, stop: StopTraining, attribute: str) -> None:
        """Handle a `StopTraining` that a function has raised: raise it."""
        raise stop

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        for name, value in vars(self).items():
            if isinstance(value, InterceptedMethod):  # of this object, not of the copy
                del state[name]
                if value.replaced is not None:
                    state[name] = value.replaced
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        functions = state.get(FUNCTIONS, [])
        install(self, [])
        vars(self).update(state)
        install(self, list(functions))


class FunctionList(MutableSequence[Pair]):
    """The functions of an object, as pairs; changes of this list apply to the object."""

    def __init__(self, owner: InterceptableMethods) -> None:
        self._owner = owner

    def __len__(self) -> int:
        return len(functions_of(self._owner))

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> list[Pair]: ...
    @override
    def __getitem__(self, index: int | slice) -> Pair | list[Pair]:
        pairs = [function.pair for function in functions_of(self._owner)]
        return pairs[index]

    def __setitem__(self, index: int | slice, value: Any) -> None:
        functions: list[Any] = list(functions_of(self._owner))
        if isinstance(index, slice):
            functions[index] = [self._owner.checked(pair) for pair in value]
        else:
            functions[index] = self._owner.checked(value)
        install(self._owner, functions)

    def __delitem__(self, index: int | slice) -> None:
        functions = list(functions_of(self._owner))
        del functions[index]
        install(self._owner, functions)

    @override
    def insert(self, index: int, value: Pair) -> None:
        """Insert a function before that at `index`."""
        added = self._owner.checked(value)
        functions = list(functions_of(self._owner))
        functions.insert(index, added)
        install(self._owner, functions)

    def __repr__(self) -> str:
        return repr(list(self))


class _Lists:
    """The attribute `callbacks`: a live list for an object, a copy for a class."""

    def __get__(self, instance: InterceptableMethods | None, cls: type) -> Any:
        return class_pairs(cls) if instance is None else FunctionList(instance)

    def __set__(self, instance: InterceptableMethods, value: Iterable[Pair]) -> None:
        FunctionList(instance)[:] = list(value)


class Interceptable(InterceptableMethods):
    """Base class of objects with interceptors in an editable list, `callbacks`.

    Example:
        >>> from modelzoo_trainer.hooks.interceptors import event
        >>> class Greeter(Interceptable):
        ...     @event("greet")
        ...     def greet(self, name: str) -> str:
        ...         return f"Hello {name}"
        >>> greeter = Greeter()
        >>> greeter.callbacks.append(("pre-greet", lambda self, name: name.title()))
        >>> handle = greeter.add_function("post-greet", lambda self, result: result + "!")
        >>> greeter.greet("ada")
        'Hello Ada!'
    """

    callbacks: Any = _Lists()


def _prepare_init(cls: type[InterceptableMethods]) -> None:
    """Wrap the constructor of a class to call its functions, for objects of exactly that class."""
    if vars(cls).get(_PREPARED):
        return
    plain = cls.__init__

    @wraps(plain)
    def init(self: InterceptableMethods, *args: Any, **kwargs: Any) -> None:
        if type(self) is not cls:  # called by the constructor of a subclass
            plain(self, *args, **kwargs)
            return
        known = [self.checked(pair) for pair in cls.own_pairs()]
        mine = [function for function in known if function.method.event == INIT]
        pre = [function for function in mine if isinstance(function, PreFunction)]
        post = [function for function in mine if isinstance(function, PostFunction)]
        if pre:
            parameters = Parameters(plain.__get__(self))
            args, kwargs = parameters.rewritten(partial(before, self, pre), args, kwargs)
        plain(self, *args, **kwargs)
        after(self, post, None)

    cls.__init__ = init  # type: ignore[method-assign, assignment]  # same signature
    setattr(cls, _PREPARED, True)
