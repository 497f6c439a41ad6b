"""A device of its own type for tests: host memory behind the rules of an accelerator.

Its tensors have another device than the host's, so that torch itself refuses to mix them, and picks
other kernels, process groups, streams and generators. What an accelerator does at a cost is
counted: reads by the host, and copies in both directions.

`install()` registers it in a process, for good; processes that test it are their own.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME: Final = "virtual"
_HOST: Final = torch.device("cpu")
_KEY: Final = "PrivateUse1"
_HOST_KEY: Final = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_CASTS: Final = ("linear", "matmul", "bmm", "mm", "addmm", "baddbmm", "conv2d")

counts: Counter[str] = Counter()
"""Of `read`, `to host`, `to device`, and of each operation by its name."""
_libraries: list[torch.library.Library] = []


class Event:
    """`torch.virtual.Event`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        counts["event"] += 1

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        counts["wait"] += 1


class Stream(torch.Stream):
    """`torch.virtual.Stream`: everything is done at once, and in order."""

    def __new__(cls, device: Any = None, priority: int = 0, **options: Any) -> Stream:
        counts["stream"] += 1
        return super().__new__(cls, device=torch.device(NAME, 0), priority=priority)

    def wait_stream(self, other: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Event:
        counts["event"] += 1
        return event or Event()

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        counts["wait"] += 1


class _Module:
    """`torch.virtual`."""

    Stream, Event = Stream, Event

    def current_stream(self, device: Any = None) -> Any:
        return self._current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.uuid = f"{NAME}-{os.getpid()}"
        self._current: Any = None

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(uuid=self.uuid)

    def set_device(self, index: Any) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self.generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return False


def module() -> _Module:
    """Return `torch.virtual`."""
    return torch.get_device_module(NAME)  # type: ignore[no-any-return]


def install() -> torch.device:
    """Register the device; return it. Idempotent."""
    if not _libraries:
        own = _Module()
        _setup_privateuseone_for_python_backend(NAME, own)
        own._current = Stream()
        every, some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        _libraries.extend((every, some))
        every.fallback(_run, _KEY)
        every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        for name in _CASTS:
            some.impl(name, _casting(name), "AutocastPrivateUse1")
        some.impl("_copy_from", _copy, _KEY)
        some.impl("_local_scalar_dense", _read, _KEY)
        some.impl("resize_", _resize, _KEY)
        some.impl("record_stream", lambda tensor, stream: counts.update(["record_stream"]), _KEY)
        some.impl("empty.memory_format", _empty, _KEY)
        some.impl("empty_strided", _empty_strided, _KEY)
        torch.accelerator.synchronize = lambda device=None: counts.update(["synchronize"])
        torch.Tensor.__deepcopy__ = _deepcopy(torch.Tensor.__deepcopy__)  # no storage.clone
        some.impl("set_.source_Storage_storage_offset", _set, _KEY)
        some.impl("set_.source_Storage", _set_all, _KEY)
    return torch.device(NAME, 0)


# ---- memory


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor of the host with the memory of the device's, if it has any."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():  # an operation may give it some
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    host = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), _HOST, storage.nbytes()
    )
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(host, tensor.storage_offset(), tensor.shape, tensor.stride())


def _on_device(host: Tensor) -> Tensor:
    return _placed(_new_storage(host.untyped_storage()), host)


def _new_storage(host: Any) -> Any:
    device = torch.device(NAME, 0)
    storage = torch._C._construct_storage_from_data_pointer(host.data_ptr(), device, host.nbytes())
    weakref.finalize(storage, lambda kept: None, host)  # as long as it lives, so does the memory
    return storage


def _placed(storage: Any, like: Tensor) -> Tensor:
    tensor = torch._C._acc.create_empty_tensor((0,), like.dtype)
    return _set(tensor, storage, like.storage_offset(), list(like.shape), list(like.stride()))


def _set(tensor: Tensor, storage: Any, offset: int, size: list[int], stride: list[int]) -> Tensor:
    operation = torch.ops.aten.set_.source_Storage_storage_offset
    operation.redispatch(_HOST_KEY, tensor, storage, offset, size, stride)
    return tensor


