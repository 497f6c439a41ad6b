"""Check whether the trainer works on a GPU, and measure how fast it is.

python -m benchmarks.gpu [--only CHECK,CHECK] [--json FILE]
python -m benchmarks.gpu --device cpu --tiny

Prints a row for each result: PASS, FAIL, or info where there is no limit. Exits with 1 if a row is
FAIL. `--list` shows the checks. Sizes are chosen for less than ten minutes on one H100 or H200.
With `--tiny` the same runs have tiny sizes, and limits of speed and memory do not apply. Run it in
a clone of the project; transformers is optional.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import torch.distributed as dist

from backends.peak_rates import rates_of, uses_tf32
from benchmarks import gpu_checks, gpu_speed
from benchmarks.gpu_runs import (
    CUDA,
    DETERMINISTIC,
    FLOAT32_LIMIT,
    GIB,
    HIGHEST,
    NO_DROPOUT,
    Batch,
    Row,
    Setup,
    attempted,
    build,
    difference,
    loop_of,
    losses_of,
    precision_of,
    small,
    token_batches,
    train,
)
from modelzoo_trainer import __version__ as version

ROOT: Final = Path(__file__).resolve().parents[1]
COLUMNS: Final = ("check", "what", "value", "result", "note")
LONGEST: Final = 200  # characters of a cell
Check = Callable[[Setup], Iterator[Row]]


def env(setup: Setup) -> Iterator[Row]:
    """Report versions, the device and its settings."""
    yield Row(
        "env", "modelzoo_trainer, torch, CUDA", f"{version}, {torch.__version__}, {toolkit()}"
    )
    if not setup.is_cuda:
        yield Row("env", "device", "cpu", None, f"{torch.get_num_threads()} threads")
        return
    properties = CUDA.get_device_properties(0)
    name, memory = CUDA.get_device_name(), properties.total_memory / GIB
    capability = ".".join(map(str, CUDA.get_device_capability()))
    note = f"{memory:.0f} GiB, capability {capability}, {CUDA.device_count()} visible"
    yield Row("env", "device", name, None, note)
    cudnn: Any = torch.backends.cudnn  # untyped in torch
    yield Row("env", "driver, cuDNN", f"{driver()}, {cudnn.version()}")
    rates = rates_of(name)
    rate = rates.get(torch.bfloat16) if rates else None
    peak = f"{rate / 1e12:.0f} TFLOP/s" if rate else "unknown"
    yield Row("env", "peak in bfloat16", peak, None, "" if rate else "no MFU in the table")
    yield Row("env", "float32 products use TF32", str(uses_tf32()), None, "torch's default: False")
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    found = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    yield Row("env", "allocator settings", ", ".join(found) or "default")


def toolkit() -> str:
    """Return the version of CUDA or ROCm that torch was built for."""
    return str(torch.version.cuda or torch.version.hip or "none")


def driver() -> str:
    """Return the version of the driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return "unknown"
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return next(iter(done.stdout.split()), "unknown")


# ---- other processes


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    output: str
    error: str


def start(
    setup: Setup, worker: str, *, processes: int = 1, folder: str, seconds: float = 240
) -> Ended:
    """Run a worker of `benchmarks.gpu` in other processes, with torchrun if there are several.

    CUBLAS_WORKSPACE_CONFIG is removed from their environment: the trainer must set it.
    """
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    command = [sys.executable, "-m", *(launcher if processes > 1 else []), "benchmarks.gpu"]
    command += ["--device", setup.kind, "--worker", worker, "--folder", folder]
    env = {key: value for key, value in os.environ.items() if key != "CUBLAS_WORKSPACE_CONFIG"}
    command += ["--tiny"] if setup.is_tiny else []
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **pipes) as process:
        try:
            output, error = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            end_group(process)
            return Ended(-1, "", f"no end after {seconds:.0f} s")
    return Ended(process.returncode, output, error)


