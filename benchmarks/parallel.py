"""Overhead per step compared with a hand-written loop, with several processes.

python benchmarks/parallel.py [--processes 2] [--steps 200] [--rounds 11]

starts them with torchrun; or `torchrun --nproc-per-node=2 benchmarks/parallel.py`. A block is
`--steps` steps of the hand-written loop or the trainer; a round has one of each row in random
order, each between two hand-written blocks. "wall" is the time of the main process; "own" is the
CPU time of its main thread, which excludes waiting for others and their load.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from overhead import Mlp, gpt, gpt_batches, mlp_batches
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from backends import World, join
from modelzoo_trainer import Callback, Logging, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import default_callbacks
from modelzoo_trainer.loggers import default_loggers

WARM: Final = 3  # warm-up blocks
SHARDED: Final = {"parallel": {"shard": -1}}
TARGET_US: Final = 30


@dataclass(frozen=True)
class Spent:
    """Wall time and CPU time of a step in seconds, and its collectives."""

    wall_s: float
    own_s: float
    collectives: float


Block = Callable[[], Spent]


class Meter(Callback):
    """Measure the steps of a fit, without its beginning and its end; no work per step."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.spent = Spent(0, 0, 0)
        self._mark = (0.0, 0.0, 0)

    @override
    def on_train_start(
        self, trainer: Trainer, model: nn.Module, train_dataloader: Any, loop: Any, loop_idx: int
    ) -> None:
        self.start()

    @override
    def on_train_end(self, trainer: Trainer, model: nn.Module, loop: Any, loop_idx: int) -> None:
        self.stop()

    def start(self) -> None:
        """Begin a block, at the same time in all processes."""
        dist.barrier()
        self._mark = _now()

    def stop(self) -> None:
        """End it."""
        wall, own, num = (end - begin for end, begin in zip(_now(), self._mark, strict=True))
        self.spent = Spent(wall / self.steps, own / self.steps, num / self.steps)


def _now() -> tuple[float, float, int]:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    groups: Any = dist.distributed_c10d._world.pg_map
    num = sum(group._get_sequence_number_for_group() for group in groups)
    return time.perf_counter(), time.thread_time(), num


def wrap(model: nn.Module, *, is_sharded: bool) -> nn.Module:
    """Return the model over all processes, as in torch's tutorials."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    model.to(device)
    if not is_sharded:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block)
    fully_shard(model)
    return model


def by_hand(
    model: nn.Module,
    batches: list[Any],
    steps: int,
    processes: World,
    *,
    is_sharded: bool,
    log_steps: int | None = None,
) -> Block:
    """Return the hand-written loop that the trainer is compared with.

    Args:
        model: Moved to the device.
        batches: Of all processes; each takes its slice.
        steps: Steps per block.
        processes: All of them.
        is_sharded: Whether to use FSDP2 instead of DDP.
        log_steps: Average the loss over the processes and read it on every n-th step.
    """
    module = wrap(model, is_sharded=is_sharded)
    device = next(module.parameters()).device
    optimizer = torch.optim.AdamW(module.parameters())
    own = batches[processes.rank :: processes.world_size]
    meter = Meter(steps)

    def run() -> Spent:
        meter.start()
        done = 0
        while done < steps:
            for batch in own[: steps - done]:
                if isinstance(batch, dict):
                    batch = {key: value.to(device) for key, value in batch.items()}
                else:
                    batch = [value.to(device) for value in batch]
                output = module(batch)
                loss = output["loss"] if isinstance(output, dict) else output
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if log_steps is not None and done % log_steps == 0:
                    mean = loss.detach()
                    dist.all_reduce(mean)
                    (mean / processes.world_size).item()
        meter.stop()
        return meter.spent

    return run


def by_trainer(
    model: nn.Module, batches: list[Any], steps: int, *, is_sharded: bool, **options: Any
) -> Block:
    """Return a fit of that number of steps."""
    meter = Meter(steps)
    processes = join()
    assert processes is not None
    folder = processes.broadcast_object(tempfile.mkdtemp())
    log_steps = options.pop("log_steps", 10)
    trainer = Trainer(
        device="auto",
        backend=SHARDED if is_sharded else None,
        model=model,
        optimizer=lambda module: torch.optim.AdamW(module.parameters()),
        loop=TrainingLoop(num_steps=steps, eval_frequency=None),
        logging=Logging(log_steps=log_steps),
        callbacks=[*options.pop("callbacks", ()), meter],
        model_dir=folder,
        seed=1,
        **options,
    )

    def run() -> Spent:
        trainer.fit(batches)
        return meter.spent

    return run


@dataclass
class Row:
    """A row of the table: blocks of the trainer, and hand-written ones around them."""

    name: str
    hand: Block
    ours: Block
    target: str = ""
    pairs: list[tuple[Spent, Spent, Spent]] = field(default_factory=list)

    def measure(self) -> None:
        """Run one block between two hand-written ones."""
        self.pairs.append((self.hand(), self.ours(), self.hand()))

    def more(self, name: str) -> float:
        """Return the median of the differences."""

        def of(before: Spent, ours: Spent, after: Spent) -> float:
            return float(getattr(ours, name) - (getattr(before, name) + getattr(after, name)) / 2)

        return statistics.median(of(*pair) for pair in self.pairs)

    def line(self) -> str:
        """Return the row's text."""
        hand_s = statistics.median(pair[0].wall_s for pair in self.pairs)
        wall, own = self.more("wall_s"), self.more("own_s")
        counts = [statistics.median(pair[idx].collectives for pair in self.pairs) for idx in (0, 1)]
        return (
            f"| {self.name} | {hand_s * 1e6:.0f} us | {wall * 1e6:+.1f} us | {own * 1e6:+.1f} us "
            f"| {100 * wall / hand_s:+.1f} % | {self.target} | {counts[0]:.2f} | {counts[1]:.2f} |"
        )


