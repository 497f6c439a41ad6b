"""What the page on optimizers says is what its programs do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer import callbacks

REFUSED = re.compile(r"^Refused before the first step: (.*?)\n\n", re.MULTILINE | re.DOTALL)


@pytest.fixture
def page(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return (root / "docs" / "optimizers.md").read_text(encoding="utf-8")


def programs(page: str) -> list[dict[str, Any]]:
    found = []
    sections = page.partition("## Several optimizers\n")[2].partition("## Edge cases\n")[0]
    for program in re.findall(r"```python\n(.*?)```", sections, re.DOTALL):
        scope: dict[str, Any] = {}
        exec(program, scope)  # what a reader would paste
        found.append(scope)
    return found


def test_the_programs_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    several, finding = programs(page)
    trainer = several["trainer"]
    counts = {
        name: int(one.state_dict()["state"][0]["step"])
        for name, one in trainer.optimizers.items()
        if name == "encoder"
    }
    assert counts == {"encoder": 5}
    assert trainer.schedulers[0].last_epoch == 10
    assert (trainer.model_dir / "checkpoint_10").is_dir()
    suggestion = finding["finder"].suggestion
    assert capsys.readouterr().out == f"suggested: {suggestion:.2g}\n"
    assert 1e-3 < suggestion < 1


def test_the_callbacks_that_are_refused_are_named(page: str) -> None:
    said = REFUSED.search(page)
    assert said is not None
    needing = {
        name
        for name in callbacks.__all__
        if getattr(getattr(callbacks, name), "needs_one_optimizer", False)
    }
    listeners = {"NormTensorListener", "SummaryTensorListener", "DumpAvailableTensorNames"}
    assert needing - listeners == {name for name in needing if f"`{name}`" in said[1]}
    assert "the tensor listeners" in said[1]
