"""Benchmarks run: nothing else would notice that one no longer fits what it measures."""

import subprocess
import sys
from pathlib import Path

import pytest

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
