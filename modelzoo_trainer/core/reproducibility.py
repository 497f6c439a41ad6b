"""The run's seed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import torch
from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class Reproducibility(CoreCallback):
    """Seeds python, numpy and torch before anything is built.

    Args:
        seed: None = what torch was seeded with when the trainer is built.

    Raises:
        ConfigError: If the seed is negative or too large.
    """

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and not 0 <= seed < 2**32:
            raise ConfigError(f"seed is {seed}; it must be in [0, 2**32).")
        self.seed = seed

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
