"""A running average of a model's weights, and its arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from modelzoo_trainer.checkpointing.parameter_names import uncompiled
from modelzoo_trainer.checkpointing.restoring import whole_number

Part = Callable[[Tensor], Tensor]
Get = Callable[[], Tensor]

_HALVES = (torch.float16, torch.bfloat16)


class WeightAverage:
    """Keeps `decay * average + (1 - decay) * weights` beside a model, on its device.

    Averaged are the parameters that require a gradient, and floating-point buffers that are part
    of the model's state. All else is taken as the model has it when the average is used: it does
    not change, or has no average.

    Args:
        model: On its device.
        decay: In [0, 1).
        warms_up: Use min(decay, (1 + n) / (10 + n)) for the update after n others.
        averages_buffers: False = leave buffers as the model has them.
        dtype: Of the averages of parameters; None = that of the parameter, or float32 where it is
            a half type, in which an average would stand still.
        launches_cost: Whether many small operations are slow, as on all devices but the host.
        part: Returns what of a tensor this process has.

    Cost: One copy of what is averaged. An update is one launch for all tensors of a type (three
        if a flag on the device decides), and a copy in passing of what is of another type.
    """

    def __init__(  # noqa: PLR0913  # what a callback's arguments become
        self,
        model: Module,
        decay: float,
        *,
        warms_up: bool = False,
        averages_buffers: bool = True,
        dtype: torch.dtype | None = None,
        launches_cost: bool = False,
        part: Part = lambda tensor: tensor,
    ) -> None:
        self.num_updates: int | Tensor = 0
        """How many updates were counted; on the device if a flag there decides."""
        self.is_swapped = False
        self._model = model
        self._decay = decay
        self._warms_up = warms_up
        self._averages_buffers = averages_buffers
        self._dtype = dtype
        self._launches_cost = launches_cost
        self._part = part
        self._averages: dict[str, Tensor] = {}
        self._sources: list[Get] = []
        self._has_buffers = False
        self._steady: list[Tensor] | None = None
        """The model's own tensors, if they stay the same and have the types of the averages."""
        self._own: list[Tensor] = []
        self.track()

    # ---- what is averaged

    @torch.no_grad()
    def track(self) -> None:
        """Begin an average of what has become trainable: so far, its value has not changed."""
        for name, param in self._model.named_parameters():
            if param.requires_grad and uncompiled(name) not in self._averages:
                dtype = self._dtype or (torch.float32 if param.dtype in _HALVES else param.dtype)
                tensor = self._part(param.detach())  # shares its memory
                self._add(name, param, lambda tensor=tensor: tensor, dtype)  # type: ignore[misc]  # mypy wants no default
        if self._averages_buffers:
            for prefix, module in self._model.named_modules():
                self._track_buffers(prefix, module)
        values = [get() for get in self._sources]
        is_steady = not self._has_buffers and self._has_types_of(values)
        self._steady = values if is_steady else None

    def _track_buffers(self, prefix: str, module: Module) -> None:
        for key, buffer in module._buffers.items():
            name = f"{prefix}.{key}" if prefix else key
            is_state = key not in module._non_persistent_buffers_set
            if buffer is None or not (is_state and buffer.is_floating_point()):
                continue
            if uncompiled(name) not in self._averages:

                def get(module: Module = module, key: str = key) -> Tensor:
                    return self._part(module._buffers[key])  # type: ignore[arg-type]  # a buffer

                self._add(name, buffer, get, buffer.dtype)
                self._has_buffers = True

    def _add(self, name: str, tensor: Tensor, get: Get, dtype: torch.dtype) -> None:
        average = tensor.detach().to(dtype, copy=True)
        self._averages[uncompiled(name)] = average
        self._sources.append(get)
        self._own.append(self._part(average))

    # ---- updates

    def update(self, keep: Tensor | None = None, *, counts_on_device: bool = False) -> None:
        """Bring the weights as they are into the average.

        Args:
            keep: (), bool, on the device: False = leave average and count as they are. None =
                True.
            counts_on_device: Take the decay from a count on the device.

        Raises:
            RuntimeError: Within `swap`, when the model has the average itself.
        """
        if self.is_swapped:
            raise RuntimeError("update was called within swap, where the weights are the average.")
        if self._steady is not None and keep is None and not self._warms_up:
            torch._foreach_lerp_(self._own, self._steady, 1.0 - self._decay)
            self.num_updates = self.num_updates + 1
            return
        with torch.no_grad():
            self._update(self._values(), keep, counts_on_device=counts_on_device)

    def _update(self, values: list[Tensor], keep: Tensor | None, *, counts_on_device: bool) -> None:
        num = self.num_updates
        is_known = isinstance(num, int) and not counts_on_device
        if keep is None and (is_known or not self._warms_up):
            weight = 1.0 - (self._decay_after(num) if isinstance(num, int) else self._decay)
            torch._foreach_lerp_(self._own, values, weight)
            self.num_updates = self.num_updates + 1
            return
        weight_on_device = self._device_weight(keep)
        if not self._launches_cost:
            torch._foreach_lerp_(self._own, values, [weight_on_device] * len(values))
            return
        # With a tensor as the weight, lerp would be one launch for each of them.
        steps = torch._foreach_sub(values, self._own)
        torch._foreach_mul_(steps, weight_on_device)
        torch._foreach_add_(self._own, steps)

    def _decay_after(self, num: int) -> float:
        return min(self._decay, (1 + num) / (10 + num)) if self._warms_up else self._decay

    def _device_weight(self, keep: Tensor | None) -> Tensor:
        """Return the weight of the model's values, (), on the device; count the update there."""
        device, dtype = self._own[0].device, self._own[0].dtype
        if keep is None:
            keep = torch.ones((), dtype=torch.bool, device=device)
        decay = torch.full((), self._decay, dtype=dtype, device=device)
        if self._warms_up:
            num = torch.as_tensor(self.num_updates, device=device).to(dtype)
            decay = torch.minimum(decay, (1 + num) / (10 + num))
        self.num_updates = self.num_updates + keep.to(torch.int64)
        return (1 - decay) * keep.to(dtype)

    def _values(self) -> list[Tensor]:
        """Return the model's own tensors, in the types of their averages."""
        values = [get() for get in self._sources]
        if self._has_types_of(values):
            return values
        cast = [torch.empty_like(own) for own in self._own]
        torch._foreach_copy_(cast, values)
        return cast

    def _has_types_of(self, values: list[Tensor]) -> bool:
        return all(own.dtype == value.dtype for own, value in zip(self._own, values, strict=True))

    @torch.no_grad()
    def set(self) -> None:
        """Make the average the weights as they are; no update is counted any more."""
        torch._foreach_copy_(self._own, [get() for get in self._sources])
        self.num_updates = 0

    # ---- use

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Have the model hold the average inside, and its own weights again behind.

        Cost: A second copy of what is averaged, inside.

        Raises:
            RuntimeError: If it is inside already.
        """
        if self.is_swapped:
            raise RuntimeError("swap was called within swap.")
        targets = [get() for get in self._sources]
        with torch.no_grad():
            before = [target.clone() for target in targets]
            self.is_swapped = True
            try:
                torch._foreach_copy_(targets, self._own)
                with torch.enable_grad():
                    yield
            finally:
                torch._foreach_copy_(targets, before)
                self.is_swapped = False

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the count, and the averages by the names that they have in the model's state."""
        return {"num_updates": self.num_updates, "average": dict(self._averages)}

    @torch.no_grad()
    def load_state_dict(
        self,
        state: Mapping[str, Any],
        fit: Callable[[Mapping[str, Any], Mapping[str, Any]], Any] = lambda found, own: found,
    ) -> None:
        """Go on from what `state_dict` returned.

        Args:
            state: Averages that are not in it stay what they are: the weights.
            fit: Returns tensors of a checkpoint in the form that is copied into one's own.
        """
        num = state["num_updates"]
        if not isinstance(num, Tensor):
            num = whole_number(state, "num_updates")
        self.num_updates = num.to(self._own[0].device) if isinstance(num, Tensor) else num
        found = {
            name: state["average"][name] for name in self._averages if name in state["average"]
        }
        for name, value in fit(found, self._averages).items():
            self._averages[name].copy_(value)
