"""Which accelerator of its host belongs to a process."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from .launch import Launch


def own_index(local_rank: int) -> int:
    """Return the index of a process's device among those that it sees.

    A scheduler may show each process its own device only, which then has the index 0.
    """
    return 0 if torch.accelerator.device_count() == 1 else local_rank


def has_own_device(launch: Launch, store: Store, timeout: timedelta) -> bool:
    """Return whether each process of the run has a device of its own. Collective.

    If each sees one device only, these are compared by their UUIDs.
    """
    count = torch.accelerator.device_count()
    if launch.local_world_size <= count:
        return True
    if count != 1:
        return False
    store.set(f"device/{launch.rank}", _uuid())
    names = [f"device/{rank}" for rank in range(launch.world_size)]
    store.wait(names, timeout)
    found = [store.get(name) for name in names]
    return b"" not in found and len(set(found)) == len(found)


def _uuid() -> str:
    """Return what tells the first device from all others; "" if that is unknown."""
    accelerator = torch.accelerator.current_accelerator()
    module = torch.get_device_module(accelerator)
    try:
        return str(module.get_device_properties(0).uuid)
    except (AttributeError, RuntimeError):
        return ""
