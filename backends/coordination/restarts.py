"""Keep torchrun from restarting a run that was stopped on request.

torchrun treats every exit code but 0 as a failure and restarts the processes. So a stopped run
leaves a record in torchrun's own store: the next attempt finds it and exits at once. The store
ends with torchrun, so that the next torchrun in the same folder resumes training.

torchrun also sends SIGTERM and restarts the processes when a node joins. It does not count that as
a failure, which distinguishes the two.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ..errors import BackendError
from .launch import read_agent
from .orphans import is_orphan
from .rendezvous import agent_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .world import World

log = logging.getLogger("modelzoo_trainer.restarts")

_REACH_S: Final = 60.0


class StopRecord:
    """Record of what stopped the run, for later attempts of the same torchrun.

    Its methods are collective with several processes. `world`: None = single process.
    """

    def __init__(self, world: World | None) -> None:
        self._world = world
        self._agent = read_agent()
        self._count = 0 if self._agent is None else self._agent.restart_count
        self._is_first = world is None or world.rank == 0
        self._store: Store | None = None

    def find(self) -> str | None:
        """Return what stopped an earlier attempt of the run; None if this one shall train."""
        found = self._read() if self._is_first else None
        if self._world is not None:
            found = self._world.broadcast_object(found)
        if found is None:
            return None
        reason: str = found[0]
        count: int = found[1]
        is_counted = self._count > count
        if self._world is not None:  # a node that has joined starts at 0
            is_counted = self._world.any_true(is_counted)
        if is_counted:
            return reason
        if self._store is not None:
            self._store.delete_key(self._key)
        return None

    def leave(self, reason: str) -> None:
        """Make later attempts exit at once; `reason`: what stopped the run, such as "SIGTERM"."""
        count = self._count
        if self._world is not None:
            if self._world.any_true(is_orphan()):  # torchrun may continue on other nodes
                return
            count = max(self._world.gather_object(count))
        if self._store is not None:
            with suppress(Exception):  # the store is gone, and torchrun with it
                self._store.set(self._key, json.dumps([reason, count]))
                self._store.check([self._key])  # an answer confirms the record
        elif self._is_first and self._agent is not None and self._agent.max_restarts > self._count:
            log.warning(
                "torchrun will treat this stop as a failure and restart the run, because "
                "torchrun's store cannot be reached. To stop the run, send SIGTERM to torchrun."
            )

    @property
    def _key(self) -> str:
        return f"modelzoo_trainer/{'' if self._agent is None else self._agent.run_id}/stopped"

    def _read(self) -> tuple[str, int] | None:
        agent = self._agent
        if agent is None or agent.max_restarts == 0 or not agent.has_store:
            return None
        with suppress(BackendError):
            self._store = agent_store(agent, time.monotonic() + _REACH_S)
        if self._store is None or not self._store.check([self._key]):
            return None
        reason, count = json.loads(self._store.get(self._key))
        return str(reason), int(count)
