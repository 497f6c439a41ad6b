"""Run the reliability tests and write a table of what they did and found.

python benchmarks/reliability.py [--long] [--rows 1 6 13] [--jobs 2] [--page docs/evidence.md]
"""

from __future__ import annotations

import argparse
import ast
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import torch

ROOT: Final = Path(__file__).resolve().parents[1]
TESTS: Final = Path("tests/reliability")
ELSEWHERE: Final[dict[int, tuple[str, Sequence[str]]]] = {
    8: (
        "Every shipped callback, logger, optimizer and schedule: what it saves, loads and saves "
        "again is the same.",
        ("tests/callbacks/test_shipped.py", "tests/optim/test_every_name.py"),
    ),
    16: (
        "YAML changed at random: an error with its place, or a configuration; nothing else.",
        ("tests/config/test_fuzz.py", "tests/config/test_mutations.py"),
    ),
    23: (
        "Both job files in a real Slurm: time limit, requeue, preemption, node failure, a kill. "
        "Ray Train: a kill, a preemption, a stop file, from 2 workers to 1 to 2.",
        ("tests/tools/launching/test_slurm.py", "tests/tools/launching/test_ray.py"),
    ),
    24: (
        "An object store: each request fails once, in nine ways; a run is killed at its requests.",
        (
            "tests/checkpointing/stores/test_faults.py",
            "tests/checkpointing/stores/test_run_faults.py",
            "tests/checkpointing/stores/test_kills.py",
            "tests/checkpointing/stores/test_run_mishaps.py",
        ),
    ),
    27: (
        "Several processes: they end, hang, change in number; each engine with each model.",
        ("tests/distributed",),
    ),
    28: (
        "Losses that are not finite, and runs that resume, bit by bit.",
        ("tests/numerics", "tests/core/test_grad_accum.py"),
    ),
    29: ("Models, and data whose process is killed.", ("tests/zoo",)),
    30: (
        "Configurations: mistakes in published files, odd values, the steps of a run.",
        (
            "tests/config/test_corpus_mutations.py",
            "tests/config/test_odd_values.py",
            "tests/config/printout/test_length.py",
        ),
    ),
    31: (
        "A store with several hosts, files that are made to harm a reader, restarts.",
        (
            "tests/checkpointing/stores/test_hosts.py",
            "tests/checkpointing/stores/test_mirror_faults.py",
            "tests/checkpointing/test_security.py",
            "tests/cli/test_restart.py",
        ),
    ),
}
MAXIMA: Final = ("most_", "longest_")  # of such counts the largest is shown, of others the sum
NO_TESTS: Final = 5

TABLE: Final = re.compile(r"^Written by.*?(?:\n\n(?:\|.*\n?)+|\Z)", re.DOTALL | re.MULTILINE)
INTRO: Final = """\
Written by `{command}`, with {environment}. A row is one command,
`python -m pytest PATHS`; with `--long` also `-m "soak or slow or not slow"`. CI runs
a sample of the cases; `last whole`: the day of the last run with `--long`, and the commit."""


