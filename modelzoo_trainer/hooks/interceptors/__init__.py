"""Interceptors: functions before and after a method, which may change its arguments and result.

    @event("step")       marks a method; nothing else changes
    ("pre-step", f)      f(self, batch) returns the batch: any of the arguments, by their names
    ("post-step", f)     f(self, result) returns the result

An object with interceptors for an event has an `InterceptedMethod` as an instance attribute, which
shadows the method of its class; without interceptors there is no cost. The event of the
constructor is `init`, in every class.
"""

from modelzoo_trainer.hooks.interceptors.classes import class_pairs, event, pair_of
from modelzoo_trainer.hooks.interceptors.functions import (
    INIT,
    Pair,
    canonical,
    is_pair,
    split_pair,
    unknown_event,
)
from modelzoo_trainer.hooks.interceptors.objects import (
    FunctionHandle,
    FunctionList,
    Interceptable,
    InterceptableMethods,
    begin,
    end,
)
from modelzoo_trainer.hooks.interceptors.placement import Interceptors, is_own_pair, parted

__all__ = [
    "INIT",
    "FunctionHandle",
    "FunctionList",
    "Interceptable",
    "InterceptableMethods",
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
