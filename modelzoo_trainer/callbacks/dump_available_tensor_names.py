"""List of the tensors that have names in a step."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Outputs
from modelzoo_trainer.callbacks.parts.activation_hooks import NamedTensorWatcher

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.dump_available_tensor_names")


class DumpAvailableTensorNames(NamedTensorWatcher):
    """Write the tensor names that the tensor listeners accept, with shapes and dtypes, to files.

    Names of the first step of a fit are in `available_tensor_names.txt` in the run folder, names of
    the first batch of a validation in `available_tensor_names_validate.txt`. The names are
    explained in `SummaryTensorListener`. If a file cannot be written, a warning is logged.

    Cost: Small, in the first step only.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[str, str] = {}
        self._is_done = [False, False]

    @override
    def enter(self, trainer: Trainer, stack: ExitStack) -> None:
        super().enter(trainer, stack)
        self._lines = {}
        self._is_done = [False, False]

    @override
    def is_watched(self, trainer: Trainer) -> bool:
        return not self._is_done[trainer.val_iterator is not None]

    @override
    def process_named(self, trainer: Trainer, name: str, tensor: Tensor) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        self._lines[name] = f"{name}\t{list(tensor.shape)}\t{dtype}\n"

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        if trainer.should_run_optimizer_step and not self._is_done[0]:
            self._is_done[0] = True
            self._write(trainer, "available_tensor_names.txt")

    @override
    def on_validate_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        if not self._is_done[1]:
            self._is_done[1] = True
            self._write(trainer, "available_tensor_names_validate.txt")

    def _write(self, trainer: Trainer, name: str) -> None:
        lines, self._lines = self._lines, {}
        if trainer.backend.comm.is_main:
            _write_text(trainer.artifact_dir / name, "".join(lines.values()))


def _write_text(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        log.warning("Cannot write %s: %s", path, error)
