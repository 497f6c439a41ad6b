"""The micro-batches that flags among the callbacks ask for."""

from __future__ import annotations

from typing import NamedTuple

from modelzoo_trainer.callbacks import GlobalFlags, ScopedTrainFlags, ScopedValidateFlags
from modelzoo_trainer.config.plan import TrainerPlan
from modelzoo_trainer.csx_flags import MICRO_BATCH_SIZE, micro_batch_size


class MicroBatchSizes(NamedTuple):
    """Most samples that go through the model at once; None = the whole batch."""

    train: int | None
    validate: int | None


def micro_batch_sizes(plan: TrainerPlan) -> MicroBatchSizes:
    """Return what the flags of a plan come to: scoped ones go before global ones.

    Args:
        plan: One trainer.
    """
    return MicroBatchSizes(_size(plan, ScopedTrainFlags), _size(plan, ScopedValidateFlags))


def _size(plan: TrainerPlan, scoped: type) -> int | None:
    callbacks = plan.init.get("callbacks", ())
    given = [one for kind in (GlobalFlags, scoped) for one in callbacks if one.target is kind]
    sizes = [micro_batch_size(one.arguments) for one in given if MICRO_BATCH_SIZE in one.arguments]
    return sizes[-1] if sizes else None
