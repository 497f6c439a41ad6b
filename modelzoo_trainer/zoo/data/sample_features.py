"""Shapes and types of the samples that a data processor will make, without reading its data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from modelzoo_trainer.core.parts.model_length import LENGTH, NO_LIMIT, PAIR_LENGTHS
from modelzoo_trainer.errors import ConfigError


class Feature(NamedTuple):
    """A tensor of a sample.

    Args:
        shape: Its shape; a batch has the samples in front.
        dtype: Its type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int32


Features = Mapping[str, Any] | tuple[Feature, ...]
"""The tensors of a sample: by key, with mappings inside, or a tuple of them."""


def rows_of(names: Iterable[str], length: int) -> dict[str, Feature]:
    """Return integers for each of `length` positions, by name."""
    return {name: Feature((length,)) for name in names}


def length_without_data(processor: Any, model: Any, argument: str = "max_sequence_length") -> int:
    """Return the length of samples: the argument of a processor, else the length of the model.

    Raises:
        ConfigError: If neither is known.
    """
    given: int | None = getattr(processor, argument, None)
    if given is not None:
        return given
    name = (LENGTH | PAIR_LENGTHS)[argument]
    found = getattr(model, name, None)
    if type(found) is not int or found >= NO_LIMIT:
        raise ConfigError(
            f"{type(processor).__name__}: the length of the samples is not known without the data. "
            f"Set {argument}, or {name} of the model, or plan with --data, which reads a batch."
        )
    return found
