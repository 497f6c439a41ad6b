"""The figures of a plan, and their table."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from modelzoo_trainer.errors import ConfigError, in_bytes
from modelzoo_trainer.tools.planning.memory_tracker import (
    EXCHANGE,
    FLOPS,
    READS,
    CollectiveTotals,
    MemoryKind,
    Peak,
    highest_of,
    local,
)

_UNITS: Final = {"": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(i?)B)?\s*", re.IGNORECASE | re.ASCII)
_LETTERS: Final = ("", "k", "M", "G", "T", "P", "E")


def bytes_of(text: str, option: str = "--memory") -> int:
    """Return a size of memory in bytes.

    `text`: such as "80GiB", "141GB" or a number of bytes. `option`: what has it, for the message.

    Raises:
        ConfigError: If it is not a size > 0.
    """
    found = _SIZE.fullmatch(text)
    size = 0.0
    if found is not None:
        letter = (found[2] or "").upper()
        base = 1024 if found[3] else 1000
        size = float(found[1]) * (base ** _UNITS[letter] if letter else 1)
    if size < 1:
        raise ConfigError(
            f"{option}: expected a size such as 80GiB, 141GB or 16000000000, got {text!r}."
        )
    return int(size)


def in_thousands(num: float, unit: str = "") -> str:
    """Format a number with an SI prefix, such as "6.7 G" or "6.7 GFLOP"."""
    power = 0
    while num >= 999.95 and power < 6:
        num, power = num / 1000, power + 1
    digits = f"{num:.0f}" if not power else f"{num:.1f}"
    return f"{digits} {_LETTERS[power]}{unit}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one process of a planned run needs."""

    world_size: int
    axes: dict[str, int]  # sizes of their mesh, by name
    device: str
    num_data_shards: int  # how many of them have different data
    batch_size: int  # samples per micro-batch of one process
    num_batches: int  # micro-batches per optimizer step
    num_samples: int  # of one process, per optimizer step
    num_params: int  # of the whole model; shared ones count once
    num_params_here: int  # of this process
    building: Peak  # memory while the model and its optimizer are built
    training: Peak
    # communication of a step, by kind of collective and group size
    exchanges: dict[tuple[str, int], CollectiveTotals]
    flops: int  # floating-point operations of a step on this process; a multiply-add is two
    num_host_reads: int  # device values read on the host in a step
    checkpoint_bytes: int  # of a checkpoint's tensors
    checkpoint_bytes_here: int  # approximate bytes written by this process

    @property
    def peak_bytes(self) -> int:
        """The peak memory of a process."""
        return max(self.building.total, self.training.total)


class Setting(NamedTuple):
    """What a run was measured with, whatever the number of its layers; see `Figures`."""

    world_size: int
    axes: dict[str, int]
    device: str
    num_data_shards: int
    batch_size: int
    num_batches: int
    num_samples: int

    @property
    def is_replicated(self) -> bool:
        """Whether each process has all parameters, of several."""
        return self.world_size > 1 and self.axes.get("shard") == self.axes.get("tensor") == 1


class Measured(NamedTuple):
    """A measured run, and its figures, each linear in the number of layers."""

    setting: Setting
    numbers: Mapping[tuple[str, ...], float]


def figures_of(measured: Measured) -> Figures:
    """Return the figures of a run."""
    numbers = {key: round(value) for key, value in measured.numbers.items()}
    exchanges: dict[tuple[str, int], CollectiveTotals] = {}
    for key, value in numbers.items():
        if key[0] == EXCHANGE and value:
            entry = exchanges.setdefault((key[1], int(key[2])), CollectiveTotals())
            setattr(entry, key[3], value)
    return Figures(
        **measured.setting._asdict(),
        num_params=numbers["params",],
        num_params_here=numbers["params here",],
        building=_peak(numbers, "building"),
        training=_peak(numbers, "training"),
        exchanges=exchanges,
        flops=numbers.get((FLOPS,), 0),
        num_host_reads=numbers.get((READS,), 0),
        checkpoint_bytes=numbers["checkpoint",],
        checkpoint_bytes_here=numbers["checkpoint here",],
    )


def _peak(numbers: Mapping[tuple[str, ...], int], when: str) -> Peak:
    """Return the highest of the peaks of all phases."""
    found: dict[str, Peak] = defaultdict(Peak)
    for key, value in numbers.items():
        if key[0] == when:
            peak, kind = found[key[1]], MemoryKind(key[3])
            getattr(peak, key[2])[kind] = value
            if key[2] == "parts":
                peak.total += value
    return highest_of(found.values())


