"""The random generators of this process, seeded from numbers that say where in the data it is."""

import random
from typing import Final

import numpy as np
import torch

_ALL: Final = (1 << 64) - 1
_SEEDS: Final = (1 << 62) - 1


def mixed(base: int, *numbers: int) -> int:
    """Return a seed that all of the numbers decide.

    Each is mixed in by the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable
    pseudorandom number generators, OOPSLA 2014), so that neighbours are far apart.

    Args:
        base: A seed.
        numbers: Of any size and sign.

    Returns:
        62 bits, unsigned.
    """
    x = base
    for number in numbers:
        x = (x + 0x9E3779B97F4A7C15 * (number + 1)) & _ALL
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _ALL
        x ^= x >> 31
    return x & _SEEDS


def seed_generators(seed: int) -> None:
    """Seed python's, numpy's legacy and torch's default generator.

    Args:
        seed: >= 0; numpy gets its low 32 bits.

    Cost:
        About 7 us; no device is touched.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
