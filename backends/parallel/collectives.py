"""Recognize collectives among tensor operations, and compute their traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

_INNER: Final[Any] = dist.distributed_c10d  # undeclared in torch
_KINDS: Final = (
    ("allreduce", "all-reduce"),
    ("all_reduce", "all-reduce"),
    ("allgather", "all-gather"),
    ("all_gather", "all-gather"),
    ("reduce_scatter", "reduce-scatter"),
    ("alltoall", "all-to-all"),
    ("all_to_all", "all-to-all"),
    ("broadcast", "broadcast"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("send", "send"),
)
_SHARE_SENT: Final[dict[str, Callable[[int], float]]] = {
    # fraction of the full tensor sent by each of n ranks, in a ring
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
}


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective operation."""

    kind: str  # such as "all-reduce"
    num: int  # number of ranks
    on_host: bool = False  # tensors in host memory

    @property
    def copies(self) -> bool:
        """Whether the tensor is copied during the operation.

        gloo, used on hosts, has no reduce-scatter: it reduces a full copy on every rank.
        """
        return self.on_host and self.kind == "reduce-scatter"

    def sent(self, num_bytes: int) -> int:
        """Return the bytes sent by each rank in a ring.

        `num_bytes`: size of the full tensor: the output of an all-gather, the input of a
        reduce-scatter.
        """
        share = _SHARE_SENT.get("all-reduce" if self.copies else self.kind)
        return round(num_bytes * (1.0 if share is None else share(self.num)))


def collective_of(
    function: Any, args: Sequence[Any], *, on_host: bool = False
) -> Collective | None:
    """Return the collective of an operation, or None.

    `function` and `args`: as in `__torch_dispatch__`; `on_host`: tensors are in host memory.
    """
    if function.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = function._schema.name.partition("::")[2].strip("_")
    kind = next((kind for part, kind in _KINDS if name.startswith(part)), None)
    return None if kind is None else Collective(kind, _group_size(args), on_host)


def _group_size(args: Sequence[Any]) -> int:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return int(dist.ProcessGroup.unbox(arg).size())
            except RuntimeError:  # not a group but a reduce op
                continue
    names = [arg for arg in args if isinstance(arg, str)]
    return int(_INNER._resolve_process_group(names[-1]).size()) if names else 1
