"""Simulate many ranks in one process: this is rank 0, and the others do not exist.

Tensors are fake (shapes without memory), and so is the process group: its traffic is counted but
not sent. The run's own backend works on it unchanged.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import _disable_current_modes

from ..coordination import world
from ..coordination.failures import Failure
from ..coordination.launch import Launch
from ..errors import BackendError
from .config import TIMEOUT_S

_LARGEST_MESH: Final = 1 << 20  # ranks
_MESHES: Final = (
    "torch.distributed.device_mesh",
    "torch.distributed._mesh_layout",
    "torch.distributed.tensor.placement_types",
)
_ARANGE_START: Final[Any] = torch.ops.aten.arange.start
_BUCKETS: Final = (1 << 20, 25 << 20)  # bytes of the first and of other buckets, as in DDP
_INNER: Final[Any] = dist  # undeclared in torch


class FakeWorld:
    """Replaces `World` in a run whose other ranks do not exist."""

    failure = None
    on_abort = None

    def __init__(self, world_size: int) -> None:
        self.launch = Launch(
            rank=0,
            local_rank=0,
            world_size=world_size,
            local_world_size=world_size,
        )
        self.rank = self.local_rank = 0
        self.world_size = world_size
        self.timeout_s = TIMEOUT_S
        self.coordinator = self  # nothing to receive
        self.control_group = self.checkpoint_group = dist.group.WORLD
        self._topics: list[str] = []

    def new_group(self, ranks: Sequence[int] | None = None) -> Any:
        """Create a group."""
        return dist.new_group(None if ranks is None else list(ranks))

    def shorten_timeouts(self, groups: Sequence[Any] = ()) -> None:
        """Do nothing: nothing waits."""

    def any_true(self, flag: bool) -> bool:
        """Return the flag: it is equal on all ranks."""
        return flag

    def barrier(self) -> None:
        """Do nothing: there is nobody to wait for."""

    def broadcast_object(self, value: Any) -> Any:
        """Return the value: this is rank 0."""
        return value

    def gather_object(self, value: Any) -> list[Any]:
        """Return the value for every rank."""
        return [value] * self.world_size

    def require_same(self, what: str, value: str, *, hint: str) -> None:
        """Do nothing: it is equal."""

    def try_barrier(self, name: str) -> bool:
        """Return True: all ranks arrive."""
        return True

    def propose(self, topic: str) -> None:
        """Make `decided` return the topic."""
        self._topics.append(topic)

    def decided(self) -> tuple[str, ...]:
        """Return the topics proposed since the last call."""
        topics, self._topics = tuple(self._topics), []
        return topics

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def fail(self, message: str, *, code: int = 1, kind: str = "error") -> Failure:
        """Return the failure; there is nobody to tell."""
        return Failure(self.rank, message, code, kind)

    def fail_by(self, error: BaseException) -> Failure:
        """Return the failure; there is nobody to tell."""
        return self.fail(f"{type(error).__name__}: {error}")

    def leave(self, code: int) -> NoReturn:
        """Exit this process."""
        raise SystemExit(code)


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of many that do not exist, until the end of the block.

    Backends created inside are those for several ranks.

    With a `world_size` of 1 nothing is simulated.

    Raises:
        BackendError: If this process is already one of several ranks.
    """
    if dist.is_initialized() or world.joined() is not None:
        raise BackendError(
            "plan requires a single process, but this is one of several. Run it without "
            "torchrun: modelzoo-trainer plan FILE --world-size N."
        )
    with ExitStack() as undo:
        _replace(undo, Module, "_apply", _apply)
        if world_size == 1:
            yield
            return
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        undo.callback(dist.destroy_process_group)
        world._JOINED.append(FakeWorld(world_size))  # type: ignore[arg-type]  # replaces it
        undo.callback(world._JOINED.clear)
        _let_replicas_be_fake(undo)
        _let_shards_be_fake(undo)
        yield


