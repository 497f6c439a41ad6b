"""The exponential moving average of a model's weights, as tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from modelzoo_trainer.checkpointing.restoring import whole_number
from modelzoo_trainer.checkpointing.state_json import uncompiled
from modelzoo_trainer.core.parts.structure import ModelStructure

log = logging.getLogger("modelzoo_trainer.model_ema")

Part = Callable[[Tensor], Tensor]
Place = tuple[dict[str, Tensor | None], str]
"""A dictionary of parameters or buffers, and a key."""

_HALVES = (torch.float16, torch.bfloat16)
_DTYPE: Final = attrgetter("dtype")


class WeightAverage:
    """An exponential moving average of the weights of a model, on its device.

    Averaged are the parameters that require a gradient, and the persistent floating-point buffers.
    When the average is used, everything else has the model's current value. The model may get
    other parameters at any time: one that is added, unfrozen or has another shape is averaged from
    its value at the next update; one that is removed, no longer.

    `decay`: in [0, 1). `dtype`: of the averages of parameters; None = the parameter's, or
    float32 for half-precision parameters, whose averages would not change. `part`: returns the
    local part of a tensor. `settle`: makes the parameters of the model those that are trained.

    Cost: One copy of what is averaged. An update is one kernel launch for all tensors of a dtype
        (three if a flag on the device decides), a temporary copy of tensors of another dtype, and
        `ModelStructure.is_current`.
    """

    def __init__(  # noqa: PLR0913  # one for each argument of the callback
        self,
        model: Module,
        decay: float,
        *,
        warms_up: bool = False,
        averages_buffers: bool = True,
        dtype: torch.dtype | None = None,
        launches_cost: bool = False,
        part: Part = lambda tensor: tensor,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_updates: int | Tensor = 0
        """Number of updates; on the device if a flag there decides."""
        self.is_swapped = False
        self.model = model
        self._decay = decay
        self._warms_up = warms_up
        self._averages_buffers = averages_buffers
        self._dtype = dtype
        self._launches_cost = launches_cost
        self._part = part
        self._settle = settle
        self._averages: dict[str, Tensor] = {}
        self._names: list[str] = []
        """All averages: first of parameters, then of buffers. The lists are parallel."""
        self._own: list[Tensor] = []
        self._dtypes: list[torch.dtype] = []
        self._params: list[Tensor] = []
        self._pointers: list[int] = []
        self._values: list[Tensor] = []
        """Detached parameters, which share the memory at `_pointers`."""
        self._fits = False
        """Whether these are all, in the dtypes of their averages."""
        self._buffers: list[Place] = []
        self._structure: ModelStructure | None = None
        self._trained: dict[str, Tensor] = {}
        """The trained values by name, while the model has the averaged ones."""
        self.track()

    # ---- averaged tensors

    def track(self) -> None:
        """Average what the model has now, if that has changed."""
        if self._structure is None or not self._structure.is_current():
            self._track()

    @torch.no_grad()
    def _track(self, also: Iterable[str] = ()) -> None:
        """Average what the model has now; also the named parameters that are frozen."""
        self._settle()
        params = {uncompiled(name): param for name, param in self.model.named_parameters()}
        params = {name: param for name, param in params.items() if not is_lazy(param)}
        wanted = {*also, *self._averages}
        kept = {name: p for name, p in params.items() if p.requires_grad or name in wanted}
        places = dict(self._places_of_buffers()) if self._averages_buffers else {}
        self._params = [self._part(param) for param in kept.values()]
        self._pointers = []
        self._buffers = list(places.values())
        for name in self._averages.keys() - kept.keys() - places.keys():
            del self._averages[name]
        for name, param in kept.items():
            self._add(name, param, self._dtype or _wide(param.dtype))
        for name, (table, key) in places.items():
            buffer = table[key]
            assert buffer is not None  # see _places_of_buffers
            self._add(name, buffer, buffer.dtype)
        self._names = [*kept, *places]
        self._own = [self._part(self._averages[name]) for name in self._names]
        self._dtypes = list(map(_DTYPE, self._own))
        has_all = not any(map(is_lazy, self.model.parameters()))
        self._structure = ModelStructure(self.model) if has_all else None

    def _places_of_buffers(self) -> Iterator[tuple[str, Place]]:
        for prefix, module in self.model.named_modules():
            for key, buffer in module._buffers.items():
                is_state = key not in module._non_persistent_buffers_set
                if buffer is not None and is_state and buffer.is_floating_point():
                    name = f"{prefix}.{key}" if prefix else key
                    yield uncompiled(name), (module._buffers, key)

    def _add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        """Begin an average, unless there is one that fits."""
        known = self._averages.get(name)
        if known is not None and known.shape == tensor.shape and known.device == tensor.device:
            return
        if known is not None and known.shape == tensor.shape:
            self._averages[name] = known.to(tensor.device)
            return
        if known is not None:
            log.warning(
                "ModelEma: the shape of %s changed from %s to %s. Its average starts again, from "
                "the current value.",
                name,
                tuple(known.shape),
                tuple(tensor.shape),
            )
        self._averages[name] = tensor.detach().to(dtype, copy=True)

    # ---- updates

    def update(self, keep: Tensor | None = None, *, counts_on_device: bool = False) -> None:
        """Update the average with the current weights.

        `keep`: (), bool, on the device: False = leave average and count unchanged. None = True.
        `counts_on_device`: compute the decay from a count on the device.

        Raises:
            RuntimeError: Within `swap`, where the model has the average.
        """
        if self.is_swapped:
            raise RuntimeError(
                "ModelEma.update() was called inside 'with ema.swap()', where the model has the "
                "averaged weights. Call it outside."
            )
        self.track()
        values = self._sources()
        if self._fits and keep is None and not self._warms_up:
            torch._foreach_lerp_(self._own, values, 1.0 - self._decay)
            self.num_updates = self.num_updates + 1
            return
        with torch.no_grad():
            self._update(self._cast(values), keep, counts_on_device=counts_on_device)

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
        # With a tensor as the weight, lerp would launch one kernel per tensor.
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

    def _sources(self) -> list[Tensor]:
        """Return the model's own tensors, after `track`."""
        pointers = _pointers(self._params)
        if pointers != self._pointers or not pointers:
            self._pointers = pointers
            self._values = [param.detach() for param in self._params]
            is_same = list(map(_DTYPE, self._values)) == self._dtypes
            self._fits = is_same and not self._buffers
        if not self._buffers:
            return self._values
        return [*self._values, *(self._part(table[key]) for table, key in self._buffers)]  # type: ignore[arg-type]  # see _places_of_buffers

    def _cast(self, values: list[Tensor]) -> list[Tensor]:
        """Return the model's own tensors in the dtypes of their averages."""
        if list(map(_DTYPE, values)) == self._dtypes:
            return values
        cast = [torch.empty_like(own) for own in self._own]
        torch._foreach_copy_(cast, values)
        return cast

    @torch.no_grad()
    def set(self) -> None:
        """Set the average to the current weights and the count to 0."""
        self.track()
        torch._foreach_copy_(self._own, self._sources())
        self.num_updates = 0

    # ---- use

    @contextmanager
    def swap(self) -> Iterator[None]:
        """Context manager in which the model has the averaged weights.

        Cost: A second copy of what is averaged, inside.

        Raises:
            RuntimeError: If it is nested.
        """
        if self.is_swapped:
            raise RuntimeError("ModelEma.swap() is already active; do not nest 'with ema.swap()'.")
        self.track()
        values = zip(self._names, self._sources(), strict=True)
        self._trained = {name: value.detach().clone() for name, value in values}
        try:
            self._put_in()
            yield
        finally:
            self._put_back()
            self._trained = {}

    @contextmanager
    def swapped_back(self) -> Iterator[None]:
        """Within `swap`: context manager in which the model has the trained weights again."""
        self._put_back()
        try:
            yield
        finally:
            self._put_in()

    @torch.no_grad()
    def _put_in(self) -> None:
        self._settle()
        self.is_swapped = True
        if self._own:
            torch._foreach_copy_(self._sources(), self._own)

    @torch.no_grad()
    def _put_back(self) -> None:
        """Give the model its trained weights, also where a parameter was replaced inside."""
        self._settle()
        self.track()
        found = dict(zip(self._names, self._sources(), strict=True))
        names = found.keys() & self._trained.keys()
        if names:
            values = [self._trained[name] for name in names]
            torch._foreach_copy_([found[name] for name in names], values)
        self.is_swapped = False

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the count, and the averages by their names in the model's state dict."""
        if not self.is_swapped:
            self.track()
        return {"num_updates": self.num_updates, "average": dict(self._averages)}

    @torch.no_grad()
    def load_state_dict(
        self,
        state: Mapping[str, Any],
        fit: Callable[[Mapping[str, Any], Mapping[str, Any]], Any] = lambda found, own: found,
    ) -> None:
        """Restore what `state_dict` returned, also for parameters that are frozen now.

        `fit`: converts tensors of a checkpoint to a form that can be copied into local tensors.
        """
        self._track(also=state["average"])
        num = state["num_updates"]
        if not isinstance(num, Tensor):
            num = whole_number(state, "num_updates")
        self.num_updates = num.to(self._own[0].device) if isinstance(num, Tensor) else num
        found = {
            name: state["average"][name] for name in self._averages if name in state["average"]
        }
        for name, value in fit(found, self._averages).items():
            self._averages[name].copy_(value)


def _pointers(tensors: list[Tensor]) -> list[int]:
    """Return where tensors have their memory; [] if their device does not say."""
    try:
        found = list(map(Tensor.data_ptr, tensors))
    except RuntimeError:  # of a fake tensor
        return []
    return found if all(found) else []


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALVES else dtype
