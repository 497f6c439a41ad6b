"""Accuracy of the figures of `--plan` compared with real runs on CPUs, with 1, 2 and 4 processes.

python -m benchmarks.plan; about five minutes on two cores. With --true-size: two layers of
llama3p1_8b at 8,192 positions, in one process with 20 GiB of memory; 20 minutes on two cores. In
float32 where the CPU has no instructions for bfloat16, which would take hours there.

Real memory is measured in two ways: the peak resident memory of the process, read from the kernel,
and the events of torch's CPU allocator, as recorded by torch.profiler. The latter miss what gloo's
threads free, so they are omitted for FSDP2, whose reduce-scatter makes copies there; with DDP, one
of these threads may be the last to release a bucket, so the minimum over its processes is used.
The bytes sent are read from the kernel, too, for the sockets.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import socket
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from typing_extensions import override

from modelzoo_trainer import Callback

FILE = """
trainer:
  init:
    device: CPU
    model:
      name: llama
      vocab_size: 8192
      hidden_size: 512
      max_position_embeddings: 64
      position_embedding_type: rotary
      rotary_dim: 64
      share_embedding_weights: false
      num_hidden_layers: 8
      norm_type: rmsnorm
      dropout_rate: 0.0
      attention_dropout_rate: 0.0
      num_heads: 8
      use_projection_bias_in_attention: false
      use_ffn_bias_in_attention: false
      filter_size: 1408
      nonlinearity: swiglu
      use_ffn_bias: false
    optimizer: {AdamW: {learning_rate: 0.0001}}
    precision: {enabled: false, max_gradient_norm: 1.0}
    loop: {num_steps: 4, eval_frequency: null}
    seed: 1
  fit:
    train_dataloader:
      data_processor: SyntheticProcessor
      kind: tokens
      batch_size: 4
      num_samples: 64
      max_sequence_length: 64
      vocab_size: 8192
"""
TRUE_SIZE = """
trainer:
  init:
    device: CPU
    model:
      name: llama
      vocab_size: 128256
      hidden_size: 4096
      max_position_embeddings: 8192
      position_embedding_type: rotary
      rotary_dim: 128
      rope_theta: 500000.0
      pos_scaling_type: llama3
      pos_scaling_factor: 8.0
      pos_scaling_extra_args:
        {low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 8192}
      share_embedding_weights: false
      num_hidden_layers: 2
      norm_type: rmsnorm
      dropout_rate: 0.0
      attention_dropout_rate: 0.0
      num_heads: 32
      attention_module: multiquery_attention
      extra_attention_params: {num_kv_groups: 8}
      use_projection_bias_in_attention: false
      use_ffn_bias_in_attention: false
      filter_size: 14336
      nonlinearity: swiglu
      use_ffn_bias: false
    optimizer: {SGD: {learning_rate: 0.0001, momentum: 0.0}}  # the state of Adam does not fit here
    precision: {enabled: HALF, fp16_type: bfloat16, max_gradient_norm: 1.0}
    loop: {num_steps: 2, eval_frequency: null}
    seed: 1
  fit:
    train_dataloader:
      data_processor: SyntheticProcessor
      kind: tokens
      batch_size: 1
      num_samples: 4
      max_sequence_length: 8192
      vocab_size: 128256
