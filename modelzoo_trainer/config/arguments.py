"""The constructor's signature is the schema: what a file gives a class, checked against it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterable
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, get_origin

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from modelzoo_trainer.config import loader
from modelzoo_trainer.config.annotations import annotations_of, choices, expected, members, writable
from modelzoo_trainer.config.positions import (
    Mapping,
    Place,
    Scalar,
    describe,
    is_null,
    to_plain,
)
from modelzoo_trainer.config.problems import Problems
from modelzoo_trainer.errors import suggest

_BOOLEANS_BEFORE: Final = {"on", "off", "yes", "no", "y", "n"}  # YAML 1.1 took them as booleans
_OF_TYPE: Final = (
    "literal_error",
    "enum",
    "is_instance_of",
    "none_required",
    "needs_python_object",
)

Check = Callable[[Place, Problems], Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument that a file may give."""

    name: str
    annotation: Any  # its type; `Any` fits everything
    is_required: bool
    # checks and converts; None if anything fits, or nothing that YAML can write
    adapter: TypeAdapter[Any] | None


@dataclass(frozen=True, slots=True)
class Schema:
    """What a class or function takes."""

    owner: str  # for messages
    parameters: dict[str, Parameter] = field(default_factory=dict)
    is_open: bool = False  # whether it takes any other name as well (`**kwargs`)


@lru_cache(maxsize=512)
def schema_of(
    target: Callable[..., Any], num_injected: int = 0, owner: str | None = None
) -> Schema:
    """Return what a file may give to `target`.

    `num_injected`: number of leading parameters that the program gives: `params` of an optimizer,
    `optimizer` of a scheduler. `owner`: its name in messages; None = its own.
    """
    owner = owner or str(getattr(target, "__name__", target))
    try:
        signature = inspect.signature(target)
    except ValueError:  # a class written in C without one
        return Schema(owner, is_open=True)
    annotations = annotations_of(target)
    parameters = {}
    is_open = False
    for parameter in list(signature.parameters.values())[num_injected:]:
        if parameter.kind is parameter.VAR_KEYWORD:
            is_open = True
        elif parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            annotation = writable(annotations.get(parameter.name, Any))
            parameters[parameter.name] = Parameter(
                parameter.name,
                annotation,
                parameter.default is parameter.empty,
                adapter_of(annotation),
            )
    return Schema(owner, parameters, is_open)


def adapter_of(annotation: Any) -> TypeAdapter[Any] | None:
    """Return what checks values for `annotation`."""
    if annotation in (Any, object):
        return None
    try:
        return TypeAdapter(annotation, config={"arbitrary_types_allowed": True})
    except (PydanticUserError, PydanticSchemaGenerationError):
        pass  # a model or a dataclass brings its own configuration
    try:
        return TypeAdapter(annotation)
    except (PydanticUserError, PydanticSchemaGenerationError):
        return None


def check_arguments(
    place: Place,
    schema: Schema,
    problems: Problems,
    *,
    nested: MappingOf[str, Check] | None = None,
    ignored: Collection[str] = (),
) -> dict[str, Any]:
    """Return the arguments that a mapping gives, checked and converted.

    `place`: a mapping of arguments; null counts as an empty one. `problems`: what is wrong is added
    here; the result is of use only if nothing was.
    """
    arguments: dict[str, Any] = {}
    if not isinstance(place.node, Mapping) and not is_null(place.node):
        problems.add(
            place.node.at,
            place.path,
            f"{describe(place.node)} does not fit; expected a mapping of arguments of "
            f"{schema.owner}.",
        )
        return arguments
    for key, value in place.pairs():
        if key in ignored:
            continue
        parameter = schema.parameters.get(key)
        if parameter is None:
            if schema.is_open and isinstance(key, str):
                arguments[key] = to_plain(value.node)
            else:
                advice = _unknown(str(key), schema, ignored)
                problems.add(value.key_at, value.path, advice)
        elif nested and key in nested:
            arguments[key] = nested[key](value, problems)
        else:
            arguments[key] = check_value(value, parameter, problems)
    _check_required(place, schema, problems)
    return arguments


