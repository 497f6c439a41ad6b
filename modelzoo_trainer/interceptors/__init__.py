"""Functions before and after the methods of building blocks: they may rewrite what goes in and out.

    @event("step")       marks a method of a block; nothing else changes for it
    ("pre-step", f)      f(self, batch) returns the batch: any of the arguments, by their names
    ("post-step", f)     f(self, result) returns the result

A block that has functions for an event has an `AdvisedMethod` among its own attributes, in the
place of the method of its class; one that has none costs nothing. The constructor's event is
`init`, on every block.
"""

from modelzoo_trainer.interceptors.classes import class_pairs, event, pair_of
from modelzoo_trainer.interceptors.functions import (
    INIT,
    Pair,
    canonical,
    is_pair,
    split_pair,
    unknown_event,
)
from modelzoo_trainer.interceptors.objects import (
    Advised,
    AdvisedMethods,
    FunctionHandle,
    FunctionList,
    begin,
    end,
)
from modelzoo_trainer.interceptors.placement import Interceptors, is_own_pair, parted

__all__ = [
    "INIT",
    "Advised",
    "AdvisedMethods",
    "FunctionHandle",
    "FunctionList",
    "Interceptors",
    "Pair",
    "begin",
    "canonical",
    "class_pairs",
    "end",
    "event",
    "is_own_pair",
    "is_pair",
    "pair_of",
    "parted",
    "split_pair",
    "unknown_event",
]
