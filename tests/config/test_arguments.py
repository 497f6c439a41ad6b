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
from modelzoo_trainer.config.positions import Place
from modelzoo_trainer.config.problems import Problems

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
        ("patience: ten", "1:11: patience: 'ten' does not fit; expected an integer."),
        ("patience: 1.0", "1:11: patience: 1.0 does not fit; expected an integer."),
        ("patience: 1.5e0", "1:11: patience: 1.5 does not fit; expected an integer."),
        ("patience: 1e-1", "1:11: patience: 0.1 does not fit; expected an integer."),
        ("patience: '1_000'", "1:11: patience: '1_000' does not fit; expected an integer."),
        ("patience: 1__0", "1:11: patience: '1__0' does not fit; expected an integer."),
        ("positive: -1e3", "1:11: positive: -1000.0 does not fit: input should be greater than 0."),
        ("patience: true", "1:11: patience: true does not fit; expected an integer."),
        ("patience: null", "1:11: patience: null does not fit; expected an integer."),
        ("patience:", "1:10: patience: null does not fit; expected an integer."),
        (
            "patience: '3'",
            "1:11: patience: '3' does not fit; expected an integer. Write it without",
        ),
        ("delta: '1e-4'", "1:8: delta: '1e-4' does not fit; expected a number. Write it without"),
        ("delta: true", "1:8: delta: true does not fit; expected a number."),
        ("monitor: 3", "1:10: monitor: 3 does not fit; expected text."),
        ("mode: mn", "1:7: mode: 'mn' does not fit; expected 'min' or 'max'. Did you mean 'min'?"),
        ("mode: [min]", "1:7: mode: a list does not fit; expected 'min' or 'max'."),
        ("outdir: 3", "1:9: outdir: 3 does not fit; expected a path or null."),
        ("keys: 3", "1:7: keys: 3 does not fit; expected text or a list (each text)."),
        ("keys:\n- lr\n- 3", "3:3: keys[1]: 3 does not fit: input should be a valid string."),
        ("betas: [1]", "1:8: betas: a list does not fit; expected a list of 2 (a number, a numb"),
        ("betas: [1, 2, 3]", "1:8: betas: a list does not fit; expected a list of 2 (a number,"),
        ("betas: [1, x]", "1:12: betas[1]: 'x' does not fit: input should be a valid number."),
        ("positive: 0", "1:11: positive: 0 does not fit: input should be greater than 0."),
        ("verbose: on", "1:10: verbose: 'on' does not fit; expected true or false. on is text in"),
        ("verbose: 1", "1:10: verbose: 1 does not fit; expected true or false."),
        ("colour: blau", "1:9: colour: 'blau' does not fit; expected 'red' or 'blue'. Did you"),
        ("every: x", "1:8: every: 'x' does not fit; expected an integer, a number or null."),
        ("scales: [1]", "1:9: scales: a list does not fit; expected a mapping (to a number) or"),
        ("scales: {a: b}", "1:13: scales.a: 'b' does not fit: input should be a valid number."),
        ("window: {end: 1}", "1:9: window: a mapping does not fit: 'start' is missing."),
        ("window: {start: x}", "1:17: window.start: 'x' does not fit: input should be a valid int"),
        ("limits: {low: x}", "1:15: limits.low: 'x' does not fit: input should be a valid number."),
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
        "f.yaml:1:1: lr: missing; Needy needs it (a number).",
        "f.yaml:1:1: name: missing; Needy needs it ('a').",
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
    assert problems == ["f.yaml:1:2: a: no such argument of Bare, which takes none."]


def test_arguments_that_are_no_mapping_are_refused():
    _, problems = check("[1]")
    assert problems == [
        "f.yaml:1:1: a list does not fit; expected a mapping of arguments of EarlyStopping."
    ]


def test_null_is_an_empty_mapping_of_arguments():
    assert check("null") == ({}, [])


def test_several_problems_of_one_mapping_are_all_found():
    _, problems = check("patience: x\nmode: y\ndelta: z\n")
    assert [line.split(":")[1] for line in problems] == ["1", "2", "3"]
