"""Weights of batches that travel with the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module, Parameter


class Weighed(Module):
    """A model, and a parameter whose gradient is the weight of a batch.

    The parameter is 0 and is added to the loss, times the weight. Its gradient is reduced with
    those of the model, so that the processes learn the sum of their weights at no further message.

    Args:
        model: What is called.
        probe: From `probe_for`.
    """

    def __init__(self, model: Module, probe: Parameter) -> None:
        super().__init__()
        self.model = model
        self.probe = probe

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        return self.model(*args, **kwargs)


def probe_for(model: Module) -> Parameter | None:
    """Return a parameter of the type of the model's; None if that counts too coarsely."""
    dtypes = {param.dtype for param in model.parameters() if param.is_floating_point()}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.float64}:
        return None
    return Parameter(torch.zeros((), dtype=dtypes.pop()))
