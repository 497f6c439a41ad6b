"""JSON Schema of types and classes, and of the two ways in which a file names a class."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from itertools import chain, count
from pathlib import Path
from typing import Any, Final, TypeAlias

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from modelzoo_trainer.base.constraints import inert_fields
from modelzoo_trainer.base.dtypes import aliases, dtype_name
from modelzoo_trainer.config.arguments import schema_of
from modelzoo_trainer.config.loader import GROUPED
from modelzoo_trainer.config.names import NameTable
from modelzoo_trainer.errors import ConfigError

_IN_YAML: Final = {"None": "null", "True": "true", "False": "false"}
NO_EFFECT: Final = "No effect."
_ENTRY: Final = re.compile(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \(.*?\))?:(?: (.*))?")


def summary(target: Any) -> str:
    """Return the first line of the docstring; empty if there is none."""
    return next((text.splitlines()[0] for text in _docstrings(target)), "")


def argument_texts(target: Any) -> dict[str, str]:
    """Return the descriptions of the section `Args:` by argument.

    `target`: a class or a function. Missing ones are taken from base classes of the same package;
    classes of another package may have other defaults.
    """
    found: dict[str, str] = {}
    for docstring in _docstrings(target):
        for name, text in _entries(docstring):
            found.setdefault(name, text)
    return {one.name: NO_EFFECT for one in inert_fields(target)} | found


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
    """Pydantic's schema generator, without values that only Python can make."""

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
        return {}  # a check by a function: only that function knows the valid values

    def function_before_schema(
        self, schema: core_schema.BeforeValidatorFunctionSchema
    ) -> JsonSchemaValue:
        found = super().function_before_schema(schema)
        if schema["function"]["function"] is not dtype_name:
            return found
        return {"anyOf": [found, {"type": "string", "pattern": _aliases_of(found["enum"])}]}

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


def _aliases_of(names: Iterable[str]) -> str:
    """Return a pattern of all aliases of names of data types."""
    known = aliases()
    every = [one for name in names if name in known for one in (name, *known[name])]
    return in_any_case(every + [f"torch.{alias}" for alias in every])


def _pruned(union: JsonSchemaValue) -> JsonSchemaValue:
    """Return a union without members that have no valid value."""
    if "anyOf" not in union:
        return union
    members = [member for member in union["anyOf"] if member != _NOTHING]
    if len(members) == 1:
        return dict(members[0])
    return {**union, "anyOf": members} if members else dict(_NOTHING)


def _repeatable(array: JsonSchemaValue) -> JsonSchemaValue:
    """Return a set's schema as a list's: duplicate values are valid and count once."""
    return {key: value for key, value in array.items() if key != "uniqueItems"}


