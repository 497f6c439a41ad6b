"""Access to the outputs of a layer that is split over ranks, for a loss without all outputs."""

from __future__ import annotations

from typing import Any, Final, cast

import torch
import torch.distributed._functional_collectives  # shapes of collectives, for fake tensors
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Linear

ATTRIBUTE: Final = "output_shards"

_COLLECTIVES: Any = torch.ops._c10d_functional  # undeclared in torch


class OutputShards:
    """This rank's outputs of a linear layer, and sums over the ranks that have the others.

    A layer that is split by its outputs has it as the attribute `output_shards`.

    Args:
        layer: The layer, which is split already.
        mesh: The ranks.
    """

    def __init__(self, layer: Linear, mesh: DeviceMesh) -> None:
        self._num, self._group_name = mesh.size(), mesh.get_group().group_name
        num = layer.out_features
        self.num_outputs: Final = num
        """The number of outputs of all ranks."""
        self.num_rows: Final = -(-num // mesh.size())
        """The largest number of outputs of a rank."""
        self.first: Final = self.num_rows * mesh.get_local_rank()
        """The first output of this rank."""
        self.is_usable: Final = self.num_rows * (mesh.size() - 1) < num
        """Whether each rank has outputs."""
        self.num_hooks: Final = len(layer._forward_pre_hooks) + len(layer._forward_hooks)
        """The number of hooks that the layer has for being split."""

    def __deepcopy__(self, memo: Any) -> OutputShards:
        return self  # a mesh cannot be copied

    def local(self, param: Tensor) -> Tensor:
        """Return this rank's rows of a parameter of the layer."""
        return param.to_local() if isinstance(param, DTensor) else param

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all ranks, with a dimension more in front. Collective."""
        given = values[None].contiguous()
        found = _COLLECTIVES.all_gather_into_tensor(given, self._num, self._group_name)
        return cast(Tensor, _COLLECTIVES.wait_tensor(found))

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of the values of all ranks. Collective."""
        found = _COLLECTIVES.all_reduce(values.contiguous(), "sum", self._group_name)
        return cast(Tensor, _COLLECTIVES.wait_tensor(found))
