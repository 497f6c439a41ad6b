"""Precision: how the loss is differentiated and the parameters are updated."""

from __future__ import annotations

import logging
import math
import warnings
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from modelzoo_trainer.base.constraints import PositiveFloat, PositiveInt, checked_dataclass
from modelzoo_trainer.base.devices import Backend
from modelzoo_trainer.base.dtypes import HalfFloat, dtype_name
from modelzoo_trainer.callback import Batch, CoreCallback, Outputs, StateDict
from modelzoo_trainer.core.parts.float8 import Recipe, check_float8, with_float8
from modelzoo_trainer.core.parts.step_check import StepCheck
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.core.model import ModelCallback
    from modelzoo_trainer.trainer import Trainer


class Precision(CoreCallback):
    """Full precision: the types of the model, without loss scaling or clipping."""

    _backend: Backend
    autocast: AbstractContextManager[Any] | None = None
    """The reusable context of the forward pass; None = none."""
    dtype: torch.dtype | None = None
    """The dtype that it computes in, where that is safe."""
    _check: StepCheck | None = None

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        self._backend = trainer.backend

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the loss, added to the current ones."""
        self._backend.backward(loss)

    def check_step(self, check: StepCheck | None) -> None:
        """Check the current step; called in `on_before_optimizer_step`.

        Args:
            check: Has its results after the step. None = cancel.
        """
        self._check = check

    def overflows(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the overflow flags of the loss scaler for the current step.

        Returns:
            On the device, each with one element, > 0 if the scaler skips the step; empty without
            a scaler.
        """
        return []

    def optimizer_step(self, optimizer: Optimizer) -> None:
        """Clip the gradients if configured, and update the parameters."""
        check = self._check
        if check is None:
            self._backend.optimizer_step(optimizer)
            return
        self._check = None
        params = parameters_of(optimizer)
        norm = self._backend.norms.grad_norm(params) if check.gradients else None
        check.judge(self._backend, norm)
        self._backend.optimizer_step(optimizer, check.bad.logical_not() if check.masks else None)

    def defer_scale(self) -> None:
        """Update the loss scale only in `update_scale`: several optimizers share it."""

    def update_scale(self) -> None:
        """Update the loss scale after the steps since the last call."""


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


log = logging.getLogger("modelzoo_trainer.precision")

_DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "cbfloat16": torch.bfloat16,  # a hardware type of the format's origin; bfloat16 is nearest
    "float16": torch.float16,
}


