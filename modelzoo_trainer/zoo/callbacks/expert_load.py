"""How tokens are distributed over the experts of a model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Callback, Metrics, Outputs
from modelzoo_trainer.zoo.models.routing import LOSS_KEY, SHARES_KEY

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.metrics")


class LogExpertLoad(Callback):
    """Log how tokens are distributed over the experts of a decoder, on log steps.

    The shares come from the main process's last micro-batch, over the tokens that count for the
    loss. Of E experts each has 1 / E if they are used equally.

    Metrics:
        expert_load/expert_<e>: Share of the choices of all layers that are this expert.
        expert_load/largest: Largest share of an expert in a layer.
        expert_load/smallest: Smallest share of an expert in a layer; 0 = one is not used.
        load_balancing_loss: The loss without its coefficient; not if that is 0.

    Cost: No host read.
    """

    log_step_hooks = frozenset({"on_train_batch_end"})

    def __init__(self) -> None:
        self._has_warned = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch, batch_idx: int
    ) -> None:
        if not trainer.should_run_optimizer_step or trainer.is_padding:
            return
        shares = outputs.get(SHARES_KEY)
        if not isinstance(shares, Tensor):
            self._warn()
            return
        of_experts = shares.mean(dim=0).unbind()
        metrics: Metrics = {
            f"expert_load/expert_{number}": share for number, share in enumerate(of_experts)
        }
        metrics["expert_load/largest"] = shares.max()
        metrics["expert_load/smallest"] = shares.min()
        if LOSS_KEY in outputs:
            metrics[LOSS_KEY] = outputs[LOSS_KEY]
        trainer.log_metrics_dict(metrics)

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "LogExpertLoad: the model has no experts, so nothing is logged. Set model.moe, or "
                "remove the callback."
            )
