"""The console of the quickstart: when it first moves, and how good its estimates are.

python benchmarks/console.py [--steps 800] [--params FILE]

Runs the file in a pseudo-terminal and reads the bar. Prints the seconds from the first step that
the bar shows to its next movement, and the ratio of the estimated to the true time left, from 10 s
after the first step on. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
BAR: Final = re.compile(r"(\d+)/\d+, .*?(?:(\d+):(\d\d):(\d\d) left|estimating)")
FROM_S: Final = 10.0


class Seen(NamedTuple):
    """A drawing of the bar."""

    at: float  # seconds
    step: int
    left_s: float | None  # None = estimating


def drawings(command: list[str]) -> list[Seen]:
    """Run a command in a terminal and return the drawings of its bar.

    Raises:
        SystemExit: If the command fails.
    """
    leader, follower = pty.openpty()
    process = subprocess.Popen(command, cwd=ROOT, stdout=follower, stderr=follower)
    os.close(follower)
    found: list[Seen] = []
    rest = ""
    while True:
        try:
            data = os.read(leader, 65536)
        except OSError:  # the command has closed the terminal
            break
        now = time.perf_counter()
        *parts, rest = re.split(r"[\r\n]", rest + data.decode("utf-8", "replace"))
        found += [seen for part in parts if (seen := parsed(part, now)) is not None]
    os.close(leader)
    if process.wait() != 0:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}.")
    return found


def parsed(text: str, now: float) -> Seen | None:
    """Return what a line of the terminal shows; None if it is not the bar of the training."""
    match = BAR.search(text)
    if match is None or not text.lstrip("\x1b[A \0").startswith("train"):
        return None
    step, *parts = match.groups()
    if parts[0] is None:
        return Seen(now, int(step), None)
    hours, minutes, seconds = map(int, parts)
    return Seen(now, int(step), (hours * 60 + minutes) * 60 + seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--params", default="configs/quickstart.yaml")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "run.py", "--params", options.params, "--model_dir", folder]
        found = drawings([*command, "--max_steps", str(options.steps), "--progress", "bar"])
    print_table(found)


def print_table(found: list[Seen]) -> None:
    """Print when the bar moved, and each tenth estimate."""
    first = next(seen for seen in found if seen.step > 0)
    second = next(seen for seen in found if seen.step > first.step)
    end = found[-1].at
    print(f"from the first step shown to the next movement: {second.at - first.at:.2f} s")
    late = [seen for seen in found if seen.at - first.at >= FROM_S and seen.left_s is not None]
    late = [seen for seen in late if end - seen.at >= 5]  # whole seconds are too coarse below
    ratios = [(seen, seen.left_s / (end - seen.at)) for seen in late if seen.left_s is not None]
    print("   after   step    left    true   ratio")
    for seen, ratio in ratios[:: max(1, len(ratios) // 10)]:
        print(
            f"{seen.at - first.at:6.0f} s {seen.step:6d} {seen.left_s:5.0f} s "
            f"{end - seen.at:5.0f} s {ratio:7.2f}"
        )
    values = [ratio for _, ratio in ratios]
    print(f"{len(values)} estimates from {FROM_S:.0f} s on: {min(values):.2f} to {max(values):.2f}")


if __name__ == "__main__":
    main()
