"""A function before or after a method: validation and call."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError, suggest

log = logging.getLogger("modelzoo_trainer.interceptors")

AnyFunction = Callable[..., Any]
Pair = tuple[str, AnyFunction]

INIT: Final = "init"
"""The event of the constructor, in every class."""

_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
CALLED: ContextVar[frozenset[tuple[int, object]]] = ContextVar("called", default=frozenset())
"""The interceptor methods that the active calls have run."""


def canonical(name: str) -> str:
    """Return an event name with hyphens instead of underscores."""
    return name.replace("_", "-")


def is_pair(value: object) -> bool:
    """Return whether a value is meant as a pair of an event and a function."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)


def split_pair(pair: Any, where: str) -> tuple[str, str, AnyFunction]:
    """Return "pre" or "post", the event name, and the function.

    Raises:
        ConfigError: If it is not such a pair.
    """
    if not is_pair(pair):
        raise ConfigError(
            f"{where}: got {pair!r}. Pass pairs of an event and a function, such as ('post-step', "
            f"function)."
        )
    spelled, function = pair
    side, _, name = canonical(spelled).partition("-")
    if side not in ("pre", "post") or not name:
        raise ConfigError(
            f"{where}: {spelled!r} must start with 'pre-' or 'post-': write 'pre-{spelled}' or "
            f"'post-{spelled}'."
        )
    if not callable(function):
        raise ConfigError(
            f"{where}: {spelled!r} needs a function, got {function!r}, which is not callable."
        )
    return side, name, function


