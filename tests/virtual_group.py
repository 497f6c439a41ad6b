"""A process group for the virtual device: like NCCL's, it refuses tensors of the host."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param
from torch.utils import _pytree as pytree

from tests.virtual_device import NAME, install, on_host

ENGINE: Final = "vccl"
sent: Counter[str] = Counter()
"""How often each collective ran on tensors of the device."""


class Group(dist.ProcessGroup):
    """Collectives of gloo on the memory of the device's tensors."""

    takes_host = False
    """Whether tensors of the host are sent, too, as by `cpu:gloo,cuda:nccl`."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._size, self._rank = size, rank

    def getBackendName(self) -> str:  # torch's
        return ENGINE

    def _get_backend(self, device: Any) -> Group:
        return self

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def pg_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


_FORMER: Final = {  # gloo's names
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}
_OF_LISTS: Final = {  # gloo has none for lists
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}


def _collective(name: str) -> Any:
    def call(self: Group, *args: Any, **options: Any) -> Any:
        sent[name] += 1

        def host(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if value.device.type != NAME:
                if self.takes_host:
                    return value
                raise RuntimeError(
                    f"No backend type associated with device type {value.device.type}"
                )
            return on_host(value)

        given = pytree.tree_map(host, args)
        several = _OF_LISTS.get(name)
        if several is None:
            calls = [given]
        else:
            outputs, inputs, *others = given
            calls = [(*pair, *others) for pair in zip(outputs, inputs, strict=True)]
        for call in calls:
            run = getattr(self._gloo, several or _FORMER.get(name, name))
            work = run(*call, **options)
            work.wait()  # the host's tensors do not own the memory
        return work

    return call


for _name in (
    *("broadcast", "allreduce", "allreduce_coalesced", "allgather", "_allgather_base"),
    *("reduce_scatter", "_reduce_scatter_base", "allgather_into_tensor_coalesced"),
    *("reduce_scatter_tensor_coalesced", "gather", "scatter", "reduce", "alltoall_base"),
    *("send", "recv", "barrier", *_FORMER),
):
    setattr(Group, _name, _collective(_name))


def install_group(*, takes_host: bool) -> None:
    """Register the device and its process group. Idempotent."""
    install()
    Group.takes_host = takes_host
    for name in ("free_storage", "alloc_storage"):  # its storages cannot be resized
        setattr(_fsdp_param, name, lambda *args: None)
        setattr(_fsdp_collectives, name, lambda *args: None)
    if ENGINE not in dist.Backend.backend_list:
        dist.Backend.register_backend(ENGINE, Group, devices=[NAME])
