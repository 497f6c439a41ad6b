"""What the page on XLA says is what the program does, as far as it needs no XLA device."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from backends.xla.backend import XlaBackend

ROW = re.compile(r"^\| `(\w+)` \| (\S+) \|", re.MULTILINE)
DEFAULTS = {"none": None, "true": True, "`batch`": "batch", "`warn`": "warn"}


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "xla.md").read_text(encoding="utf-8")


def test_the_table_of_options_is_that_of_the_backend(page: str) -> None:
    told = {name: DEFAULTS[default] for name, default in ROW.findall(page)}
    parameters = inspect.signature(XlaBackend.__init__).parameters.values()
    known = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != "kind"
    }
    assert told == known


def test_the_example_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [program] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    scope: dict[str, object] = {}
    exec(program, scope)  # what a reader would paste
    assert scope["lengths"] == [32, 64, 128]
    assert scope["trainer"].global_step == 10  # type: ignore[attr-defined]  # the program's


def test_the_constraints_are_those_of_the_other_environment_but_for_torch(root: Path) -> None:
    def pins(name: str) -> set[str]:
        lines = (root / name).read_text(encoding="utf-8").splitlines()
        return {line for line in lines if not line.startswith("#")}

    host, xla = pins("constraints.txt"), pins("constraints-xla.txt")
    assert sorted(xla - host) == ["torch-xla==2.9.0", "torch==2.9.0"]
    assert all(line.startswith("torch==") for line in host - xla)