def sizes_of(tensors: Iterable[Tensor]) -> tuple[int, int]:
    """Return the number of elements of tensors, globally and on this process."""
    unique = list({id(tensor): tensor for tensor in tensors}.values())
    return sum(one.numel() for one in unique), sum(local(one).numel() for one in unique)


def checkpoint_sizes(trees: Iterable[Any], world_size: int) -> tuple[int, int]:
    """Return the bytes of all tensors in state dicts, and about how many this process writes."""
    tensors = {id(leaf): leaf for leaf in tree_leaves(list(trees)) if isinstance(leaf, Tensor)}
    unique = {_place(one): one for one in tensors.values()}.values()
    total = sum(one.numel() * one.element_size() for one in unique)
    return total, round(sum(local(one).nbytes / _num_copies(one, world_size) for one in unique))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    part = local(tensor)
    return part.untyped_storage()._cdata, part.storage_offset(), part.numel()


def _num_copies(tensor: Tensor, world_size: int) -> int:
    """Return how many processes hold the same shard of a tensor."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return world_size
    placements: Any = tensor.placements  # type: ignore[attr-defined]  # a DTensor
    num_parts: int = prod(
        int(mesh.size(dim)) for dim, placement in enumerate(placements) if placement.is_shard()
    )
    return max(1, world_size // num_parts)


Row = Sequence[str]

_ROWS: Final = (
    MemoryKind.PARAMETERS,
    MemoryKind.GRADIENTS,
    MemoryKind.OPTIMIZER,
    MemoryKind.ACTIVATIONS,
    MemoryKind.EXCHANGE,
    MemoryKind.BUFFERS,
    MemoryKind.BATCH,
)


def table(figures: Figures) -> str:
    """Format the figures as text."""
    parts = [_heading(figures), _sizes(figures), _memory(figures), _exchanges(figures)]
    return "\n\n".join(parts)


def _heading(figures: Figures) -> str:
    if not figures.axes:
        return f"Plan for one process, device {figures.device} (nothing was run on it)."
    axes = ", ".join(f"{name} {size}" for name, size in figures.axes.items())
    return (
        f"Plan for {figures.world_size} processes ({axes}), device {figures.device} "
        f"(nothing was run on them)."
    )


def _sizes(figures: Figures) -> str:
    num = figures.world_size
    params = in_thousands(figures.num_params), in_thousands(figures.num_params_here)
    flops = figures.flops
    saved = figures.checkpoint_bytes, figures.checkpoint_bytes_here
    rows = [
        ("", "whole run", "per process"),
        ("parameters", *params),
        ("samples per step", str(figures.num_samples * figures.num_data_shards), _samples(figures)),
        ("compute per step", in_thousands(flops * num, "FLOP"), in_thousands(flops, "FLOP")),
        ("checkpoint", in_bytes(saved[0]), f"about {in_bytes(saved[1])}"),
    ]
    return _lines(rows)


def _samples(figures: Figures) -> str:
    num, size = figures.num_batches, figures.batch_size
    if num == 1:
        return str(size)
    exact = num * size == figures.num_samples
    return f"{num} x {size}" if exact else f"{figures.num_samples} ({num} x {size} or less)"


def _memory(figures: Figures) -> str:
    peak = figures.training
    rows = [("memory of a process", "peak by kind", "at the peak")]
    rows += [
        (kind.value, in_bytes(peak.highest[kind]), in_bytes(peak.parts[kind])) for kind in _ROWS
    ]
    rows += [("total, training", "", in_bytes(peak.total))]
    rows += [("total, building the model", "", in_bytes(figures.building.total))]
    return _lines(rows)


def _exchanges(figures: Figures) -> str:
    if not figures.exchanges:
        return "No communication."
    rows: list[Row] = [("collectives per step", "ranks", "calls", "tensors", "sent per process")]
    for (kind, num), entry in sorted(figures.exchanges.items()):
        amounts = in_bytes(entry.num_bytes), in_bytes(entry.num_sent)
        rows.append((kind, str(num), str(entry.num_calls), *amounts))
    return _lines(rows)


def _lines(rows: Iterable[Row]) -> str:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