def _apply(module: Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
    """Change all tensors of a module like `Module._apply`, which swaps their contents instead.

    Fake tensors with weak references cannot be swapped.
    """
    for child in module.children() if recurse else ():
        child._apply(change)  # type: ignore[no-untyped-call]  # untyped in torch
    with torch.no_grad():
        for name, param in module._parameters.items():
            changed = None if param is None else change(param)
            if param is not None and changed is not None and changed is not param:
                module._parameters[name] = Parameter(changed, param.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = change(buffer)
    return module


def _let_replicas_be_fake(undo: ExitStack) -> None:
    """Patch DistributedDataParallel to neither read nor send real numbers.

    Patches the comparison of models at the start, the order in which gradients become ready
    (replaced by their order in the model), and results from other ranks.
    """
    from torch.nn.parallel import distributed as replicated

    from . import apply

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    _replace(undo, replicated, "_verify_param_shape_across_processes", nothing)
    _replace(undo, replicated, "_sync_module_states", nothing)
    _replace(undo, apply, "fix_bucket_order", nothing)

    assign = _INNER._compute_bucket_assignment_by_size

    def assigned(tensors: Any, limits: list[int], *args: Any) -> Any:
        is_one = limits == [sys.maxsize]  # for the first step only
        return assign(tensors, list(_BUCKETS) if is_one else limits, *args)

    _replace(undo, dist, "_compute_bucket_assignment_by_size", assigned)
    start = replicated.DistributedDataParallel.__init__

    def init(module: Any, *args: Any, **kwargs: Any) -> None:
        start(module, *args, **kwargs)
        module.reducer = _Reducer(module)

    _replace(undo, replicated.DistributedDataParallel, "__init__", init)
    send = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        send(tensor, *args, **kwargs)
        return _Sent(tensor) if async_op else None

    _replace(undo, dist, "all_reduce", all_reduce)


def _let_shards_be_fake(undo: ExitStack) -> None:
    """Create shards one by one, and infer shapes while memory is not tracked."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    _replace(undo, _fsdp_param, "_chunk_with_empty", _Chunks)
    name = "_propagate_tensor_meta_non_cached"
    find = getattr(ShardingPropagator, name)

    def found(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return find(*args, **kwargs)

    _replace(undo, ShardingPropagator, name, found)


def _replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


class _Reducer:
    """Wraps DDP's reducer, except for the order of its buckets."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._reducer = module.reducer
        self._has_hook = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        if not self._has_hook and not self._module._comm_hooks:
            _INNER._register_comm_hook(self._reducer, None, _add_up)
            self._has_hook = True
        return False


class _Chunks:
    """Equal chunks of a tensor, created on access."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor = tensor
        self._dim = dim
        self._size = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._size
        size = min(self._size, self._tensor.size(self._dim) - start)
        if size <= 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, size)


def _add_up(state: None, bucket: Any) -> Future[Tensor]:
    """Reduce a bucket like torch without a hook."""
    buffer = bucket.buffer()
    buffer.div_(dist.get_world_size())
    dist.all_reduce(buffer)
    return _Sent(buffer).future(buffer)


class _Sent:
    """Result of `all_reduce`, complete at once."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future[list[Tensor]]:
        return self.future([self._tensor])

    @staticmethod
    def future(value: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(value)
        return done


def is_for_real(function: Any, args: Sequence[Any]) -> bool:
    """Return whether an operation uses real numbers: ranks of a mesh, or sizes of shards."""
    if function is not torch.ops.aten.arange.default and function is not _ARANGE_START:
        return False
    last = args[-1] if args else None
    return isinstance(last, int) and 0 <= last <= _LARGEST_MESH and _is_for_a_mesh()


def _is_for_a_mesh() -> bool:
    """Return whether torch is making a mesh, or finding out where shards of a tensor begin."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        if frame.f_globals.get("__name__") in _MESHES:
            return True
        frame = frame.f_back
    return False


def num_buckets(num_bytes: int) -> int:
    """Return in how many messages DDP sends gradients, about: tensors are not split."""
    first, other = _BUCKETS
    return 1 + -(-max(0, num_bytes - first) // other)


_OPTIONS: Final = (
    "activation_checkpointing",
    "find_unused_parameters",
    "parallel",
    "sequence_parallel",
    "sharding",
    "tensor_plan",
)


def fake_world_backend(
    device: str | None, options: Mapping[str, Any] | None
) -> tuple[str, dict[str, Any], bool]:
    """Return a replacement for a run's device and backend options.

    The device is the host; options that affect neither memory nor traffic are removed.

    Returns:
        The last value is whether the run's tensors would be in host memory.

    Raises:
        BackendError: If the device is not supported.
    """
    name = (device or "cpu").lower()
    if name == "xla" or (name == "tpu" and importlib.util.find_spec("torch_tpu") is None):
        raise BackendError(
            f"device {name!r}: --plan does not support torch_xla, which traces whole steps. "
            f"Plan with --device cpu or cuda."
        )
    kept = {key: value for key, value in (options or {}).items() if key in _OPTIONS}
    return "cpu", kept, name in ("cpu", "fake", "meta")
