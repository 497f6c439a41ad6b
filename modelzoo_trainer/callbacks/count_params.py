"""Table of the parameters and buffers of a model."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from torch import Tensor
from torch.nn import Module, Parameter
from typing_extensions import override

from modelzoo_trainer.base.constraints import checked
from modelzoo_trainer.callback import Callback, Loader
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.count_params")

Column = Literal["name", "type", "dtype", "shape", "elements", "bytes", "trainable"]
_TITLES: Final = ("name", "type", "dtype", "shape", "elements", "bytes", "% of total", "trainable")
_TEXTS: Final = 4  # number of left-aligned columns


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedTensor:
    """A tensor, or several merged under one name."""

    name: str
    type: str
    dtype: str
    shape: str
    elements: int
    bytes: int
    trainable: int


class CountParams(Callback):
    r"""Log a table of all parameters and buffers when the first run begins.

    A tensor with several names (tied weights) is counted once, under the first one. Percentages
    are of all elements. The table is also in `table`, from `post_setup` on.

    Args:
        search_and_replace: Pairs of a regular expression and its replacement, applied to the names;
            rows whose names become equal are merged, as with `[['layers\.\d+', 'layers.*']]`.
        order_by: Column to sort by; None = order of the model.
        descending: Whether to sort in descending order.

    Raises:
        ConfigError: If a regular expression is invalid.
    """

    @checked()
    def __init__(
        self,
        search_and_replace: list[tuple[str, str]] | None = None,
        order_by: Column | None = None,
        descending: bool = False,
    ) -> None:
        self._replacements: list[tuple[re.Pattern[str], str]] = []
        for pattern, text in search_and_replace or ():
            try:
                self._replacements.append((re.compile(pattern), text))
            except re.error as error:
                raise ConfigError(
                    f"CountParams.search_and_replace: {pattern!r} is not a valid regular "
                    f"expression: {error}."
                ) from None
        self._order_by = order_by
        self._descending = descending
        self._is_logged = False
        self.table = ""

    @override
    def post_setup(self, trainer: Trainer) -> None:
        rows = self._grouped(list(rows_of(trainer.model)))
        if self._order_by is not None:
            column = self._order_by
            rows.sort(key=lambda row: getattr(row, column), reverse=self._descending)
        elif self._descending:
            rows.reverse()
        self.table = format_table(rows)
        self._is_logged = False

    def _grouped(self, rows: list[CountedTensor]) -> list[CountedTensor]:
        groups: dict[str, list[CountedTensor]] = {}
        for row in rows:
            name = row.name
            for pattern, text in self._replacements:
                name = pattern.sub(text, name)
            groups.setdefault(name, []).append(row)
        return [_merged(name, members) for name, members in groups.items()]

    # The log file of a run receives messages only during the run.

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._log(trainer)

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        self._log(trainer)

    def _log(self, trainer: Trainer) -> None:
        if not self._is_logged and trainer.backend.comm.is_main:
            log.info("Parameters and buffers of %s:\n%s", type(trainer.model).__name__, self.table)
        self._is_logged = True


def rows_of(model: Module) -> Iterator[CountedTensor]:
    """Yield a row for each parameter and buffer, tied ones once."""
    yield from (_row(name, tensor, "parameter") for name, tensor in model.named_parameters())
    yield from (_row(name, tensor, "buffer") for name, tensor in model.named_buffers())


def _row(name: str, tensor: Tensor, kind: str) -> CountedTensor:
    num = tensor.numel()
    is_trainable = isinstance(tensor, Parameter) and tensor.requires_grad
    return CountedTensor(
        name=name,
        type=kind,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape="x".join(map(str, tensor.shape)) or "()",
        elements=num,
        bytes=num * tensor.element_size(),
        trainable=num if is_trainable else 0,
    )


def _merged(name: str, rows: list[CountedTensor]) -> CountedTensor:
    def common(column: str) -> str:
        values = {getattr(row, column) for row in rows}
        return str(values.pop()) if len(values) == 1 else "mixed"

    shape = common("shape")
    return replace(
        rows[0],
        name=name,
        type=common("type"),
        dtype=common("dtype"),
        shape=shape if len(rows) == 1 else f"{len(rows)} * {shape}",
        elements=sum(row.elements for row in rows),
        bytes=sum(row.bytes for row in rows),
        trainable=sum(row.trainable for row in rows),
    )


def format_table(rows: list[CountedTensor]) -> str:
    """Format rows and their total as a table."""
    total = sum(row.elements for row in rows)
    sums = CountedTensor(
        name="total",
        type="",
        dtype="",
        shape="",
        elements=total,
        bytes=sum(row.bytes for row in rows),
        trainable=sum(row.trainable for row in rows),
    )
    cells = [_TITLES, *(_cells(row, total) for row in [*rows, sums])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [_line(line, widths) for line in cells]
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


def _cells(row: CountedTensor, total: int) -> tuple[str, ...]:
    percent = f"{100 * row.elements / total:.2f}" if total else "-"
    counts = (f"{row.elements:,}", f"{row.bytes:,}", percent, f"{row.trainable:,}")
    return (row.name, row.type, row.dtype, row.shape, *counts)


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    padded = [
        cell.ljust(width) if idx < _TEXTS else cell.rjust(width)
        for idx, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()
