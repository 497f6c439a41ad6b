"""The averaged weights of a checkpoint in place of the model's own."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from modelzoo_trainer.errors import CheckpointError
from modelzoo_trainer.zoo.conversion.engine import TensorSource
from modelzoo_trainer.zoo.conversion.weights_folder import Shape


class Averaged:
    """A source of averages, in the dtypes of the weights, and of weights that have none.

    Args:
        source: The weights of the model.
        averages: The averages, by the names of the weights; of shared weights, one of these.
        shared: Groups of names of shared weights.
        where: Where the tensors are, for messages.

    Raises:
        CheckpointError: If there is an average of a weight that the model does not have.
    """

    def __init__(
        self,
        source: TensorSource,
        averages: TensorSource,
        *,
        shared: Iterable[Collection[str]] = (),
        where: str,
    ) -> None:
        self._source = source
        self._averages = averages
        self._stored = {name: name for name in averages.names()}
        odd = sorted(self._stored.keys() - set(source.names()))
        if odd:
            raise CheckpointError(
                f"{where} has the average of {odd[0]!r}, but no such weight. Omit --averaged."
            )
        for names in shared:
            stored = next((name for name in names if name in self._stored), None)
            if stored is not None:
                self._stored |= {name: stored for name in names if name not in self._stored}

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._source.names()

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor."""
        return self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor: the weight's."""
        return self._source.dtype(name)

    def read(self, name: str) -> Tensor:
        """Return a tensor on the host."""
        stored = self._stored.get(name)
        if stored is None:
            return self._source.read(name)
        return self._averages.read(stored).to(self._source.dtype(name))
