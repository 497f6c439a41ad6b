"""Classes as JSON Schema: what each takes, and the two ways in which a file names one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from modelzoo_trainer.config.arguments import schema_of
from modelzoo_trainer.config.json_schema.types import (
    NOT_GIVEN,
    JsonSchema,
    TypeSchemas,
    argument_texts,
    summary,
)
from modelzoo_trainer.config.names import NameTable
from modelzoo_trainer.errors import ConfigError

FREE: Final = "free"
"""The definition of arguments about which nothing is known."""

_INERT: Final = "Has no effect."
_UNSUPPORTED: Final = "Known in the format, but not supported here."
_DOTTED: Final = r"^[^.]+(\.[^.]+)+$"
_SPECIAL: Final = re.compile(r"[\\^$.|?*+()\[\]{}]")


def reference(name: str) -> JsonSchema:
    """Return a schema that is a definition."""
    return {"$ref": f"#/$defs/{name}"}


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
    """What classes take, one definition for each class."""

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
                with suppress(ConfigError):  # it is of another kind
                    found.setdefault(name, table.adapt(value))
    return found


def _defaults_of(target: Any) -> dict[str, Any]:
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:  # a class written in C without one
        return {}
    return {one.name: one.default for one in parameters if one.default is not one.empty}