def end_group(process: subprocess.Popen[str]) -> None:
    """End a process and all that it has started."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, kind)
            process.wait(timeout=40)  # torchrun gives its processes 30 s


def cold(setup: Setup) -> Iterator[Row]:
    """Start deterministic runs in new processes, without CUBLAS_WORKSPACE_CONFIG."""
    ended = start(setup, "deterministic", folder=setup.new_folder())
    yield ended_row("cold", "deterministic, one process", ended)
    if setup.is_cuda and CUDA.device_count() == 1:
        yield Row("cold", "deterministic, two processes", "skipped", None, "one device")
        return
    ended = start(setup, "deterministic", processes=2, folder=setup.new_folder())
    yield ended_row("cold", "deterministic, two processes", ended)


def ended_row(check: str, what: str, ended: Ended) -> Row:
    """Return the row of a process whose exit code must be 0."""
    return Row(check, what, f"exit code {ended.code}", ended.code == 0, reason_of(ended))


def reason_of(ended: Ended) -> str:
    """Return why a process failed: the last line that names an error."""
    if ended.code == 0:
        return ""
    lines = [line.strip() for line in ended.error.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line and "ChildFailed" not in line]
    return (named or lines or ["no output"])[-1]


def processes(setup: Setup) -> Iterator[Row]:
    """Compare FSDP over two processes with one process."""
    settings, batches = shared_data(setup)
    pairs = [
        {key: torch.cat((one[key], two[key])) for key in one}
        for one, two in zip(batches[::2], batches[1::2], strict=True)
    ]
    expected = losses_of(setup, partial(build, settings), pairs, backend=HIGHEST)
    shares_device = setup.is_cuda and CUDA.device_count() == 1
    cases = {"sharded": "gloo" if shares_device or not setup.is_cuda else "NCCL"}
    if shares_device:
        cases["sharded-nccl"] = "NCCL"
    for worker, library in cases.items():
        ended = start(setup, worker, processes=2, folder=setup.new_folder(), seconds=120)
        what = f"{library}, {'one device' if shares_device else 'two devices'}"
        what = f"{what if setup.is_cuda else library}: losses relative to one process"
        if ended.code:
            ok = None if shares_device else False  # no library has to support this
            yield Row("processes", what, f"exit code {ended.code}", ok, reason_of(ended))
            continue
        found = json.loads(next(line for line in ended.output.splitlines() if line[:1] == "["))
        largest = difference(found, expected)
        note = f"limit {FLOAT32_LIMIT:g}"
        yield Row("processes", what, f"{largest:.1e}", largest < FLOAT32_LIMIT, note)


def shared_data(setup: Setup) -> tuple[dict[str, Any], list[Batch]]:
    """Return settings and the batches that two processes divide."""
    settings = small(setup, **NO_DROPOUT)
    return settings, token_batches(settings, 12, setup.pick(4, 2))


def deterministic_worker(setup: Setup, folder: Path) -> None:
    """Train three steps with deterministic algorithms."""
    settings = small(setup)
    data = token_batches(settings, 6, 2)
    options = {"backend": DETERMINISTIC, "precision": precision_of("bfloat16")}
    train(setup, partial(build, settings), data, loop=loop_of(3), model_dir=folder, **options)


def sharded_worker(setup: Setup, folder: Path, *, own_group: bool = False) -> None:
    """Train with FSDP; rank 0 prints the losses.

    `own_group`: initialize torch.distributed first, with NCCL, as some programs do.
    """
    backend: dict[str, Any] = {"parallel": {"shard": -1}, "timeout": 60, **HIGHEST}
    if setup.is_cuda and CUDA.device_count() == 1:
        backend["index"] = 0  # without it, processes that share a device are refused
    if own_group:
        CUDA.set_device(0)
        dist.init_process_group("cpu:gloo,cuda:nccl")
    settings, batches = shared_data(setup)
    options = {"backend": backend, "model_dir": folder, "loop": loop_of(len(batches) // 2)}
    found = losses_of(setup, partial(build, settings), batches, **options)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)


WORKERS: Final[dict[str, Callable[[Setup, Path], None]]] = {
    "deterministic": deterministic_worker,
    "sharded": sharded_worker,
    "sharded-nccl": partial(sharded_worker, own_group=True),
}

CHECKS: Final[dict[str, Check]] = {
    "env": env,
    "correct": gpu_checks.correct,
    "resume": gpu_checks.resume,
    "cold": cold,
    "sync": gpu_checks.sync,
    "graphs": gpu_checks.graphs,
    "gaps": gpu_speed.gaps,
    "speed": gpu_speed.speed,
    "memory": gpu_speed.memory,
    "saves": gpu_speed.saves,
    "feeding": gpu_speed.feeding,
    "experts": gpu_checks.experts,
    "processes": processes,
}


def line(cells: Sequence[str]) -> str:
    """Return a row of a table in Markdown."""
    texts = (" ".join(cell.split()).replace("|", "\\|")[:LONGEST] for cell in cells)
    return f"| {' | '.join(texts)} |"


def run(names: Sequence[str], setup: Setup) -> list[Row]:
    """Run checks and print the table; return its rows."""
    print(f"{line(COLUMNS)}\n{'|---' * len(COLUMNS)}|", flush=True)
    found = []
    for name in names:
        begin = time.perf_counter()
        setup.clean()
        for row in attempted(name, "the check itself", CHECKS[name](setup)):
            found.append(row)
            cells = (row.check, row.what, row.value, row.result, row.note)
            print(line(cells), flush=True)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    return found


def summary(rows: Sequence[Row], seconds: float) -> str:
    """Return how many rows have each result."""
    counts = [sum(row.result == kind for row in rows) for kind in ("PASS", "FAIL", "info")]
    return "{} passed, {} failed, {} for information; {:.0f} s".format(*counts, seconds)


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes; required on a CPU")
    parser.add_argument("--only", help="names of checks, separated by commas; default: all")
    parser.add_argument("--list", action="store_true", help="print the checks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to a file")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.names = options.only.split(",") if options.only else list(CHECKS)
    if unknown := [name for name in options.names if name not in CHECKS]:
        parser.error(f"--only: no such check: {', '.join(unknown)}. Checks: {', '.join(CHECKS)}.")
    if options.device == "cpu" and not options.tiny and not options.list:
        parser.error("--device cpu requires --tiny")
    is_missing = options.device == "cuda" and not CUDA.is_available()
    if is_missing and not options.list:
        parser.error("torch finds no CUDA device; --device cpu --tiny runs without one")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; return 1 if one fails."""
    options = options_of(argv)
    if options.list:
        for name in options.names:
            print(f"{name:10} {(CHECKS[name].__doc__ or '').splitlines()[0]}")
        return 0
    logging.getLogger("modelzoo_trainer").addHandler(logging.NullHandler())
    if options.worker:
        WORKERS[options.worker](Setup(options.device, options.tiny, options.folder), options.folder)
        return 0
    if options.device == "cuda":  # for deterministic runs in this process, see `cold`
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    begin = time.perf_counter()
    with TemporaryDirectory(prefix="benchmarks_gpu_") as folder:
        rows = run(options.names, Setup(options.device, options.tiny, Path(folder)))
    print(f"\n{summary(rows, time.perf_counter() - begin)}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return int(any(row.ok is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
