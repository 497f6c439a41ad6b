"""Throughput of a slow data set, and the time to the first batch of an epoch.

python benchmarks/loading.py [--rounds 5] [--epochs 4] [--batch-size 32] [--work sleep|cpu]

A run trains for several epochs, in a hand-written loop or with the trainer, with a new DataLoader
over the same data set. A round is three runs: hand-written, trainer, hand-written. The table shows
medians of the rounds; `share` is the trainer's value divided by the mean of the two hand-written
runs of its round.

Throughput is measured from the end of the first step to the end of the last, so it includes changes
of epochs but not the start of the first workers. The time to the first batch is measured from the
end of the last step of an epoch to the first batch of the next one. The target is at most 102 % of
the hand-written loop, or more if its two runs of a round differ by more than 2 %.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from overhead import Mlp, Samples  # beside this file
from torch import nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from modelzoo_trainer import Callback, Logging, Trainer, TrainingLoop

LEAST_SHARE = 0.98  # of the throughput by hand
LEAST_NOISE = 0.02  # of the time to the first batch


class SlowSamples(Samples):
    """A data set whose samples take a given time each.

    Args:
        num: Number of samples.
        seconds: Time per sample.
        uses_cpu: Whether to compute for this time (CPU time of the thread) instead of sleeping.
    """

    def __init__(self, num: int, seconds: float, *, uses_cpu: bool) -> None:
        super().__init__(torch.randn(num, 64), torch.randint(0, 10, (num,)))
        self.seconds = seconds
        self.uses_cpu = uses_cpu

    @override
    def __getitem__(self, idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.uses_cpu:
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                pass
        else:
            time.sleep(self.seconds)
        return super().__getitem__(idx)


class SameSample(Dataset[Any]):
    """A data set of any length with the same sample for each index."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.sample = torch.randn(64), torch.tensor(1)

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.sample


@dataclass
class Times:
    """When the batches of a run were available, and when their steps ended, in seconds."""

    fetched: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)

    def batches_per_s(self) -> float:
        """Return the throughput after the first step."""
        return (len(self.done) - 1) / (self.done[-1] - self.done[0])

    def first_batch_s(self, num_batches: int) -> float:
        """Return the median time to the first batch of an epoch of `num_batches`."""
        firsts = range(num_batches, len(self.fetched), num_batches)
        return statistics.median(self.fetched[num] - self.done[num - 1] for num in firsts)


Round = tuple[Times, Times, Times]  # by hand, trainer, by hand


class Stopwatch(Callback):
    """Record the times of a fit."""

    def __init__(self) -> None:
        self.times = Times()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int
    ) -> None:
        self.times.fetched.append(time.perf_counter())

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.times.done.append(time.perf_counter())


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The training of both sides.

    Args:
        make_loader: Returns a new DataLoader.
        epochs: Number of epochs, at least two.
        num_batches: Batches per epoch, even if the data set has more.
    """

    make_loader: Callable[[], DataLoader[Any]]
    epochs: int
    num_batches: int

    def by_hand(self) -> Times:
        """Train in a hand-written loop."""
        loader, model, times = self.make_loader(), Mlp().train(), Times()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(self.epochs):
            for batch in islice(loader, self.num_batches):
                times.fetched.append(time.perf_counter())
                model(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                times.done.append(time.perf_counter())
        return times

    def by_trainer(self) -> Times:
        """Train with the trainer, with all core callbacks only."""
        stopwatch, loader = Stopwatch(), self.make_loader()
        limit = None if len(loader) == self.num_batches else self.num_batches
        with tempfile.TemporaryDirectory() as folder:
            Trainer(
                model=Mlp(),
                optimizer=lambda m: torch.optim.AdamW(m.parameters()),
                loop=TrainingLoop(
                    num_epochs=self.epochs, steps_per_epoch=limit, eval_frequency=None
                ),
                logging=Logging(log_steps=10),
                callbacks=[stopwatch],
                check_loss=False,
                model_dir=folder,
                seed=1,
            ).fit(loader)
        return stopwatch.times

    def rounds(self, num: int) -> list[Round]:
        """Return the times of several rounds: hand-written, trainer, hand-written."""
        return [(self.by_hand(), self.by_trainer(), self.by_hand()) for _ in range(num)]


@dataclass
class Comparison:
    """Medians of the rounds: both values, the trainer's share, and the noise of the share."""

    by_hand: float
    trainer: float
    share: float
    noise: float


