"""Folders of runs, as a trainer leaves them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer.tools.report.command import read_runs
from modelzoo_trainer.tools.report.page import page
from modelzoo_trainer.tools.report.run import ReportedRun
from tests.tools.report.run_lines import to_text

WriteRun = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """A function that writes a run: `write_run(name, lines, events=..., params=..., files=...)`."""

    def write(
        name: str = "run",
        lines: Iterable[Mapping[str, Any] | str] | None = None,
        *,
        session: str = "20260101_000000",
        events: Iterable[Mapping[str, Any] | str] = (),
        params: str | None = None,
        files: Mapping[str, str | bytes] | None = None,
    ) -> Path:
        run = tmp_path / name
        logs = run / "logs" / session
        logs.mkdir(parents=True)
        if lines is not None:
            (run / "metrics.jsonl").write_text(to_text(lines))
        if events:
            (logs / "events.jsonl").write_text(to_text(events))
        if params is not None:
            (logs / "params.yaml").write_text(params)
        for path, content in (files or {}).items():
            target = run / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.encode() if isinstance(content, str) else content)
        return run

    return write


@pytest.fixture
def read() -> Callable[..., list[ReportedRun]]:
    return lambda *paths: read_runs(paths)


@pytest.fixture
def page_of() -> Callable[..., str]:
    return lambda *paths: page(read_runs(paths))
