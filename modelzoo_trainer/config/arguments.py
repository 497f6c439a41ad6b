"""Check the arguments in a file against the signature of a class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from collections.abc import Mapping as MappingOf
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from modelzoo_trainer.base.annotations import (
    adapter_of,
    annotations_of,
    converted,
    expected,
    members,
    misfit,
    writable,
)
from modelzoo_trainer.base.foreign_names import ARGUMENTS, advice_for
from modelzoo_trainer.config import loader
from modelzoo_trainer.config.positions import (
    Mapping,
    Place,
    Problems,
    Scalar,
    describe,
    is_null,
    to_plain,
)
from modelzoo_trainer.errors import suggest

_BOOLEANS_BEFORE: Final = {"on", "off", "yes", "no", "y", "n"}  # YAML 1.1 took them as booleans

Check = Callable[[Place, Problems], Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument that a file may set."""

    name: str
    annotation: Any  # its type; `Any` fits everything
    is_required: bool
    # checks and converts; None if any value is valid, or YAML cannot express any
    adapter: TypeAdapter[Any] | None


@dataclass(frozen=True, slots=True)
class Schema:
    """The arguments of a class or function."""

    owner: str  # for messages
    parameters: dict[str, Parameter] = field(default_factory=dict)
    is_open: bool = False  # whether it accepts other names too (`**kwargs`)


@lru_cache(maxsize=512)
def schema_of(
    target: Callable[..., Any], num_injected: int = 0, owner: str | None = None
) -> Schema:
    """Return the arguments that a file may set for `target`.

    `num_injected`: number of leading parameters that are not set by the file: `params` of an
    optimizer, `optimizer` of a scheduler. `owner`: its name in messages; None = its own.
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


def check_arguments(
    place: Place,
    schema: Schema,
    problems: Problems,
    *,
    nested: MappingOf[str, Check] | None = None,
    ignored: Collection[str] = (),
) -> dict[str, Any]:
    """Return the arguments in a mapping, checked and converted.

    `place`: a mapping of arguments; null counts as an empty one. `problems`: errors are added here;
    the result is valid only if there were none.
    """
    arguments: dict[str, Any] = {}
    if not isinstance(place.node, Mapping) and not is_null(place.node):
        problems.add(
            place.node.at,
            place.path,
            f"expected a mapping of arguments of {schema.owner}, got {describe(place.node)}.",
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
                advice = _unknown(str(key), schema, ignored, problems)
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
            what = f"missing; {schema.owner} requires it ({expected(parameter.annotation)})."
            problems.add(place.key_at, place.path_of(name), what)


def _unknown(key: str, schema: Schema, others: Collection[str], problems: Problems) -> str:
    if not schema.parameters:
        return f"no such argument of {schema.owner}, which has no arguments."
    hint = advice_for(ARGUMENTS.get(schema.owner, {}), key)
    hint = hint or problems.suggest(key, [*schema.parameters, *others])
    return f"no such argument of {schema.owner}. {hint}".rstrip()


def check_value(place: Place, parameter: Parameter, problems: Problems) -> Any:
    """Return one value, checked and converted: a number for a float, a text for a path."""
    plain = to_plain(place.node)
    if parameter.adapter is None:
        return plain
    try:
        return converted(parameter.adapter, plain)
    except ValidationError as failure:
        error = failure
    whole = _whole_numbers(place, error.errors(include_url=False, include_input=False))
    if whole:
        plain = to_plain(place.node, whole)
        try:
            value = converted(parameter.adapter, plain)
        except ValidationError as failure:
            error = failure
        else:
            problems.whole_numbers |= whole
            return value
    wrong = misfit(parameter.annotation, to_plain(place.node), error)
    where = place.inside(wrong.location)
    for other, misspelt in where.pairs() if wrong.lacks else ():
        if suggest(str(other), (wrong.lacks,), cutoff=0.6).startswith("Did"):
            what = f"no such key. Did you mean {wrong.lacks!r}?"
            problems.add(misspelt.key_at, misspelt.path, what)
            return None
    hint = "" if wrong.location else _hint(where, parameter.annotation)
    problems.add(where.node.at, where.path, f"{wrong.text}{hint}")
    return None


def _whole_numbers(place: Place, details: Iterable[ErrorDetails]) -> dict[int, int]:
    """Return the integers that scalars such as `1e3` and `1_000` stand for."""
    found = {}
    for detail in details:
        node = place.inside(detail["loc"]).node
        if detail["type"] == "int_type" and isinstance(node, Scalar):
            number = loader.whole_number(node.plain)
            if number is not None:
                found[id(node)] = number
    return found


def _hint(place: Place, annotation: Any) -> str:
    """Return a hint for a value that is nearly valid, with a space before it."""
    if not isinstance(place.node, Scalar) or not isinstance(place.node.value, str):
        return ""
    text, kinds = place.node.value, members(annotation)
    if bool in kinds and text.lower() in _BOOLEANS_BEFORE:
        return f" {text} is text in YAML 1.2; write true or false."
    number = loader.kind_of(text)
    if (float in kinds and number in ("int", "float")) or (int in kinds and number == "int"):
        return " Write it without quotes."
    return ""
