"""How long a run takes until its first step, by phase."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.start")

_LONG_S: Final = 30.0


class StartTimes:
    """Times the phases from the creation of a trainer to the end of its first step."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def skip(self) -> None:
        """Leave out the time since the last phase, in which the program did something else."""
        self._last = time.perf_counter()

    def end_phase(self, name: str) -> None:
        """Count the time since the last phase as another one, unless it was counted before."""
        now = time.perf_counter()
        if name not in self._seconds:
            self._seconds[name] = now - self._last
        self._last = now

    def report(self, trainer: Trainer) -> None:
        """Log the phases of a long start, and what would make the next one shorter."""
        trainer.backend.synchronize()
        self.end_phase("first step")
        total = sum(self._seconds.values())
        if total < _LONG_S or not trainer.backend.comm.is_main or trainer.progress == "none":
            return
        phases = [f"{name} {seconds:.1f}" for name, seconds in self._seconds.items()]
        drawn = trainer.backend.initial_values.num_drawn
        if drawn is not None:
            phases[0] += f" ({drawn:,} initial values drawn)"
        log.info("Started in %.1f s: %s", total, ", ".join(phases))
        is_long = self._seconds.get("model", 0.0) > _LONG_S
        if is_long and drawn is None and trainer.backend.caps.sharded_state:
            log.info(
                "Each process has built and initialized the whole model. With "
                "backend.sharding.meta_init: true, it initializes its shards only, and nothing if "
                "a checkpoint is loaded."
            )