@checked_dataclass(owner="precision")
class MixedPrecision(Precision):
    """Run the forward pass in autocast with a 16-bit type; scale losses and clip gradients.

    Losses are scaled only for float16; with bfloat16 the scaling arguments have no effect.

    Args:
        enabled: Use the 16-bit type; clipping works either way.
        fp16_type: The 16-bit type, or an alias such as "bf16"; "cbfloat16" means bfloat16 here.
        precision_opt_level: Accepted for compatibility; no effect on this hardware.
        loss_scaling_factor: A constant, "dynamic", or None = "dynamic" if scaling is needed.
        initial_loss_scale: Initial scale of dynamic scaling; None = 65536.
        steps_per_increase: Steps without overflow until a dynamic scale doubles.
        min_loss_scale: Lower bound of a dynamic scale.
        max_loss_scale: Upper bound of a dynamic scale.
        max_gradient_norm: Clip the total 2-norm of the gradients to this, > 0.
        max_gradient_value: Clip each element to [-value, value], > 0; excludes `max_gradient_norm`.
        log_loss_scale: Log `loss_scale`; None = if scaling is dynamic.
        fp8: Multiply in float8 in the linear layers of the model's blocks, by a recipe of torchao:
            "tensorwise", "rowwise" or "rowwise_with_gw_hp"; None = do not. Weights are unchanged.

    State: `grad_scaler`, if there is one.

    Raises:
        ConfigError: If a value is out of range, or both kinds of clipping are given; at set-up, if
            `fp8` does not work here.
    """

    enabled: bool = True
    fp16_type: HalfFloat = "bfloat16"
    precision_opt_level: Literal[0, 1, 2] | None = None
    loss_scaling_factor: PositiveFloat | Literal["dynamic"] | None = 1.0
    initial_loss_scale: PositiveFloat | None = None
    steps_per_increase: PositiveInt = 2000
    min_loss_scale: PositiveFloat | None = None
    max_loss_scale: PositiveFloat | None = None
    max_gradient_norm: PositiveFloat | None = None
    max_gradient_value: PositiveFloat | None = None
    log_loss_scale: bool | None = None
    fp8: Recipe | None = None

    def __post_init__(self) -> None:
        if self.max_gradient_norm is not None and self.max_gradient_value is not None:
            raise ConfigError(
                f"precision: set either max_gradient_norm or max_gradient_value, not both; got "
                f"{self.max_gradient_norm} and {self.max_gradient_value}."
            )
        self.fp16_type: str = dtype_name(self.fp16_type)
        if self.fp8 is not None and not (self.enabled and self.fp16_type == "bfloat16"):
            raise ConfigError(
                f"precision.fp8 is {self.fp8}; it requires enabled: true and fp16_type: bfloat16."
            )
        factor = self.loss_scaling_factor
        if not isinstance(factor, str) and factor is not None:
            self.loss_scaling_factor = float(factor)  # may be a number of numpy or torch
        self.scaler: torch.amp.GradScaler | None = None
        self._defers_scale = False
        self._owes_scale = False

    @property
    def notes(self) -> list[str]:
        """Notes on settings for other hardware."""
        if not self.enabled:
            return []
        found = []
        if self.fp16_type == "cbfloat16":
            found.append("fp16_type cbfloat16 is bfloat16 here.")
        if self.precision_opt_level is not None:
            found.append("precision_opt_level: no effect on this hardware.")
        if self.fp16_type != "float16" and self.loss_scaling_factor != 1.0:
            found.append(
                "loss_scaling_factor: no effect with bfloat16, which needs no loss scaling."
            )
        return found

    @override
    def pre_setup(self, trainer: Trainer) -> None:
        super().pre_setup(trainer)
        if not self.enabled:
            return
        caps = trainer.backend.caps
        dtype = _DTYPES[self.fp16_type]
        if dtype in caps.refused_dtypes:
            raise ConfigError(
                f"precision.fp16_type {self.fp16_type} does not work on {trainer.backend.device}: "
                f"{caps.refused_dtypes[dtype]}. Use bfloat16."
            )
        if dtype not in caps.autocast_dtypes:
            warnings.warn(
                f"precision.fp16_type {self.fp16_type} does not work on {trainer.backend.device}; "
                f"using bfloat16.",
                stacklevel=2,
            )
            dtype = torch.bfloat16
        self.autocast, self.dtype = trainer.backend.autocast(dtype), dtype
        if self.fp8 is not None:
            check_float8(caps.no_float8)
            model: ModelCallback = trainer.callbacks["model"]
            model.change(partial(with_float8, self.fp8), needs_values=False)
        if dtype in caps.needs_scaler:
            self.scaler = trainer.backend.grad_scaler(**self._scaler_options())
        elif self.loss_scaling_factor != 1.0:
            log.info("Not scaling the loss: %s does not need it.", dtype)

    def _scaler_options(self) -> dict[str, Any]:
        if isinstance(self.loss_scaling_factor, (int, float)):
            return {"init_scale": float(self.loss_scaling_factor), "growth_interval": 2**31 - 1}
        return {
            "init_scale": self.initial_loss_scale or 65536.0,
            "growth_interval": self.steps_per_increase,
        }

    @override
    def backward(self, loss: Tensor) -> None:
        super().backward(loss if self.scaler is None else self.scaler.scale(loss))

    @override
    def on_before_optimizer_step(
        self, trainer: Trainer, model: Module, optimizer: Optimizer
    ) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def clip_gradients(self, optimizer: Optimizer) -> Tensor | None:
        """Clip the gradients, in place.

        Returns:
            Their norm before, on the device, if clipped by norm.
        """
        if self.max_gradient_norm is not None:
            params = parameters_of(optimizer)
            return self._backend.norms.clip_grad_norm(params, self.max_gradient_norm)
        if self.max_gradient_value is not None:
            self._backend.norms.clip_grad_value(parameters_of(optimizer), self.max_gradient_value)
        return None

    @override
    def optimizer_step(self, optimizer: Optimizer) -> None:
        check, self._check = self._check, None
        if check is None:
            self.clip_gradients(optimizer)
        else:
            self._clip_and_check(optimizer, check)
        if self.scaler is None:
            keep = None if check is None or not check.masks else check.bad.logical_not()
            self._backend.optimizer_step(optimizer, keep)
        else:
            self._scaled_step(optimizer, self.scaler, check)

    @override
    def overflows(self, optimizer: Optimizer) -> list[Tensor]:
        # torch has no public name for this result of unscale_.
        scaler = self.scaler
        return [] if scaler is None else list(scaler._found_inf_per_device(optimizer).values())

    def _clip_and_check(self, optimizer: Optimizer, check: StepCheck) -> None:
        norm = None
        judges = check.gradients and self.scaler is None
        if judges and self.max_gradient_norm is None:  # clipping by value makes gradients finite
            norm = self._backend.norms.grad_norm(parameters_of(optimizer))
        clipped = self.clip_gradients(optimizer)
        check.judge(self._backend, (clipped if norm is None else norm) if judges else None)

    def _scaled_step(
        self, optimizer: Optimizer, scaler: torch.amp.GradScaler, check: StepCheck | None
    ) -> None:
        if check is None or not check.masks:
            scaler.step(optimizer)
        else:
            # The scaler's own step cannot be masked; what it found is part of the mask.
            overflows = [found.reshape(()) > 0 for found in self.overflows(optimizer)]
            bad = torch.stack([check.bad, *overflows]).any()
            self._backend.optimizer_step(optimizer, bad.logical_not())
        self._owes_scale = True
        if not self._defers_scale:
            self.update_scale()

    @override
    def defer_scale(self) -> None:
        self._defers_scale = True

    @override
    def update_scale(self) -> None:
        if self.scaler is None or not self._owes_scale:
            return
        self._owes_scale = False
        self.scaler.update()
        if self.min_loss_scale is not None or self.max_loss_scale is not None:
            self._scale().clamp_(self.min_loss_scale or 0.0, self.max_loss_scale or math.inf)

    def _scale(self) -> Tensor:
        # The public get_scale reads the value on the host.
        scale = None if self.scaler is None else self.scaler._get_scale_async()
        assert scale is not None  # it exists from the first scaled loss on
        return scale

    @override
    def on_train_step_end(
        self, trainer: Trainer, model: Module, outputs: Outputs, batch: Batch
    ) -> None:
        if self.scaler is not None and trainer.is_log_step and self._wants_log():
            trainer.log_metrics(loss_scale=self._scale())

    def _wants_log(self) -> bool:
        if self.log_loss_scale is None:
            return not isinstance(self.loss_scaling_factor, (int, float))
        return self.log_loss_scale

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if self.scaler is not None:
            state_dict["grad_scaler"] = self.scaler.state_dict()

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if self.scaler is not None and "grad_scaler" in state_dict:
            self.scaler.load_state_dict(state_dict["grad_scaler"])
