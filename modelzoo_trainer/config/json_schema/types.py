"""Annotations and docstrings as JSON Schema."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeAlias

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from modelzoo_trainer.config.loader import GROUPED

_IN_YAML: Final = {"None": "null", "True": "true", "False": "false"}
_ENTRY: Final = re.compile(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \(.*?\))?:(?: (.*))?")


def summary(target: Any) -> str:
    """Return the first line of the docstring; empty if there is none."""
    return next((text.splitlines()[0] for text in _docstrings(target)), "")


def argument_texts(target: Any) -> dict[str, str]:
    """Return what the section `Args:` says, by argument.

    `target`: a class or a function. What a class leaves out is taken from its bases of the same
    package; another package's may have other defaults, and are not asked.
    """
    found: dict[str, str] = {}
    for docstring in _docstrings(target):
        for name, text in _entries(docstring):
            found.setdefault(name, text)
    return found


def _docstrings(target: Any) -> Iterator[str]:
    package = _package(target)
    for owner in inspect.getmro(target) if isinstance(target, type) else (target,):
        text = vars(owner).get("__doc__") if isinstance(owner, type) else owner.__doc__
        if not isinstance(text, str) or not text.strip() or _package(owner) != package:
            continue
        if not text.startswith(f"{owner.__name__}("):  # else a dataclass wrote it: its signature
            yield re.sub(r"\b(None|True|False)\b", _in_yaml, inspect.cleandoc(text))


def _in_yaml(word: re.Match[str]) -> str:
    return _IN_YAML[word[0]]


def _package(target: Any) -> str:
    return str(target.__module__).partition(".")[0]


def _entries(docstring: str) -> Iterator[tuple[str, str]]:
    names: list[str] = []
    words: list[str] = []
    is_inside = False
    for line in [*docstring.splitlines(), "end"]:
        entry = _ENTRY.fullmatch(line) if is_inside else None
        if entry or (line and not line.startswith(" ")):
            yield from ((name, " ".join(words)) for name in names if words)
            names, words = [], []
            is_inside = is_inside if entry else line == "Args:"
        if entry:
            names = [name.lstrip("*") for name in entry[1].split(", ")]
            words = [entry[2]] if entry[2] else []
        elif is_inside and line.startswith("     "):
            words.append(line.strip())


JsonSchema: TypeAlias = dict[str, Any]

NOT_GIVEN: Final = object()
_NOTHING: Final[JsonSchema] = {"not": {}}  # no value fits


class _Generator(GenerateJsonSchema):
    """Says what a file can hold: pydantic's schema, without what only Python can make."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012  # pydantic's

    def is_instance_schema(self, schema: core_schema.IsInstanceSchema) -> JsonSchemaValue:
        return dict(_NOTHING)

    def is_subclass_schema(self, schema: core_schema.IsSubclassSchema) -> JsonSchemaValue:
        return dict(_NOTHING)

    def callable_schema(self, schema: core_schema.CallableSchema) -> JsonSchemaValue:
        return dict(_NOTHING)

    def handle_invalid_for_json_schema(
        self, schema: CoreSchema, error_info: str
    ) -> JsonSchemaValue:
        return {}  # a check by a function: only that function knows what fits

    def int_schema(self, schema: core_schema.IntSchema) -> JsonSchemaValue:
        found = super().int_schema(schema)
        return {**found, "type": ["integer", "string"], "pattern": f"^{GROUPED}$"}

    def union_schema(self, schema: core_schema.UnionSchema) -> JsonSchemaValue:
        return _pruned(super().union_schema(schema))

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return _pruned(super().nullable_schema(schema))

    def set_schema(self, schema: core_schema.SetSchema) -> JsonSchemaValue:
        return _repeatable(super().set_schema(schema))

    def frozenset_schema(self, schema: core_schema.FrozenSetSchema) -> JsonSchemaValue:
        return _repeatable(super().frozenset_schema(schema))

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _pruned(union: JsonSchemaValue) -> JsonSchemaValue:
    """Return a union without the members that nothing fits."""
    if "anyOf" not in union:
        return union
    members = [member for member in union["anyOf"] if member != _NOTHING]
    if len(members) == 1:
        return dict(members[0])
    return {**union, "anyOf": members} if members else dict(_NOTHING)


def _repeatable(array: JsonSchemaValue) -> JsonSchemaValue:
    """Return a set's schema as a list's: a value written twice counts once, and is no mistake."""
    return {key: value for key, value in array.items() if key != "uniqueItems"}


class TypeSchemas:
    """The schemas of many annotations, with one set of definitions for what they share."""

    def __init__(self) -> None:
        self.definitions: JsonSchema = {}

    def of(
        self, adapter: TypeAdapter[Any] | None, text: str = "", default: object = NOT_GIVEN
    ) -> JsonSchema:
        """Return a schema; what it refers to is among the definitions then.

        `adapter`: what checks values; None if anything fits.
        """
        found = {} if adapter is None else self._written_down(adapter)
        return ({"description": text} if text else {}) | found | _default(default)

    def _written_down(self, adapter: TypeAdapter[Any]) -> JsonSchema:
        for number in count(1):
            suffix = "" if number == 1 else f"_{number}"  # two types may have one name
            schema = adapter.json_schema(
                ref_template=f"#/$defs/type.{{model}}{suffix}", schema_generator=_Generator
            )
            shared = schema.pop("$defs", {})
            named = {f"type.{name}{suffix}": inner for name, inner in shared.items()}
            if all(self.definitions.get(name, inner) == inner for name, inner in named.items()):
                break
        self.definitions.update(named)
        return schema


def _default(value: object) -> JsonSchema:
    """Return the keyword `default`, unless there is none that JSON can hold."""
    if value is NOT_GIVEN:
        return {}
    try:
        return {"default": json.loads(json.dumps(value, allow_nan=False, default=_as_text))}
    except (TypeError, ValueError):
        return {}


def _as_text(value: object) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} cannot be written in a file.")
