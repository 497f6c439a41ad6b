"""Checkpoints compared with torch.save, torch.distributed.checkpoint, safetensors and raw I/O.

python benchmarks/checkpoint.py [--mib 512] [--rounds 7] [--folder DIR]

Every save ends with fsync. Rows run in turn, in a different order in each round; before each, the
disk is idle, and before a load the files are not cached.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from modelzoo_trainer import checkpointing

MIB: Final = 1 << 20
TENSOR_MIB: Final = 8
MAX_EXTRA_MB: Final = 100
Act = Callable[[Path], Any]


def make_state(mib: int) -> dict[str, Any]:
    """Return a model and its optimizer of this many MiB, in tensors of 8 MiB."""
    number = max(3, mib // TENSOR_MIB)
    tensors = [torch.empty(TENSOR_MIB * MIB // 4).uniform_() for _ in range(number)]
    third = number // 3
    moments = tensors[third:]
    state = {
        idx: {"exp_avg": moments[2 * idx], "exp_avg_sq": moments[2 * idx + 1]}
        for idx in range(len(moments) // 2)
    }
    rest = {f"buffer.{idx}": tensor for idx, tensor in enumerate(moments[2 * len(state) :])}
    return {
        "model": {f"layers.{idx}.weight": tensors[idx] for idx in range(third)} | rest,
        "optimizer": {"state": state, "param_groups": [{"lr": 1e-3, "params": list(state)}]},
        "global_step": 1000,
    }


def flat(state: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of a state by dotted names, as safetensors requires."""
    if isinstance(state, torch.Tensor):
        return {name: state}
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items() if isinstance(state, dict) else ():
        found |= flat(value, f"{name}.{key}" if name else str(key))
    return found


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def forget(path: Path) -> None:
    """Drop a file, or the files of a folder, from the page cache."""
    for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def timed(act: Act, path: Path) -> float:
    begin = time.perf_counter()
    act(path)
    return time.perf_counter() - begin


@dataclass
class Row:
    """A row of a table.

    Args:
        name: Name of the row.
        act: What is timed.
        times: Seconds, one per round.
    """

    name: str
    act: Act
    times: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Return the median of the times."""
        return statistics.median(self.times)


class Saves:
    """All ways to write a state.

    Args:
        state: The state.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self.tensors = flat(state)
        self.saver = checkpointing.BackgroundSaver()
        self.stalls: list[float] = []
        self.dcp_stalls: list[float] = []

    def disk(self, path: Path) -> None:
        """Write only the bytes of the tensors."""
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        for tensor in self.tensors.values():
            os.write(fd, memoryview(tensor.numpy()).cast("B"))
        os.fsync(fd)
        os.close(fd)

    def torch(self, path: Path) -> None:
        """Write a pickle in a zip file."""
        torch.save(self.state, path)
        sync(path)

    def safetensors(self, path: Path) -> None:
        """Write only the tensors."""
        safetensors.torch.save_file(self.tensors, path)
        sync(path)

    def dcp(self, path: Path) -> None:
        """Write a directory, with default options."""
        dcp.save(self.state, checkpoint_id=path)

    def dcp_async(self, path: Path) -> None:
        """Write it in the background, and wait for it."""
        begin = time.perf_counter()
        future: Any = dcp.async_save(self.state, checkpoint_id=path)
        self.dcp_stalls.append(time.perf_counter() - begin)
        future.result()

    def ours(self, path: Path) -> None:
        """Write a checkpoint."""
        checkpointing.save(path, self.state, step=1000)

    def ours_async(self, path: Path) -> None:
        """Write it in the background, and wait for it."""
        begin = time.perf_counter()
        self.saver.save(path, self.state, step=1000)
        self.stalls.append(time.perf_counter() - begin)
        self.saver.wait()


def take_turns(rows: Iterable[Row], rounds: int, prepare: Callable[[Row], Path]) -> None:
    """Time rows in turn, after a warm-up round."""
    rows = list(rows)
    for number in range(rounds + 1):
        for row in random.sample(rows, len(rows)):
            path = prepare(row)
            os.sync()
            taken = timed(row.act, path)
            if number:
                row.times.append(taken)


def print_saves(saves: Saves, folder: Path, rounds: int, mib: float) -> dict[str, Row]:
    """Time and print the saves; their files remain for the loads."""
    acts = {
        "disk: write + fsync": saves.disk,
        "torch.save + fsync": saves.torch,
        "safetensors + fsync": saves.safetensors,
        "dcp.save": saves.dcp,
        "dcp.async_save, until written": saves.dcp_async,
        "ours": saves.ours,
        "ours, in the background, until committed": saves.ours_async,
    }
    rows = {name: Row(name, act) for name, act in acts.items()}

    def prepare(row: Row) -> Path:
        path = folder / row.name.split(":")[0].replace(" ", "_").replace(",", "")
        remove(path)
        return path

    take_turns(rows.values(), rounds, prepare)
    print("| save | min | median | max | MiB/s |\n|---|---|---|---|---|")
    for row in rows.values():
        figures = (min(row.times), row.median, max(row.times))
        shown = " | ".join(f"{one:.3f} s" for one in figures)
        print(f"| {row.name} | {shown} | {mib / row.median:.0f} |")
    return rows


