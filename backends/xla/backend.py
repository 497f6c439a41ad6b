"""Devices supported by torch_xla: TPUs and other devices with a PJRT plugin.

torch_xla records operations and runs them as one graph on request: only at the step boundary, by
this backend. torch_xla is imported in `runtime.py` and `spmd.py`, inside functions, as that
patches torch for the whole process.
"""

from __future__ import annotations

import importlib.util
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Literal

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from ..backend import Backend, Caps, Region
from ..conditional_step import put_back
from ..errors import BackendError, HostReadError, check_choice, check_flag
from ..norms import Norms
from ..placement import map_tensors, swap_model
from ..prefetch import LookAhead, PlainLane, placed
from ..sync_guard import SyncGuard
from .optimizers import LazyOptimizers
from .reads import BatchedReads
from .recompilation import Recompilation, RecompilationWatch, Shapes, shapes_of
from .runtime import XlaRuntime
from .spmd import check_parallel
from .tensors import OutOfPlace, Snapshot, check_batch_norms, correct_batch_norms

Accumulation = Literal["batch", "step"]

log = logging.getLogger("modelzoo_trainer.backends.xla")

_HOST: Final = torch.device("cpu")
_NUM_GUARDED: Final = 4  # steps
_OWN: Final = (  # folders that contain no user code
    str(Path(torch.__file__).parent),
    str(Path(torch.__file__.replace("torch/", "torch_xla/")).parent),
    str(Path(__file__).parents[1]),
)
_NO_FLOAT16: Final = (
    "a loss scaler checks gradients for overflow on the CPU in every step, which would split the "
    "step's graph. bfloat16 needs no scaler"
)
_CUT: Final = "Unexpected execution happens inside the compiled function"


class _Region(Region):
    """The step; converts torch_xla's error for a host read into ours, with the line."""

    __slots__ = ()

    @override
    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        error, trace = rest
        self.backend._exit_step(ok=kind is None)
        if isinstance(error, RuntimeError) and _CUT in str(error):
            raise HostReadError(
                f"{_caller(trace)}: this line reads the value of a tensor (.item(), print, if) "
                f"inside a training step, which would split the step's graph. Use "
                f"trainer.log_metrics, trainer.read, @step_closure or torch.where, or read it "
                f"after the step."
            ) from error


