"""Sums of weights and losses over ranks: separate, or reduced with the gradients."""

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
    """A model plus two parameters whose gradients are the window's sums of weights and losses.

    The two parameters are not used in the forward pass: `GradientWindow` passes their gradient to
    autograd. It is accumulated and reduced with the gradients of the model, so the sums need no
    extra message.

    All parameters of the model have one dtype, float32 or float64.
    """

    def __init__(self, model: Module) -> None:
        super().__init__()
        self.model = model
        dtype = next(param.dtype for param in model.parameters() if param.is_floating_point())
        self.probe = Parameter(torch.zeros(2, dtype=dtype))

    @staticmethod
    def fits(model: Module) -> bool:
        """Return whether the dtype of a model's gradients is precise enough."""
        dtypes = {param.dtype for param in model.parameters() if param.is_floating_point()}
        return len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model directly; no module hooks are used here."""
        return self.model(*args, **kwargs)


class ReducedWindow(LossWindow):
    """The window with several ranks; sums are reduced on first access."""

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
    """The window with several ranks whose sums are reduced with the model's gradients.

    Created once the model is on its device. State that changes with each batch is kept here and not
    in the module, where setting an attribute takes as long as a small layer.
    """

    def __init__(self, weighting: LossWeighting) -> None:
        super().__init__()
        self._probe = weighting.probe
        self._reduced: tuple[Any, Any] | None = None
        self._known: dict[float, Tensor] = {}
        self._noted: Tensor | None = None
        self._one: Tensor | None = None

    @override
    def add(self, weight: Any, loss: Tensor | None = None) -> None:
        noted = self._known.get(weight) if loss is None and type(weight) is float else None
        if noted is None:
            with torch.no_grad():
                noted = self._pair(weight, loss)
        self._noted = noted

    def _pair(self, weight: Any, loss: Tensor | None) -> Tensor:
        probe = self._probe
        if isinstance(weight, Tensor):
            counted = weight.to(probe)
            weighted = (
                torch.zeros_like(counted)
                if loss is None
                else weighted_loss(loss.to(probe), counted)
            )
            return torch.stack((counted, weighted))
        known = self._known.get(weight)
        if known is None:
            self._known.clear()
            known = self._known[weight] = probe.new_tensor([weight, 0.0])
        if loss is None:
            return known
        return torch.stack((known[0], weighted_loss(loss.to(probe), weight)))

    def backward(self, loss: Tensor) -> None:
        """Accumulate a loss's gradients, and before them the gradients of the last `add`."""
        noted, self._noted = self._noted, None
        if noted is None:
            loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
            return
        one = self._one
        if one is None or not _is_like(loss, one):
            is_plain = type(loss) is Tensor and loss.is_floating_point() and loss.numel() == 1
            one = self._one = torch.ones_like(loss.detach()) if is_plain else None
        if one is None:
            torch.autograd.backward([self._probe, loss], [noted, None])
            return
        # The function behind `backward`, which first compares the shapes of all gradients in
        # Python; that takes longer than the gradients of a small layer.
        _engine_run_backward(
            (self._probe, loss),
            (noted, one),
            False,
            False,
            (),
            allow_unreachable=True,
            accumulate_grad=True,
        )

    @override
    def sums(self) -> tuple[Any, Any]:
        if self._reduced is None:
            assert self._probe.grad is not None  # set by `add`
            weight, loss = self._probe.grad.clone().unbind()
            self._reduced = weight, loss
        return self._reduced

    @override
    def reset(self) -> None:
        self._reduced = self._noted = self._probe.grad = None


def _is_like(loss: Tensor, one: Tensor) -> bool:
    """Return whether a gradient has the shape, dtype and device of a loss."""
    return (
        type(loss) is Tensor
        and loss.dtype is one.dtype
        and loss.shape == one.shape
        and loss.device == one.device
    )
