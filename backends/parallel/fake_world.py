"""Many processes on paper: this one is the first of them, and the others are made up.

Tensors are fake (they have a shape and no memory), and so is the process group: what it is asked
to send is counted, and nothing is sent. The run's own backend works on it as it is.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import _disable_current_modes

from ..coordination import world
from ..coordination.launch import Launch
from ..errors import BackendError
from .config import TIMEOUT_S

_LARGEST_MESH: Final = 1 << 20  # processes
_BUCKETS: Final = (1 << 20, 25 << 20)  # bytes of the first one and of others, DDP's own
_INNER: Final[Any] = dist  # with what torch does not declare


class FakeWorld:
    """Stands for `World` in a run whose other processes do not exist."""

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
        self.coordinator = self  # has nothing to hear
        self.control_group = self.checkpoint_group = dist.group.WORLD
        self._topics: list[str] = []

    def new_group(self, ranks: Sequence[int] | None = None) -> Any:
        """Return a group."""
        return dist.new_group(None if ranks is None else list(ranks))

    def shorten_timeouts(self, groups: Sequence[Any] = ()) -> None:
        """Do nothing: nobody is waited for."""

    def any_true(self, flag: bool) -> bool:
        """Return the flag: the others say the same."""
        return flag

    def barrier(self) -> None:
        """Do nothing: everybody is here."""

    def broadcast_object(self, value: Any) -> Any:
        """Return the value: this is the first process."""
        return value

    def gather_object(self, value: Any) -> list[Any]:
        """Return the value as that of every process."""
        return [value] * self.world_size

    def require_same(self, what: str, value: str, *, hint: str) -> None:
        """Do nothing: it is the same."""

    def try_barrier(self, name: str) -> bool:
        """Return True: everybody comes."""
        return True

    def propose(self, topic: str) -> None:
        """Have `decided` return the topic."""
        self._topics.append(topic)

    def decided(self) -> tuple[str, ...]:
        """Return what was proposed since the last call."""
        topics, self._topics = tuple(self._topics), []
        return topics

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@contextmanager
def fake_world(world_size: int) -> Iterator[None]:
    """Make this process the first of many that do not exist, and undo it at the end.

    Backends that are made inside are those of several processes.

    For a `world_size` of one nothing is made up.

    Raises:
        BackendError: If this process is already one of several.
    """
    if dist.is_initialized() or world.joined() is not None:
        raise BackendError(
            "the run on paper needs one process alone, and this one is one of several. Start it "
            "without torchrun: python run.py --params FILE --plan --world-size N."
        )
    with ExitStack() as undo:
        _replace(undo, Module, "_apply", _apply)
        if world_size == 1:
            yield
            return
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        undo.callback(dist.destroy_process_group)
        world._JOINED.append(FakeWorld(world_size))  # type: ignore[arg-type]  # stands for it
        undo.callback(world._JOINED.clear)
        _let_replicas_be_fake(undo)
        _let_shards_be_fake(undo)
        yield


def _apply(module: Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Module:
    """Change all tensors of a module, in `Module._apply`'s place: that one swaps their contents.

    Fake tensors that somebody refers to weakly cannot be swapped.
    """
    for child in module.children() if recurse else ():
        child._apply(change)  # type: ignore[no-untyped-call]  # torch leaves it untyped
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
    """Have DistributedDataParallel do without what reads or sends real numbers.

    That is: the comparison of the models at the start, the order in which gradients became ready
    (their order in the model stands for it), and what comes back from other processes.
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
        is_one = limits == [sys.maxsize]  # for the first step alone
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
    """Have shards made one by one, and shapes of results worked out where nobody counts memory."""
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
    """DDP's reducer, which is asked for everything but the order of its buckets."""

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
    """Equal parts of a tensor, of which only those that are asked for are made."""

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
    """Send a bucket as torch does without a hook."""
    buffer = bucket.buffer()
    buffer.div_(dist.get_world_size())
    dist.all_reduce(buffer)
    return _Sent(buffer).future(buffer)


class _Sent:
    """What `all_reduce` returns at once: nothing is under way."""

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
    """Return whether an operation is done with real numbers: those that meshes are made of."""
    if function is torch.ops.aten.arange.default or function is torch.ops.aten.arange.start:
        last = args[-1] if args else None
        return isinstance(last, int) and 0 <= last <= _LARGEST_MESH
    return False


_OPTIONS: Final = (
    "activation_checkpointing",
    "find_unused_parameters",
    "parallel",
    "sharding",
    "tensor_plan",
)


def fake_world_backend(
    device: str | None, options: Mapping[str, Any] | None
) -> tuple[str, dict[str, Any], bool]:
    """Return the device that stands on paper for a run's, its backend's options, and more.

    It is the host; options that do not decide what a process holds and sends are left out.

    Returns:
        The last value is whether the run's tensors would be in host memory.

    Raises:
        BackendError: If nothing can stand for the device.
    """
    name = (device or "cpu").lower()
    if name == "xla" or (name == "tpu" and importlib.util.find_spec("torch_tpu") is None):
        raise BackendError(
            f"device {name!r}: a run on paper is not offered for torch_xla, which traces steps in "
            f"a way of its own. Plan with --device cpu or cuda."
        )
    kept = {key: value for key, value in (options or {}).items() if key in _OPTIONS}
    return "cpu", kept, name in ("cpu", "fake", "meta")