def unknown_event(where: str, spelled: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an unknown event."""
    side, _, name = canonical(spelled).partition("-")
    names = sorted(set(known))
    advice = suggest(f"{side}-{name}", [f"{side}-{one}" for one in names])
    near = f"{advice} " if advice.startswith("Did") else ""
    return ConfigError(
        f"{where}: there is no event {name!r} for {spelled!r}. {near}Events: {', '.join(names)}."
    )


@dataclass(frozen=True, slots=True)
class Method:
    """The method of an event, as interceptors see it."""

    block: str  # the class's name
    event: str
    attribute: str  # the method's name
    parameters: Mapping[str, inspect.Parameter]  # without the object itself
    returns: Any  # its annotation; `inspect.Parameter.empty` = there is none
    keeps_result: bool = False  # whether a post-function must not replace a result by None
    passes_result: bool = True  # whether a post-function gets the result

    @classmethod
    def of(cls, block: type, event: str, attribute: str) -> Method:
        """Return the method of a class.

        An override without a return annotation uses the annotation of the method it overrides.
        """
        signature = inspect.signature(getattr(block, attribute))
        parameters = dict(list(signature.parameters.items())[1:])
        returns: Any = inspect.Parameter.empty
        declared = [vars(base)[attribute] for base in block.__mro__ if attribute in vars(base)]
        for method in declared:
            if returns is inspect.Parameter.empty:
                returns = inspect.signature(method).return_annotation
        keeps = any(getattr(method, "__keeps_result__", False) for method in declared)
        passes = all(getattr(method, "__passes_result__", True) for method in declared)
        return cls(block.__name__, event, attribute, parameters, returns, keeps, passes)

    @property
    def nameable(self) -> list[str]:
        """The parameters that a function may take."""
        return [name for name, p in self.parameters.items() if p.kind not in _VARIADIC]

    @property
    def has_result(self) -> bool:
        """Whether it returns something, or may, that functions get."""
        return (
            self.event != INIT
            and self.passes_result
            and self.returns not in (None, "None", type(None))
        )


class Function:
    """A function of an event.

    Raises:
        ConfigError: If its parameters do not fit the method.
    """

    def __init__(self, pair: Pair, method: Method) -> None:
        self.pair = pair
        self.method = method
        self.attribute = method.attribute
        self._function = pair[1]
        self.label = f"{name_of(pair[1])}, {pair[0]!r} of {method.block}"
        self.chained: object | None = getattr(pair[1], "__chained__", None)
        self._parameters = self._own_parameters()

    def _own_parameters(self) -> list[inspect.Parameter]:
        """Return the parameters after the first one, which is the object."""
        try:
            parameters = list(inspect.signature(self._function).parameters.values())
        except (TypeError, ValueError):
            raise self.misfit(
                "cannot inspect its signature. Wrap it: lambda self, ...: f(...)"
            ) from None
        if inspect.iscoroutinefunction(self._function):
            raise self.misfit("async functions are not supported. Make it a plain function")
        bound = self._function.keywords if isinstance(self._function, partial) else {}
        parameters = [p for p in parameters if p.name not in bound]
        if not parameters:
            raise self.misfit("it takes no parameters, but the first one must be the object (self)")
        for p in parameters:
            if p.kind in _VARIADIC:
                raise self.misfit(f"it takes {p}. Name its parameters, without * and **")
            if p.default is not p.empty:
                raise self.misfit(
                    f"remove the default of parameter {p.name!r}: the trainer always passes it"
                )
        return parameters[1:]

    def misfit(self, why: str) -> ConfigError:
        """Return the error for a function that does not fit its event."""
        end = "" if why.endswith(("?", ".")) else "."
        return ConfigError(f"{self.label}: {why}{end}")

    def note(self, owner: object) -> None:
        """Record that the active call has run this function, if it is a method of the object."""
        note_call(owner, self.chained)

    def none_instead_of(self, what: str) -> ValueError:
        """Return the error for a function that probably lacks its `return`."""
        return ValueError(
            f"{self.label}, returned None instead of {what}. Return the value, changed or not."
        )


class PreFunction(Function):
    """A function called before a method, with the arguments that it names; may replace them."""

    def __init__(self, pair: Pair, method: Method) -> None:
        super().__init__(pair, method)
        known = method.nameable
        first = next(iter(inspect.signature(self._function).parameters))
        if first in known:
            raise self.misfit(
                f"the first parameter receives the {method.block}, but {first!r} is the name of an "
                f"argument of {method.attribute}. Make the parameters (self, {first}, ...)"
            )
        for p in self._parameters:
            if p.name not in known:
                advice = suggest(p.name, known) if known else "It has no named arguments."
                raise self.misfit(
                    f"it takes {p.name!r}, which is not an argument of {method.attribute}. {advice}"
                )
        self._names = [p.name for p in self._parameters]
        self._keywords = [p.name for p in self._parameters if p.kind is p.KEYWORD_ONLY]
        self._positional = [name for name in self._names if name not in self._keywords]
        self._may_be_none = {name for name in self._names if _admits_none(method.parameters[name])}

    def rewrite(self, owner: object, arguments: dict[str, Any]) -> None:
        """Call it, and replace the arguments that it took by what it returns.

        Raises:
            ValueError: If it returns another number of values than it took.
        """
        returned = self._function(
            owner,
            *(arguments[name] for name in self._positional),
            **{name: arguments[name] for name in self._keywords},
        )
        for name, value in zip(self._names, self._values(returned), strict=True):
            is_lost = value is None and arguments[name] is not None
            if is_lost and name not in self._may_be_none:
                raise self.none_instead_of(repr(name))
            arguments[name] = value
        self.note(owner)

    def _values(self, returned: Any) -> Iterable[Any]:
        num = len(self._names)
        if num == 1:
            return (returned,)
        if num == 0 and returned is None:
            return ()
        if num == 0:
            raise ValueError(
                f"{self.label}, takes no argument of the method, so it must return None; got "
                f"{returned!r}."
            )
        is_sequence = isinstance(returned, (tuple, list))
        if is_sequence and len(returned) == num:
            return returned  # type: ignore[no-any-return]  # a sequence, checked above
        given = f"{len(returned)} values" if is_sequence else f"a {type(returned).__name__}"
        raise ValueError(
            f"{self.label}, returned {given}, but must return {num}: ({', '.join(self._names)})."
        )


class PostFunction(Function):
    """A function called after a method, with its result, if it has one; may replace it."""

    def __init__(self, pair: Pair, method: Method) -> None:
        super().__init__(pair, method)
        num = len(self._parameters)
        self._has_result = method.has_result
        if method.has_result and num != 1:
            taken = ", ".join(inspect.signature(self._function).parameters)
            raise self.misfit(
                f"it takes ({taken}), but must take (self, result), because {method.attribute} "
                f"returns a value (if {method.attribute} does not, annotate it with '-> None')"
            )
        if not method.has_result and num != 0:
            raise self.misfit(
                f"it must take only (self), because {method.attribute} passes on no result"
            )
        if method.has_result and method.returns is inspect.Parameter.empty:
            log.warning(
                "%s: %s has no return annotation, so the function gets the method's result even if "
                "it is None. Annotate the return type of %s ('-> None' if it returns nothing).",
                self.label,
                method.attribute,
                method.attribute,
            )
        may_return_none = "None" in str(method.returns) or "Optional" in str(method.returns)
        self._may_be_none = may_return_none and not method.keeps_result
        self._keyword = [p.name for p in self._parameters if p.kind is p.KEYWORD_ONLY]

    def result(self, owner: object, value: Any) -> Any:
        """Call it, and return the result of the method, possibly replaced.

        Raises:
            ValueError: If it returns None although there was a result.
        """
        if not self._has_result:
            self._function(owner)
            returned = value
        else:
            keyword = dict.fromkeys(self._keyword, value)
            returned = self._function(owner, **keyword) if keyword else self._function(owner, value)
            if returned is None and value is not None and not self._may_be_none:
                raise self.none_instead_of("the result")
        self.note(owner)
        return returned


def name_of(function: AnyFunction) -> str:
    """Return the name of a function for messages; partials and objects have no name."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _admits_none(parameter: inspect.Parameter) -> bool:
    said = str(parameter.annotation)
    return parameter.default in (None, ...) or "None" in said or "Optional" in said


def note_call(owner: object, chained: object | None) -> None:
    """Record that the active call has run an interceptor method of an object.

    `chained`: the id of the function; None = it is not a method of the object.
    """
    if chained is not None:
        CALLED.set(CALLED.get() | {(id(owner), chained)})