class TypeSchemas:
    """The schemas of annotations, with shared definitions."""

    def __init__(self) -> None:
        self.definitions: JsonSchema = {}

    def of(
        self, adapter: TypeAdapter[Any] | None, text: str = "", default: object = NOT_GIVEN
    ) -> JsonSchema:
        """Return a schema; its definitions are added to `definitions`.

        `adapter`: checks values; None if any value is valid.
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
    raise TypeError(f"Default value {value!r} has no YAML form.")


FREE: Final = "free"
"""The definition of unknown arguments."""

_INERT: Final = "Has no effect."
_UNSUPPORTED: Final = "Part of the format, but not supported here."
_DOTTED: Final = r"^[^.]+(\.[^.]+)+$"
_REFERENCE: Final = 60  # characters of one
_SPECIAL: Final = re.compile(r"[\\^$.|?*+()\[\]{}]")


def reference(name: str) -> JsonSchema:
    """Return a schema that is a definition."""
    return {"$ref": f"#/$defs/{name.replace('/', '~1')}"}  # as in JSON pointers


def one_of_types(kind: str, *, is_optional: bool) -> str | list[str]:
    """Return the keyword `type` of what may be null."""
    return [kind, "null"] if is_optional else kind


def in_any_case(names: Iterable[str]) -> str:
    """Return a pattern of texts that are one of `names`; JSON Schema has no flag for the case."""
    return f"^({'|'.join(''.join(map(_either_case, name)) for name in names)})$"


def _either_case(character: str) -> str:
    upper, lower = character.upper(), character.lower()
    return f"[{upper}{lower}]" if upper != lower else _SPECIAL.sub(r"\\\g<0>", character)


class Definitions:
    """The arguments of classes, one definition for each class."""

    def __init__(self, types: TypeSchemas) -> None:
        self._types = types
        self._names: dict[tuple[str, int], str] = {}
        self.found: JsonSchema = {
            FREE: {
                "description": "Arguments of a class that this schema does not know.",
                "type": ["object", "null"],
            }
        }

    def of_table(
        self,
        table: NameTable,
        *,
        num_injected: int = 0,
        nested: Mapping[str, JsonSchema] | None = None,
        ignored: Collection[str] = (),
        removable: Collection[Any] | None = None,
        published: Callable[[str], Mapping[str, Any]] = lambda name: {},
    ) -> dict[str, JsonSchema]:
        """Return references to the definitions of all classes of a kind, by name.

        `removable`: the classes for which null may stand; None = those without a required argument.
        `published`: returns what the format knows of a class beyond what it takes here.
        """
        return {
            name: self._of_class(
                f"{table.kind.replace(' ', '_')}.{name}",
                target,
                num_injected=num_injected,
                nested=nested or {},
                ignored=ignored,
                is_optional=None if removable is None else target in removable,
                published=published(name),
            )
            for name, target in _classes_of(table).items()
        }

    def _of_class(self, name: str, target: Any, **options: Any) -> JsonSchema:
        kind = name.partition(".")[0]
        known = self._names.setdefault((kind, id(target)), name)
        if known == name:
            self.found[name] = self.of_call(target, **options)
        return reference(known)

    def of_call(
        self,
        target: Any,
        *,
        num_injected: int = 0,
        nested: Mapping[str, JsonSchema] | None = None,
        ignored: Collection[str] = (),
        is_optional: bool | None = None,
        published: Mapping[str, Any] | None = None,
    ) -> JsonSchema:
        """Return the schema of the arguments of one class.

        `is_optional`: whether null may stand for all arguments; None = if none is required.
        `published`: what the format knows of the class, by key (`published.Field`).
        """
        schema = schema_of(target, num_injected)
        texts, defaults = argument_texts(target), _defaults_of(target)
        properties: dict[str, JsonSchema | bool] = dict.fromkeys(ignored, True)
        for name, parameter in schema.parameters.items():
            text = texts.get(name, "")
            if nested and name in nested:
                properties[name] = ({"description": text} if text else {}) | nested[name]
            elif name not in ignored:
                default = defaults.get(name, NOT_GIVEN)
                properties[name] = self._types.of(parameter.adapter, text, default)
        for name, field in (published or {}).items():
            text = _INERT if field.is_inert else _UNSUPPORTED
            properties.setdefault(name, {"description": text})
        required = [name for name, one in schema.parameters.items() if one.is_required]
        text = summary(target)
        return {
            "title": schema.owner,
            **({"description": text} if text else {}),
            "type": one_of_types(
                "object", is_optional=not required if is_optional is None else is_optional
            ),
            "properties": properties,
            **({"required": required} if required else {}),
            "additionalProperties": schema.is_open,
        }


def with_shared_arguments(classes: Mapping[str, JsonSchema]) -> JsonSchema:
    """Return the definitions of classes, with one more for each argument that several have alike.

    `classes`: the definitions by name.
    """
    shown = {name: _shown_arguments(one) for name, one in classes.items()}
    counts = Counter(key for keys in shown.values() for key in keys.items())
    shared: JsonSchema = {}
    names: dict[tuple[str, str], str] = {}
    result: JsonSchema = {}
    for name, one in classes.items():
        properties = dict(one.get("properties", {}))
        for key in shown[name].items():
            if counts[key] > 1:
                if key not in names:
                    names[key] = _free_name(f"argument.{key[0]}", shared)
                    shared[names[key]] = properties[key[0]]
                properties[key[0]] = reference(names[key])
        result[name] = {**one, "properties": properties} if properties else one
    return result | shared


def _shown_arguments(definition: JsonSchema) -> dict[str, str]:
    """Return the arguments of a class whose schema is longer than a reference, as texts."""
    texts = {name: json.dumps(one) for name, one in definition.get("properties", {}).items()}
    return {name: text for name, text in texts.items() if len(text) > _REFERENCE}


def _free_name(name: str, taken: Collection[str]) -> str:
    numbered = (f"{name}_{number}" for number in count(2))
    return next(one for one in chain([name], numbered) if one not in taken)


def component_schema(
    table: NameTable, classes: Mapping[str, JsonSchema], *, is_optional: bool = False
) -> JsonSchema:
    """Return the schema of `{ClassName: {arguments}}`.

    `classes`: what each takes, by name; an editor offers these names.
    """
    patterns = {in_any_case([name]): arguments for name, arguments in classes.items()}
    known = {name.lower() for name in classes}
    others = [name for name in table.published_names(table.kind) if name.lower() not in known]
    if others:
        patterns[in_any_case(others)] = reference(FREE)
    return {
        "description": f"{table.one[0].upper()}{table.one[1:]}: {{ClassName: {{arguments}}}}, or "
        f"{{package.module.ClassName: {{arguments}}}} for one of your own.",
        "type": one_of_types("object", is_optional=is_optional),
        "minProperties": 1,
        "allOf": [{"maxProperties": 1}],  # apart: editors count the key that they are to complete
        "properties": dict(classes),
        "patternProperties": patterns | {_DOTTED: reference(FREE)},
        "additionalProperties": False,
    }


def named_schema(text: str, classes: Mapping[str, JsonSchema], keys: Collection[str]) -> JsonSchema:
    """Return the schema of a mapping in which a key names the class, beside its arguments.

    `classes`: what each class takes, by name; the arguments of any other are free.
    """
    sharing: dict[str, list[str]] = {}
    for name, arguments in classes.items():
        sharing.setdefault(arguments["$ref"], []).append(name)
    names = {"description": text, "anyOf": [{"enum": list(classes)}, {"type": "string"}]}
    return {
        "properties": dict.fromkeys(keys, names),
        "allOf": [
            {"if": _says(keys, in_any_case(several)), "then": {"$ref": arguments}}
            for arguments, several in sharing.items()
        ],
    }


def _says(keys: Collection[str], pattern: str) -> JsonSchema:
    """Return the schema of a mapping in which one of `keys` has a text of that pattern."""
    text = {"type": "string", "pattern": pattern}
    found = [{"properties": {key: text}, "required": [key]} for key in keys]
    return found[0] if len(found) == 1 else {"anyOf": found}


def _classes_of(table: NameTable) -> dict[str, Any]:
    found = {name: table.load(name) for name in table.names}
    for module in table.modules:
        for name, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__:
                with suppress(ConfigError):  # another kind of class
                    found.setdefault(name, table.adapt(value))
    return found


def _defaults_of(target: Any) -> dict[str, Any]:
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:  # a class written in C without one
        return {}
    return {one.name: one.default for one in parameters if one.default is not one.empty}
