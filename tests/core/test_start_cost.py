"""The cost of starting a fit in function calls, which do not depend on the machine."""

from __future__ import annotations

import pytest

from benchmarks.startup import calls_before_first_step


@pytest.fixture(scope="module", autouse=True)
def _imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have what a fit imports imported, so that its lines are not counted."""
    calls_before_first_step(0, tmp_path_factory.mktemp("first"))


def test_a_fit_calls_few_functions_before_its_first_step(tmp_path) -> None:
    num = calls_before_first_step(0, tmp_path)
    assert 100 < num <= 600  # below 100 nothing was counted


def test_these_calls_do_not_grow_with_the_modules(tmp_path) -> None:
    few = calls_before_first_step(0, tmp_path / "few")
    assert calls_before_first_step(500, tmp_path / "many") == few
