"""Annotations of parameters: resolved, checked by pydantic, and described in messages."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import typing_extensions
from annotated_types import Ge, Gt, Le, Lt, MinLen, Predicate
from pydantic import (
    BaseModel,
    PydanticSchemaGenerationError,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import ErrorDetails

from modelzoo_trainer.errors import suggest

_UNWRITABLE: Final = " (which YAML cannot write)"
_OF_TYPE: Final = (
    "literal_error",
    "enum",
    "is_instance_of",
    "none_required",
    "needs_python_object",
)
_WORDS: Final[dict[Any, str]] = {
    Any: "anything",
    object: "anything",
    NoneType: "null",
    None: "null",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path",
    dict: "a mapping",
    list: "a list",
    tuple: "a list",
    set: "a list",
    frozenset: "a list",
}


def annotations_of(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of the parameters of `target`, with names resolved.

    Args:
        target: A class or a function. An annotation with names that exist only for type checkers
            becomes `Any`.
    """
    made_by = getattr(target, "__init__") if isinstance(target, type) else target  # noqa: B009
    function = inspect.unwrap(made_by)
    raw = getattr(function, "__annotations__", {})
    namespace = getattr(function, "__globals__", {})
    resolved = {}
    for name, annotation in raw.items():
        holder = SimpleNamespace(__annotations__={name: annotation})
        try:
            hints = typing.get_type_hints(holder, globalns=namespace, include_extras=True)
        except (NameError, AttributeError):
            hints = {name: Any}
        resolved[name] = hints[name]
    return resolved


def writable(annotation: Any) -> Any:
    """Return `annotation` with iterables as lists, since they are checked and then read again."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in (Iterable, Collection):
        return list
    if origin in (Iterable, Collection):
        return list[writable(args[0])]  # type: ignore[misc]  # a type created at run time
    if origin is Annotated:
        return Annotated[(writable(args[0]), *args[1:])]
    if origin in (Union, UnionType):
        return Union[tuple(writable(arg) for arg in args)]  # noqa: UP007  # created at run time
    return annotation


def _alternatives(annotation: Any) -> Iterator[Any]:
    """Yield the alternatives of a union, or the annotation itself, with `Annotated`."""
    if get_origin(annotation) in (Union, UnionType):
        for arg in get_args(annotation):
            yield from _alternatives(arg)
    elif get_origin(annotation) is Annotated and len(members(annotation)) > 1:
        yield from _alternatives(get_args(annotation)[0])
    else:
        yield annotation


def members(annotation: Any) -> list[Any]:
    """Return the alternatives of a union, or the annotation itself, without `Annotated`."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [inner for arg in get_args(annotation) for inner in members(arg)]
    return [annotation]


def choices(annotation: Any) -> list[Any]:
    """Return the allowed values of an annotation, from `Literal`s and enumerations."""
    found: list[Any] = []
    for member in members(annotation):
        if get_origin(member) is Literal:
            found.extend(get_args(member))
        elif isinstance(member, type) and issubclass(member, Enum):
            found.extend(item.value for item in member)
    return found


def expected(annotation: Any) -> str:
    """Describe the expected value: "an integer or null", "'min' or 'max'"."""
    listed = [repr(choice) for choice in choices(annotation)]
    words = [_word(member) for member in _alternatives(annotation) if not choices(member)]
    plain = [word for word in words if not word.endswith(_UNWRITABLE)]
    words = plain if plain or listed else words
    nothing = [word for word in words if word == "null"]
    others = list(dict.fromkeys(word for word in words if word != "null"))
    return _either([*listed, *others, *nothing])