def rows(steps: int, processes: World) -> list[Row]:
    """Return the rows; those of one model and engine are compared with one loop."""

    def defaults(log_steps: int) -> dict[str, Any]:
        return {
            "log_steps": log_steps,
            "callbacks": default_callbacks(),
            "loggers": default_loggers(),
        }

    found = []
    for engine, is_sharded in (("DDP", False), ("FSDP2", True)):
        batches = mlp_batches() * processes.world_size
        hand = by_hand(Mlp(), batches, steps, processes, is_sharded=is_sharded)
        logged = by_hand(Mlp(), batches, steps, processes, is_sharded=is_sharded, log_steps=10)
        found.append(Row(f"MLP, {engine}, by hand, mean loss read every 10 steps", hand, logged))
        for name, options, target in (
            ("core callbacks, log_steps 10", {}, ""),
            ("YAML defaults, log_steps 10", defaults(10), f"{TARGET_US} us"),
            ("YAML defaults, log_steps 1", defaults(1), ""),
        ):
            ours = by_trainer(Mlp(), batches, steps, is_sharded=is_sharded, **options)
            found.append(Row(f"MLP, {engine}, {name}", hand, ours, target))
        num, samples = max(10, steps // 20), gpt_batches() * processes.world_size
        by_loop = by_hand(gpt(), samples, num, processes, is_sharded=is_sharded)
        by_fit = by_trainer(gpt(), samples, num, is_sharded=is_sharded, **defaults(10))
        found.append(Row(f"GPT, {engine}, YAML defaults, log_steps 10", by_loop, by_fit))
    return found


def work(arguments: argparse.Namespace, processes: World) -> None:
    """Measure in one of the processes; the main process prints the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same batches everywhere
    logging.getLogger("modelzoo_trainer").addHandler(logging.NullHandler())
    table = [row for row in rows(arguments.steps, processes) if arguments.rows in row.name]
    order = random.Random(0)  # the same in all processes
    for number in range(WARM + arguments.rounds):
        for row in order.sample(table, len(table)):
            row.measure()
            if number < WARM:
                row.pairs.clear()
    if processes.rank:
        return
    where = torch.accelerator.current_accelerator(check_available=True) or "CPUs, one thread each"
    print(f"torch {torch.__version__}, {processes.world_size} processes, {where}, ", end="")
    print(f"medians of {arguments.rounds} rounds of {arguments.steps} steps\n")
    print("| workload | by hand | wall | own | share | target | collectives by hand | trainer |")
    print("|---" * 8 + "|")
    for row in table:
        print(row.line(), flush=True)


def main() -> int:
    """Measure, or start the processes that do; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, help="default: 2, or one for each accelerator")
    parser.add_argument("--steps", type=int, default=200, help="steps per block")
    parser.add_argument("--rounds", type=int, default=11, help="rounds; medians are shown")
    parser.add_argument("--rows", default="", help="only rows whose names contain this")
    arguments = parser.parse_args()
    processes = join()
    if processes is not None:
        work(arguments, processes)
        processes.leave(0)
    num = arguments.processes
    if num is None:
        num = torch.accelerator.device_count() or 2
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num}"]
    return subprocess.run([*torchrun, *sys.argv], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
