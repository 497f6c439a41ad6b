"""An object store in memory whose calls fail as planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import obstore
from obstore.store import MemoryStore

from modelzoo_trainer.checkpointing.stores.client import TimeLimits
from modelzoo_trainer.checkpointing.stores.store import Store
from modelzoo_trainer.checkpointing.stores.urls import StoreUrl

BUSY: Final = "Server returned non-2xx status code: 503: <Error><Code>SlowDown</Code></Error>"
EXPIRED: Final = "status code: 400 Bad Request: <Error><Code>ExpiredToken</Code></Error>"
CALLS: Final = ("put", "get", "get_range", "list", "delete")
LIMITS: Final = TimeLimits(request_s=1, retry_s=5, attempts=4, pause_s=0.001)


class Faulty:
    """Stands for the module obstore.

    Args:
        plan: Faults, each used once by the next call of its name: (name, fault). A fault is the
            text of an error before the call, or "lost" (an error after it), or "twice".
    """

    exceptions = obstore.exceptions

    def __init__(self, plan: Iterable[tuple[str, str]] = ()) -> None:
        self.plan = list(plan)
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            self.calls[name] += 1
            fault = next((fault for called, fault in self.plan if called == name), None)
            if fault is not None:
                self.plan.remove((name, fault))
            if fault == "twice":
                args = tuple(_repeatable(argument) for argument in args)
            if fault not in (None, "lost", "twice"):
                raise obstore.exceptions.GenericError(fault)
            found = getattr(obstore, name)(*args, **keywords)
            if fault == "twice":
                found = getattr(obstore, name)(*args, **keywords)
            if fault == "lost":
                raise obstore.exceptions.GenericError("HTTP error: error sending request")
            return found

        return call


def _repeatable(argument: Any) -> Any:
    return b"".join(argument) if isinstance(argument, Iterator) else argument


def faulty_store(*plan: tuple[str, str], client: Any = None) -> tuple[Store, Faulty]:
    """Return a store in memory and what it calls."""
    api = Faulty(plan)
    client = MemoryStore() if client is None else client
    return Store(StoreUrl("memory", "bucket", "run"), client, api, LIMITS), api
