"""Time to the first error message and to the first step of a run, as whole processes.

Then the functions of this project that `fit` calls before the first optimizer step, which do not
depend on the machine.

python benchmarks/startup.py [--rounds 7] [--params FILE]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import nn
from typing_extensions import override

from modelzoo_trainer import Callback, Trainer, TrainingLoop

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent
QUICKSTART: Final = ROOT / "configs/quickstart.yaml"
FIRST_STEP: Final = "the first step is done"


class FirstStep(Callback):
    """Print a line when the first step is done."""

    @override
    def on_train_batch_end(
        self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        print(FIRST_STEP, flush=True)


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Args:
        name: Name of the row.
        command: Arguments of the interpreter.
        code: The expected exit code.
        until: Part of the line of output that stops the clock; None = end of the process.
    """

    name: str
    command: Sequence[str]
    code: int = 0
    until: str | None = None

    def seconds(self) -> float:
        """Run it once and return the time."""
        paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        begin = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *self.command],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        stopped = None
        shown = []
        assert process.stdout is not None  # stdout is a pipe
        for line in process.stdout:
            if stopped is None and self.until is not None and self.until in line:
                stopped = time.perf_counter() - begin
            shown.append(line)
        code = process.wait()
        if code != self.code or (self.until is not None and stopped is None):
            raise SystemExit(f"{self.name}: exit code {code} after:\n{''.join(shown)}")
        return time.perf_counter() - begin if stopped is None else stopped


def cases(folder: Path, others: Sequence[Path]) -> list[Case]:
    """Return the rows; the first one is the reference.

    Args:
        folder: For the files of the rows, and the output of their runs.
        others: Additional files to check.
    """
    text = QUICKSTART.read_text(encoding="utf-8")

    def run(*options: str) -> list[str]:
        return ["run.py", *options]

    def changed(name: str, old: str, new: str) -> list[str]:
        assert text.count(old) == 1
        path = folder / f"{name}.yaml"
        path.write_text(text.replace(old, new), encoding="utf-8")
        return run("--params", str(path))

    probe = changed("probe", "GenerateText: {", "startup.FirstStep: {} #")
    once = ["--mode", "train", "--max_steps", "1", "--set", "init.checkpoint.steps=null"]
    once += ["--model_dir", str(folder / "run")]
    return [
        Case("import torch", ["-c", "import torch"]),
        Case("an empty program", ["-c", "pass"]),
        Case("--help", run("--help")),
        Case("fit --help", run("fit", "--help")),
        Case("error: an unknown command", run("fti", str(QUICKSTART)), code=2),
        Case("error: bad YAML", changed("syntax", "seed: 1", "seed: [1"), code=2),
        Case("error: a misspelt key", changed("key", "log_steps", "log_stpes"), code=2),
        Case("error: an unknown class", changed("class", "GenerateText", "GenerateTxet"), code=2),
        Case("--check of the quickstart", run("--params", str(QUICKSTART), "--check")),
        *(
            Case(
                f"--check of {path.name}", run("--params", str(path), "--device", "cpu", "--check")
            )
            for path in others
        ),
        Case("first step of the quickstart", [*probe, *once], until=FIRST_STEP),
    ]


class CountedModel(nn.Module):
    """One layer that is trained, and `num_more` that are only there."""

    def __init__(self, num_more: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.more = nn.ModuleList(nn.Linear(1, 1) for _ in range(num_more))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return self.layer(batch).square().mean()


class UncountedStep(torch.optim.SGD):
    """Ends the count of calls at its first step."""

    @override
    def step(self, closure: Any = None) -> Any:
        sys.setprofile(None)
        return super().step(closure)


def calls_before_first_step(num_more: int, folder: Path) -> int:
    """Return how many functions of this project a fit of six steps calls before its first one.

    Args:
        num_more: Modules of the model besides three.
        folder: Of the run's output.
    """
    packages = tuple(str(ROOT / name) for name in ("modelzoo_trainer", "backends"))
    num = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num
        num += event == "call" and frame.f_code.co_filename.startswith(packages)

    with Trainer(
        device="cpu",
        model_dir=folder,
        model=lambda: CountedModel(num_more),
        optimizer=lambda model: UncountedStep(model.parameters(), lr=0.1),
        loop=TrainingLoop(num_epochs=1),
        seed=1,
    ) as trainer:
        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            trainer.fit(list(torch.randn(6, 4, 8)))
        finally:
            sys.setprofile(before)
    return num


def print_calls(folder: Path) -> None:
    """Print the calls before the first step for models of several sizes."""
    calls_before_first_step(0, folder / "imports")  # some modules are imported when needed
    for num_more in (0, 500):
        num = calls_before_first_step(num_more, folder / f"calls_{num_more}")
        print(f"{num} calls before the first step of a model with {num_more + 3} modules")


def print_table(rows: Sequence[Case], rounds: int) -> None:
    """Time the rows in turn, after a warm-up round, and print them."""
    times: dict[str, list[float]] = {row.name: [] for row in rows}
    for number in range(rounds + 1):
        for row in rows:
            taken = row.seconds()
            if number:
                times[row.name].append(taken)
    yardstick = times[rows[0].name]
    print("| until | min | median | max | relative |\n|---|---|---|---|---|")
    for name, taken in times.items():
        ratio = statistics.median(a / b for a, b in zip(taken, yardstick, strict=True))
        figures = min(taken), statistics.median(taken), max(taken)
        print(f"| {name} | {' | '.join(f'{one:.2f} s' for one in figures)} | {ratio:.2f} |")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Start-up time of whole processes.")
    parser.add_argument("--rounds", type=int, default=7, help="timed runs of each row")
    parser.add_argument(
        "--params", type=Path, action="append", default=[], help="additional file to check"
    )
    arguments = parser.parse_args()
    print(f"{arguments.rounds} runs of each row, in turn; relative to the first row\n")
    with tempfile.TemporaryDirectory() as folder:
        others = [path.resolve() for path in arguments.params]
        print_table(cases(Path(folder), others), arguments.rounds)
        print()
        print_calls(Path(folder))


if __name__ == "__main__":
    main()
