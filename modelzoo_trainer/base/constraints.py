"""Constraints on constructor arguments as types, checked for files and Python alike.

`config.arguments` checks arguments from a file, `checked` arguments of a call; both use
pydantic and produce the same messages. It is imported with the first constrained argument.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from itertools import chain, pairwise
from numbers import Integral, Number
from operator import or_
from types import UnionType
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen, Predicate
from typing_extensions import dataclass_transform

from modelzoo_trainer.base.foreign_names import ARGUMENTS, advice_for
from modelzoo_trainer.errors import ConfigError, suggest

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

_OR_FLOAT: Final = "an integer"
_FINITE: Final = Predicate(math.isfinite)
_OR_NUMPY: Final = Integral

PositiveInt = Annotated[int, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
Count = Annotated[int, Ge(1), Le(1_000_000_000), _OR_NUMPY]
"""Number of objects that are kept in memory."""
PositiveFloat = Annotated[float, Gt(0)]
FinitePositiveFloat = Annotated[float, Gt(0), _FINITE]
Seconds = Annotated[float, Gt(0), _FINITE, "a number of seconds"]
NonNegative = Annotated[float, Ge(0)]
NonNegativeFloat = Annotated[float, Ge(0), _FINITE]
FiniteFloat = Annotated[float, _FINITE]
AtLeastOne = Annotated[float, Ge(1)]
Fraction = Annotated[float, Ge(0), Lt(1)]
Share = Annotated[float, Gt(0), Lt(1)]
UnitInterval = Annotated[float, Ge(0), Le(1)]
Size = Annotated[int, Gt(0), _OR_NUMPY]
"""Size of a model or its data, which a program may take from an array."""
NonNegativeSize = Annotated[int, Ge(0), _OR_NUMPY]
HeightAndWidth = Annotated[list[Size], MinLen(2), MaxLen(2)]
"""Of an image or a patch, in pixels."""
Progress = Literal["bar", "lines", "none"]
Seed = Annotated[int, Ge(0), Lt(2**32), _OR_NUMPY]
Steps = Annotated[int, Gt(0), _OR_FLOAT]
"""Number of steps, which a program may compute as a float: `0.1 * total`."""
NonNegativeSteps = Annotated[int, Ge(0), _FINITE, _OR_FLOAT]
Flag = Annotated[bool, "true or false"]
"""A `bool` that is checked in Python as well."""
Name = Annotated[str, MinLen(1)]
Call = Literal["batch", "kwargs", "args"]
"""How a model is called with a batch."""
Names = Annotated[list[str], MinLen(1), Predicate(all), "a list of names"]


def _is_increasing(steps: list[float]) -> bool:
    return all(before < after for before, after in pairwise(steps))


Milestones = Annotated[
    list[Steps], MinLen(1), Predicate(_is_increasing), "a list of increasing steps > 0"
]


def checked(owner: str = "") -> Callable[[_F], _F]:
    """Return a decorator of a method or a dataclass that checks constrained arguments.

    Not checked are defaults and types without a constraint: a program may pass any object that
    works. An unknown argument is refused with a suggestion.

    Args:
        owner: Prefix of the argument name in messages; "" = name of the class.
    """

    def decorate(init: _F) -> _F:
        if isinstance(init, type):
            init.__init__ = decorate(init.__init__)  # type: ignore[misc]  # same signature
            return init
        parameters = inspect.signature(init).parameters.values()
        is_open = any(one.kind is one.VAR_KEYWORD for one in parameters)
        defaults = {one.name: one.default for one in list(parameters)[1:]}

        @functools.wraps(init)
        def checking(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_open:
                _refuse_unknown(type(self), kwargs, defaults)
            given = dict(zip(defaults, args, strict=False)) | kwargs
            given = {key: one for key, one in given.items() if one is not defaults.get(key, init)}
            rules = _rules_of(init) if given else {}
            for name in given:
                if name in rules:
                    check(f"{owner or type(self).__name__}.{name}", given[name], rules[name])
            return init(self, *args, **kwargs)

        return checking  # type: ignore[return-value]  # signature of `wraps`

    return decorate


def _refuse_unknown(cls: type, given: Iterable[str], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            tables = [ARGUMENTS.get(base.__name__, {}) for base in cls.__mro__]
            hints = filter(None, (advice_for(table, name) for table in tables))
            advice = next(hints, None) or suggest(name, known)
            raise ConfigError(f"{cls.__name__} has no argument {name!r}. {advice}")


@dataclass_transform(eq_default=False, field_specifiers=(field,))
def checked_dataclass(cls: Any = None, /, *, kw_only: bool = False, owner: str = "") -> Any:
    """Make a class a dataclass whose constructor checks its arguments, as `checked` does.

    It compares by identity. Defaults belong to arguments only: they are not class attributes.
    Arguments that classes share, and their texts, are in a base class. `owner`: see `checked`.
    """
    if cls is None:
        return functools.partial(checked_dataclass, kw_only=kw_only, owner=owner)
    cls.__annotations__ = inspect.get_annotations(cls, eval_str=True)  # names of its module
    made: Any = checked(owner)(dataclass(eq=False, repr=False, kw_only=kw_only)(cls))
    for one in fields(made):
        if one.init and one.name in vars(made):
            delattr(made, one.name)
    return made


def without_effect(reason: str, default: Any = None) -> Any:
    """Return a field of a `checked_dataclass` that is accepted, as published files have it.

    Where it is described, its text is "No effect.", if no docstring has another.
    """
    return field(default=default, metadata={"reason": reason})


def inert_fields(cls: Any) -> list[Field[Any]]:
    """Return the fields of a class that have no effect, with the `reason` in `metadata`."""
    found = getattr(cls, "__dataclass_fields__", {}).values()
    return [one for one in found if "reason" in one.metadata]


@functools.lru_cache(maxsize=512)
def _rules_of(init: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of the constrained arguments, by name."""
    from modelzoo_trainer.base.annotations import annotations_of

    return {
        name: annotation
        for name, annotation in annotations_of(init).items()
        if name != "return" and _constraints_of(annotation)
    }


