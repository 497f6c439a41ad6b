"""The results of validations in run.log, where nothing shows the progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from modelzoo_trainer.callbacks import ModelEma
from modelzoo_trainer.loggers import ProgressLogger
from tests.doubles import tiny_batches


@pytest.fixture
def results(trainer_of, tmp_path) -> Callable[..., list[str]]:
    """Run a fit with two validations, then a test; return the lines of run.log with results."""

    def fit(*callbacks: Any, **settings: Any) -> list[str]:
        trainer = trainer_of(*callbacks, max_steps=2, eval_frequency=1, **settings)
        trainer.fit(tiny_batches(), tiny_batches(1))
        trainer.test(tiny_batches(1))
        [path] = {found.resolve() for found in tmp_path.rglob("run.log")}
        lines = path.read_text().splitlines()
        return [line.partition(": loss ")[0].split()[-1] for line in lines if ": loss " in line]

    return fit


@pytest.mark.parametrize("loggers", [[], [ProgressLogger]], ids=["none", "of a file"])
def test_each_validation_has_one_line(results, loggers) -> None:
    found = results(progress="none", loggers=[kind() for kind in loggers])
    assert found == ["validate_0", "validate_0", "test"]


def test_a_custom_validation_has_one_too(results) -> None:
    assert results(ModelEma(), progress="none").count("ema/validate_0") == 2
