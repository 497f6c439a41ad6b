"""Which operations on tensors are messages among processes, and what is sent for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

_INNER: Final[Any] = dist.distributed_c10d  # with what torch does not declare
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
    # of the whole tensor, by each process of n, in a ring
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
}


@dataclass(frozen=True, slots=True)
class Collective:
    """A message among processes."""

    kind: str  # such as "all-reduce"
    num: int  # processes that take part
    on_host: bool = False  # the tensors are in host memory

    @property
    def copies(self) -> bool:
        """Whether the tensor is copied for the time of the message.

        gloo, which serves hosts, has no reduce-scatter: it reduces a copy of all for everybody.
        """
        return self.on_host and self.kind == "reduce-scatter"

    def sent(self, num_bytes: int) -> int:
        """Return what each process sends, in the ring that engines build.

        `num_bytes` are those of the whole tensor: what an all-gather returns, a reduce-scatter
        takes.
        """
        share = _SHARE_SENT.get("all-reduce" if self.copies else self.kind)
        return round(num_bytes * (1.0 if share is None else share(self.num)))


def collective_of(
    function: Any, args: Sequence[Any], *, on_host: bool = False
) -> Collective | None:
    """Return what an operation sends, or None if it is no collective.

    `function` and `args` are what a dispatch mode gets; `on_host`: the tensors are in host memory.
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
            except RuntimeError:  # not a group but an operation such as the sum
                continue
    names = [arg for arg in args if isinstance(arg, str)]
    return int(_INNER._resolve_process_group(names[-1]).size()) if names else 1
