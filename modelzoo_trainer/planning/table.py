"""The figures of a run on paper, for a reader."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from modelzoo_trainer.planning.amounts import in_bytes, in_thousands
from modelzoo_trainer.planning.figures import Figures
from modelzoo_trainer.planning.memory_tracker import Kind

Row = Sequence[str]

_ROWS: Final = (
    Kind.PARAMETERS,
    Kind.GRADIENTS,
    Kind.OPTIMIZER,
    Kind.ACTIVATIONS,
    Kind.EXCHANGE,
    Kind.BUFFERS,
    Kind.BATCH,
)


def table(figures: Figures) -> str:
    """Return the figures as text of several lines."""
    parts = [_heading(figures), _sizes(figures), _memory(figures), _exchanges(figures)]
    return "\n\n".join(parts)


def _heading(figures: Figures) -> str:
    if not figures.axes:
        return f"On paper: one process, device {figures.device}. Nothing was run on it."
    axes = ", ".join(f"{name} {size}" for name, size in figures.axes.items())
    return (
        f"On paper: {figures.world_size} processes ({axes}), device {figures.device}. "
        f"Nothing was run on them."
    )


def _sizes(figures: Figures) -> str:
    num = figures.world_size
    samples = figures.batch_size * figures.num_batches
    params = in_thousands(figures.num_params), in_thousands(figures.num_params_here)
    flops = figures.flops
    saved = figures.checkpoint_bytes, figures.checkpoint_bytes_here
    rows = [
        ("", "whole run", "each process"),
        ("parameters", *params),
        ("samples a step", str(samples * figures.num_data_shards), _samples(figures)),
        ("arithmetic a step", in_thousands(flops * num, "FLOP"), in_thousands(flops, "FLOP")),
        ("checkpoint", in_bytes(saved[0]), f"about {in_bytes(saved[1])}"),
    ]
    return _lines(rows)


def _samples(figures: Figures) -> str:
    if figures.num_batches == 1:
        return str(figures.batch_size)
    return f"{figures.num_batches} times {figures.batch_size}"


def _memory(figures: Figures) -> str:
    peak = figures.training
    rows = [("memory of a process", "most at a time", "at the peak")]
    rows += [
        (kind.value, in_bytes(peak.highest[kind]), in_bytes(peak.parts[kind])) for kind in _ROWS
    ]
    rows += [("all, while training", "", in_bytes(peak.total))]
    rows += [("all, while the model is built", "", in_bytes(figures.building.total))]
    return _lines(rows)


def _exchanges(figures: Figures) -> str:
    if not figures.exchanges:
        return "Nothing is sent."
    rows: list[Row] = [("sent in a step", "processes", "calls", "tensors", "by each process")]
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
