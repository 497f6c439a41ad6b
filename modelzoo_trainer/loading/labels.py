"""Batches without any label that counts, from which nothing can be learned or measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from modelzoo_trainer.base.devices import Backend, Comm
from modelzoo_trainer.callback import Batch
from modelzoo_trainer.errors import ConfigError

_WHY: Final = (
    "each one is -100 or has the weight 0 in its mask. Check how labels and masks are made: which "
    "part of a text is trained on, and whether truncation cuts that part off."
)


class FirstLabels:
    """Counts the labels of the first batch of a run, in host memory.

    A later batch without a label has no weight, and is no error.

    Args:
        model: Its method `count_labels(batch)`, if it has one, returns how many labels of a batch
            count, as a tensor (), or None if that is not known.
    """

    def __init__(self, model: Any) -> None:
        self._count = getattr(model, "count_labels", None)
        self._num: int | None = None

    def then(self, inspect: Callable[[Batch], None] | None) -> Callable[[Batch], None] | None:
        """Return a function that calls another one with the first batch, then counts its labels."""
        count = self._count
        if count is None:
            return inspect

        def both(batch: Batch) -> None:
            if inspect is not None:
                inspect(batch)
            self._num = _on_host(count(batch))

        return both

    def require_any(self, comm: Comm) -> None:
        """Check that the batch has a label that counts on any process. Collective.

        Raises:
            ConfigError: If it has none.
        """
        if self._count is not None and not comm.any_true(self._num is None or self._num > 0):
            raise ConfigError(f"The first batch has no label that counts: {_WHY}")


class ValidationLabels:
    """Whether any label of a validation counts: added up on the device, read at its end."""

    def __init__(self) -> None:
        self._num: Any = 0
        self._num_batches = 0

    def reset(self) -> None:
        """Forget all batches."""
        self._num = self._num_batches = 0

    def add(self, model: Any, batch: Batch, weight: Any) -> None:
        """Add a batch.

        Args:
            model: As for `FirstLabels`.
            batch: The batch.
            weight: Of its loss, 0 for a padding batch; stands for the number of labels if that is
                not known.

        Cost:
            No host read.
        """
        count = getattr(model, "count_labels", None)
        is_padding = type(weight) is int and weight == 0
        found = None if count is None or is_padding else count(batch)
        num = weight if found is None else found
        # Only whether there are any matters: sums of float32 are never rounded to 0.
        self._num = self._num + (num.detach().float() if isinstance(num, Tensor) else num)
        self._num_batches += 1

    def require_any(self, backend: Backend, read: Callable[..., None]) -> None:
        """Check that a label of a complete validation counts on any process. Collective.

        Args:
            backend: Reduces the number.
            read: `Trainer.read`.

        Raises:
            ConfigError: When the number is read, if it is 0.
        """
        num, num_batches = self._num, self._num_batches
        self.reset()
        if backend.comm.world_size == 1:
            if isinstance(num, Tensor):
                read([num], lambda values: _require_labels(values[0]))
            return
        pair = torch.full((2,), float(num_batches), device=backend.device)
        pair[0] = num
        pair = backend.comm.reduce(pair)  # another process may have had batches with a loss
        read([pair], lambda values: _require_labels(values[0][0] + (values[0][1] == 0)))


def _require_labels(num: Any) -> None:
    if num == 0:
        raise ConfigError(
            f"The validation has no label that counts, so its loss is of nothing: {_WHY}"
        )


def _on_host(num: Tensor | None) -> int | None:
    """Return a number; None if it is not known, as in a plan, whose tensors have no values."""
    if num is None or torch._guards.detect_fake_mode([num]) is not None:
        return None
    return int(num.item())  # host read: of a batch that has not been moved yet
