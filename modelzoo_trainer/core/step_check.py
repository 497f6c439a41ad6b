"""What is asked of one optimizer step, and what was found."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from modelzoo_trainer.devices import Backend


@dataclass(slots=True)
class StepCheck:
    """A look at the gradients before a step, all of it on the device.

    Whoever wants one gives it to `precision.check_step` in `on_before_optimizer_step`, and finds
    its results in `on_after_optimizer_step`.

    Args:
        bad: (), bool: whether the step is bad already. Afterwards: whether it was, on any process.
        gradients: Whether gradients whose norm is not finite make it bad. Under a loss scaler
            they do not: the scaler expects them, and leaves such a step out itself.
        masks: Whether a bad step leaves parameters and the optimizer's state as they are.
    """

    bad: Tensor
    gradients: bool
    masks: bool
    norm: Tensor | None = None
    """The gradients' norm before clipping, if it was looked at."""

    def judge(self, backend: Backend, norm: Tensor | None) -> None:
        """Judge the norm, None = not asked for, and agree with the other processes. Collective."""
        self.norm = norm
        if norm is not None:
            self.bad = self.bad | norm.isfinite().logical_not()
        if backend.comm.world_size > 1:
            self.bad = backend.comm.reduce(self.bad.float(), "max") > 0