def check(where: str, value: Any, annotation: Any) -> None:
    """Check that a value fits an annotation.

    Args:
        where: Name of the value, for messages.
        value: The value, which is not converted.
        annotation: A type with constraints.

    Raises:
        ConfigError: If it does not fit.
    """
    from pydantic import ValidationError

    from modelzoo_trainer.base.annotations import (
        adapter_of,
        converted,
        describe,
        expected,
        misfit,
        writable,
    )

    adapter: Any = adapter_of(writable(_in_python(annotation)))
    plain = _plain(value, _OR_NUMPY in _constraints_of(annotation))
    try:
        try:
            converted(adapter, plain)
        except (TypeError, ValueError) as error:  # not a JSON value
            if isinstance(error, ValidationError):
                raise
            if isinstance(value, Number):  # a type that cannot be compared with floats
                got = f"expected {expected(annotation)}, got {describe(value)}."
                raise ConfigError(f"{where}: {got}") from None
            adapter.validate_python(value, strict=True)
    except ValidationError as error:
        wrong = misfit(annotation, plain if isinstance(plain, list | dict) else value, error)
        path = "".join(
            f"[{step}]" if isinstance(step, int) else f".{step}" for step in wrong.location
        )
        raise ConfigError(f"{where}{path}: {wrong.text}") from None


def _plain(value: Any, has_integers: bool) -> Any:
    """Return the JSON equivalent of a value.

    A number of numpy or torch becomes a float or, if `has_integers`, an integer an int; an array of
    one number counts as a number if a float is expected.
    """
    if isinstance(value, list | tuple):
        return [_plain(one, has_integers) for one in value]
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    shape = getattr(value, "shape", None)
    is_array = shape is not None and math.prod(shape) == 1 and not (has_integers and shape)
    number = value.item() if is_array else value
    if has_integers and isinstance(number, Integral) and not isinstance(number, bool):
        return int(number)
    return float(number) if is_array and type(number) in (int, float) else number


def _constraints_of(annotation: Any) -> list[Any]:
    """Return all constraints in an annotation: metadata, and the choices of a `Literal`."""
    if get_origin(annotation) is Literal:
        return [*get_args(annotation)]
    found = list(getattr(annotation, "__metadata__", ()))
    return [*found, *chain.from_iterable(map(_constraints_of, get_args(annotation)))]


def _in_python(annotation: Any) -> Any:
    """Return an annotation with floats instead of integers in `Steps`."""
    if get_origin(annotation) is Annotated and _OR_FLOAT in annotation.__metadata__:
        return Annotated[(float, *annotation.__metadata__)]
    if get_origin(annotation) is Annotated:
        return Annotated[(_in_python(get_args(annotation)[0]), *annotation.__metadata__)]
    if get_origin(annotation) is list:
        return list[_in_python(get_args(annotation)[0])]  # type: ignore[misc]  # created at run time
    if get_origin(annotation) in (Union, UnionType):
        return functools.reduce(or_, map(_in_python, get_args(annotation)))
    return annotation