@dataclass(slots=True)
class Row:
    """A row of the table.

    Args:
        number: Number of the row.
        what: What is done.
        paths: Its tests.
        counts: Counts that the tests reported.
        outcomes: Numbers of tests that passed, failed and were skipped.
        seconds: Duration.
        whole: Day and commit of the last run in the long form.
    """

    number: int
    what: str
    paths: Sequence[str]
    counts: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0
    whole: str = ""

    def run(self, *, is_long: bool) -> None:
        """Run its tests."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.xml")
            words = [
                "-q",
                "-p",
                "no:cacheprovider",
                f"--junitxml={report}",
                "-o",
                "junit_family=xunit1",
            ]
            words += ["-m", "soak or slow or not slow"] if is_long else []
            begin = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *words, *self.paths],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            self.seconds = time.perf_counter() - begin
            if done.returncode > 1 and done.returncode != NO_TESTS:
                raise SystemExit(f"row {self.number}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
            self._read(report)
        if is_long:
            self.whole = f"{date.today()}, {commit()}"
        print(f"{self.number:2} {self.result:24} {self.seconds:6.1f} s", flush=True)

    def _read(self, report: Path) -> None:
        for case in ElementTree.parse(report).iter("testcase"):
            kinds = {child.tag for child in case}
            found = "failed" if kinds & {"failure", "error"} else "passed"
            found = "skipped" if "skipped" in kinds else found
            self.outcomes[found] = self.outcomes.get(found, 0) + 1
            for counted in case.iter("property"):
                name, number = counted.attrib["name"], int(counted.attrib["value"])
                known = self.counts.get(name, 0)
                is_largest = name.startswith(MAXIMA)
                self.counts[name] = max(known, number) if is_largest else known + number

    @property
    def result(self) -> str:
        """Numbers of tests that passed, failed and were skipped."""
        found = [f"{number} {name}" for name, number in sorted(self.outcomes.items())]
        return ", ".join(found) or "in the long form"


def commit() -> str:
    """Return the commit that is checked out."""
    words = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def all_rows() -> list[Row]:
    """Return all rows in order, including those of other folders."""
    rows = [Row(number, what, paths) for number, (what, paths) in ELSEWHERE.items()]
    for path in sorted((ROOT / TESTS).glob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        what = (ast.get_docstring(tree) or "").splitlines()[0]
        rows.append(Row(int(path.name.split("_")[1]), what, (str(TESTS / path.name),)))
    return sorted(rows, key=lambda row: (row.number, row.paths[0]))


def line(row: Row) -> str:
    """Return a row of the table of results."""
    counts = ", ".join(f"{name} {count:,}" for name, count in row.counts.items())
    paths = " ".join(f"`{path}`" for path in row.paths)
    return (
        f"| {row.number} | {row.what} | {counts.replace('_', ' ')} | {row.result} "
        f"| {row.seconds:.0f} | {row.whole} | {paths} |"
    )


def table(rows: Iterable[Row]) -> str:
    """Return the table of results."""
    lines = [
        "| # | what is done | counted | tests | seconds | last whole | paths |",
        "|---" * 7 + "|",
    ]
    return "\n".join([*lines, *map(line, rows)])


def environment() -> str:
    """Describe the environment."""
    return (
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()} "
        f"on {platform.machine()}, {os.cpu_count()} cores"
    )


def _keep_dates(rows: Iterable[Row], page: Path) -> None:
    """Take over from a page when its rows last ran in the long form."""
    lines = page.read_text(encoding="utf-8").splitlines() if page.exists() else []
    known = {one.rpartition("| `")[2]: one.split(" | ")[-2] for one in lines if "| `" in one}
    for row in rows:
        row.whole = known.get(line(row).rpartition("| `")[2], "")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--long", action="store_true", help="long form: more than 15 minutes")
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        metavar="N",
        help="only these rows; others on the page do not change",
    )
    parser.add_argument("--jobs", type=int, default=2, help="concurrent rows (default: 2)")
    parser.add_argument("--page", type=Path, help="page to write the table to")
    options = parser.parse_args()
    rows = [row for row in all_rows() if options.rows is None or row.number in options.rows]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda row: row.run(is_long=options.long), rows))
    if options.page is not None and not options.long:
        _keep_dates(rows, options.page)
    text = table(rows)
    if options.page is None:
        print(text)
    elif options.rows is not None and options.page.exists():
        new = {line(row).rpartition("| `")[2]: line(row) for row in rows}
        old = options.page.read_text(encoding="utf-8").splitlines()
        lines = [new.pop(one.rpartition("| `")[2], one) for one in old]
        first = next(at for at, one in enumerate(lines) if one.startswith("|---")) + 1
        last = next(at for at in range(first, len(lines)) if not lines[at].startswith("|"))
        table_lines = [*lines[first:last], *new.values()]
        table_lines.sort(key=lambda one: int(one.split("|")[1]))
        lines[first:last] = table_lines
        options.page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        command = f"python benchmarks/reliability.py{' --long' if options.long else ''}"
        intro = INTRO.format(command=command, environment=environment())
        page = options.page.read_text(encoding="utf-8") if options.page.exists() else "Written by"
        found = f"{intro}\n\n{text}"
        options.page.write_text(TABLE.sub(lambda _: found, page, count=1), encoding="utf-8")
    return int(any("failed" in row.outcomes for row in rows))


if __name__ == "__main__":
    sys.exit(main())
