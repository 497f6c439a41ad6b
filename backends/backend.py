"""The contract between the trainer and a device, with the host's behaviour as default."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
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
from .errors import OUT_OF_MEMORY_ADVICE, BackendError, check_choice, is_out_of_memory
from .fast_step import plain_step, plain_zero_grad
from .loss_window import LossWindow
from .norms import Norms
from .placement import map_tensors, move_model
from .reads import Deliver, HostReads, Reads
from .seeds import GAMMA, MASK, Stream, stream_base

Precision = Literal["highest", "high", "medium"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """What a backend can do: facts to ask for, instead of its name.

    Args:
        lazy: Operations are recorded and run at the step boundary.
        static_shapes: A new shape costs a compilation.
        holds_values: Tensors have values that can be read (not so on `meta`).
        autocast_dtypes: Types that `autocast` takes.
        needs_scaler: Types under which gradients need a loss scaler.
        float64: Double precision exists.
        sharded_state: One process holds only a part of the state.
        collectives: More than one process takes part.
        looks_ahead: Batches may be asked for before earlier ones are trained on.
        refused_dtypes: Types that `autocast` does not take, and that nothing may stand in for,
            each with the reason.
    """

    lazy: bool = False
    static_shapes: bool = False
    holds_values: bool = True
    autocast_dtypes: frozenset[torch.dtype] = frozenset({torch.bfloat16})
    needs_scaler: frozenset[torch.dtype] = frozenset()
    float64: bool = True
    sharded_state: bool = False
    collectives: bool = False
    looks_ahead: bool = False
    refused_dtypes: Mapping[torch.dtype, str] = field(default_factory=dict)


class Region:
    """The traced step: `with backend.step(index)`. One object a backend, entered each step."""

    __slots__ = ("backend", "seed")

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.seed = 0

    def __enter__(self) -> None:
        self.backend._enter_step(self.seed)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.backend._exit_step(ok=kind is None)


_OF_NORMS: Final = frozenset({"clip_grad_norm", "clip_grad_value", "grad_norm", "norms"})


class Backend(ABC):
    """One device and all that depends on it.

    Each method says whether it waits for the device and whether it is collective; one that says
    nothing does neither. A new backend overrides what differs from the host.

    Args:
        compile: Compile the model; None = run it as it is.
        matmul_precision: Internal precision of float32 matrix products, as in
            `torch.set_float32_matmul_precision`; None = leave it.
        deterministic: Only algorithms that give the same bits each time; an operation without
            one raises.
        lag: Steps between a value's read and its delivery; None = the backend's own.
        activation_checkpointing: What the backward pass computes anew instead of having kept it:
            "full" = all within each block, "selective" = all but products of matrices and
            attention; None = nothing. Blocks are the elements of every `ModuleList`.

    Raises:
        BackendError: If an option does not fit.
        BackendUnavailable: In `open`, if the device is not there.
    """

    name: ClassVar[str]
    """The device's name, as `make_backend` takes it."""
    caps: Caps = Caps()
    """What it can do; known from `open` on."""
    comm: Comm
    """This process among those of the run, and what they tell each other."""
    _default_lag: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if never_called := vars(cls).keys() & _OF_NORMS:
            raise BackendError(
                f"{cls.__name__}.{min(never_called)} is not called: return norms of your own from "
                f"_make_norms."
            )

    def __init__(
        self,
        *,
        compile: CompileOptions | bool | None = None,  # the YAML's word
        matmul_precision: Precision | None = None,
        deterministic: bool = False,
        lag: int | None = None,
        activation_checkpointing: CheckpointMode | None = None,
    ) -> None:
        check_choice("matmul_precision", matmul_precision, (*get_args(Precision), None))
        if lag is not None and (type(lag) is not int or lag < 0):
            raise BackendError(f"backend.lag is {lag!r}; it must be a whole number of steps >= 0.")
        choices = (*get_args(CheckpointMode), None)
        check_choice("activation_checkpointing", activation_checkpointing, choices)
        self._activation_checkpointing = activation_checkpointing
        self._compile = CompileOptions() if compile is True else compile or None
        if activation_checkpointing and self._compile and self._compile.backend == "eager":
            raise BackendError(
                "backend.activation_checkpointing: torch.compile with backend 'eager' computes "
                "other dropout masks anew than there were. Use its backend 'aot_eager' or "
                "'inductor', or leave one of the two out."
            )
        self._matmul_precision = matmul_precision
        self._deterministic = deterministic
        self._lag = self._default_lag if lag is None else lag
        self.comm = self._make_comm()
        self.seed = 0
        self.in_step = False
        """Whether a traced step is under way."""
        self.reads = self._make_reads()
        """The queue of deferred reads. `flush` of it waits for the device."""
        self.window = LossWindow()
        """Weights and losses of the batches since the last optimizer step. `sums` is collective."""
        self.norms = self._make_norms()
        """Norms of gradients and state, and clipping. Collective where they are sharded."""
        self._region = self._make_region()
        self._nothing = nullcontext()
        self._undo: list[Callable[[], None]] = []

    @property
    def seed(self) -> int:
        """The run's seed, from which those of steps and passes are derived."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed
        place = self.comm.data_shard[0]
        self._bases = tuple(stream_base(seed, stream, place) for stream in Stream)

    # ---- life

    @staticmethod
    @abstractmethod
    def is_available() -> bool:
        """Return whether the device is there; never raises."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the model and its batches are."""

    def open(self) -> None:
        """Start the runtime and set the process-wide switches that the options ask for.

        Collective where there are several processes.

        Raises:
            BackendUnavailable: If the device is not there.
        """
        if self._matmul_precision is not None:
            before = torch.get_float32_matmul_precision()
            self._undo.append(lambda: torch.set_float32_matmul_precision(before))
            torch.set_float32_matmul_precision(self._matmul_precision)
        if self._deterministic:
            was = torch.are_deterministic_algorithms_enabled()
            self._undo.append(lambda: torch.use_deterministic_algorithms(was))
            torch.use_deterministic_algorithms(True)

    def close(self, *, ok: bool = True) -> None:
        """Undo what `open` has set; a second call does nothing.

        Args:
            ok: Whether the run ended well; if not, nothing collective may happen.
        """
        while self._undo:
            self._undo.pop()()

    def _make_comm(self) -> Comm:
        return Comm()

    # ---- other processes: `comm` has all of it, these are the names that most callbacks need

    @property
    def is_main(self) -> bool:
        """Whether this process writes what is written once: `comm.is_main`."""
        return self.comm.is_main

    @property
    def data_shard(self) -> tuple[int, int]:
        """Which part of the data this process reads, and of how many: `comm.data_shard`."""
        return self.comm.data_shard

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Combine a tensor over the processes that have different data. Collective."""
        return self.comm.reduce(tensor, op)

    def barrier(self, name: str) -> None:
        """Wait until every process is here. Collective."""
        self.comm.barrier(name)

    def broadcast_object(self, value: Any) -> Any:
        """Return the main process's value, as `comm.broadcast_object`. Collective."""
        return self.comm.broadcast_object(value)

    def gather_object(self, value: Any) -> list[Any]:
        """Return the values of all processes, as `comm.gather_object`. Collective."""
        return self.comm.gather_object(value)

    # ---- model, optimizer, data

    def building(self) -> AbstractContextManager[Any]:
        """Return the context in which modules are built."""
        return self._nothing

    def prepare_model(self, model: Module) -> Module:
        """Move a model to the device, keeping tied parameters tied, and compile it if asked.

        Collective where there are several processes; may wait for the device.

        Returns:
            The module to call. The names of its parameters are the model's own.
        """
        return self._place_model(model)

    def _place_model(self, model: Module) -> Module:
        """Do what `prepare_model` says for a model that has been looked at."""
        move_model(model, self.device)
        self._checkpoint_activations(model)
        if self._compile is not None:
            compile_model(model, self._compile)
        return model

    def _checkpoint_activations(self, model: Module) -> None:
        """Have a model's blocks compute activations anew, if that was asked for."""
        if self._activation_checkpointing is not None:
            checkpoint_activations(model, self._activation_checkpointing)

    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return an optimizer that fits the device; its parameters are there already."""
        return optimizer

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches on the device, in order; their loader's errors come through."""
        return map(self.to_device, batches)

    def to_device(self, batch: Any) -> Any:
        """Return a batch with its tensors on the device."""
        device = self.device
        return map_tensors(batch, lambda tensor: tensor.to(device), lambda item: item.to(device))

    # ---- the step

    def step(self, index: int, stream: int = 0) -> Region:
        """Return the step's region: seeded on entry, launched and its reads delivered on exit.

        Args:
            index: Number of the batch within the stream; with the run's seed and this process's
                place among the data it decides every random number of the step.
            stream: A `Stream`; 0 = training.
        """
        region = self._region
        region.seed = (self._bases[stream] + GAMMA * index) & MASK
        return region

    def _make_region(self) -> Region:
        return Region(self)

    def _enter_step(self, seed: int) -> None:
        """Seed the generators; forbid host reads where the backend can."""
        self._seed_device(seed)
        self.in_step = True

    def _exit_step(self, *, ok: bool) -> None:
        """Launch the step, allow host reads, deliver what is due."""
        self.in_step = False
        if ok:
            self.reads.end_group()

    def _seed_device(self, seed: int) -> None:
        """Seed the generators that the step's operations draw from."""
        torch.default_generator.manual_seed(seed)

    def backward(self, loss: Tensor) -> None:
        """Add a loss's gradients.

        Args:
            loss: As it is to be differentiated: scaled, weighted, ().
        """
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def accumulating(self) -> AbstractContextManager[Any]:
        """Return the context of a batch after which the optimizer does not step yet.

        Gradients are not exchanged between processes inside.
        """
        return self._nothing

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        """Return the context that computes in `dtype` where that is safe."""
        return torch.autocast(self.device.type, dtype=dtype)

    def inference(self) -> AbstractContextManager[Any]:
        """Return the context of a pass without gradients.

        `no_grad`: tensors that a model keeps from a validation may be used in training.
        """
        return torch.no_grad()

    def grad_scaler(self, **options: Any) -> torch.amp.GradScaler | None:
        """Return a loss scaler, or None where the device has no use for one."""
        return None

    def _make_norms(self) -> Norms:
        return Norms(self)

    def optimizer_step(self, optimizer: Optimizer, keep: Tensor | None = None) -> None:
        """Update the parameters; or, where `keep` is false, leave them as they are, bit by bit.

        Args:
            optimizer: Its state, step counts too, stays as it is with the parameters.
            keep: (), bool, on the device; None = update.

        Cost: On a device a conditional step waits for it only where an optimizer counts on the
            host, and in the first step of a parameter. Memory for a copy of parameters and state
            during the step, unless the optimizer is a fused one.
        """
        if keep is None or self._look(keep):
            plain_step(optimizer)
        else:
            skip_step(optimizer)

    def restore(self, tensors: Sequence[Tensor], copies: Sequence[Tensor], keep: Tensor) -> None:
        """Put copies back into their tensors where `keep` is false.

        Does not wait for the device.

        Args:
            tensors: Changed in place.
            copies: One for each, of its shape and type.
            keep: (), bool, on the device.
        """
        if tensors and not self._look(keep):
            torch._foreach_copy_(list(tensors), list(copies))

    def _look(self, flag: Tensor) -> bool:
        """Return the value of a flag, also within a step. Waits for the device."""
        return bool(flag.item())

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Drop the gradients."""
        plain_zero_grad(optimizer)

    # ---- values

    @property
    def reads_at_once(self) -> bool:
        """Whether a value can be read here and now without waiting or overtaking another read."""
        return False

    def _make_reads(self) -> Reads:
        return HostReads(self._lag)

    def read(self, tensors: Sequence[Tensor], deliver: Deliver) -> None:
        """Have `deliver` called with the values, in order, at most `lag` steps later.

        Args:
            tensors: What to read, as it is now.
            deliver: Gets a list: a number for each tensor without dimensions, else a CPU tensor.
        """
        self.reads.put(tensors, deliver)
        if not self.in_step and self._lag == 0:
            self.reads.flush()

    def hold(self, values: Iterable[Any]) -> None:  # noqa: B027  # right where nothing is recorded
        """Keep tensors that nobody wants until the step's end.

        Where a step is recorded, what nobody has any more is dropped from its graph, and steps
        with another graph are compiled anew.
        """

    def flush(self) -> None:
        """Deliver all that was read. Waits for the device."""
        self.reads.flush()

    # ---- state

    def host_state(self, tree: Any) -> Any:
        """Return a copy of the structure with whole tensors in host memory. Waits for the device.

        Collective where a process holds only a part of the state.
        """
        return map_tensors(tree, lambda tensor: tensor.detach().to("cpu", copy=True))

    def state_view(self, tree: Any) -> Any:
        """Return the structure with whole, detached tensors that share memory with the run.

        Collective where a process holds only a part of the state.
        """
        return map_tensors(tree, lambda tensor: tensor.detach())

    def writable(self, tree: Any) -> Any:
        """Return the structure with tensors whose bytes can be had one by one.

        May wait for the device.
        """
        return tree

    def for_loading(self, tree: Any, like: Mapping[str, Any] | None = None) -> Any:
        """Return a structure of host tensors in the form that is best copied into the run's.

        Args:
            tree: The structure.
            like: The run's own tensors by name, where the structure has the same names.
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
        """Restore what `rng_state` returned. May wait for the device."""
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal), gauss))
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])

    # ---- facts

    def counters(self) -> dict[str, int]:
        """Return counts since the start: compilations, host reads, ... as the backend has them."""
        return {}

    def memory(self) -> dict[str, int]:
        """Return bytes: `host_peak_bytes`, and on a device with memory of its own its figures."""
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"host_peak_bytes": peak * (1 if sys.platform == "darwin" else 1024)}

    def synchronize(self) -> None:  # noqa: B027  # right for the host
        """Wait for the device."""

    def explain(self, error: BaseException) -> None:
        """Add to an error what this backend knows of its cause: what to lower on out of memory."""
        if is_out_of_memory(error):
            figures = ", ".join(f"{k} {v / 2**30:.2f} GiB" for k, v in self.memory().items())
            error.add_note(f"Out of memory on {self.device} ({figures}). {OUT_OF_MEMORY_ADVICE}")
