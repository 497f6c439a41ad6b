"""What a user finds who has a clone, and nothing beside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WITH_CORPUS = ("tests/compat/test_corpus.py", "tests/config/test_corpus_mutations.py")
COLLECT = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]


@pytest.mark.slow
def test_tests_are_collected_without_the_published_configurations():
    environment = {name: value for name, value in os.environ.items() if name != "MODELZOO_CORPUS"}
    done = subprocess.run(
        [*COLLECT, "-m", "", *WITH_CORPUS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^\d+ tests collected", done.stdout, re.MULTILINE)


@pytest.mark.slow
def test_a_pattern_of_slow_cases_that_matches_none_is_named(tmp_path):
    file = tmp_path / "test_one.py"
    file.write_text(
        "import pytest\n"
        "@pytest.mark.slow_cases('a', 'c')\n"
        "@pytest.mark.parametrize('x', ['a', 'b'])\n"
        "def test_it(x): pass\n"
    )
    done = subprocess.run(
        [
            *COLLECT,
            "-c",
            str(ROOT / "pyproject.toml"),
            f"--confcutdir={ROOT}",
            "-p",
            "conftest",
            str(file),
        ],
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
    )
    assert done.returncode == 4
    assert re.findall(r"test_it', '(\w)'", done.stderr) == ["c"]


def test_ci_gives_our_variables_to_no_stage_but_that_of_the_published_configurations():
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    setting = [line.strip() for line in lines if re.search(r"\bMODELZOO_\w+=", line)]
    assert len(setting) == 1
    assert setting[0].startswith("MODELZOO_CORPUS=$corpus .venv/bin/python -m pytest")
