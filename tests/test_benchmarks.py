"""Benchmarks run: nothing else would notice that one no longer fits what it measures."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_checks import Profile
from benchmarks.gpu_runs import Row, Setup

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = [
    "benchmarks/overhead.py --steps 5 --rounds 1 --rows ag",
    "benchmarks/resume.py --rounds 1",
    "benchmarks/checkpoint.py --mib 2 --rounds 1",
    "-m benchmarks.background --mib 2 --rounds 1",
    "benchmarks/parallel.py --steps 2 --rounds 1",
    "-m benchmarks.model_scaling --quick",
]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_benchmark_prints_its_table(command: str) -> None:
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "\n|---" in done.stdout


def first(setup: Setup) -> Iterator[Row]:
    yield Row("first", "a limit", "3 us", ok=True)
    yield Row("first", "another limit", "5 us", ok=False, note="a | b")


def second(setup: Setup) -> Iterator[Row]:
    yield Row("second", "no limit", "7 us")
    raise ValueError("broken\nin two lines")


def third(setup: Setup) -> Iterator[Row]:
    yield Row("third", "a limit", "1 us", ok=True)


@pytest.fixture
def gpu_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "CHECKS", {"first": first, "second": second, "third": third})
    monkeypatch.setattr(logging.getLogger("modelzoo_trainer"), "handlers", [])


@pytest.mark.usefixtures("gpu_checks")
def test_a_check_that_fails_is_a_row_and_does_not_end_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    code = gpu.main(["--device", "cpu", "--tiny", "--json", str(file)])
    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    assert lines[2:7] == [
        "| first | a limit | 3 us | PASS |  |",
        r"| first | another limit | 5 us | FAIL | a \| b |",
        "| second | no limit | 7 us | info |  |",
        "| second | the check itself | ValueError | FAIL | broken |",
        "| third | a limit | 1 us | PASS |  |",
    ]
    assert "2 passed, 2 failed, 1 for information" in lines[-1]
    assert [row["ok"] for row in json.loads(file.read_text())] == [True, False, None, False, True]


@pytest.mark.usefixtures("gpu_checks")
def test_checks_without_a_failure_end_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--tiny", "--only", "third"]) == 0
    assert "first" not in capsys.readouterr().out


def test_a_profile_is_busy_while_at_least_one_kernel_runs() -> None:
    profile = Profile(kernels=[(0, 10), (5, 8), (9, 20), (30, 50)])
    assert profile.busy() == (0.8, 10)
