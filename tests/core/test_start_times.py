"""What a long start logs."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from modelzoo_trainer.core.parts import start_times
from tests.core.test_initial_values import BATCH, size_of, trainer_in

PHASES = ["model", "set-up", "checkpoint", "first batch", "first step"]


@pytest.mark.parametrize(("limit", "num_lines"), [(0.0, 1), (1e6, 0)])
def test_a_long_start_is_logged_once_by_phase(
    limit: float,
    num_lines: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(start_times, "_LONG_S", limit)
    caplog.set_level(logging.INFO, start_times.log.name)
    with trainer_in(tmp_path, progress="lines") as trainer:
        trainer.fit([BATCH] * 4)
        num_drawn = size_of(trainer)
    lines = [one.getMessage() for one in caplog.records if one.name == start_times.log.name]
    assert len(lines) == num_lines
    for line in lines:
        total, phases = re.fullmatch(r"Started in ([\d.]+) s: (.*)", line).groups()  # type: ignore[union-attr]
        assert f"({num_drawn:,} initial values drawn)" in phases
        found = dict(re.findall(r"([a-z -]+?) ([\d.]+)(?: \([^)]*\))?(?:, |$)", phases))
        assert list(found) == PHASES
        assert sum(map(float, found.values())) == pytest.approx(float(total), abs=0.3)