def _set_all(tensor: Tensor, storage: Any) -> Tensor:
    return _set(tensor, storage, 0, [storage.nbytes() // tensor.itemsize], [1])


def _empty(size: Any, **options: Any) -> Tensor:
    memory_format = options.get("memory_format") or torch.contiguous_format
    dtype = options.get("dtype") or torch.get_default_dtype()
    return _on_device(torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format))


def _empty_strided(size: Any, stride: Any, **options: Any) -> Tensor:
    dtype = options.get("dtype") or torch.get_default_dtype()
    return _on_device(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def _resize(tensor: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    host = torch.empty(size, dtype=tensor.dtype, device="cpu")
    if host.nbytes <= tensor.untyped_storage().nbytes() - tensor.storage_offset() * host.itemsize:
        return _set(
            tensor, tensor.untyped_storage(), tensor.storage_offset(), size, list(host.stride())
        )
    old = on_host(tensor).flatten()
    host.flatten()[: old.numel()].copy_(old)
    return _set(tensor, _new_storage(host.untyped_storage()), 0, size, list(host.stride()))


def _deepcopy(usual: Any) -> Any:
    def deepcopy(self: Tensor, memo: dict[int, Any]) -> Tensor:
        if self.device.type != NAME or id(self) in memo:
            return usual(self, memo)
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy.detach(), self.requires_grad)
        memo[id(self)] = copy
        return copy

    return deepcopy


# ---- operations


def _run(operation: Any, *args: Any, **options: Any) -> Any:
    """Run any operation on the memory of its tensors."""
    counts[operation.name().removeprefix("aten::")] += 1
    seen: dict[int, tuple[Tensor, Tensor]] = {}  # of the device and of the host

    def host(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == NAME:
            return _HOST
        if not isinstance(value, Tensor) or value.device.type != NAME:
            return value
        return seen.setdefault(id(value), (value, on_host(value)))[1]

    kinds = [str(one.type) for one in operation._schema.arguments]
    args = tuple(  # numbers that stand for tensors
        torch.tensor(value) if kind == "Tensor" and isinstance(value, int | float) else value
        for kind, value in zip(kinds, args, strict=False)
    )
    found = operation(*pytree.tree_map(host, args), **pytree.tree_map(host, options))
    return _results(found, list(seen.values()))


def _results(found: Any, seen: list[tuple[Tensor, Tensor]]) -> Any:
    """Return what an operation returned as tensors of the device: arguments, views, new ones."""
    for tensor, host in seen:
        if tensor.shape != host.shape:  # an output without memory
            storage = _new_storage(host.untyped_storage())
            _set(tensor, storage, host.storage_offset(), list(host.shape), list(host.stride()))
    own = {id(host): tensor for tensor, host in seen}
    owners = {host.untyped_storage().data_ptr(): tensor for tensor, host in seen}

    def device(value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) in own:
            return own.get(id(value), value)
        owner = owners.get(value.untyped_storage().data_ptr())
        if owner is None or not value.untyped_storage().nbytes():
            return _on_device(value)
        return _placed(owner.untyped_storage(), value)

    return pytree.tree_map(device, found)


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    is_own = [tensor.device.type == NAME for tensor in (source, target)]
    if is_own[0] != is_own[1]:
        counts["to host" if is_own[0] else "to device"] += 1
    first, second = (
        on_host(tensor) if own else tensor
        for tensor, own in zip((source, target), is_own, strict=True)
    )
    second.copy_(first)
    return target


def _read(tensor: Tensor) -> Any:
    counts["read"] += 1
    return on_host(tensor).item()


def _casting(name: str) -> Any:
    function = getattr(torch.ops.aten, name)

    def cast(*args: Any, **options: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)

        def lower(value: Any) -> Any:
            is_wide = isinstance(value, Tensor) and value.dtype == torch.float32
            return value.to(dtype) if is_wide else value

        with torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        ):
            return function(*map(lower, args), **options)

    return cast
