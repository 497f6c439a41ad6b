"""The seed of the run, and the random number generators of the host."""

from __future__ import annotations

import logging
import random
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from typing_extensions import override

from modelzoo_trainer.base.constraints import Seed, checked
from modelzoo_trainer.callback import CoreCallback, Loader, StateDict
from modelzoo_trainer.checkpointing.restoring import whole_number

if TYPE_CHECKING:
    from modelzoo_trainer.base.devices import Backend
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.reproducibility")


class Reproducibility(CoreCallback):
    """Seed Python, NumPy and PyTorch before set-up, and save their generators' state.

    A resumed run continues the sequence of random numbers: the state of the generators is restored
    just before the first batch. A validation restores it, so that training does not depend on the
    number of validations.

    Args:
        seed: None = the seed of torch when the trainer is built, or a loaded checkpoint's.

    State: `rng`: the seed, and the state of each process's host generators.

    Raises:
        ConfigError: If the seed is not an integer, negative or too large.
    """

    @checked("trainer")
    def __init__(self, seed: Seed | None = None) -> None:
        self.seed = None if seed is None else int(seed)
        self._loaded: dict[str, Any] | None = None

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        if self.seed is not None:
            _seed_all(self.seed)

    @property
    def step_seed(self) -> int:
        """The base of the seeds of steps."""
        return torch.initial_seed() if self.seed is None else self.seed

    def share_seed(self, backend: Backend) -> None:
        """Use the seed of the main process on all processes, for equal initial weights."""
        if backend.comm.world_size == 1:
            return
        seed = backend.comm.broadcast_object(self.step_seed)
        backend.seed = seed
        if self.seed is None:
            _seed_all(seed)

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        backend = trainer.backend
        stack.callback(backend.set_rng_state, backend.rng_state())

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        backend = trainer.backend
        now = {"seed": backend.seed, _key_of(backend): backend.rng_state()}
        if backend.comm.world_size > 1:
            now["world_size"] = backend.comm.world_size
        state_dict["rng"] = now if self._loaded is None else self._loaded

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        self._loaded = state_dict.get("rng")

    @override
    def on_train_ready(self, trainer: Trainer) -> None:
        """Restore the loaded state of the host's generators, if any, once."""
        state, self._loaded = self._loaded, None
        if state is not None:
            with trainer.checkpoint.restoring(trainer):
                self._restore(trainer, state)

    def _restore(self, trainer: Trainer, state: dict[str, Any]) -> None:
        if self.seed is None:
            trainer.backend.seed = whole_number(state, "seed")
        elif self.seed != whole_number(state, "seed"):
            log.warning(
                "The resumed run may differ: the checkpoint was saved with seed %d, but this run "
                "has %d.",
                state["seed"],
                self.seed,
            )
            return
        num, own = whole_number(state, "world_size", 1), trainer.backend.comm.world_size
        if num == own:
            trainer.backend.set_rng_state(state[_key_of(trainer.backend)])
            return
        log.warning(
            "The resumed run may differ: the number of processes was %d at the checkpoint and is "
            "now %d. The weights and the position in the data are restored, but random numbers "
            "drawn on the CPU differ.",
            num,
            own,
        )


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _key_of(backend: Backend) -> str:
    """Return the key of this process's state."""
    return "host" if backend.comm.world_size == 1 else f"host_{backend.comm.rank}"
