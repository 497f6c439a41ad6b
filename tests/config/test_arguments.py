"""The constructor's signature as the schema."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from annotated_types import Gt
from pydantic import BaseModel

from modelzoo_trainer.config.arguments import check_arguments, schema_of
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.positions import Place, Problems

if TYPE_CHECKING:
    from nowhere import Missing


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Window:
    start: int
    end: int = 3


class Limits(BaseModel):
    low: float


class EarlyStopping:
    def __init__(
        self,
        monitor: str = "loss",
        *,
        patience: int = 3,
        delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
        outdir: Path | None = None,
        keys: str | Iterable[str] = "lr",
        betas: tuple[float, float] = (0.9, 0.999),
        positive: Annotated[int, Gt(0)] | None = None,
        verbose: bool = False,
        colour: Colour = Colour.RED,
        every: int | float | None = 1.0,
        scales: Mapping[str, float] | None = None,
        steps: Sequence[int] = (),
        window: Window | None = None,
        limits: Limits | None = None,
        path: Missing | None = None,
        anything=None,
    ) -> None: ...


class Needy:
    def __init__(self, params: Any, lr: float, name: Literal["a"]) -> None: ...


class Open:
    def __init__(self, first: int = 0, **flags: Any) -> None: ...


class Bare: ...


def check(text, target=EarlyStopping, num_injected=0):
    problems = Problems()
    place = Place.root(read_text(text, "f.yaml"))
    arguments = check_arguments(place, schema_of(target, num_injected), problems)
    return arguments, problems.lines()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("patience: 1e3", 1000),
        ("patience: 1_000", 1000),
        ("patience: 1.5E1", 15),
        ("positive: 1_000_000", 1_000_000),
        ("steps: [1, 2e1, 3_0]", [1, 20, 30]),
        ("every: 1_000", 1000),
        ("every: 1e3", 1000.0),
        ("monitor: 1_000", "1_000"),
        ("window: {start: 1e1}", Window(10)),
        ("delta: 1", 1.0),
        ("delta: 1e-4", 1e-4),
        ("outdir: /data/x", Path("/data/x")),
        ("outdir: null", None),
        ("keys: lr", "lr"),
        ("keys: [lr, wd]", ["lr", "wd"]),
        ("betas: [1, 0.5]", (1.0, 0.5)),
        ("colour: blue", Colour.BLUE),
        ("every: 1", 1),
        ("every: 1.0", 1.0),
        ("scales: {a: 1}", {"a": 1.0}),
        ("steps: [1, 2]", [1, 2]),
        ("window: {start: 1}", Window(1)),
        ("limits: {low: 1}", Limits(low=1.0)),
        ("path: [1]", [1]),
        ("anything: {1: [true]}", {1: [True]}),
    ],
)
def test_a_value_that_fits_is_converted(text, value):
    arguments, problems = check(text)
    (found,) = arguments.values()
    assert problems == []
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("patiance: 3", "1:1: patiance: no such argument of EarlyStopping. Did you mean 'patien"),
        ("patience: ten", "1:11: patience: expected an integer, got 'ten'."),
        ("patience: 1.0", "1:11: patience: expected an integer, got 1.0."),
        ("patience: 1.5e0", "1:11: patience: expected an integer, got 1.5."),
        ("patience: 1e-1", "1:11: patience: expected an integer, got 0.1."),
        ("patience: '1_000'", "1:11: patience: expected an integer, got '1_000'."),
        ("patience: 1__0", "1:11: patience: expected an integer, got '1__0'."),
        ("positive: -1e3", "1:11: positive: expected an integer > 0 or null, got -1000.0."),
        ("patience: true", "1:11: patience: expected an integer, got true."),
        ("patience: null", "1:11: patience: expected an integer, got null."),
        ("patience:", "1:10: patience: expected an integer, got null."),
        (
            "patience: '3'",
            "1:11: patience: expected an integer, got '3'. Write it without quotes.",
        ),
        ("delta: '1e-4'", "1:8: delta: expected a number, got '1e-4'. Write it without quotes."),
        ("delta: true", "1:8: delta: expected a number, got true."),
        ("monitor: 3", "1:10: monitor: expected a string, got 3."),
        ("mode: mn", "1:7: mode: expected 'min' or 'max', got 'mn'. Did you mean 'min'?"),
        ("mode: [min]", "1:7: mode: expected 'min' or 'max', got ['min']."),
        ("outdir: 3", "1:9: outdir: expected a path or null, got 3."),
        ("keys: 3", "1:7: keys: expected a string or a list (each a string), got 3."),
        ("keys:\n- lr\n- 3", "3:3: keys[1]: expected a string, got 3."),
        ("betas: [1]", "1:8: betas: expected a list of 2 (a number, a number), got [1]."),
        (
            "betas: [1, 2, 3]",
            "1:8: betas: expected a list of 2 (a number, a number), got [1, 2, 3].",
        ),
        ("betas: [1, x]", "1:12: betas[1]: expected a number, got 'x'."),
        ("positive: 0", "1:11: positive: expected an integer > 0 or null, got 0."),
        (
            "verbose: on",
            "1:10: verbose: expected true or false, got 'on'. on is text in YAML 1.2; write true "
            "or false.",
        ),
        ("verbose: 1", "1:10: verbose: expected true or false, got 1."),
        ("colour: blau", "1:9: colour: expected 'red' or 'blue', got 'blau'. Did you mean 'blue'?"),
        ("every: x", "1:8: every: expected an integer, a number or null, got 'x'."),
        ("scales: [1]", "1:9: scales: expected a mapping (to a number) or null, got [1]."),
        ("scales: {a: b}", "1:13: scales.a: expected a number, got 'b'."),
        ("window: {end: 1}", "1:9: window: 'start' is missing in a mapping."),
        ("window: {start: x}", "1:17: window.start: expected a valid integer, got 'x'."),
        ("limits: {low: x}", "1:15: limits.low: expected a valid number, got 'x'."),
        ("3: x", "1:1: 3: no such argument of EarlyStopping. Known: anything, betas, "),
    ],
)
def test_a_value_that_does_not_fit_says_what_does(text, message):
    _, problems = check(text)
    assert len(problems) == 1
    assert problems[0].startswith(f"f.yaml:{message}")


def test_what_is_missing_is_named_with_what_fits():
    _, problems = check("{}", Needy, num_injected=1)
    assert problems == [
        "f.yaml:1:1: lr: missing; Needy requires it (a number).",
        "f.yaml:1:1: name: missing; Needy requires it ('a').",
    ]


def test_what_the_program_gives_is_no_argument_of_the_file():
    _, problems = check("{params: 1, lr: 1, name: a}", Needy, num_injected=1)
    assert problems == [
        "f.yaml:1:2: params: no such argument of Needy. Known: lr, name.",
    ]


def test_a_class_with_keyword_arguments_takes_any_name():
    arguments, problems = check("{csx.flag: [1, {a: b}], first: 1}", Open)
    assert problems == []
    assert arguments == {"csx.flag": [1, {"a": "b"}], "first": 1}


def test_a_class_without_arguments_says_so():
    _, problems = check("{a: 1}", Bare)
    assert problems == ["f.yaml:1:2: a: no such argument of Bare, which has no arguments."]


def test_arguments_that_are_no_mapping_are_refused():
    _, problems = check("[1]")
    assert problems == ["f.yaml:1:1: expected a mapping of arguments of EarlyStopping, got [1]."]


def test_null_is_an_empty_mapping_of_arguments():
    assert check("null") == ({}, [])


def test_several_problems_of_one_mapping_are_all_found():
    _, problems = check("patience: x\nmode: y\ndelta: z\n")
    assert [line.split(":")[1] for line in problems] == ["1", "2", "3"]
