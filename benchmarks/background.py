"""What saves in the background, and snapshots in memory, cost the training they run beside.

python -m benchmarks.background [--rounds 7] [--mib 512] [--rows saves memory]

Saves: a model and its AdamW of this many MiB are trained with one thread, so that a second core is
spare. In each round every way saves once, in another order; the disk is idle before. The pause is
how long the call takes; the slow-down is of the steps until the checkpoint is written, compared
with those just before the save.

Memory: a decoder of 30 million parameters is trained for some steps by two trainers in turn, with
`checkpoint: {memory: {steps: 5}}` and without.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop, checkpointing
from modelzoo_trainer.callback import Callback
from modelzoo_trainer.checkpointing import BackgroundSaver
from modelzoo_trainer.zoo.models.registry import model_class

WIDTH: Final = 1024
ROWS: Final = 128  # of a batch
NUM_BEFORE: Final = 4  # steps
SNAPSHOT_STEPS: Final = 5
NUM_STEPS: Final = 25  # of a round of the memory rows


class Training:
    """Steps of a stack of layers with AdamW.

    Args:
        mib: Size of the weights and the optimizer state.
    """

    def __init__(self, mib: int) -> None:
        num = max(1, mib * 2**20 // (3 * 4 * WIDTH * WIDTH))
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.inputs = torch.randn(ROWS, WIDTH)

    def step(self) -> tuple[float, float]:
        """Train on the batch; return the seconds, and those of the processor."""
        begin = time.perf_counter(), time.thread_time()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - begin[0], time.thread_time() - begin[1]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint has."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


@dataclass
class Way:
    """A way to save.

    Args:
        name: Of the row.
        save: Starts a save; returns what tells whether it is written, and what waits for it.
        pauses: Seconds, one per round.
        slower: Time of a step while writing, relative to one before the save.
        busier: The same of the processor time of the thread that trains, which does not count the
            time in which other processes have its core.
    """

    name: str
    save: Callable[[dict[str, Any], Path], tuple[Callable[[], bool], Callable[[], Any]]]
    pauses: list[float] = field(default_factory=list)
    slower: list[float] = field(default_factory=list)
    busier: list[float] = field(default_factory=list)


def by_saver(
    saver: BackgroundSaver,
) -> Callable[[dict[str, Any], Path], tuple[Callable[[], bool], Callable[[], Any]]]:
    def save(state: dict[str, Any], path: Path) -> tuple[Callable[[], bool], Callable[[], Any]]:
        saver.save(path, state, step=1)
        return lambda: not saver.is_busy, saver.wait

    return save


def by_dcp(
    kind: AsyncCheckpointerType,
) -> Callable[[dict[str, Any], Path], tuple[Callable[[], bool], Callable[[], Any]]]:
    def save(state: dict[str, Any], path: Path) -> tuple[Callable[[], bool], Callable[[], Any]]:
        options: dict[str, Any] = {"checkpoint_id": path, "async_checkpointer_type": kind}
        future: Any = async_save(state, **options)
        return future.done, future.result

    return save


def ways() -> list[Way]:
    """Return all ways."""
    return [
        Way("ours: a thread", by_saver(BackgroundSaver())),
        Way("dcp.async_save: a thread", by_dcp(AsyncCheckpointerType.THREAD)),
        Way("dcp.async_save: a process", by_dcp(AsyncCheckpointerType.PROCESS)),
    ]


def print_saves(mib: int, rounds: int, folder: Path) -> None:
    """Time and print the saves."""
    training, rows, plain = Training(mib), ways(), []
    for _ in range(NUM_BEFORE):
        training.step()
    for number in range(rounds + 1):
        path = folder / f"sync_{number}"
        os.sync()
        begin = time.perf_counter()
        checkpointing.save(path, training.state(), step=1)
        if number:
            plain.append(time.perf_counter() - begin)
        shutil.rmtree(path)
        for row in random.sample(rows, len(rows)):
            measure(row, training, folder / f"{rows.index(row)}_{number}", is_timed=number > 0)
    save_s = statistics.median(plain)
    size = checkpointing.state_bytes(training.state()) / 2**20
    print(
        f"{size:.0f} MiB, torch {torch.__version__}, {torch.get_num_threads()} thread, "
        f"{os.cpu_count()} cores; a synchronous save takes {save_s:.3f} s\n\n"
        "| save | pause: min | median | max | of a synchronous save | steps while writing "
        "| their processor time |\n|---|---|---|---|---|---|---|"
    )
    for row in rows:
        pause = statistics.median(row.pauses)
        times = (min(row.pauses), pause, max(row.pauses))
        shown = " | ".join(f"{1e3 * one:.1f} ms" for one in times)
        slower, busier = statistics.median(row.slower), statistics.median(row.busier)
        share = f"{pause / save_s:.1%}"
        print(f"| {row.name} | {shown} | {share} | x {slower:.3f} | x {busier:.3f} |")


def measure(row: Way, training: Training, path: Path, *, is_timed: bool) -> None:
    """Save once, and train until it is written."""
    os.sync()
    before = [training.step() for _ in range(NUM_BEFORE)]
    begin = time.perf_counter()
    is_written, wait = row.save(training.state(), path)
    pause = time.perf_counter() - begin
    during = [training.step()]
    while not is_written():
        during.append(training.step())
    wait()
    if is_timed:
        row.pauses.append(pause)
        for found, number in ((row.slower, 0), (row.busier, 1)):
            median = statistics.median(step[number] for step in before)
            found.append(statistics.fmean(step[number] for step in during) / median)
    shutil.rmtree(path)


# ---- snapshots in memory


class Timer(Callback):
    """Times the steps after the first ones."""

    def __init__(self) -> None:
        self.begin = (0.0, 0.0)
        self.seconds = (0.0, 0.0)  # by the clock, of the processor

    def on_step_boundary(self, trainer: Trainer) -> None:
        """Start after a warm-up that has written both snapshots; stop at the end."""
        if trainer.global_step == 2 * SNAPSHOT_STEPS:
            self.begin = time.perf_counter(), time.process_time()
        now = time.perf_counter(), time.process_time()
        self.seconds = now[0] - self.begin[0], now[1] - self.begin[1]


def decoder() -> torch.nn.Module:
    """Return a decoder of 30 million parameters."""
    model: torch.nn.Module = model_class("gpt2")(
        vocab_size=8192,
        hidden_size=512,
        num_hidden_layers=8,
        num_heads=8,
        filter_size=2048,
        max_position_embeddings=256,
    )
    return model


def train(folder: Path, memory: dict[str, Any] | None) -> tuple[float, float]:
    """Return the seconds per step, by the clock and of the processor."""
    tokens = torch.randint(0, 8192, (1, 257))
    batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    timer = Timer()
    trainer = Trainer(
        device="cpu",
        progress="none",
        model_dir=folder,
        model=decoder,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
        loop=TrainingLoop(max_steps=2 * SNAPSHOT_STEPS + NUM_STEPS),
        checkpoint=Checkpoint(memory=memory),
        callbacks=[timer],
        seed=1,
    )
    with trainer:
        trainer.fit([batch] * (2 * SNAPSHOT_STEPS + NUM_STEPS))
    shutil.rmtree(folder)
    return timer.seconds[0] / NUM_STEPS, timer.seconds[1] / NUM_STEPS


def print_memory(rounds: int, folder: Path) -> None:
    """Time and print the snapshots in memory."""
    num = sum(param.numel() for param in decoder().parameters())
    pairs = []
    for number in range(rounds):
        times = {}
        for name in random.sample(("with", "without"), 2):
            memory = {"steps": SNAPSHOT_STEPS} if name == "with" else None
            times[name] = train(folder / f"{name}_{number}", memory)
        pairs.append((times["with"], times["without"]))
    print(
        f"\n{num / 1e6:.1f} million parameters, AdamW, 256 tokens a step, a snapshot on every "
        f"{SNAPSHOT_STEPS}th\n\n| seconds per step | with snapshots | without | ratio: min "
        f"| median | max |\n|---|---|---|---|---|---|"
    )
    for idx, name in enumerate(("by the clock", "of the processor")):
        ratios = [one[idx] / other[idx] for one, other in pairs]
        medians = [
            statistics.median(times[idx] for times in ways) for ways in zip(*pairs, strict=True)
        ]
        shown = " | ".join(f"{one:.3f}" for one in (*medians, min(ratios)))
        print(f"| {name} | {shown} | {statistics.median(ratios):.3f} | {max(ratios):.3f} |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=512, help="size of the state that is saved")
    parser.add_argument("--rounds", type=int, default=7, help="timed runs of each row")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--rows", nargs="+", choices=("saves", "memory"), default=["saves"])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # dcp always warns about a single process
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        if "saves" in arguments.rows:
            # The process of dcp.async_save requires a process group.
            place = f"file://{name}/rendezvous"
            dist.init_process_group("gloo", init_method=place, rank=0, world_size=1)
            print_saves(arguments.mib, arguments.rounds, Path(name))
            dist.destroy_process_group()
        if "memory" in arguments.rows:
            print_memory(arguments.rounds, Path(name))


if __name__ == "__main__":
    main()
