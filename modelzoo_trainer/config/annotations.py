"""A parameter's annotation: resolved, made fit for YAML, and put into words."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import typing_extensions
from pydantic import BaseModel

_UNWRITABLE: Final = " (which YAML cannot write)"
_WORDS: Final[dict[Any, str]] = {
    Any: "anything",
    object: "anything",
    NoneType: "null",
    None: "null",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    Path: "a path",
    dict: "a mapping",
    list: "a list",
    tuple: "a list",
    set: "a list",
    frozenset: "a list",
}


def annotations_of(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of the parameters of `target`, names resolved.

    `target`: a class or a function. An annotation that names what exists for type checkers only
    counts as `Any`.
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
    """Return `annotation` with iterables as lists: they are checked at once, and read twice."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in (Iterable, Collection):
        return list
    if origin in (Iterable, Collection):
        return list[writable(args[0])]  # type: ignore[misc]  # a type made at run time
    if origin is Annotated:
        return Annotated[(writable(args[0]), *args[1:])]
    if origin in (Union, UnionType):
        return Union[tuple(writable(arg) for arg in args)]  # noqa: UP007  # built at run time
    return annotation


def members(annotation: Any) -> list[Any]:
    """Return the alternatives of a union, or the annotation itself; `Annotated` is left out."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [inner for arg in get_args(annotation) for inner in members(arg)]
    return [annotation]


def choices(annotation: Any) -> list[Any]:
    """Return the values that an annotation lists: of its `Literal`s and enumerations."""
    found: list[Any] = []
    for member in members(annotation):
        if get_origin(member) is Literal:
            found.extend(get_args(member))
        elif isinstance(member, type) and issubclass(member, Enum):
            found.extend(item.value for item in member)
    return found


def expected(annotation: Any) -> str:
    """Return what fits, in words: "an integer or null", "'min' or 'max'"."""
    listed = [repr(choice) for choice in choices(annotation)]
    words = [_word(member) for member in members(annotation) if not choices(member)]
    plain = [word for word in words if not word.endswith(_UNWRITABLE)]
    words = plain if plain or listed else words
    nothing = [word for word in words if word == "null"]
    others = list(dict.fromkeys(word for word in words if word != "null"))
    return _either([*listed, *others, *nothing])


def _word(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
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
        is_typed_dict = typing_extensions.is_typeddict(annotation)
        is_record = is_typed_dict or dataclasses.is_dataclass(annotation)
        if is_record or issubclass(annotation, BaseModel):
            return "a mapping"
        return f"a {annotation.__name__}{_UNWRITABLE}"
    return f"{annotation}{_UNWRITABLE}".replace("typing.", "")


def _either(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
