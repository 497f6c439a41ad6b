"""Access to the outputs of a layer that is split over ranks, for a loss without all outputs."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Linear

ATTRIBUTE: Final = "output_shards"


class OutputShards:
    """This rank's outputs of a linear layer, and sums over the ranks that have the others.

    A layer that is split by its outputs has it as the attribute `output_shards`.

    Args:
        layer: The layer, which is split already.
        mesh: The ranks.
    """

    def __init__(self, layer: Linear, mesh: DeviceMesh) -> None:
        self._mesh = mesh
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
        return _waited(collectives.all_gather_tensor(values[None], 0, self._mesh))

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of the values of all ranks. Collective."""
        return _waited(collectives.all_reduce(values, "sum", self._mesh))


def _waited(values: Tensor) -> Tensor:
    if isinstance(values, collectives.AsyncCollectiveTensor):
        return values.wait()
    return values
