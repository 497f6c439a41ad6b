"""Names and arguments of the classes that the Model Zoo publishes and this package lacks.

`published.json` has a class a line: its fields, on top of the fields of the class or field set that
it is `like`. A type is `int`, `float`, `str`, `bool`, `list`, `dict` or `any`, or several with `|`
between them; then `!` if it is required, and `?` if null is valid. An `open` class accepts other
keys: not all of its fields are known, or it has `**kwargs`. Shipped models have all fields; those
that are `inert` have no effect in the original either, or none in training.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, reduce
from importlib.resources import files
from operator import or_
from typing import Any, Final

from modelzoo_trainer.base.annotations import adapter_of
from modelzoo_trainer.config.arguments import Parameter, Schema

_SECTIONS: Final = {
    "model": "models",
    "data processor": "processors",
    "callback": "callbacks",
    "logger": "loggers",
}
_SHIPPED: Final = "shipped models"
_FIELD_SETS: Final = "field sets"
_TYPES: Final[dict[str, Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "list": list,
    "dict": dict,
}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a published class."""

    parameter: Parameter  # its name and type
    is_inert: bool  # whether it has no effect in the original either


def published_schema(kind: str, name: str) -> Schema | None:
    """Return the arguments of a published class; None if there is none of that name.

    `kind`: "model", "data processor", "callback" or "logger"; there is nothing of another one.
    """
    by_lower_name = {known.lower(): known for known in published_names(kind)}
    known = by_lower_name.get(name.lower())
    return None if known is None else _schema(_SECTIONS[kind], known)


def published_names(kind: str) -> tuple[str, ...]:
    """Return the names of the published classes of a kind, as the format writes them."""
    return tuple(_tables()[_SECTIONS[kind]]) if kind in _SECTIONS else ()


def published_fields(name: str) -> dict[str, Field]:
    """Return what the format knows of a shipped model, whether or not this package supports it.

    `name`: in any case; there is nothing of a model that is not shipped.
    """
    name = name.lower()
    if name not in _tables()[_SHIPPED]:
        return {}
    inert = _inert(name)
    return {
        key: Field(_parameter(key, kind), key in inert)
        for key, kind in _fields(_SHIPPED, name).items()
    }


def _inert(name: str) -> list[str]:
    entry = _tables()[_SHIPPED].get(name, {})
    found: list[str] = entry["inert"] if "inert" in entry else _inert(entry["like"])
    return found


@cache
def _tables() -> dict[str, dict[str, dict[str, Any]]]:
    text = files("modelzoo_trainer.config").joinpath("published.json").read_text("ascii")
    tables: dict[str, dict[str, dict[str, Any]]] = json.loads(text)
    return tables


@cache
def _schema(section: str, name: str) -> Schema:
    parameters = {key: _parameter(key, kind) for key, kind in _fields(section, name).items()}
    return Schema(name, parameters, _tables()[section][name].get("open", False))


def _fields(section: str, name: str) -> dict[str, str]:
    """Return the types of all fields, including the fields of what a class is like."""
    tables = _tables()
    entry = tables[section].get(name) or tables[_FIELD_SETS][name]
    inherited = _fields(section, entry["like"]) if "like" in entry else {}
    return {**inherited, **entry.get("fields", {})}


def _parameter(name: str, kind: str) -> Parameter:
    types = kind.rstrip("!?")
    annotation = Any if types == "any" else _union(types, is_optional="?" in kind)
    return Parameter(name, annotation, "!" in kind, adapter_of(annotation))


def _union(types: str, *, is_optional: bool) -> Any:
    members = [_TYPES[one] for one in types.split("|")]
    return reduce(or_, [*members, None] if is_optional else members)