class XlaBackend(Backend):
    """One XLA device, or several as one (SPMD): a step is one graph, compiled once.

    Reads are batched: when metrics are logged, one step later, all values since the last transfer
    are fetched in one transfer.

    Args:
        kind: "tpu" = must be a TPU; None = any kind found by torch_xla (environment: PJRT_DEVICE).
        accumulation: What becomes one graph: each "batch" (cost independent of their number), or
            all batches of an optimizer "step" (fewer launches, larger graph).
        parallel: Several devices as one: `replicate` copies of the model, each in `shard` shards;
            -1 = the remaining devices. None = one device.
        recompilation: What to do when a step is recompiled: "warn" (once), "error", or "ignore".
        cache_dir: Folder of compiled graphs for later runs; None = no cache. CPU devices cannot
            load them.
        look_ahead: Fetch the next batch from the loader before a step, so that its copy overlaps.
        **options: Options of `Backend`, without `compile`.

    Raises:
        BackendError: If an option is invalid.
        BackendUnavailable: In `open`, if there is no such device, or torch_xla does not match
            torch.
    """

    name = "xla"
    _default_lag: ClassVar[int] = 100
    caps = Caps(
        lazy=True,
        static_shapes=True,
        float64=False,
        looks_ahead=True,
        refused_dtypes={torch.float16: _NO_FLOAT16},
    )
    _never_called: ClassVar = {
        "_place_model": "override prepare_model",
        "_checkpoint_activations": "the compiler decides what to recompute",
        "_look": "a step cannot wait for a flag; override optimizer_step and restore",
    }

    def __init__(
        self,
        *,
        kind: str | None = None,
        accumulation: Accumulation = "batch",
        parallel: Mapping[str, int] | None = None,
        recompilation: Recompilation = "warn",
        cache_dir: str | Path | None = None,
        look_ahead: bool = True,
        **options: Any,
    ) -> None:
        check_choice("accumulation", accumulation, ("batch", "step"))
        check_flag("look_ahead", look_ahead)
        if cache_dir is not None and not isinstance(cache_dir, (str, Path)):
            raise BackendError(
                f"backend.cache_dir: expected the path of a folder, got {cache_dir!r}."
            )
        if parallel is not None:
            check_parallel(parallel)
        if options.get("compile"):
            raise BackendError(
                "backend.compile: torch.compile does not apply to XLA devices, which always "
                "compile each step as a whole. Remove it."
            )
        if options.get("activation_checkpointing"):
            raise BackendError(
                "backend.activation_checkpointing is not supported on XLA devices, whose compiler "
                "decides what to recompute. Remove it."
            )
        self._kind = kind
        self._joins = accumulation == "step"
        self._parallel = parallel
        self._look_ahead = look_ahead
        self._cache_dir = cache_dir
        self._runtime: XlaRuntime  # set in `open`
        self._device = torch.device("xla", 0)
        self._stream = 0
        self._held: list[Any] = []
        self._at_risk: list[Snapshot] = []
        self._guard = SyncGuard("xla")
        self._is_guarded = False
        self._num_guarded: Counter[int] = Counter()
        self._num_fetched = 0
        self._accumulates = False
        self._accumulating = _Accumulating(self)
        self._is_open = False  # whether a graph of several batches has started
        self._num_expected = 0
        self.optimizers = LazyOptimizers(
            lambda tensors: self._runtime.send_state(tensors), self._device
        )
        self._watch = RecompilationWatch(
            recompilation, lambda: self._runtime.num_compiled(), lambda: self._runtime.fallbacks()
        )
        super().__init__(**options)

    # ---- life

    @staticmethod
    @override
    def is_available() -> bool:
        """Return whether torch_xla is installed; `open` checks for a device."""
        return importlib.util.find_spec("torch_xla") is not None

    @property
    @override
    def device(self) -> torch.device:
        """The device; with several as one, the virtual device."""
        return self._device

    @override
    def open(self) -> None:
        self._runtime = XlaRuntime(self._kind, self._parallel, self._cache_dir)
        self._device = self._runtime.device
        self._watch.begin()
        self._num_expected = self._runtime.num_made()
        super().open()
        if self._matmul_precision is not None:
            self._undo.append(self._runtime.set_precision(self._matmul_precision))

    @override
    def close(self, *, ok: bool = True) -> None:
        if self.in_step:
            self._exit_step(ok=False)
        super().close(ok=ok)

    # ---- model, optimizer, data

    @override
    def prepare_model(self, model: Module) -> Module:
        self.initial_values.draw(model, _HOST)
        check_batch_norms(model)
        swap_model(model, self._device)
        correct_batch_norms(model)
        if self._runtime.spmd is not None:
            self._runtime.spmd.shard_model(model)
        self._run_pending()
        return model

    @override
    def prepare_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self.optimizers.prepare(optimizer)
        return optimizer

    @override
    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        lane = _Lane(self.to_device, self._watch)
        return LookAhead(batches, lane) if self._look_ahead else placed(batches, lane.carry)

    @override
    def to_device(self, batch: Any) -> Any:
        """Send all tensors of a batch in one transfer."""
        made = self._runtime.num_made()
        tensors: list[Tensor] = []
        map_tensors(batch, tensors.append)
        ready = [_is_plain(tensor) for tensor in tensors]
        plain = [tensor for tensor, is_plain in zip(tensors, ready, strict=True) if is_plain]
        sent = iter(self._runtime.send_batch(plain))
        placed = iter(
            [
                next(sent) if is_plain else tensor.to(self._device)
                for tensor, is_plain in zip(tensors, ready, strict=True)
            ]
        )
        batch = map_tensors(batch, lambda _: next(placed), lambda item: item.to(self._device))
        self._num_expected += self._runtime.num_made() - made
        return batch

    # ---- the step

    @override
    def step(self, index: int, stream: int = 0) -> Region:
        self._stream = stream
        return super().step(index, stream)

    @override
    def _make_region(self) -> Region:
        return _Region(self)

    @override
    def _enter_step(self, seed: int) -> None:
        if self._stream == 0 and self.optimizers.has_new:
            self.optimizers.begin()
        if self._has_strays:
            self._run_pending()
        self._seed_device(seed)
        self._num_fetched = self._runtime.num_fetched()
        if self._num_guarded[self._stream] < _NUM_GUARDED:
            self._guard.arm()
            self._is_guarded = True
        self._runtime.allow_launches(False)
        self.in_step = True

    @override
    def _exit_step(self, *, ok: bool) -> None:
        self.in_step = False
        self._runtime.allow_launches(True)
        self._end_guard()
        accumulates, self._accumulates = self._accumulates, False
        self._is_open = ok and accumulates and self._joins
        if self._is_open:
            return
        try:
            self._launch()
        except RuntimeError:  # the graph was split; the error that did it propagates
            if ok:
                raise
        self._held.clear()
        self._num_expected = self._runtime.num_made()
        if ok:
            self._watch.look((self._stream, accumulates), ends_window=not accumulates)
            self.reads.end_group()

    def _end_guard(self) -> None:
        """Stop checking for host reads; check again in the next step if one went undetected.

        Reads of values that are already available do not split a graph, so the runtime allows them.
        They are detected by Python functions, which is too expensive for every step.
        """
        if self._is_guarded:
            self._is_guarded = False
            self._num_guarded[self._stream] += 1
            self._guard.disarm()
        elif self._runtime.num_fetched() != self._num_fetched:
            self._num_guarded[self._stream] = _NUM_GUARDED - 1
            log.warning(
                "A step has read the value of a device tensor on the CPU, so it waited for the "
                "device. The next such read raises an error that names the line."
            )

    def _launch(self) -> None:
        """Run the recorded operations."""
        if self._at_risk:
            self._at_risk = [snapshot for snapshot in self._at_risk if snapshot.save()]
        self._runtime.sync()

    @property
    def _has_strays(self) -> bool:
        """Whether operations were recorded since the last step: they get their own graph."""
        return not self._is_open and self._runtime.num_made() != self._num_expected

    def _run_pending(self) -> None:
        """Run operations recorded outside of steps."""
        self._launch()
        self._is_open = False
        self._num_expected = self._runtime.num_made()
        self._watch.skip_pending()

    @override
    def _seed_device(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        self._runtime.seed(seed)

    @override
    def accumulating(self) -> AbstractContextManager[Any]:
        return self._accumulating

    @override
    def _make_norms(self) -> Norms:
        return Norms(self, OutOfPlace)

    @override
    def optimizer_step(self, optimizer: Optimizer, keep: Tensor | None = None) -> None:
        self.optimizers.step(optimizer, keep)

    @override
    def restore(self, tensors: Sequence[Tensor], copies: Sequence[Tensor], keep: Tensor) -> None:
        put_back(tensors, copies, keep)

    # ---- values

    @override
    def _make_reads(self) -> BatchedReads:
        return BatchedReads(self._lag, self._snapshot, self._fetch_snapshots, "xla")

    @override
    def hold(self, values: Iterable[Any]) -> None:
        self._held += values

    @override
    def flush(self) -> None:
        if self._is_open:
            self._run_pending()
        super().flush()
        self._at_risk.clear()

    def _snapshot(self, tensor: Tensor) -> Snapshot:
        own = tensor.detach()
        snapshot = Snapshot(own)
        if tensor.grad_fn is None:  # results with a history are rarely changed in place
            self._at_risk.append(snapshot)
        return snapshot

    def _fetch_snapshots(self, snapshots: Sequence[Snapshot]) -> list[Tensor]:
        values = self._fetch([snapshot.kept for snapshot in snapshots])
        for snapshot in snapshots:
            snapshot.forget()
        return values

    def _fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if tensors and self.in_step:
            raise HostReadError(
                "Values of tensors were requested (by flush, host_state or a checkpoint) inside a "
                "step. Request them after the step, in on_train_batch_end or on_step_boundary."
            )
        return self._runtime.fetch(tensors)

    # ---- state

    @override
    def host_state(self, tree: Any) -> Any:
        return self._on_host(tree, lambda tensor: tensor.detach().clone())

    @override
    def writable(self, tree: Any) -> Any:
        """Return the tree with its tensors on the host, in one transfer. Waits for the device."""
        return self._on_host(tree, lambda tensor: tensor)

    def _on_host(self, tree: Any, otherwise: Callable[[Tensor], Tensor]) -> Any:
        if not self.in_step and self._has_strays:
            self._run_pending()
        found: dict[int, Tensor] = {}
        ids: dict[int, int] = {}  # the id of a view differs on each request

        def note(tensor: Tensor) -> None:
            if tensor.device.type == "xla":
                own = ids[id(tensor)] = self._runtime.id_of(tensor)
                found.setdefault(own, tensor)

        map_tensors(tree, note)
        copies = dict(zip(found, self._fetch(list(found.values())), strict=True))
        self._num_expected = self._runtime.num_made()

        def take(tensor: Tensor) -> Tensor:
            if tensor.device.type != "xla":
                return otherwise(tensor)
            return copies[ids[id(tensor)]]

        return map_tensors(tree, take)

    @override
    def rng_state(self) -> dict[str, Any]:
        state = {"device": self._runtime.rng_seed, "device_kind": "xla"}
        return super().rng_state() | state

    @override
    def set_rng_state(self, state: Mapping[str, Any]) -> None:
        super().set_rng_state(state)
        if state.get("device_kind") == "xla":  # else from another device; steps are seeded anyway
            self._runtime.seed(state["device"])

    @override
    def for_loading(self, tree: Any, like: Mapping[str, Any] | None = None) -> Any:
        """Return the tree with single numbers on the device, as graph inputs."""

        def send(tensor: Tensor) -> Tensor:
            is_single = tensor.device.type == "cpu" and tensor.dim() == 0
            return self._runtime.send_state([tensor])[0] if is_single else tensor

        return map_tensors(tree, send)

    # ---- facts

    @override
    def counters(self) -> dict[str, int]:
        """Return counts since the start of the process; waits for the device.

        `compilations`, `executions` of graphs, `transfers_to_host`, `transfers_to_device`,
        `fallbacks` (operations that ran on the host), `late_compilations` (see `recompilation`),
        `reads` and `transfers` (of deferred reads).
        """
        self.synchronize()
        reads = self._batched_reads
        return {
            "compilations": self._runtime.num_compiled(),
            "executions": self._runtime.num_executed(),
            "transfers_to_host": self._runtime.num_fetched(),
            "transfers_to_device": self._runtime.num_sent(),
            "fallbacks": len(self._runtime.fallbacks()),
            "late_compilations": self._watch.num_late,
            "reads": reads.num_reads,
            "transfers": reads.num_transfers,
        }

    @property
    def _batched_reads(self) -> BatchedReads:
        reads = self.reads
        assert isinstance(reads, BatchedReads)
        return reads

    @override
    def memory(self) -> dict[str, int]:
        return super().memory() | self._runtime.memory()

    @override
    def synchronize(self) -> None:
        self._runtime.wait()


class _Accumulating(AbstractContextManager[None]):
    """Marks a batch without an optimizer step after it."""

    def __init__(self, backend: XlaBackend) -> None:
        self._backend = backend

    @override
    def __enter__(self) -> None:
        self._backend._accumulates = True

    @override
    def __exit__(self, *exc_info: object) -> None:
        pass


class _Lane(PlainLane):
    """Copies batches to the device, and passes their shapes to the watch."""

    def __init__(self, place: Callable[[Any], Any], watch: RecompilationWatch) -> None:
        super().__init__(place)
        self._watch = watch

    @override
    def start(self, batch: Any) -> tuple[Any, Shapes]:
        return super().start(batch), shapes_of(batch)

    @override
    def finish(self, copying: tuple[Any, Shapes]) -> Any:
        batch, self._watch.shapes = copying
        return batch

    def carry(self, batch: Any) -> Any:
        """Return a batch on the device."""
        return self.finish(self.start(batch))


def _is_plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided


def _caller(trace: TracebackType | None) -> str:
    """Return a traceback's last line outside of libraries, or of torch and this package."""
    found = library = "the step"
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith(_OWN):
            library = f"{name}:{trace.tb_lineno}"
            found = found if "site-packages" in name else library
        trace = trace.tb_next
    return library if found == "the step" else found