def _word(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _constrained(_word(args[0]), args[1:])
    if annotation in _WORDS:
        return _WORDS[annotation]
    if origin is tuple and args and args[-1] is not Ellipsis:
        return f"a list of {len(args)} ({', '.join(expected(arg) for arg in args)})"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a mapping (to {expected(args[1])})"
    if isinstance(origin, type) and issubclass(origin, Collection):
        inner = expected(args[0])
        return "a list" if _UNWRITABLE in inner else f"a list (each {inner})"
    if isinstance(annotation, type):
        if _is_record(annotation):
            return "a mapping"
        return f"a {annotation.__name__}{_UNWRITABLE}"
    return f"{annotation}{_UNWRITABLE}".replace("typing.", "")


def _is_record(annotation: Any) -> bool:
    """Return whether it has fields: a dataclass, a typed dictionary, a pydantic model."""
    return isinstance(annotation, type) and (
        typing_extensions.is_typeddict(annotation)
        or dataclasses.is_dataclass(annotation)
        or issubclass(annotation, BaseModel)
    )


def _constrained(word: str, constraints: Sequence[Any]) -> str:
    """Add the bounds to a description: "an integer > 0", "a number in [0, 1)"."""
    bounds: dict[str, str] = {}
    for one in constraints:
        match one:
            case Gt(gt=least) | Ge(ge=least):
                bounds["> " if isinstance(one, Gt) else ">= "] = str(least)
            case Lt(lt=most) | Le(le=most):
                bounds["< " if isinstance(one, Lt) else "<= "] = str(most)
            case MinLen():
                word += (
                    " that is not empty" if one.min_length == 1 else f" of {one.min_length} or more"
                )
            case Predicate() if one.func is math.isfinite:
                word = word.replace("a number", "a finite number")
            case str():  # the name of what a function checks
                word = one
    return f"{word} {_range(bounds)}" if bounds else word


def _range(bounds: dict[str, str]) -> str:
    if len(bounds) == 1:
        return "".join(*bounds.items())
    (above, low), (below, high) = sorted(bounds.items(), reverse=True)
    return f"in {'(' if above == '> ' else '['}{low}, {high}{')' if below == '< ' else ']'}"


def _either(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


@lru_cache(maxsize=1024)
def adapter_of(annotation: Any) -> TypeAdapter[Any] | None:
    """Return the pydantic adapter that checks values for `annotation`.

    Args:
        annotation: None is returned if it accepts everything, or pydantic does not support it.
    """
    if annotation in (Any, object):
        return None
    try:
        return TypeAdapter(annotation, config={"arbitrary_types_allowed": True})
    except (PydanticUserError, PydanticSchemaGenerationError):
        pass  # a model or a dataclass has its own configuration
    try:
        return TypeAdapter(annotation)
    except (PydanticUserError, PydanticSchemaGenerationError):
        return None


def converted(adapter: TypeAdapter[Any], plain: Any) -> Any:
    """Return a value converted by the adapter.

    The rules follow JSON, as for a file: a string may be a path or the value of an
    enumeration, a list may be a tuple, an integer may be a float; otherwise strict.

    Raises:
        ValidationError: If the value is invalid.
    """
    return adapter.validate_json(json.dumps(plain), strict=True)


def describe(value: Any) -> str:
    """Describe a given value: `'text'`, `3`, `[1, 2]`, "a mapping"."""
    match value:
        case str():
            return repr(value if len(value) <= 60 else value[:57] + "...")
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case list() | tuple():
            is_plain = not any(isinstance(one, list | tuple | dict) for one in value)
            text = repr(list(value)) if is_plain and len(value) < 20 else ""
            return text if text and len(text) <= 60 else "a list"
        case dict():
            return "a mapping"
    return repr(value)


@dataclasses.dataclass(frozen=True, slots=True)
class Misfit:
    """An invalid part of a value, with its message.

    Args:
        location: Keys and indices that lead to it.
        kind: Pydantic's error type.
        text: "expected an integer, got 'x'."
        lacks: The missing key of a mapping; "" if that is not the problem.
    """

    location: tuple[int | str, ...]
    kind: str
    text: str
    lacks: str = ""


def misfit(annotation: Any, plain: Any, error: ValidationError) -> Misfit:
    """Return what is invalid in a value; the deepest of several problems.

    Args:
        annotation: The expected type.
        plain: The value.
        error: The exception of `converted`.
    """
    details = error.errors(include_url=False, include_input=False)
    found = [(_reached(plain, detail["loc"]), detail) for detail in details]
    depth = max(len(location) for location, _ in found)
    deepest = [one for one in found if len(one[0]) == depth]
    location, detail = next((one for one in deepest if not _is_of_type(one[1])), deepest[0])
    value, inner = plain, annotation
    for step in location:
        value, inner = value[step], _inner(inner, step)
    kind, message = detail["type"], detail["msg"]
    if kind == "missing" and isinstance(value, dict):
        lacks = str(detail["loc"][-1])
        return Misfit(location, kind, f"{lacks!r} is missing in {describe(value)}.", lacks)
    if inner is not None and not any(_is_record(member) for member in members(inner)):
        message = f"expected {expected(inner)}"
    else:
        message = message[0].lower() + message[1:]
        message = message.replace("input should be ", "expected ")
    named = [] if inner is None else [one for one in choices(inner) if isinstance(one, str)]
    advice = suggest(value, named) if named and isinstance(value, str) else ""
    hint = f" {advice}" if advice.startswith("Did") else ""
    return Misfit(location, kind, f"{message}, got {describe(value)}.{hint}")


def _reached(plain: Any, location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return the steps of a location that exist in the value, without those into a union."""
    found = []
    for step in location:
        has_key = isinstance(plain, dict) and step in plain
        has_item = isinstance(plain, list | tuple) and isinstance(step, int) and step < len(plain)
        if has_key or has_item:
            plain = plain[step]
            found.append(step)
    return tuple(found)


def _inner(annotation: Any, step: int | str) -> Any:
    """Return the annotation of an item; None if it is unknown."""
    for member in members(annotation):
        origin, args = get_origin(member), get_args(member)
        if not isinstance(origin, type) or not args:
            continue
        if issubclass(origin, Mapping):
            if isinstance(step, str):
                return args[1]
        elif isinstance(step, int) and issubclass(origin, Collection):
            is_record = origin is tuple and args[-1] is not Ellipsis
            return args[step] if is_record and step < len(args) else args[0]
    return None


def _is_of_type(detail: ErrorDetails) -> bool:
    kind = detail["type"]
    return kind.endswith(("_type", "_parsing")) or kind in _OF_TYPE