"""
ENGINES = {
    "DDP": [],
    "FSDP2": ["init.backend.parallel={shard: -1}"],
}
NUMBERS = (1, 2, 4)
_NUM_STEPS = 4
_BYTES_SENT = 200  # offset of tcpi_bytes_sent in the kernel's struct tcp_info
_SMALL = 1 << 16  # bytes: larger blocks are returned to the kernel when freed


def plans_of(path: Path, changes: list[str]) -> Any:
    """Return the plans of a file."""
    from modelzoo_trainer.config.build import load_plans
    from modelzoo_trainer.config.shipped import shipped_names

    return load_plans(path, shipped_names, mode="train", changes=changes)


def predicted(path: Path, num: int, changes: list[str]) -> Any:
    """Return the predicted figures."""
    from modelzoo_trainer.base.devices import fake_world
    from modelzoo_trainer.tools.planning.measure import measure

    with fake_world(num):
        return measure(plans_of(path, changes)[0])


def real(rank: int, path: Path, changes: list[str], watch: str) -> dict[str, float]:
    """Train for a few steps in one of several processes, and return the measurements.

    Args:
        rank: Rank of this process.
        path: The configuration file.
        changes: As for `--set`.
        watch: "allocator" or "resident"; measuring one would affect the other.
    """
    ctypes.CDLL(None).mallopt(-3, _SMALL)  # M_MMAP_THRESHOLD
    [plan] = plans_of(path, changes)
    plan.init["model_dir"] = str(path.parent / f"run_{watch}")
    plan.defaults.update(callbacks=[], loggers=[])
    sent = Sent()
    plan.init["callbacks"] = []
    plan.defaults["callbacks"] = [sent]
    figures = {"memory": _allocated(plan) if watch == "allocator" else _resident(plan)}
    return figures | {"sent": sent.per_step}


def _train(plan: Any) -> None:
    with plan.build() as trainer:
        plan.run(trainer)


def _allocated(plan: Any) -> float:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _train(plan)
    events = profiler.profiler.kineto_results.events()
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    now = highest = 0
    for _, change in changes:
        now += change
        highest = max(highest, now)
    return float(highest)


def _resident(plan: Any) -> float:
    import gc

    gc.collect()
    _warm_up()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _status("VmRSS")
    _train(plan)
    return float(_status("VmHWM") - before)


def _warm_up() -> None:
    """Trigger one-time allocations of the first operations."""
    import torch

    weights = torch.ones(64, 64, requires_grad=True)
    (weights @ weights).sum().backward()  # type: ignore[no-untyped-call]
    torch.optim.AdamW([weights]).step()


def _status(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


class Sent(Callback):
    """Read the bytes that the process has sent, from the third step on."""

    def __init__(self) -> None:
        self._seen: list[int] = []

    @property
    def per_step(self) -> float:
        """Bytes."""
        seen = self._seen[1:]
        if len(seen) < 2:
            return 0.0
        return (seen[-1] - seen[0]) / (len(seen) - 1)

    @override
    def on_step_boundary(self, trainer: Any) -> None:
        self._seen.append(sum(_sent()))


def _sent() -> Iterator[int]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as own:
                if own.type == socket.SOCK_STREAM and own.family != socket.AF_UNIX:
                    info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    yield struct.unpack_from("Q", info, _BYTES_SENT)[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Predicted memory and communication of `plan` compared with real runs on CPUs."
    )
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, default=[*ENGINES], help="default: both"
    )
    parser.add_argument(
        "--processes",
        nargs="+",
        type=int,
        default=NUMBERS,
        help="numbers of processes; default: 1 2 4; FSDP2 runs with 2 or more",
    )
    parser.add_argument("--true-size", action="store_true", help="two layers of llama3p1_8b alone")
    arguments = parser.parse_args()
    if arguments.true_size:
        print_true_size()
        return
    print_table({name: ENGINES[name] for name in arguments.engines}, arguments.processes)


def print_table(engines: dict[str, list[str]], numbers: Sequence[int]) -> None:
    """Print all rows."""
    from tests.distributed.ranks import run_ranks

    print(f"{'':17}{'predicted':>12}{'resident':>13}{'':8}{'allocator':>13}{'':8}")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.yaml"
        path.write_text(FILE)
        for engine, changes in engines.items():
            for num in numbers:
                if num == 1 and changes:
                    continue
                figures = predicted(path, num, changes)
                found = {}
                for watch in ("resident",) if changes else ("resident", "allocator"):
                    runs = run_ranks(num, real, path, changes, watch, timeout_s=600)
                    which = min if watch == "allocator" else max
                    found[watch] = which(one["memory"] for one in runs)
                    sent = max(one["sent"] for one in runs)
                line(f"{engine}, {num}, memory", figures.peak_bytes, *found.values())
                planned = sum(one.num_sent for one in figures.exchanges.values())
                line(f"{engine}, {num}, sent", planned, sent)
                sys.stdout.flush()


def print_true_size() -> None:
    """Print the row of two layers of llama3p1_8b."""
    from backends.speed import has_bfloat16
    from tests.distributed.ranks import run_ranks

    is_half = has_bfloat16()
    print(f"{'bfloat16' if is_half else 'float32':17}{'predicted':>12}{'resident':>13}", flush=True)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.yaml"
        path.write_text(TRUE_SIZE.replace("HALF", str(is_half).lower()))
        figures = predicted(path, 1, [])
        [found] = run_ranks(1, real_alone, path, timeout_s=3600)
        line("llama3p1_8b", figures.peak_bytes, found["memory"])


def real_alone(rank: int, path: Path) -> dict[str, float]:
    """Return the resident memory of a process that has all cores for itself."""
    import torch

    from modelzoo_trainer.base.cores import num_cores

    torch.set_num_threads(num_cores())
    return real(rank, path, [], "resident")


def line(name: str, planned: float, *measured: float) -> None:
    """Print the predicted and the measured values with their quotients."""
    cells = [f"{one / 2**20:>9.1f} MiB{_quotient(planned, one):>8}" for one in measured]
    print(f"{name:17}{planned / 2**20:>8.1f} MiB{''.join(cells)}")


def _quotient(planned: float, measured: float) -> str:
    return f"{planned / measured:.3f}" if measured else "-"


if __name__ == "__main__":
    main()
