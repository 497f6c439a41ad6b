"""The batch of a plan: as a data processor describes it, or the first one of the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._pytree import tree_leaves, tree_map

from modelzoo_trainer.callback import Batch
from modelzoo_trainer.config.printout.hooks import micro_batch_sizes
from modelzoo_trainer.core.parts.model_length import lengths_of
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.batches import batch_size_of, split_batch
from modelzoo_trainer.loading.dataset_info import check_model
from modelzoo_trainer.loading.epochs import resolve_loader
from modelzoo_trainer.zoo.data.sample_features import Feature

if TYPE_CHECKING:
    from modelzoo_trainer.config.components import Component
    from modelzoo_trainer.config.plan import TrainerPlan

_LOADER = "train_dataloader"
_MEASURED = 2  # micro-batches: one that only accumulates gradients, and the last


class Samples(NamedTuple):
    """What a dataloader yields: the number of samples of a batch, and batches of fewer."""

    num: int
    is_global: bool  # of all processes
    take: Callable[[int], Batch]


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """The batch of one process that is measured, and how it differs from the one of a run."""

    batch: Batch  # with at most `_MEASURED` micro-batches
    num_samples: int  # of the run, in a batch of this process
    num_parts: int  # micro-batches of a batch of the run

    @property
    def micro_batch_size(self) -> int:
        """Samples of a full micro-batch."""
        return -(-self.num_samples // self.num_parts)

    @property
    def missing_bytes(self) -> int:
        """Bytes of the samples that are not in `batch`."""
        num = batch_size_of(self.batch)
        leaves = [leaf for leaf in tree_leaves(self.batch) if isinstance(leaf, Tensor)]
        return sum(leaf.nbytes for leaf in leaves) // num * (self.num_samples - num)

    def weights(self, num_batches: int) -> list[int]:
        """Return how often each measured micro-batch occurs in a step of `num_batches`."""
        return [
            outer * inner for outer in repeated(num_batches) for inner in repeated(self.num_parts)
        ]


def repeated(num: int) -> list[int]:
    """Return how often each measured one of so many micro-batches occurs; the last, once."""
    return [num - 1, 1] if num > 1 else [1]


def local_batch(plan: TrainerPlan, samples: Samples, num_shards: int) -> LocalBatch:
    """Return the batch of one process.

    Raises:
        ConfigError: If the processes cannot have equally many samples.
    """
    num = samples.num
    if samples.is_global:
        if num % num_shards:
            raise ConfigError(
                f"{_LOADER}: a batch size of {num} over all processes is not divisible by the "
                f"data-parallel size {num_shards}. Use a multiple of {num_shards} or another "
                f"--world-size."
            )
        num //= num_shards
    size = min(micro_batch_sizes(plan).train or num, num)
    num_parts = -(-num // size)
    left_out = max(0, num_parts - _MEASURED) * size
    return LocalBatch(samples.take(num - left_out), num, num_parts)


def find_samples(plan: TrainerPlan, model: Module, *, use_data: bool = False) -> Samples:
    """Return what the training data are.

    Args:
        plan: The plan.
        model: Whose settings the data may follow.
        use_data: Whether to read the data, also if the data processor can do without.

    Raises:
        ConfigError: If the samples cannot be known, or there are none.
    """
    component = plan.call[_LOADER]
    found = None if use_data else component.placed(lambda: _described(component, model))
    return found or _loaded(plan, component, model, use_data=use_data)


def _described(component: Component, model: Module) -> Samples | None:
    """Return what a data processor says of its samples; None if it says nothing."""
    unopened = getattr(component.target, "unopened", None)
    if unopened is None:
        return None
    processor = unopened(**component.arguments)
    features = processor.sample_features(model)
    if features is None:
        return None
    options = processor.loading_options()

    def take(num: int) -> Any:
        def tensor(one: Feature) -> Tensor:
            return torch.empty((num, *one.shape), dtype=one.dtype)

        return tree_map(tensor, features, is_leaf=lambda one: isinstance(one, Feature))

    return Samples(options.num_drawn, options.global_batch_size is not None, take)


def _loaded(plan: TrainerPlan, component: Component, model: Module, *, use_data: bool) -> Samples:
    with lengths_of(model):
        try:
            made = component.build()
            loader = resolve_loader(getattr(made, "create_dataloader", made), _LOADER)
        except ConfigError as error:
            if use_data:
                raise
            name = component.target.__name__
            raise ConfigError(
                f"plan cannot know the samples of {name} without its data: {error}"
            ) from error
    check_model(loader, model)
    for batch in loader:

        def take(num: int, batch: Batch = batch) -> Any:
            return batch if num == batch_size_of(batch) else split_batch(batch, num)[0]

        is_global = getattr(loader, "is_global_batch", False) is True
        return Samples(batch_size_of(batch), is_global, take)
    raise ConfigError(
        f"{_LOADER} yields no batch. Check the data, the split, and whether drop_last with this "
        f"batch_size drops all samples."
    )


class Copies:
    """The same batch repeated; every process has its own copy of the same shape."""

    def __init__(self, batch: Batch, num: int) -> None:
        self._batch = batch
        self._num = num

    def __iter__(self) -> Iterator[Batch]:
        return iter([self._batch] * self._num)
