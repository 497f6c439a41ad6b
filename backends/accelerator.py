"""Backend for every device of torch.accelerator."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from .backend import Backend, Caps, overridden
from .conditional_step import ConditionalSteps, put_back
from .coordination.launch import local_rank
from .coordination.own_device import own_index
from .coordination.world import joined
from .errors import BackendUnavailable, check_count, check_flag
from .fast_step import fuse_optimizer
from .prefetch import Lane, LookAhead, PlainLane, StreamLane, has_streams
from .reads import DeferredReads, HostCopies

# Memory figures of a device's module (mps has other names).
_FIGURES: Final[dict[str, tuple[str, ...]]] = {
    "device_allocated_bytes": ("memory_allocated", "current_allocated_memory"),
    "device_peak_bytes": ("max_memory_allocated",),
    "device_reserved_bytes": ("memory_reserved", "driver_allocated_memory"),
}


class AsynchronousBackend(Backend):
    """An asynchronous device: nothing in a step waits for it.

    Args:
        look_ahead: Fetch the next batch from the loader before a step, so that its copy overlaps
            the step. False = only when it is needed, for a dataset that draws from torch's
            generator in this process and must resume with the same draws.
        **options: Options of `Backend`.
    """

    _default_lag: ClassVar[int] = 2
    caps = Caps(
        autocast_dtypes=frozenset({torch.bfloat16, torch.float16}),
        needs_scaler=frozenset({torch.float16}),
        looks_ahead=True,
    )

    def __init__(self, *, look_ahead: bool = True, **options: Any) -> None:
        self._look_ahead = check_flag("look_ahead", look_ahead)
        self._lane: Lane | None = None
        self.conditional_steps = ConditionalSteps(self._look)
        super().__init__(**options)

    def make_lane(self) -> Lane:
        """Create the lane that copies batches to the device."""
        return PlainLane(self.to_device)

    @override
    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        if not self._look_ahead:
            return super().batches(batches)
        return LookAhead(batches, self._lane or self.make_lane())

    @override
    def optimizer_step(self, optimizer: Optimizer, keep: Tensor | None = None) -> None:
        if keep is None:
            super().optimizer_step(optimizer)
        else:
            self.conditional_steps.step(optimizer, keep)

    @override
    def restore(self, tensors: Sequence[Tensor], copies: Sequence[Tensor], keep: Tensor) -> None:
        put_back(tensors, copies, keep)

    @override
    def _make_reads(self) -> DeferredReads:
        return DeferredReads(self._lag, HostCopies(self.device))

    @override
    def counters(self) -> dict[str, int]:
        reads = self.reads
        assert isinstance(reads, DeferredReads)
        return {"reads": reads.num_reads, "transfers": reads.copies.num_transfers}


class AcceleratorBackend(AsynchronousBackend):
    """An accelerator supported by torch.

    Weights are initialized on the host, so that they are the same on every device. torch's Adam,
    AdamW, SGD and Adagrad use fused kernels by default.

    Args:
        kind: torch's name of the device.
        index: The device index; None = the rank of this process on its host, or 0 if the process
            sees one device only.
        **options: Options of `AsynchronousBackend`.

    Raises:
        BackendUnavailable: In `open`, if there is no such device.
    """

    name = "accelerator"
    caps = dataclasses.replace(AsynchronousBackend.caps, several_ranks=True)

    def __init__(self, *, kind: str, index: int | None = None, **options: Any) -> None:
        check_count("index", index)
        rank = local_rank() if index is None else None
        self._from_local_rank = rank is not None
        if index is None:
            index = own_index(rank) if rank else 0
        self._device = torch.device(kind, index)
        self._has_sparse_gradients = False
        super().__init__(**options)

    # ---- life

    @staticmethod
    @override
    def is_available(kind: str | None = None) -> bool:
        """Return whether torch finds an accelerator, optionally of a given kind."""
        found = torch.accelerator.current_accelerator(check_available=True)
        return found is not None and kind in (None, found.type)

    @property
    @override
    def device(self) -> torch.device:
        """The device, with its index."""
        return self._device

    @property
    def module(self) -> Any:
        """Torch's module for the kind, such as `torch.xpu`."""
        return torch.get_device_module(self._device)

    @override
    def open(self) -> None:
        self._before_start()
        self.select_device()
        super().open()
        self._lane = self.make_lane()
        self.caps = dataclasses.replace(
            type(self).caps,
            autocast_dtypes=type(self).caps.autocast_dtypes & self._autocast_dtypes(),
            float64=self._has_float64(),
            pins=getattr(self._lane, "pins", False),
        )
        if hasattr(self.module, "reset_peak_memory_stats"):
            self.module.reset_peak_memory_stats(self._device)

    def select_device(self) -> None:
        """Set the current device.

        Raises:
            BackendUnavailable: If it does not exist.
        """
        kind, index = self._device.type, self._device.index
        if not self.is_available(kind):
            raise BackendUnavailable(
                f"device: {kind!r} is not available: torch {torch.__version__} finds no such "
                f"device. Use device: cpu or auto, or install a torch build for it."
            )
        count = torch.accelerator.device_count()
        if not 0 <= index < count:
            given = "LOCAL_RANK" if self._from_local_rank else "backend.index"
            raise BackendUnavailable(
                f"{given} is {index}, but this process sees {count} {kind} devices "
                f"(0-{count - 1}). Start at most {count} processes per node, make one or all "
                f"devices of the node visible to each, or set backend.index."
            )
        world = joined()
        if world is not None and self._from_local_rank and not world.has_own_device:
            raise BackendUnavailable(
                f"Each of {world.launch.local_world_size} processes of this node sees one {kind} "
                f"device, which is the same for several of them. Start one process per device, or "
                f"use device: cpu."
            )
        torch.accelerator.set_device_index(index)

    @override
    def make_lane(self) -> Lane:
        has_own = overridden(type(self), AcceleratorBackend, ("to_device",))
        if has_own or not has_streams(self._device):
            return super().make_lane()
        return StreamLane(self._device)

    def _autocast_dtypes(self) -> frozenset[torch.dtype]:
        if not torch.amp.is_autocast_available(self._device.type):
            return frozenset()
        supported = getattr(self.module, "get_amp_supported_dtype", None)
        return type(self).caps.autocast_dtypes if supported is None else frozenset(supported())

    def _has_float64(self) -> bool:
        try:
            torch.empty(1, dtype=torch.float64, device=self._device)
        except (TypeError, RuntimeError):
            return False
        return True

    # ---- model, optimizer, data

    @override
    def prepare_model(self, model: Module) -> Module:
        self._has_sparse_gradients = any(
            getattr(module, "sparse", False) is True for module in model.modules()
        )
        return super().prepare_model(model)

    @override
    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        if not self._has_sparse_gradients:  # fused kernels do not support them
            fuse_optimizer(optimizer, self._device)
        return optimizer

    # ---- the step

    @override
    def _seed_device(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        self._seed_generator(seed)

    def _seed_generator(self, seed: int) -> None:
        generator = self._generator()
        if generator is not None:
            generator.manual_seed(seed)
        elif hasattr(self.module, "manual_seed"):
            self.module.manual_seed(seed)

    def _generator(self) -> torch.Generator | None:
        generators = getattr(self.module, "default_generators", ())
        index = self._device.index
        return generators[index] if index < len(generators) else None

    @override
    def grad_scaler(self, **options: Any) -> torch.amp.GradScaler | None:
        return torch.amp.GradScaler(self._device.type, **options)

    # ---- state

    @override
    def rng_state(self) -> dict[str, Any]:
        state = super().rng_state()
        generator = self._generator()
        if generator is not None:
            state["device"] = generator.get_state()
        elif hasattr(self.module, "get_rng_state"):
            state["device"] = self.module.get_rng_state()
        state["device_kind"] = self._device.type
        return state

    @override
    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        super().set_rng_state(state)
        if "device" not in state or state.get("device_kind") != self._device.type:
            return  # state of another device; steps are seeded anyway
        generator = self._generator()
        if generator is not None:
            generator.set_state(state["device"])
        else:
            self.module.set_rng_state(state["device"])

    # ---- facts

    @override
    def memory(self) -> dict[str, int]:
        figures = super().memory()
        for figure, names in _FIGURES.items():
            for name in names:
                if hasattr(self.module, name):
                    figures[figure] = int(getattr(self.module, name)())
                    break
        return figures

    @override
    def synchronize(self) -> None:
        torch.accelerator.synchronize(self._device)
