"""Annotations as JSON Schema: as strict as the checks, and no stricter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import AfterValidator, Field, PlainValidator
from typing_extensions import TypedDict

from modelzoo_trainer.config.arguments import adapter_of
from modelzoo_trainer.config.json_schema.components import NOT_GIVEN, TypeSchemas


class Color(Enum):
    RED = "red"
    BLUE = 2


class Tree(TypedDict):
    name: str
    inner: list[Tree]


@dataclass
class Point:
    x: int
    near: list[Path] = field(default_factory=list)
    made_by: Any = math.sqrt


class Opaque:
    pass


def schema_of(annotation: Any, **options: Any) -> dict[str, Any]:
    """Return the schema with its definitions."""
    types = TypeSchemas()
    return types.of(adapter_of(annotation), **options) | {"$defs": types.definitions}


@pytest.mark.parametrize(
    ("annotation", "right", "wrong"),
    [
        (int, [3], [3.5, "3", None, True]),
        (float, [3, 0.5], ["3", None, True]),
        (bool, [True], [1, "yes"]),
        (str | None, ["x", None], [3, []]),
        (Path | None, ["x", None], [3]),
        (Literal["a", 2] | None, ["a", 2, None], ["b", 3]),
        (Color, ["red", 2], ["blue", 3]),
        (list[int], [[], [1]], [["1"], 1]),
        (tuple[float, str], [[1, "x"]], [[1], [1, "x", 2], ["x", 1]]),
        (set[int], [[1, 1], []], [["x"]]),
        (frozenset[str], [["x", "x"]], [[1]]),
        (dict[str, float], [{}, {"x": 1}], [{"x": "1"}, []]),
        (Annotated[int, Field(ge=1)], [1], [0]),
        (Annotated[int, AfterValidator(abs)], [1], ["x"]),
        (Annotated[int, PlainValidator(int)], [1, "1"], []),
        (Tree, [{"name": "x", "inner": [{"name": "y", "inner": []}]}], [{"name": "x"}, {}]),
        (Point, [{"x": 1}, {"x": 1, "near": ["y"]}], [{"near": []}, {"x": "1"}]),
        (float | Opaque | None, [1, None], ["x", {}]),
        (Opaque | str, ["x"], [1, None]),
        (Opaque, [], [None, 1, "x", {}]),
        (type[int] | Opaque, [], [None, "int"]),
        (Callable[[], int] | None, [None], ["x"]),
        (list[Opaque], [[]], [[1]]),
        (Any, [None, 1, "x", [], {}], []),
    ],
    ids=str,
)
def test_a_value_fits_if_the_check_takes_it(annotation, right, wrong):
    validator = Draft202012Validator(schema_of(annotation))
    assert [value for value in right if not validator.is_valid(value)] == []
    assert [value for value in wrong if validator.is_valid(value)] == []


@pytest.mark.parametrize(
    ("default", "shown"),
    [
        (None, {"default": None}),
        ((1, 2.5), {"default": [1, 2.5]}),
        (Path("a/b"), {"default": "a/b"}),
        (Color.BLUE, {"default": 2}),
        (math.inf, {}),
        (Opaque(), {}),
        (NOT_GIVEN, {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_default_is_shown_if_a_file_can_hold_it(default, shown):
    assert TypeSchemas().of(None, default=default) == shown


def test_two_types_of_one_name_have_two_definitions():
    def other() -> Any:
        class Point(TypedDict):
            y: str

        return Point

    types = TypeSchemas()
    schemas = [types.of(adapter_of(list[one])) for one in (Point, other(), Point)]
    assert [schema["items"]["$ref"] for schema in schemas] == [
        "#/$defs/type.Point",
        "#/$defs/type.Point_2",
        "#/$defs/type.Point",
    ]
    assert types.definitions["type.Point_2"]["required"] == ["y"]