def print_loads(saves: Saves, folder: Path, rounds: int) -> dict[str, Row]:
    """Time and print the loads of what was saved."""
    files = {
        "torch.load": "torch.save_+_fsync",
        "safetensors": "safetensors_+_fsync",
        "dcp.load": "dcp.save",
        "ours": "ours",
        "ours: verify alone": "ours",
    }

    def dcp_load(path: Path) -> None:
        empty = {name: torch.empty_like(tensor) for name, tensor in saves.tensors.items()}
        dcp.load(empty, checkpoint_id=path)

    acts: dict[str, Act] = {
        "torch.load": lambda path: torch.load(path, weights_only=True),
        "safetensors": lambda path: [
            tensor.clone() for tensor in safetensors.torch.load_file(path).values()
        ],
        "dcp.load": dcp_load,
        "ours": checkpointing.load,
        "ours: verify alone": checkpointing.verify,
    }
    cold = {name: Row(name, act) for name, act in acts.items()}
    warm = {name: Row(name, act) for name, act in acts.items()}

    def place(row: Row) -> Path:
        return folder / files[row.name]

    def prepare_cold(row: Row) -> Path:
        forget(place(row))
        return place(row)

    take_turns(cold.values(), rounds, prepare_cold)
    take_turns(warm.values(), rounds, place)
    print("\n| load | cold: min | median | max | warm: median |\n|---|---|---|---|---|")
    for name, row in cold.items():
        figures = (min(row.times), row.median, max(row.times), warm[name].median)
        print(f"| {name} | {' | '.join(f'{one:.3f} s' for one in figures)} |")
    return cold


def extra_mb(way: str, mib: int, folder: Path) -> float:
    """Return the memory in MB that a save takes besides the state, in a separate process."""
    command = [sys.executable, __file__, "--child", way, "--mib", str(mib), "--folder", str(folder)]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(shown.split()[-1])


def measure_extra(way: str, mib: int, folder: Path) -> None:
    """Print the growth of this process's peak memory in a save."""
    state = make_state(mib)
    small = make_state(1)
    act: Act = getattr(Saves(small), way)
    act(folder / "warm-up")  # imports do not count
    saves = Saves(state)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    getattr(saves, way)(folder / "child")
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    remove(folder / "warm-up")
    remove(folder / "child")
    print((after - before) * 1024 / 1e6)


def verdict(name: str, figure: str, target: str, is_met: bool) -> None:
    print(f"| {name} | {figure} | {target} | {'yes' if is_met else 'no'} |")


def print_targets(
    saves: Saves, saved: dict[str, Row], loaded: dict[str, Row], extras: dict[str, float]
) -> None:
    """Print the targets, as ratios of medians."""
    ours = saved["ours"].median
    stall = statistics.median(saves.stalls[1:])
    dcp_stall = statistics.median(saves.dcp_stalls[1:])
    print("\n| target | measured | required | met |\n|---|---|---|---|")
    over_dcp = saved["dcp.save"].median / ours
    verdict("save: times as fast as dcp.save", f"{over_dcp:.2f}", ">= 1.40", over_dcp >= 1.4)
    of_disk = saved["disk: write + fsync"].median / ours
    verdict("save: of the disk's own rate", f"{of_disk:.0%}", ">= 70 %", of_disk >= 0.7)
    of_load = loaded["ours"].median / loaded["torch.load"].median
    verdict("load: of torch.load's time, cold", f"{of_load:.2f}", "<= 1.00", of_load <= 1)
    extra = extras["ours"]
    verdict("save: memory besides the state", f"{extra:.0f} MB", "< 100 MB", extra < MAX_EXTRA_MB)
    print(
        f"\nstall of a save in the background: ours {stall * 1e3:.0f} ms, {stall / ours:.0%} of a "
        f"synchronous save (the first {saves.stalls[0] * 1e3:.0f} ms), dcp.async_save "
        f"{dcp_stall * 1e3:.0f} ms (the first {saves.dcp_stalls[0] * 1e3:.0f} ms)"
    )
    print("memory besides the state: ", end="")
    print(", ".join(f"{name} {extra:.0f} MB" for name, extra in extras.items()))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Time of saving and loading a state.")
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--rounds", type=int, default=7, help="timed runs of each row")
    parser.add_argument("--folder", type=Path, help="where to write; default: a temporary folder")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # dcp always warns about a single process
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        if arguments.child is not None:
            measure_extra(arguments.child, arguments.mib, folder)
            return
        ways = ("torch", "safetensors", "dcp", "ours", "ours_async")
        extras = {way: extra_mb(way, arguments.mib, folder) for way in ways}
        saves = Saves(make_state(arguments.mib))
        mib = sum(tensor.nbytes for tensor in saves.tensors.values()) / MIB
        print(
            f"{mib:.0f} MiB in {len(saves.tensors)} tensors, torch {torch.__version__}, "
            f"{torch.get_num_threads()} threads, {arguments.rounds} runs of each row, in turn\n"
        )
        saved = print_saves(saves, folder, arguments.rounds, mib)
        loaded = print_loads(saves, folder, arguments.rounds)
        print_targets(saves, saved, loaded, extras)
        print(
            "\nTraining beside saves in the background (`benchmarks/background.py`):\n", flush=True
        )
        words = ["--mib", str(arguments.mib), "--rounds", str(arguments.rounds), "--folder", name]
        command = [sys.executable, "-m", "benchmarks.background", *words]
        subprocess.run(command, cwd=Path(__file__).resolve().parents[1], check=True)


if __name__ == "__main__":
    main()
