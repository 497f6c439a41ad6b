"""The micro-batches that flags among the callbacks ask for."""

from __future__ import annotations

from typing import NamedTuple

from modelzoo_trainer.callbacks import GlobalFlags, ScopedTrainFlags, ScopedValidateFlags
from modelzoo_trainer.config.plan import TrainerPlan
from modelzoo_trainer.flags import micro_batch_size


class MicroBatchSizes(NamedTuple):
    """Most samples that go through the model at once; None = the whole batch."""

    train: int | None
    validate: int | None


def micro_batch_sizes(plan: TrainerPlan) -> MicroBatchSizes:
    """Return what the flags of a plan come to: they are heeded in their order.

    Args:
        plan: One trainer.
    """
    train: int | None = None
    validate: int | None = None
    for component in plan.init.get("callbacks", ()):
        size = micro_batch_size(component.arguments)
        is_global = component.target is GlobalFlags
        if size is not None and (is_global or component.target is ScopedTrainFlags):
            train = size
        if component.target is ScopedValidateFlags or (is_global and size is not None):
            validate = size
    return MicroBatchSizes(train, validate)
