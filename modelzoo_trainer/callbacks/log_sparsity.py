"""How many weights are zero."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.callback import Callback, Metrics
from modelzoo_trainer.core.sparsity import Sparsity

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.sparsity")


class LogSparsity(Callback):
    """Logs which fraction of the weights of each sparse parameter is zero, on log steps.

    Metrics:
        sparsity/<name>/target: The fraction that is meant, 0 to 1.
        sparsity/<name>/actual: The fraction that is masked, 0 to 1.

    Cost: A pass over the masks per log step, no host read.
    """

    log_step_hooks = frozenset({"on_after_optimizer_step"})

    def __init__(self) -> None:
        self._sparsity: Sparsity | None = None

    @override
    def setup(self, trainer: Trainer) -> None:
        self._sparsity = trainer.get_callback(Sparsity)
        if self._sparsity is None or not self._sparsity.params:
            log.warning("LogSparsity: the trainer has no sparsity, so nothing is logged.")

    @override
    def on_after_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        if self._sparsity is None or not self._sparsity.params:
            return
        metrics: Metrics = {}
        for name, (target, actual) in self._sparsity.fractions(trainer.global_step).items():
            metrics[f"sparsity/{name}/target"] = target
            metrics[f"sparsity/{name}/actual"] = actual
        trainer.log_metrics_dict(metrics)
