"""Seeds of steps: random numbers that only depend on (seed, step, place among the ranks)."""

import enum
from typing import Final

MASK: Final = (1 << 62) - 1
GAMMA: Final = 0x9E3779B1  # 2**32 / golden ratio, odd: different low words for 2**32 steps
_ALL: Final = (1 << 64) - 1


class Stream(enum.IntEnum):
    """Purpose of a seed; different streams never share numbers.

    EPOCH is for the order of an epoch, SAMPLE for loading samples, FETCH for fetching batches from
    a loader whose samples are not known, and for the host's generators afterwards.
    """

    TRAIN = 0
    VALIDATE = 1
    EPOCH = 2
    SAMPLE = 3
    FETCH = 4


def stream_base(seed: int, stream: int = 0, place: int = 0) -> int:
    """Return the base of the seeds of a stream's steps.

    Mixed by the finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, OOPSLA 2014), so that streams, shards and close seeds give unrelated numbers.

    `place`: `Comm.seed_place` of this rank.

    Returns:
        62 bits, unsigned.
    """
    x = seed + 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03 * stream + 0xABC98388FB8FAC03 * place
    x &= _ALL
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _ALL
    return (x ^ (x >> 31)) & MASK


def step_seed(seed: int, index: int, stream: int = 0, place: int = 0) -> int:
    """Return the seed of one step: the stream's base plus `index` golden-ratio steps.

    `index`: number of the step within its stream, >= 0. `place`: `Comm.seed_place` of this rank.

    Returns:
        62 bits, unsigned; different for each index.
    """
    return (stream_base(seed, stream, place) + GAMMA * index) & MASK