def compared(rounds: list[Round], figure: Callable[[Times], float]) -> Comparison:
    """Compare a value of the trainer with that of the hand-written loop."""
    figures = [(figure(before), figure(fit), figure(after)) for before, fit, after in rounds]
    means = [(before + after) / 2 for before, _, after in figures]
    pairs = list(zip(figures, means, strict=True))
    return Comparison(
        by_hand=statistics.median(means),
        trainer=statistics.median(fit for _, fit, _ in figures),
        share=statistics.median(fit / mean for (_, fit, _), mean in pairs),
        noise=statistics.median(abs(first - last) / mean for (first, _, last), mean in pairs),
    )


def print_throughput(name: str, rounds: list[Round], batch_size: int) -> None:
    """Print a row of samples per second."""
    found = compared(rounds, lambda times: times.batches_per_s() * batch_size)
    met = "yes" if found.share >= LEAST_SHARE else "no"
    print(
        f"| {name} | {found.by_hand:.1f} samples/s | {found.trainer:.1f} samples/s "
        f"| {100 * found.share:.1f} % | at least {100 * LEAST_SHARE:.0f} % | {met} |",
        flush=True,
    )


def print_first_batch(name: str, rounds: list[Round], num_batches: int) -> None:
    """Print a row of the time to the first batch of an epoch."""
    found = compared(rounds, lambda times: times.first_batch_s(num_batches))
    most = 1 + max(found.noise, LEAST_NOISE)
    met = "yes" if found.share <= most else "no"
    print(
        f"| {name} | {found.by_hand * 1e3:.1f} ms | {found.trainer * 1e3:.1f} ms "
        f"| {100 * found.share:.1f} % | at most {100 * most:.0f} % | {met} |",
        flush=True,
    )


def print_table(arguments: argparse.Namespace) -> None:
    """Print all rows."""
    size, num_batches = arguments.batch_size, arguments.batches
    dataset = SlowSamples(
        size * num_batches, arguments.sample_ms / 1e3, uses_cpu=arguments.work == "cpu"
    )
    print("| workload | by hand | trainer | share | target | met |\n|---|---|---|---|---|---|")
    for persistent in (True, False):
        options: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent}
        workload = Workload(
            make_loader=partial(DataLoader, dataset, size, shuffle=True, **options),
            epochs=arguments.epochs,
            num_batches=num_batches,
        )
        rounds = workload.rounds(arguments.rounds)
        workers = "persistent workers" if persistent else "new workers in each epoch"
        print_throughput(f"throughput, {workers}", rounds, size)
        print_first_batch(f"first batch of an epoch, {workers}", rounds, num_batches)
    num = arguments.order
    workload = Workload(
        make_loader=partial(DataLoader, SameSample(num), 32, shuffle=True),
        epochs=arguments.epochs,
        num_batches=2,
    )
    name = f"first batch of an epoch, {num:,} samples in random order, no workers"
    print_first_batch(name, workload.rounds(arguments.rounds), workload.num_batches)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Throughput and first batches of DataLoaders.")
    parser.add_argument("--rounds", type=int, default=5, help="by hand, trainer, by hand")
    parser.add_argument("--epochs", type=int, default=4, help="epochs per run, at least two")
    parser.add_argument("--batches", type=int, default=12, help="batches per epoch")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per batch")
    parser.add_argument("--sample-ms", type=float, default=5, help="time per sample")
    parser.add_argument(
        "--work",
        choices=["sleep", "cpu"],
        default="sleep",
        help="what a sample does in this time: sleep, as if waiting for a disk, or compute",
    )
    parser.add_argument(
        "--order", type=int, default=10_000_000, help="samples of the data set in the last row"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("modelzoo_trainer").addHandler(logging.NullHandler())
    work = {"sleep": "sleep", "cpu": "computation"}[arguments.work]
    print(
        f"torch {torch.__version__}, one thread, medians of {arguments.rounds} rounds; throughput: "
        f"{arguments.sample_ms:g} ms of {work} per sample, batches of {arguments.batch_size}, "
        f"2 workers, {arguments.epochs} epochs of {arguments.batches} batches\n"
    )
    print_table(arguments)


if __name__ == "__main__":
    main()
