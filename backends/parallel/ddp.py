"""Weights and losses of batches, summed over processes: beside the gradients, or with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn import Module, Parameter
from typing_extensions import override

from ..loss_window import LossWindow, weighted_loss
from .comm import DistributedComm


class LossWeighting(Module):
    """A model, and two numbers whose gradient is the sums of a window: of weights, and of losses.

    The numbers are part of no computation: their gradient is given to autograd. It is accumulated
    and reduced with those of the model, so that processes learn the sums at no further message.

    The model's parameters are of one type, float32 or float64.
    """

    def __init__(self, model: Module) -> None:
        super().__init__()
        self.model = model
        dtype = next(param.dtype for param in model.parameters() if param.is_floating_point())
        self.probe = Parameter(torch.zeros(2, dtype=dtype))
        self._known: dict[float, Tensor] = {}
        self._noted: Tensor | None = None
        self._one: Tensor | None = None

    @staticmethod
    def fits(model: Module) -> bool:
        """Return whether a model's gradients count finely enough."""
        dtypes = {param.dtype for param in model.parameters() if param.is_floating_point()}
        return len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns; nobody has hooks here, so that nothing looks for any."""
        return self.model(*args, **kwargs)

    def weigh(self, weight: Any, loss: Tensor | None) -> None:
        """Note a batch, whose backward pass is next.

        The weight is a number or (); the loss (), None = it is not wanted.
        """
        known = self._known.get(weight) if loss is None and type(weight) is float else None
        if known is None:
            with torch.no_grad():
                known = self._pair(weight, loss)
        self._noted = known

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients, and before them, so that none waits, what was noted."""
        noted, self._noted = self._noted, None
        if noted is None:
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            return
        one = self._one
        if one is None or not _is_like(loss, one):
            is_plain = type(loss) is Tensor and loss.is_floating_point() and loss.numel() == 1
            one = self._one = torch.ones_like(loss.detach()) if is_plain else None
        if one is None:
            torch.autograd.backward([self.probe, loss], [noted, None])
            return
        # What that ends in. Before, it compares the shapes of each gradient in Python, which takes
        # longer than the gradients of a small layer.
        _engine_run_backward(
            (self.probe, loss),
            (noted, one),
            False,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )

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
        self._noted = self.probe.grad = None


def _is_like(loss: Tensor, one: Tensor) -> bool:
    """Return whether a gradient fits a loss."""
    return (
        type(loss) is Tensor
        and loss.dtype is one.dtype
        and loss.shape == one.shape
        and loss.device == one.device
    )


class ReducedWindow(LossWindow):
    """The window of several processes; its sums are reduced when they are first asked for."""

    def __init__(self, comm: DistributedComm, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self._comm = comm
        self._device = device
        self._dtype = dtype
        self._reduced: tuple[Any, Any] | None = None

    @override
    def sums(self) -> tuple[Any, Any]:
        if self._reduced is None:
            self._reduced = self._reduce()
        return self._reduced

    def _reduce(self) -> tuple[Any, Any]:
        found = [
            value.to(self._dtype)
            if isinstance(value, Tensor)
            else torch.full((), float(value), dtype=self._dtype, device=self._device)
            for value in super().sums()[: 1 + bool(self._losses)]
        ]
        sums = self._comm.reduce(torch.stack(found), "mean").unbind()
        return sums[0], sums[-1] if len(sums) > 1 else 0

    @override
    def reset(self) -> None:
        super().reset()
        self._reduced = None


class GradientWindow(LossWindow):
    """The window of several processes whose sums are reduced with the gradients of the model."""

    def __init__(self, weighting: LossWeighting) -> None:
        super().__init__()
        self._weighting = weighting
        self._reduced: tuple[Any, Any] | None = None

    @override
    def add(self, weight: Any, loss: Tensor | None = None) -> None:
        self._weighting.weigh(weight, loss)

    @override
    def sums(self) -> tuple[Any, Any]:
        if self._reduced is None:
            self._reduced = self._weighting.sums()
        return self._reduced

    @override
    def reset(self) -> None:
        self._reduced = None
        self._weighting.drop()
