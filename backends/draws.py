"""Random initial values that each rank draws for its own part of a tensor.

A tensor is divided into tiles. Each tile has its own seed, made of the run's seed, the tensor's
name, and its place: which rank draws it does not matter, and its neighbours are not drawn for it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

Region = tuple[slice, ...]
Draw = Callable[[Tensor, torch.Generator], object]

_TILE_NUMBERS: Final = 1 << 18
"""So many that a seed costs little, and so few that they stay in a cache."""
_TILE_COLUMNS: Final = 1024
_LEAST_INSIDE: Final = 0.3  # share of a normal distribution below which torch draws otherwise


@dataclass(frozen=True, slots=True)
class Seeds:
    """Seeds of tiles.

    `run`: the run's seed. `name`: the tensor's name and which of its draws this is.
    """

    run: int
    name: str

    def of_tile(self, index: tuple[int, ...]) -> int:
        """Return the seed of a tile by its index along each dimension."""
        text = f"{self.run}/{self.name}/{','.join(map(str, index))}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def fill(own: Tensor, part: Region, shape: torch.Size, seeds: Seeds, draw: Draw) -> None:
    """Fill a part of a tensor with random numbers, in place.

    They are drawn on the host, by `torch.get_num_threads()` threads. They depend on neither the
    device, nor the part, nor the number of ranks.

    Args:
        own: The values of the part, of its shape.
        part: Where it is in the tensor.
        shape: Of the whole tensor.
        seeds: Of this draw.
        draw: Fills a float tile with a generator.
    """
    if not own.numel() or isinstance(own, FakeTensor):
        return
    own = own.detach()  # other threads record gradients
    dtype = own.dtype if own.dtype == torch.float64 else torch.float32

    def fill_tile(cuts: tuple[_Cut, ...]) -> None:
        generator = torch.Generator().manual_seed(seeds.of_tile(tuple(cut.index for cut in cuts)))
        tile = torch.empty([cut.length for cut in cuts], dtype=dtype, device="cpu")
        draw(tile, generator)
        values = tile[tuple(cut.in_tile for cut in cuts)]
        own[tuple(cut.in_part for cut in cuts)].copy_(values)

    sizes = _tile_sizes(shape)
    along = [list(_cuts(*one)) for one in zip(part, sizes, shape, strict=True)]
    tiles = list(product(*along))
    if len(tiles) == 1:
        fill_tile(tiles[0])
        return
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for _ in threads.map(fill_tile, tiles):  # raises what they raise
            pass


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where a tile and a part meet, along one dimension."""

    index: int  # of the tile
    length: int  # of the tile
    in_tile: slice
    in_part: slice


def _cuts(part: slice, size: int, length: int) -> Iterator[_Cut]:
    """Yield what a part has of tiles of a size, in a dimension of a length."""
    for index in range(part.start // size, -(-part.stop // size)):
        begin, end = index * size, min((index + 1) * size, length)
        start, stop = max(begin, part.start), min(end, part.stop)
        yield _Cut(
            index=index,
            length=end - begin,
            in_tile=slice(start - begin, stop - begin),
            in_part=slice(start - part.start, stop - part.start),
        )


def _tile_sizes(shape: torch.Size) -> list[int]:
    """Return the extent of a tile along each dimension: rows of at most so many columns."""
    left = _TILE_NUMBERS
    sizes = [min(shape[-1], _TILE_COLUMNS)] if shape else []
    for size in reversed(shape[:-1]):
        left //= max(sizes[0], 1)
        sizes.insert(0, max(1, min(size, left)))
    return sizes


def truncated(mean: float, std: float, a: float, b: float) -> Draw:
    """Return how a tile is filled from a normal distribution within [a, b].

    Values outside are drawn again, like torch's `trunc_normal_`, which draws all of them again.
    """
    inside = 0.5 * (math.erf((b - mean) / std / 2**0.5) - math.erf((a - mean) / std / 2**0.5))
    if inside < _LEAST_INSIDE:
        return lambda tile, generator: torch.nn.init.trunc_normal_(
            tile, mean, std, a, b, generator=generator
        )

    def draw(tile: Tensor, generator: torch.Generator) -> None:
        flat = tile.view(-1).normal_(mean, std, generator=generator)
        values = flat.numpy()
        outside = np.flatnonzero((values < a) | (values > b))
        while outside.size:
            again = torch.empty(outside.size, dtype=flat.dtype, device="cpu")
            values[outside] = drawn = again.normal_(mean, std, generator=generator).numpy()
            outside = outside[(drawn < a) | (drawn > b)]

    return draw
