"""The run's seed, and the random generators of the host."""

from __future__ import annotations

import logging
import random
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback, Loader, StateDict
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.reproducibility")


class Reproducibility(CoreCallback):
    """Seeds python, numpy and torch before anything is built, and keeps their state.

    A run that resumes goes on with the numbers that come next: the generators get their state
    back when everything else is in place, before the first batch. A validation leaves them as they
    were, so that training does not depend on how often one validates.

    Args:
        seed: None = what torch was seeded with when the trainer is built; a checkpoint's, once one
            is loaded.

    State: `rng`: the seed, and the state of the host's generators.

    Raises:
        ConfigError: If the seed is negative or too large.
    """

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and not 0 <= seed < 2**32:
            raise ConfigError(f"seed is {seed}; it must be in [0, 2**32).")
        self.seed = seed
        self._loaded: dict[str, Any] | None = None

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        if self.seed is not None:
            random.seed(self.seed)
            np.random.seed(self.seed)
            torch.manual_seed(self.seed)

    @property
    def step_seed(self) -> int:
        """What the seeds of steps are derived from."""
        return torch.initial_seed() if self.seed is None else self.seed

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        backend = trainer.backend
        stack.callback(backend.set_rng_state, backend.rng_state())

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        backend = trainer.backend
        now = {"seed": backend.seed, "host": backend.rng_state()}
        state_dict["rng"] = now if self._loaded is None else self._loaded

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        self._loaded = state_dict.get("rng")

    def restore(self, trainer: Trainer) -> None:
        """Give the host's generators the state that was loaded, if there is one; once."""
        state, self._loaded = self._loaded, None
        if state is None:
            return
        if self.seed is None:
            trainer.backend.seed = state["seed"]
        elif self.seed != state["seed"]:
            log.warning(
                "The checkpoint was made with seed %d and this run has %d: it does not go on as "
                "that one would have.",
                state["seed"],
                self.seed,
            )
            return
        trainer.backend.set_rng_state(state["host"])
