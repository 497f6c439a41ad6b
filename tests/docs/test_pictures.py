"""The pictures of schedules are what the classes give."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer.optim import SCHEDULERS
from tests.docs.conftest import load_script

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
# Their curve is that of a function of the reader's, or of their member.
WITHOUT = {"LambdaLR", "LambdaWD", "ScalePerParamLR"}


@pytest.fixture(scope="module")
def maker() -> Any:
    return load_script("make_pictures.py")


def test_each_schedule_has_a_picture_or_that_of_its_learning_rate(maker: Any) -> None:
    drawn = set(maker.EXAMPLES)
    of_decay = {name for name in SCHEDULERS if name.endswith("WD")}
    assert set(SCHEDULERS) - of_decay - drawn == WITHOUT - of_decay
    namesakes = {name.removesuffix("WD") for name in of_decay - WITHOUT}
    known = {name.removesuffix("LR").removesuffix("Scheduler") for name in drawn}
    assert namesakes - known == set()


def test_the_pictures_are_up_to_date(maker: Any) -> None:
    there = {path.stem: path.read_text(encoding="utf-8") for path in PICTURES.glob("*.svg")}
    again = {name: maker.picture(name) for name in maker.EXAMPLES}
    assert there == again, "run: python docs/make_pictures.py"


def test_a_picture_has_the_values_of_the_schedule(maker: Any) -> None:
    text = maker.picture("StepLR")
    line = re.search(r'points="([^"]+)"', text)
    assert line
    heights = {float(point.split(",")[1]) for point in line[1].split()}
    base, top = maker.HEIGHT - maker.BOTTOM, maker.TOP
    assert heights == {round(base - (base - top) * 0.5**n, 1) for n in range(5)}


def test_a_jump_stays_a_jump(maker: Any) -> None:
    steps = [step for step, _ in maker.points(maker.values_of("StepLR"))]
    assert {249, 250, 499, 500, 749, 750} <= set(steps)
