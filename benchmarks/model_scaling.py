"""Memory and time of decoders over length, vocabulary and experts.

python -m benchmarks.model_scaling [PART ...] [--rounds 5] [--quick]

attention     a llama of two layers over T, by attention, against full causal attention
head          the loss of 2,048 states over the vocabulary, against the plain head: a linear layer,
              its logits in float32, cross_entropy
experts       a layer of experts, against torch.nn.functional.grouped_mm over sorted tokens
transformers  four decoders of two layers, against transformers' models with the same weights

A measurement is one forward and backward pass on one CPU thread, in a process of its own: peak
memory above the model, and CPU time. Tensors above 1 MiB are returned to the system when they are
freed: glibc otherwise keeps up to 32 MiB of some, by chance. A round has each of a table's
measurements once. Values are medians over the rounds, and so are ratios. Exits with 1 if a ratio
exceeds its limit; `--quick` measures tiny sizes, which have no limits. Linux only.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
LENGTHS: Final = (1024, 2048, 4096, 8192, 16384)
FULL, OURS = "full causal", "ours"
LIMITED: Final = ("window 256", "packed, spans of 256", "softcap 50")
OTHERS: Final = ("ALiBi", "dropout 0.1")
MEMORY_LIMIT, TIME_LIMIT, TIMED_AT = 1.2, 1.0, 8192
HEAD_LIMITS: Final = (1 / 8, 1.5)  # of the logits' memory, of the time
EXPERTS_LIMIT: Final = 1.25
GIB: Final = 1 << 30
RETURNED: Final = 1 << 20  # bytes of allocations that are returned to the system
SMALLEST: Final = 1e-9  # tiny sizes may fit into memory that the process has
SAME: Final = 1e-4  # relative difference of two losses


@dataclass(frozen=True)
class Figures:
    """What a pass takes; infinite where it fails."""

    bytes: float = float("inf")
    seconds: float = float("inf")
    loss: float = float("nan")


@dataclass
class Table:
    """Measurements that are made in turn, by row and column."""

    options: argparse.Namespace
    over: list[str] = field(default_factory=list)  # what exceeds a limit
    figures: dict[tuple[str, str], list[Figures]] = field(default_factory=dict)

    def measure(self, cases: dict[tuple[str, str], dict[str, Any]]) -> None:
        """Measure each case once in each round."""
        self.figures = {key: [] for key in cases}
        for number in range(self.options.rounds):
            for key, case in cases.items():
                found = measure(case, self.options.gib)
                self.figures[key].append(found)
                print(f"{', '.join(key)}: {found}", file=sys.stderr, flush=True)
            print(f"round {number + 1} of {self.options.rounds}", file=sys.stderr, flush=True)

    def value(self, row: str, column: str, name: str) -> float:
        """Return a median."""
        return statistics.median(getattr(one, name) for one in self.figures[row, column])

    def ratio(self, row: str, base: str, column: str, name: str) -> float:
        """Return the median of the ratios to another row."""
        pairs = zip(self.figures[row, column], self.figures[base, column], strict=True)
        return statistics.median(
            getattr(one, name) / max(getattr(two, name), SMALLEST) for one, two in pairs
        )

    def cell(self, row: str, base: str, column: str) -> str:
        """Return memory and time, and their ratios to another row."""
        num_mib, seconds = (
            self.value(row, column, "bytes") / 2**20,
            self.value(row, column, "seconds"),
        )
        text = f"{num_mib:,.0f} MiB, {seconds:.2f} s"
        if row == base:
            return text
        ratios = (self.ratio(row, base, column, name) for name in ("bytes", "seconds"))
        return f"{text} ({', '.join(f'{one:.2f}' for one in ratios)})"

    def check(self, what: str, ratio: float, limit: float) -> None:
        """Note a ratio that exceeds its limit."""
        if not self.options.quick and not ratio <= limit:
            self.over.append(f"{what}: {ratio:.3f}, at most {limit:.3f}")


def measure(case: dict[str, Any], gib: int) -> Figures:
    """Measure in a process with limited memory; print why it fails, if it does."""
    given = json.dumps({**case, "limit": gib * GIB})
    command = [sys.executable, "-m", "benchmarks.model_scaling_runs", given]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(RETURNED)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return Figures(**json.loads(done.stdout.splitlines()[-1]))
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    print(f"{case}: {lines[-1]}", file=sys.stderr, flush=True)
    return Figures()


def print_table(title: str, columns: Sequence[str], rows: Iterator[list[str]]) -> None:
    """Print a table in Markdown."""
    print(f"\n| {' | '.join([title, *columns])} |\n{'|---' * (len(columns) + 1)}|")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def attention(table: Table) -> None:
    """Print the costs of attention over the length."""
    is_quick = table.options.quick
    lengths, vocab = ((512,), 128) if is_quick else (table.options.lengths, 8192)
    columns = {f"T {length:,}": length for length in lengths}
    kinds = (FULL, *LIMITED, *OTHERS)
    table.measure(
        {
            (kind, column): {"part": "attention", "kind": kind, "length": length, "vocab": vocab}
            for column, length in columns.items()
            for kind in kinds
        }
    )
    rows = ([kind, *(table.cell(kind, FULL, column) for column in columns)] for kind in kinds)
    print_table("attention (ratios: to full causal)", list(columns), rows)
    for column, length in columns.items():
        for kind in LIMITED:
            table.check(
                f"memory of {kind}, {column}",
                table.ratio(kind, FULL, column, "bytes"),
                MEMORY_LIMIT,
            )
        if length == TIMED_AT:
            kind = LIMITED[0]
            table.check(
                f"time of {kind}, {column}", table.ratio(kind, FULL, column, "seconds"), TIME_LIMIT
            )


def head(table: Table) -> None:
    """Print the costs of the output layer over the vocabulary."""
    length, hidden, sizes = 2048, 1024, (32768, 131072)
    if table.options.quick:
        length, hidden, sizes = 64, 16, (512,)
    columns = {f"V {vocab:,}": vocab for vocab in sizes}
    plain = "the plain head"
    table.measure(
        {
            (kind, column): {
                "part": "head",
                "kind": kind,
                "length": length,
                "vocab": vocab,
                "hidden": hidden,
            }
            for column, vocab in columns.items()
            for kind in (plain, OURS)
        }
    )
    shares = {
        column: table.value(OURS, column, "bytes") / (4 * length * vocab)
        for column, vocab in columns.items()
    }
    rows = [
        [kind, *(table.cell(kind, plain, column) for column in columns)] for kind in (plain, OURS)
    ]
    rows.append(["memory of ours, over the logits", *(f"{one:.3f}" for one in shares.values())])
    print_table("head (ratios: to the plain head)", list(columns), iter(rows))
    column = list(columns)[-1]
    table.check(f"memory of the head over the logits, {column}", shares[column], HEAD_LIMITS[0])
    ratio = table.ratio(OURS, plain, column, "seconds")
    table.check(f"time of the head, {column}", ratio, HEAD_LIMITS[1])
    check_losses(table, plain, columns)


def experts(table: Table) -> None:
    """Print the costs of experts over their number."""
    loop, length, width, sizes = "grouped_mm by hand", 1024, 1792, ((8, 2), (32, 2), (32, 8))
    if table.options.quick:
        length, width, sizes = 64, 32, ((8, 2),)
    columns = {f"{num} experts, top {k}": (num, k) for num, k in sizes}
    table.measure(
        {
            (kind, column): {
                "part": "experts",
                "kind": kind,
                "length": length,
                "filter_size": width,
                "num": num,
                "top_k": top_k,
            }
            for column, (num, top_k) in columns.items()
            for kind in (loop, OURS)
        }
    )
    rows = (
        [
            kind,
            *(
                f"{table.value(kind, column, 'seconds'):.2f} s "
                f"({table.ratio(kind, loop, column, 'seconds'):.2f})"
                for column in columns
            ),
        ]
        for kind in (loop, OURS)
    )
    print_table("experts (ratios: to grouped_mm)", list(columns), rows)
    for column in columns:
        ratio = table.ratio(OURS, loop, column, "seconds")
        table.check(f"time of {column}", ratio, EXPERTS_LIMIT)
    check_losses(table, loop, columns)


def transformers(table: Table) -> None:
    """Print the costs of decoders over the length."""
    theirs = "transformers"
    if importlib.util.find_spec(theirs) is None:
        print("\ntransformers is not installed: no comparison with its models.")
        return
    lengths, vocab = ((512,), 128) if table.options.quick else ((1024, 4096), 8192)
    names = ("llama", "mistral", "gemma2", "mixtral")
    columns = {f"{name}, T {length:,}": (name, length) for name in names for length in lengths}
    table.measure(
        {
            (kind, column): {
                "part": theirs,
                "kind": kind,
                "name": name,
                "length": length,
                "vocab": vocab,
            }
            for column, (name, length) in columns.items()
            for kind in (theirs, OURS)
        }
    )
    rows = (
        [column, *(table.cell(kind, theirs, column) for kind in (theirs, OURS))]
        for column in columns
    )
    print_table("model (ratios: to transformers)", [theirs, OURS], rows)
    check_losses(table, theirs, columns)


def check_losses(table: Table, base: str, columns: Sequence[str] | dict[str, Any]) -> None:
    """Note where two losses of the same weights differ."""
    for column in columns:
        one, two = (table.figures[row, column][0].loss for row in (base, OURS))
        if not abs(one - two) <= SAME * abs(one):
            table.over.append(f"{column}: the losses differ, {one:.6f} and {two:.6f}")


PARTS: Final = {
    "attention": attention,
    "head": head,
    "experts": experts,
    "transformers": transformers,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; return 1 if a ratio exceeds its limit."""
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=lines[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; medians are shown")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of attention")
    parser.add_argument("--gib", type=int, default=32, help="address space of a measurement")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round, no limits")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds = 1
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"no such part: {', '.join(unknown)}. Parts: {', '.join(PARTS)}.")
    over = []
    for name in options.parts or PARTS:
        table = Table(options)
        PARTS[name](table)
        over += table.over
    for line in over:
        print(f"\nEXCEEDED: {line}")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
