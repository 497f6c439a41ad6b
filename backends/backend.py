"""The interface between the trainer and a device, with the host's behaviour as default."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from .blocks import CompileOptions, checkpoint_activations, compile_model
from .blocks import Mode as CheckpointMode
from .comm import Comm, ReduceOp
from .conditional_step import skip_step
from .errors import (
    OUT_OF_MEMORY_ADVICE,
    BackendError,
    check_choice,
    check_count,
    check_flag,
    in_bytes,
    is_out_of_memory,
)
from .fast_step import plain_step, plain_zero_grad
from .initial_values import InitialValues
from .loss_window import LossWindow
from .norms import Norms
from .placement import map_tensors, move_model
from .prefetch import placed
from .reads import Deliver, HostReads, Reads
from .seeds import GAMMA, MASK, Stream, stream_base

_SETTINGS: Final[Any] = torch.utils.deterministic
Precision = Literal["highest", "high", "medium"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """Capabilities of a backend, to test instead of its name.

    Args:
        lazy: Operations are recorded and run at the step boundary.
        static_shapes: A new shape costs a compilation.
        holds_values: Tensors have values that can be read (not on `meta`).
        autocast_dtypes: Dtypes supported by `autocast`.
        needs_scaler: Dtypes whose gradients need a loss scaler.
        float64: Double precision is supported.
        sharded_state: A rank holds only a shard of the state.
        collectives: There are several ranks.
        several_ranks: There may be several, each with its own device, over torch.distributed.
        looks_ahead: Batches may be fetched before earlier ones are trained on.
        pins: Batches are copied from pinned memory, while a step runs.
        no_float8: Why linear layers cannot multiply in float8; "" = they can.
        refused_dtypes: Dtypes that `autocast` does not support and that must not be replaced, each
            with the reason.
    """

    lazy: bool = False
    static_shapes: bool = False
    holds_values: bool = True
    autocast_dtypes: frozenset[torch.dtype] = frozenset({torch.bfloat16})
    needs_scaler: frozenset[torch.dtype] = frozenset()
    float64: bool = True
    sharded_state: bool = False
    collectives: bool = False
    several_ranks: bool = False
    looks_ahead: bool = False
    pins: bool = False
    no_float8: str = "float8 requires an NVIDIA GPU of compute capability 8.9 or newer"
    refused_dtypes: Mapping[torch.dtype, str] = field(default_factory=dict)


class Region:
    """The traced step: `with backend.step(index)`. One object per backend, reused in each step."""

    __slots__ = ("backend", "seed")

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.seed = 0

    def __enter__(self) -> None:
        self.backend._enter_step(self.seed)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.backend._exit_step(ok=kind is None)


_OF_NORMS: Final = ("clip_grad_norm", "clip_grad_value", "grad_norm", "norms")
_OF_COMM: Final = (
    "barrier",
    "broadcast_object",
    "data_shard",
    "gather_object",
    "is_main",
    "reduce",
)


def overridden(cls: type, base: type, names: Iterable[str]) -> list[str]:
    """Return the names that `cls` has from another class than `base` and its bases.

    A fast path of `base` that does not call these methods asks it once, and is not taken if any is.
    """
    others = [vars(kind) for kind in cls.__mro__ if kind not in base.__mro__]
    return [name for name in names if any(name in other for other in others)]


class Backend(ABC):
    """A device and everything that depends on it.

    Unless a method says so, it does not wait for the device and is not collective. A new backend
    overrides what differs from the host; an override that would not be called is refused.

    Args:
        compile: Compile the model; None = run it eagerly.
        matmul_precision: Internal precision of float32 matrix products, as in
            `torch.set_float32_matmul_precision`; None = unchanged.
        deterministic: Only use deterministic algorithms; raise for an operation without one.
        lag: Steps between a read and its delivery; None = the backend's default.
        activation_checkpointing: What to recompute in the backward pass instead of storing it:
            "full" = everything in each block, "selective" = everything but matrix products and
            attention; None = nothing. Blocks are the elements of every `ModuleList`.

    Raises:
        BackendError: If an option is invalid.
        BackendUnavailable: In `open`, if the device does not exist.
    """

    name: ClassVar[str]
    """The device's name, as for `make_backend`."""
    caps: Caps = Caps()
    """What it supports; complete after `open`."""
    comm: Comm
    """This rank, and communication with the others."""
    _default_lag: ClassVar[int] = 0
    _never_called: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(_OF_NORMS, "return custom norms from _make_norms"),
        **dict.fromkeys(_OF_COMM, "the trainer uses comm; return a custom Comm from _make_comm"),
    }
    """What subclasses of this class cannot override, and what to do instead."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for base in cls.__mro__:
            never_called: Mapping[str, str] = vars(base).get("_never_called", {})
            for name in overridden(cls, base, never_called):
                owner = next(
                    kind for kind in cls.__mro__ if name in vars(kind) and kind not in base.__mro__
                )
                raise BackendError(
                    f"{owner.__name__}.{name} is never called: {never_called[name]}."
                )

    def __init__(
        self,
        *,
        compile: CompileOptions | bool | None = None,  # the YAML key
        matmul_precision: Precision | None = None,
        deterministic: bool = False,
        lag: int | None = None,
        activation_checkpointing: CheckpointMode | None = None,
    ) -> None:
        check_choice("matmul_precision", matmul_precision, (*get_args(Precision), None))
        check_count("lag", lag, " (steps)")
        choices = (*get_args(CheckpointMode), None)
        check_choice("activation_checkpointing", activation_checkpointing, choices)
        self._activation_checkpointing = activation_checkpointing
        if not isinstance(compile, CompileOptions | bool | None):
            raise BackendError(
                f"backend.compile: expected true, false, 'model', 'blocks' or a mapping, "
                f"got {compile!r}."
            )
        self._compile = CompileOptions() if compile is True else compile or None
        if activation_checkpointing and self._compile and self._compile.backend == "eager":
            raise BackendError(
                "backend.activation_checkpointing: torch.compile with backend 'eager' recomputes "
                "other dropout masks than in the forward pass. Set backend.compile.backend to "
                "'aot_eager' or 'inductor', or remove activation_checkpointing or compile."
            )
        self._matmul_precision = matmul_precision
        self._deterministic = check_flag("deterministic", deterministic)
        self._lag = self._default_lag if lag is None else lag
        self.comm = self._make_comm()
        self.seed = 0
        self.in_step = False
        """Whether a traced step is active."""
        self.reads = self._make_reads()
        """The queue of deferred reads. Its `flush` waits for the device."""
        self.window = LossWindow()
        """Weights and losses of batches since the last optimizer step. `sums` is collective."""
        self.norms = self._make_norms()
        """Norms of gradients and state, and gradient clipping. Collective if sharded."""
        self.initial_values = InitialValues()
        """Initial values of a model that was built without them."""
        self._region = self._make_region()
        self._nothing = nullcontext()
        self._undo: list[Callable[[], None]] = []

    @property
    def seed(self) -> int:
        """The run's seed, from which seeds of steps and epochs are derived."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed
        place = self.comm.seed_place
        self._bases = tuple(stream_base(seed, stream, place) for stream in Stream)

    # ---- life

    @staticmethod
    @abstractmethod
    def is_available() -> bool:
        """Return whether the device is available; never raises."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of the model and its batches."""

    def open(self) -> None:
        """Start the runtime and apply the process-wide settings of the options.

        Collective with several processes.

        Raises:
            BackendUnavailable: If the device does not exist.
        """
        self._before_start()
        if self._matmul_precision is not None:
            before = torch.get_float32_matmul_precision()
            self._undo.append(lambda: torch.set_float32_matmul_precision(before))
            torch.set_float32_matmul_precision(self._matmul_precision)
        if self._deterministic:
            was = torch.are_deterministic_algorithms_enabled()
            self._undo.append(lambda: torch.use_deterministic_algorithms(was))
            torch.use_deterministic_algorithms(True)
            filled = _SETTINGS.fill_uninitialized_memory
            self._undo.append(partial(_fill_empty, filled))
            _fill_empty(False)  # results do not depend on it, and it writes every tensor once more

    def _before_start(self) -> None:  # noqa: B027  # a no-op on the host
        """Set what a device's runtime reads when it starts, such as environment variables.

        Called before the device is used, and, with several processes, before they meet. Idempotent.
        """

    def close(self, *, ok: bool = True) -> None:
        """Undo `open`. Idempotent.

        Args:
            ok: Whether the run succeeded; if not, nothing collective may happen.
        """
        while self._undo:
            self._undo.pop()()

    def _make_comm(self) -> Comm:
        return Comm()

    # ---- other ranks: shortcuts for the members of `comm` that most callbacks need

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, which writes files and logs: `comm.is_main`."""
        return self.comm.is_main

    @property
    def data_shard(self) -> tuple[int, int]:
        """(index of the data shard of this rank, number of shards): `comm.data_shard`."""
        return self.comm.data_shard

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce a tensor over ranks with different data. Collective."""
        return self.comm.reduce(tensor, op)

    def barrier(self, name: str) -> None:
        """Wait until every rank is here. Collective."""
        self.comm.barrier(name)

    def broadcast_object(self, value: Any) -> Any:
        """Return the main process's value, see `comm.broadcast_object`. Collective."""
        return self.comm.broadcast_object(value)

    def gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, see `comm.gather_object`. Collective."""
        return self.comm.gather_object(value)

    # ---- model, optimizer, data

    def building(self) -> AbstractContextManager[Any]:
        """Return the context in which modules are built."""
        return self._nothing

    def prepare_model(self, model: Module) -> Module:
        """Move a model to the device, keeping tied parameters tied, and compile it if enabled.

        Collective with several processes; may wait for the device.

        Returns:
            The module to call; its parameters keep the model's names.
        """
        return self._place_model(model)

    def _place_model(self, model: Module) -> Module:
        """Implement `prepare_model`, after activation checkpointing."""
        if self.caps.holds_values:
            self.initial_values.draw(model, self.device)
        move_model(model, self.device)
        self._checkpoint_activations(model)
        if self._compile is not None:
            compile_model(model, self._compile)
        return model

    def _checkpoint_activations(self, model: Module) -> None:
        """Enable activation checkpointing for a model's blocks, if configured."""
        if self._activation_checkpointing is not None:
            checkpoint_activations(model, self._activation_checkpointing)

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Adapt an optimizer to the device; its parameters are already there."""
        return optimizer

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches on the device, in order; errors of the loader propagate."""
        return placed(batches, self.to_device)

    def to_device(self, batch: Any) -> Any:
        """Return a batch with its tensors on the device."""
        device = self.device
        return map_tensors(batch, lambda tensor: tensor.to(device), lambda item: item.to(device))

    # ---- the step

    def step(self, index: int, stream: int = 0) -> Region:
        """Return the step's context: seeds on entry, launches and delivers reads on exit.

        Args:
            index: Number of the batch within the stream; with the run's seed and `comm.seed_place`
                it determines every random number of the step.
            stream: A `Stream`; 0 = training.
        """
        region = self._region
        region.seed = (self._bases[stream] + GAMMA * index) & MASK
        return region

    def _make_region(self) -> Region:
        return Region(self)

    def _enter_step(self, seed: int) -> None:
        """Seed the generators; forbid host reads where supported."""
        self._seed_device(seed)
        self.in_step = True

    def _exit_step(self, *, ok: bool) -> None:
        """Launch the step, allow host reads, deliver pending reads."""
        self.in_step = False
        if ok:
            self.reads.end_group()

    def _seed_device(self, seed: int) -> None:
        """Seed the generators used by the step's operations."""
        torch.default_generator.manual_seed(seed)

    def backward(self, loss: Tensor) -> None:
        """Accumulate a loss's gradients.

        Args:
            loss: The scaled and weighted loss, ().
        """
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch

    def accumulating(self) -> AbstractContextManager[Any]:
        """Return the context of a batch without an optimizer step after it.

        Gradients are not synchronized between ranks inside.
        """
        return self._nothing

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Return the context that computes in `dtype` where that is safe."""
        return torch.autocast(self.device.type, dtype=dtype)

    def inference(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass without gradients.

        `no_grad`: tensors that a model keeps from validation may be used in training.
        """
        return torch.no_grad()

    def grad_scaler(self, **options: Any) -> torch.amp.GradScaler | None:
        """Return a loss scaler, or None where the device needs none."""
        return None

    def _make_norms(self) -> Norms:
        return Norms(self)

    def optimizer_step(self, optimizer: Optimizer, keep: Tensor | None = None) -> None:
        """Update the parameters, or leave them bitwise unchanged where `keep` is false.

        Args:
            optimizer: Its state and step counts are left unchanged with the parameters.
            keep: (), bool, on the device; None = update.

        Cost: On a device, a conditional step waits only if the optimizer counts steps on the host,
            and in the first step of a parameter. Memory for a copy of parameters and state during
            the step, unless the optimizer is fused.
        """
        if keep is None or self._look(keep):
            plain_step(optimizer)
        else:
            skip_step(optimizer)

    def restore(self, tensors: Sequence[Tensor], copies: Sequence[Tensor], keep: Tensor) -> None:
        """Copy values back into their tensors where `keep` is false.

        Does not wait for the device.

        Args:
            tensors: Changed in place.
            copies: One for each, of its shape and type.
            keep: (), bool, on the device.
        """
        if tensors and not self._look(keep):
            torch._foreach_copy_(list(tensors), list(copies))

    def _look(self, flag: Tensor) -> bool:
        """Read a flag, also within a step. Waits for the device."""
        return bool(flag.item())

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Drop the gradients."""
        plain_zero_grad(optimizer)

    # ---- values

    @property
    def reads_at_once(self) -> bool:
        """Whether a value can be read at once, without waiting or overtaking another read."""
        return False

    def _make_reads(self) -> Reads:
        return HostReads(self._lag)

    def read(self, tensors: Sequence[Tensor], deliver: Deliver) -> None:
        """Call `deliver` with the values, in order, at most `lag` steps later.

        Args:
            tensors: What to read; their current values are captured.
            deliver: Called with a list: a number for each 0-d tensor, else a CPU tensor.
        """
        self.reads.put(tensors, deliver)
        if not self.in_step and self._lag == 0:
            self.reads.flush()

    def hold(self, values: Iterable[Any]) -> None:  # noqa: B027  # a no-op without a recorded graph
        """Keep unused tensors alive until the step's end.

        In a recorded step, tensors without references are dropped from the graph, and a step with a
        different graph is recompiled.
        """

    def flush(self) -> None:
        """Deliver all reads. Waits for the device."""
        self.reads.flush()

    # ---- state

    def host_state(self, tree: Any) -> Any:
        """Return a copy of the tree with full tensors in host memory. Waits for the device.

        Collective where a rank holds only a shard of the state.
        """
        return map_tensors(tree, lambda tensor: tensor.detach().to("cpu", copy=True))

    def state_view(self, tree: Any) -> Any:
        """Return the tree with full, detached tensors that share memory with the run.

        Collective where a rank holds only a shard of the state.
        """
        return map_tensors(tree, lambda tensor: tensor.detach())

    def writable(self, tree: Any) -> Any:
        """Return the tree with tensors whose bytes can be accessed.

        May wait for the device.
        """
        return tree

    def for_loading(self, tree: Any, like: Mapping[str, Any] | None = None) -> Any:
        """Return a tree of host tensors in a form that can be copied into the run's tensors.

        Args:
            tree: The tree.
            like: The run's own tensors by name, where the tree has the same names.
        """
        return tree

    def rng_state(self) -> dict[str, Any]:
        """Return the state of all generators of this process. Waits for the device."""
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
        }

    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `rng_state`. May wait for the device."""
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])

    # ---- facts

    def counters(self) -> dict[str, int]:
        """Return counts since the start: compilations, host reads, ... (backend-specific)."""
        return {}

    def memory(self) -> dict[str, int]:
        """Return bytes: `host_peak_bytes`, and figures of the device's own memory, if any."""
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"host_peak_bytes": peak * (1 if sys.platform == "darwin" else 1024)}

    def synchronize(self) -> None:  # noqa: B027  # a no-op on the host
        """Wait for the device."""

    def explain(self, error: BaseException) -> None:
        """Add a note to an error, such as what to reduce when out of memory."""
        if is_out_of_memory(error):
            figures = ", ".join(f"{k} {in_bytes(v)}" for k, v in self.memory().items())
            error.add_note(f"Out of memory on {self.device} ({figures}). {OUT_OF_MEMORY_ADVICE}")


def _fill_empty(is_on: bool) -> None:
    """Set whether deterministic mode fills new tensors with NaN."""
    _SETTINGS.fill_uninitialized_memory = is_on