def _check_required(place: Place, schema: Schema, problems: Problems) -> None:
    for name, parameter in schema.parameters.items():
        if parameter.is_required and place.key(name) is None:
            what = f"missing; {schema.owner} needs it ({expected(parameter.annotation)})."
            problems.add(place.key_at, place.path_of(name), what)


def _unknown(key: str, schema: Schema, others: Collection[str]) -> str:
    if not schema.parameters:
        return f"no such argument of {schema.owner}, which takes none."
    return f"no such argument of {schema.owner}. {suggest(key, [*schema.parameters, *others])}"


def check_value(place: Place, parameter: Parameter, problems: Problems) -> Any:
    """Return one value, checked and converted: a number for a float, a text for a path."""
    plain = to_plain(place.node)
    if parameter.adapter is None:
        return plain
    try:
        return _converted(parameter.adapter, plain)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    whole = _whole_numbers(place, details)
    if whole:
        try:
            converted = _converted(parameter.adapter, to_plain(place.node, whole))
        except ValidationError as error:
            details = error.errors(include_url=False, include_input=False)
        else:
            problems.whole_numbers |= whole
            return converted
    found = [_locate(place, detail) for detail in details]
    depth = max(len(inner.path) for inner, _, _ in found)
    deepest = [detail for detail in found if len(detail[0].path) == depth]
    where, kind, message = next((d for d in deepest if not _is_of_type(d[1])), deepest[0])
    if kind == "misspelt":
        problems.add(where.key_at, where.path, message)
        return None
    given = describe(where.node)
    if where.path == place.path and (_is_of_type(kind) or _is_of_length(kind, parameter)):
        fits = f"expected {expected(parameter.annotation)}"
        text = f"{given} does not fit; {fits}.{_hint(where, parameter.annotation)}"
    else:
        text = f"{given} does not fit: {message}."
    problems.add(where.node.at, where.path, text)
    return None


def _converted(adapter: TypeAdapter[Any], plain: Any) -> Any:
    """Return a value as the adapter has it.

    JSON's rules are those of a file: a text is a path or an enumeration's value, a list is a tuple,
    an integer is a float; and strict otherwise.
    """
    return adapter.validate_json(json.dumps(plain), strict=True)


def _whole_numbers(place: Place, details: Iterable[ErrorDetails]) -> dict[int, int]:
    """Return what scalars such as `1e3` and `1_000` mean where an integer was expected."""
    found = {}
    for detail in details:
        node = place.inside(detail["loc"]).node
        if detail["type"] == "int_type" and isinstance(node, Scalar):
            number = loader.whole_number(node.plain)
            if number is not None:
                found[id(node)] = number
    return found


def _is_of_type(kind: str) -> bool:
    return kind.endswith(("_type", "_parsing")) or kind in _OF_TYPE


def _is_of_length(kind: str, parameter: Parameter) -> bool:
    is_tuple = any(get_origin(member) is tuple for member in members(parameter.annotation))
    return is_tuple and kind in ("missing", "too_long")


def _locate(place: Place, detail: ErrorDetails) -> tuple[Place, str, str]:
    """Return where a detail belongs, its kind, and what it says."""
    inner = place.inside(detail["loc"])
    message = detail["msg"]
    if detail["type"] != "missing":
        return inner, detail["type"], message[0].lower() + message[1:]
    key = str(detail["loc"][-1])
    for other, misspelt in inner.pairs():
        if suggest(str(other), (key,), cutoff=0.6).startswith("Did"):
            return misspelt, "misspelt", f"no such key. Did you mean {key!r}?"
    return inner, "missing", f"{key!r} is missing"


def _hint(place: Place, annotation: Any) -> str:
    """Return advice about a value that nearly fits, with a space before it."""
    if not isinstance(place.node, Scalar) or not isinstance(place.node.value, str):
        return ""
    text, kinds = place.node.value, members(annotation)
    if bool in kinds and text.lower() in _BOOLEANS_BEFORE:
        return f" {text} is text in YAML 1.2."
    number = loader.kind_of(text)
    if (float in kinds and number in ("int", "float")) or (int in kinds and number == "int"):
        return " Write it without quotes."
    named = [choice for choice in choices(annotation) if isinstance(choice, str)]
    advice = suggest(text, named) if named else ""
    return f" {advice}" if advice.startswith("Did") else ""
