"""Weights and losses of batches that travel with the gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter


class Weighed(Module):
    """A model, and two numbers whose gradient is the sums of a window: of weights, and of losses.

    The numbers are part of no computation: their gradient is given to autograd. It is accumulated
    and reduced with those of the model, so that processes learn the sums at no further message.

    Args:
        model: What is called. Its parameters are of one type, float32 or float64.
    """

    def __init__(self, model: Module) -> None:
        super().__init__()
        self.model = model
        dtype = next(param.dtype for param in model.parameters() if param.is_floating_point())
        self.probe = Parameter(torch.zeros(2, dtype=dtype))
        self._known: dict[float, Tensor] = {}

    @staticmethod
    def takes(model: Module) -> bool:
        """Return whether a model's gradients count finely enough."""
        dtypes = {param.dtype for param in model.parameters() if param.is_floating_point()}
        return len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        return self.model(*args, **kwargs)

    def weigh(self, weight: Any, loss: Tensor | None) -> None:
        """Add a batch; between its forward and its backward pass, so that no gradient waits.

        Args:
            weight: A number, or a tensor without dimensions.
            loss: The batch's, (); None = it is not wanted.
        """
        with torch.no_grad():
            both = self._pair(weight, loss)
        torch.autograd.backward([self.probe], [both])

    def _pair(self, weight: Any, loss: Tensor | None) -> Tensor:
        if loss is None and not isinstance(weight, Tensor):
            known = self._known.get(weight)
            if known is None:
                self._known.clear()
                known = self._known[weight] = self.probe.new_tensor([weight, 0.0])
            return known
        probe = self.probe
        counted = weight.to(probe) if isinstance(weight, Tensor) else probe.new_full((), weight)
        weighted = counted.new_zeros(()) if loss is None else weighted_loss(loss.to(probe), counted)
        return torch.stack((counted, weighted))

    def sums(self) -> tuple[Tensor, Tensor]:
        """Return the sums so far; of all processes, on average, if gradients were reduced."""
        assert self.probe.grad is not None  # a batch was added
        weight, loss = self.probe.grad.clone().unbind()
        return weight, loss

    def drop(self) -> None:
        """Begin another window."""
        self.probe.grad = None


def weighted_loss(loss: Tensor, weight: Any) -> Tensor:
    """Return a loss times its weight, (); 0 without weight, as the mean of nothing may be NaN."""
    product = loss.detach().reshape(()) * weight
    nothing = torch.zeros_like(product)
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, nothing, product)
    return product if weight else nothing
