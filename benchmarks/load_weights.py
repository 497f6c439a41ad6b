"""Peak memory while a file of weights is loaded, on one process and into a sharded model.

python benchmarks/load_weights.py [--mb 200] [--processes 2]

A row is a model of `--mb` megabytes of float32 parameters, sharded over the processes by FSDP2, or
whole on one process, that loads a safetensors file of its size. "keeps": the bytes of its shards.
"peak": the most resident memory of a process during the load, over that before it (Linux only);
the largest of the processes. "at once": with all tensors read before the first is used, as a
callback does that changes each of them.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
from torch import Tensor, nn
from typing_extensions import override

from modelzoo_trainer import Callback, Trainer

MB: Final = 1_000_000
WIDTH: Final = 1024  # a matrix has 4.2 MB


class Net(nn.Module):
    """Blocks of one matrix each."""

    def __init__(self, mb: int) -> None:
        super().__init__()
        num = max(2, round(mb * MB / (4 * WIDTH**2)))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num))

    @override
    def forward(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.mean()


class ReadAll(Callback):
    """Read all tensors before the first is used."""

    @override
    def preprocess_checkpoint(self, trainer: Trainer, state_dict: dict[str, Any]) -> None:
        model = state_dict["model"]
        state_dict["model"] = {name: value.read() for name, value in model.items()}


def resident(field: str) -> int:
    """Return a figure of this process's memory in bytes: VmRSS, or its peak, VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this system has no {field}")


def measure(file: Path, mb: int, *, is_sharded: bool, reads_all: bool) -> None:
    """Load the file, and print the bytes that this process keeps, and its peak."""
    options = {"parallel": {"shard": -1}, "sharding": {"meta_init": True}}
    trainer = Trainer(
        device="cpu",
        backend=options if is_sharded else None,
        model_dir=file.parent / "run",
        model=lambda: Net(mb),
        callbacks=[ReadAll()] if reads_all else [],
    )
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    trainer.load_checkpoint(file)
    peak = resident("VmHWM") - before
    parts = (trainer.backend.comm.local_part(param) for param in trainer.model.parameters())
    print("measured", sum(part.nbytes for part in parts), peak, flush=True)


def run(args: argparse.Namespace, file: Path, *flags: str) -> str:
    """Measure in new processes; return the bytes kept and the peak, in MB."""
    own = [__file__, "--mb", str(args.mb), "--file", str(file), *flags]
    start = [sys.executable]
    if "--sharded" in flags:
        processes = f"--nproc-per-node={args.processes}"
        start += ["-m", "torch.distributed.run", "--standalone", processes]
    done = subprocess.run([*start, *own], check=True, capture_output=True, text=True)
    rows = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("measured")]
    keeps, peak = (max(int(row[column]) for row in rows) / MB for column in (0, 1))
    return f"{keeps:>8.1f}{peak:>8.1f}"


def main() -> None:
    """Measure each row and print the table."""
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sharded", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--at-once", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.file is not None:
        measure(args.file, args.mb, is_sharded=args.sharded, reads_all=args.at_once)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        with torch.no_grad():
            safetensors.torch.save_file(Net(args.mb).state_dict(), file)
        print(f"{file.stat().st_size / MB:.1f} MB, tensors of {4 * WIDTH**2 / MB:.1f} MB")
        print(f"{'MB of a process':<34}{'keeps':>8}{'peak':>8}")
        for name, flags in (
            ("one process", ()),
            ("one process, at once", ("--at-once",)),
            (f"sharded over {args.processes}", ("--sharded",)),
            (f"sharded over {args.processes}, at once", ("--sharded", "--at-once")),
        ):
            print(f"{name:<34}{run(args, file, *flags)}", flush=True)


if __name__ == "__main__":
    main()
