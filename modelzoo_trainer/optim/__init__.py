"""Optimizers and schedules by the names of a configuration file."""

from modelzoo_trainer.optim.factory import OptimizerFactory
from modelzoo_trainer.optim.param_groups import ParamFilter, make_param_groups
from modelzoo_trainer.optim.registry import (
    OPTIMIZERS,
    SCHEDULERS,
    optimizer_class,
    scheduler_class,
)
from modelzoo_trainer.optim.scheduler import (
    LRScheduler,
    Scheduler,
    WeightDecayScheduler,
    check_conflicts,
)

__all__ = [
    "OPTIMIZERS",
    "SCHEDULERS",
    "LRScheduler",
    "OptimizerFactory",
    "ParamFilter",
    "Scheduler",
    "WeightDecayScheduler",
    "check_conflicts",
    "make_param_groups",
    "optimizer_class",
    "scheduler_class",
]
