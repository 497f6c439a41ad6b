"""The batches themselves, as metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.callback import Batch, Callback
from modelzoo_trainer.callbacks.activation_hooks import named_tensors
from modelzoo_trainer.current_trainer import is_recorded, snapshot

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class LogInputSummaries(Callback):
    """Logs every tensor of the batch as it goes into the model, on log steps.

    A batch that is a mapping or a sequence gives `input.<key>`, nested ones `input.<key>.<key>`,
    and a tensor alone `input`. Of a step over several batches it is the last one that is logged,
    of several processes the first one's. In a validation likewise, with its prefix.

    Metrics:
        input.<path>: The tensor, whole; a number if it has no dimensions.

    Cost: On log steps, a copy of the batch to the host.
    """

    log_step_hooks = frozenset({"on_before_forward"})

    @override
    def on_before_forward(
        self,
        trainer: Trainer,
        model: Module,
        batch: Batch,
        args: list[Any],
        kwargs: dict[str, Any],
    ) -> None:
        if is_recorded(trainer):
            found = named_tensors(batch)
            trainer.log_metrics_dict({f"input{path}": snapshot(tensor) for path, tensor in found})
