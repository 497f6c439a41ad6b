"""A fit on an XLA device compared with a hand-written torch_xla loop, in one process.

PJRT_DEVICE=CPU python benchmarks/xla.py [--steps 200] [--rounds 7]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from overhead import Mlp, gpt, gpt_batches, mlp_batches
from torch import nn
from typing_extensions import override

from modelzoo_trainer import Callback, Logging, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import default_callbacks
from modelzoo_trainer.loggers import default_loggers

LOG_STEPS = 10
WARM = 20  # steps that are not timed


@dataclass(frozen=True)
class Spent:
    """Time of a step, CPU time of the main thread in it, in seconds; counts over all steps."""

    wall_s: float
    host_s: float
    compilations: int
    executions: float
    transfers_to_host: float


class Meter(Callback):
    """Record the time and the backend's counters after the warm-up and at the end."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.marks: list[tuple[float, float, dict[str, int]]] = []

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        if trainer.global_step in (WARM, self.last):
            counts = trainer.backend.counters()  # waits for the device
            self.marks.append((time.perf_counter(), time.thread_time(), counts))


def spent(marks: list[tuple[float, float, dict[str, int]]], steps: int) -> Spent:
    """Return the difference of two marks, per step."""
    (wall, host, before), (end, host_end, after) = marks

    def of(name: str) -> int:
        return after[name] - before[name]

    return Spent(
        (end - wall) / steps,
        (host_end - host) / steps,
        of("compilations"),
        of("executions") / steps,
        of("transfers_to_host") / steps,
    )


def by_trainer(make: Callable[[], nn.Module], batches: list[Any], steps: int) -> Spent:
    """Fit with the default callbacks and loggers."""
    last = WARM + steps
    meter = Meter(last)
    data = [batches[idx % len(batches)] for idx in range(last)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            device="xla",
            model_dir=folder,
            model=make(),
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            loop=TrainingLoop(max_steps=last, eval_frequency=0),
            logging=Logging(log_steps=LOG_STEPS),
            callbacks=[*default_callbacks(), meter],
            loggers=default_loggers(),
            seed=1,
        )
        with trainer:
            trainer.fit(data)
    return spent(meter.marks, steps)


def by_hand(make: Callable[[], nn.Module], batches: list[Any], steps: int) -> Spent:
    """Train in a hand-written torch_xla loop."""
    import torch_xla

    from backends import make_backend

    backend = make_backend("xla")
    backend.open()  # for its counters
    device = torch_xla.device()
    model = make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    data = [batches[idx % len(batches)] for idx in range(WARM + steps)]
    marks = []
    for number, batch in enumerate(data, 1):
        if isinstance(batch, dict):
            batch = {key: value.to(device) for key, value in batch.items()}
        else:
            batch = [value.to(device) for value in batch]
        output = model(batch)
        loss = output["loss"] if isinstance(output, dict) else output
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        if number % LOG_STEPS == 0:
            loss.item()
        if number in (WARM, WARM + steps):
            counts = backend.counters()
            marks.append((time.perf_counter(), time.thread_time(), counts))
    return spent(marks, steps)


def main() -> None:
    """Print a table of medians of ratios and differences per round."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="timed steps per round")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each, in turn")
    options = parser.parse_args()
    logging.getLogger("modelzoo_trainer").setLevel(logging.ERROR)
    torch.manual_seed(0)
    print("| model | by hand, ms | trainer, ms | ratio | host, us more |", end="")
    print(" compilations | executions | transfers to the host |\n" + "|---" * 8 + "|")
    for name, make, batches, share in (
        ("MLP 64-64-10, batch 32", Mlp, mlp_batches(), 1.0),
        ("GPT, 4 layers of 96, 16 x 64 tokens", gpt, gpt_batches(), 0.25),
    ):
        steps = max(20, int(options.steps * share))
        by_hand(make, batches, 5)
        by_trainer(make, batches, 5)
        pairs = []
        for idx in range(options.rounds):
            runs = [by_hand, by_trainer] if idx % 2 else [by_trainer, by_hand]
            found = {run: run(make, batches, steps) for run in runs}
            pairs.append((found[by_hand], found[by_trainer]))
        ratio = statistics.median(ours.wall_s / hand.wall_s for hand, ours in pairs)
        more = statistics.median(ours.host_s - hand.host_s for hand, ours in pairs)
        hand_s = statistics.median(hand.wall_s for hand, _ in pairs)
        ours_s = statistics.median(ours.wall_s for _, ours in pairs)
        last = pairs[-1][1]
        print(
            f"| {name} | {hand_s * 1e3:.3f} | {ours_s * 1e3:.3f} | {ratio:.3f} | {more * 1e6:+.0f} "
            f"| {last.compilations} | {last.executions:.2f} | {last.transfers_to_host:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
