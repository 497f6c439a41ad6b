"""End a job that its scheduler queues again and again without progress."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from modelzoo_trainer.base.regular_files import read_bytes
from modelzoo_trainer.callback import Callback
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.supervisor.protocol import write_json

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.requeues")

MAX_REQUEUES: Final = 3
"""How often a job may be queued again while its run begins at the same step."""
_RECORD: Final = ".requeues.json"


class RequeueLimit(Callback):
    """Raise an error when a job was queued again several times, and begins at the same step.

    Its time limit may be too short for the start, a step and a checkpoint. The step and the number
    are kept in `model_dir`.

    Args:
        num_requeues: How often the job was queued again so far.
    """

    def __init__(self, num_requeues: int) -> None:
        self._num_requeues = num_requeues

    @override
    def on_fit_start(self, trainer: Trainer, *args: Any) -> None:
        comm = trainer.backend.comm
        num = self._num_without_progress(trainer) if comm.is_main else 0
        num = comm.broadcast_object(num)
        if num > MAX_REQUEUES:
            raise ConfigError(
                f"The job was queued again {num} times without a checkpoint after step "
                f"{trainer.global_step}. Give it more time, --grace and --signal included, or "
                f"checkpoints more often, and submit it again."
            )

    def _num_without_progress(self, trainer: Trainer) -> int:
        path = Path(trainer.model_dir, _RECORD)
        try:
            found = json.loads(read_bytes(path))
            step, first = int(found["step"]), int(found["requeues"])
        except (OSError, ValueError, KeyError, TypeError):
            step, first = -1, 0
        if step == trainer.global_step and first <= self._num_requeues:
            return self._num_requeues - first
        try:
            write_json(path, {"step": trainer.global_step, "requeues": self._num_requeues})
        except OSError as error:
            log.warning("Cannot write %s: %s.", path, error.strerror or error)
        return 0
