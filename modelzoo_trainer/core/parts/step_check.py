"""The check of one optimizer step, and its result."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from modelzoo_trainer.base.devices import Backend


@dataclass(slots=True)
class StepCheck:
    """A check of the gradients before a step, on the device.

    A callback passes it to `precision.check_step` in `on_before_optimizer_step`, and reads its
    results in `on_after_optimizer_step`.

    Args:
        bad: (), bool: whether the step is already bad. Afterwards: whether it is, on any process.
        gradients: Whether non-finite gradients make it bad. Ignored with a loss scaler, which
            skips such steps itself.
        masks: Whether a bad step leaves parameters and optimizer state unchanged.
    """

    bad: Tensor
    gradients: bool
    masks: bool
    norm: Tensor | None = None
    """The norm of the gradients before clipping, if checked."""

    def judge(self, backend: Backend, norm: Tensor | None) -> None:
        """Update `bad` with the norm, if given, and on all processes. Collective."""
        self.norm = norm
        if norm is not None:
            self.bad = self.bad | norm.isfinite().logical_not()
        if backend.comm.world_size > 1:
            self.bad = backend.comm.reduce(self.bad.float(), "max") > 0
