"""Module outputs and their gradients in `.npz` files."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.base.constraints import PositiveInt, checked
from modelzoo_trainer.callback import Batch, Outputs
from modelzoo_trainer.callbacks.parts.activation_hooks import (
    TensorPath,
    TensorWatcher,
    named_params,
)
from modelzoo_trainer.errors import ConfigError, unusable

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.dump_activations")

Record = dict[str, np.ndarray[Any, Any]]

_STEP: Final = "step"
_INTEGERS: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_KNOWN_TO_NUMPY: Final = frozenset(
    {
        *(torch.bool, *_INTEGERS, torch.uint16, torch.uint32, torch.uint64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    }
)


class DumpActivations(TensorWatcher):
    """Write module outputs and gradients of training to `.npz` files.

    Arrays are named `<module>.fwd`, `<module>.bwd` and `<parameter>.grad`; from the second call in
    a batch on, `<module>.call1.fwd`; an item of a mapping or a sequence has its key appended. The
    model itself is named after its class. The first axis of each array is the batch; the array
    `step` has the global step of each. Gradients are those after the backward pass of a batch:
    scaled under a loss scaler, and accumulated over the batches of a step so far. Types that numpy
    lacks, such as bfloat16, are written as float32.

    Files are named `act_dumps.npz`, `act_dumps_1.npz` and so on; none is overwritten. A new file
    begins when the shapes of the batches change. The main process writes its own tensors. If a file
    cannot be written, a warning is logged and the run continues without further files. What was
    collected before an exception is written as well. A compiled model runs eagerly.

    Args:
        outdir: Folder of the files; None = `act_dumps` in `model_dir`.
        buffer_steps: Steps per file, > 0, buffered in host memory; None = the whole fit.

    Raises:
        ConfigError: If an argument is invalid; in `fit`, if the folder cannot be created.

    Cost: In each step, a copy of all activations and gradients to the host.
    """

    watches_validation = False

    @checked()
    def __init__(self, outdir: Path | None = None, buffer_steps: PositiveInt | None = None) -> None:
        super().__init__()
        if outdir is not None and (not isinstance(outdir, (str, Path)) or not str(outdir)):
            raise ConfigError(f"DumpActivations.outdir is {outdir!r}; it must be a folder name.")
        self.outdir = None if outdir is None else Path(outdir)
        self.buffer_steps = buffer_steps
        self._folder = Path()
        self._record: Record = {}
        self._rows: list[Record] = []
        self._steps: list[int] = []
        self._num_steps = 0
        self._has_failed = False

    @override
    def enter(self, trainer: Trainer, stack: ExitStack) -> None:
        super().enter(trainer, stack)
        self._folder = self.outdir or trainer.model_dir / "act_dumps"
        self._has_failed = False
        self._reset()
        if trainer.backend.comm.is_main:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise unusable("DumpActivations.outdir", self._folder, error) from None
        stack.callback(self._write)

    def _reset(self) -> None:
        self._record, self._rows, self._steps, self._num_steps = {}, [], [], 0

    # ---- within the step

    @override
    def is_watched(self, trainer: Trainer) -> bool:
        return True

    @override
    def before(
        self, trainer: Trainer, model: Module, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        self._record = {}  # of an interrupted step

    @override
    def process(self, trainer: Trainer, place: TensorPath, tensor: Tensor) -> None:
        self._read(trainer, place.key, tensor)

    @override
    def on_after_backward(self, trainer: Trainer, model: Module, outputs: Outputs) -> None:
        for name, param in named_params(model).items():
            if param.grad is not None:
                self._read(trainer, f"{name}.grad", param.grad)

    def _read(self, trainer: Trainer, key: str, tensor: Tensor) -> None:
        part = trainer.backend.comm.local_part(tensor.detach())
        part = part.to_dense() if part.is_sparse else part
        trainer.read((part,), partial(_keep, self._record, key, part.dtype))

    @override
    def on_train_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        ends_step = trainer.should_run_optimizer_step
        trainer.read((), partial(self._add, trainer, self._record, ends_step))

    # ---- on the host

    def _add(self, trainer: Trainer, record: Record, ends_step: bool, _: list[Any]) -> None:
        backend = trainer.backend
        if self._has_failed or not backend.comm.is_main or not backend.caps.holds_values:
            return
        if self._rows and _layout(self._rows[0]) != _layout(record):
            self._write()
        self._rows.append(record)
        self._steps.append(trainer.global_step)
        self._num_steps += ends_step
        if self._num_steps == self.buffer_steps:
            self._write()

    def _write(self) -> None:
        rows, steps = self._rows, self._steps
        self._reset()
        if not rows:
            return
        arrays = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
        arrays[_STEP] = np.array(steps)
        path = self._free_path()
        try:
            _save(path, arrays)
        except OSError as error:
            log.warning("Cannot write %s; no more activations are dumped: %s", path, error)
            self._has_failed = True

    def _free_path(self) -> Path:
        path = self._folder / "act_dumps.npz"
        number = 0
        while path.exists():
            number += 1
            path = self._folder / f"act_dumps_{number}.npz"
        return path


def _keep(record: Record, key: str, dtype: torch.dtype, values: list[Any]) -> None:
    value = values[0]
    tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype)
    record[key] = (tensor if dtype in _KNOWN_TO_NUMPY else tensor.float()).numpy()


def _layout(record: Record) -> dict[str, Any]:
    return {key: (array.shape, array.dtype) for key, array in record.items()}


def _save(path: Path, arrays: Record) -> None:
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # no key is allow_pickle
    os.replace(unfinished, path)
