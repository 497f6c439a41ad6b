"""Several XLA devices in one process: which tensors are replicated or sharded."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ..errors import BackendError, suggest

AXES: Final = ("replicate", "shard")
SMALLEST_SHARDED: Final = 4096  # elements; smaller ones save no memory
_REFUSED: Final = {"context": "context parallelism", "tensor": "tensor parallelism"}
_KEYS: Final = (*AXES, *_REFUSED)
_LOG_LEVEL: Final = "TF_CPP_MIN_LOG_LEVEL"
_REPLICATED: Final = 0  # torch_xla.distributed.spmd.ShardingType.REPLICATED
Partition = tuple[str | tuple[str, ...] | None, ...]  # for each dimension: its mesh axes


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Use of the devices; the product of the sizes is their number."""

    replicate: int = 1  # groups of devices with equal content
    shard: int = 1  # devices per group; parameters and optimizer state are sharded over them

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return self.replicate * self.shard

    @classmethod
    def from_options(cls, options: Mapping[str, Any], num_devices: int) -> MeshShape:
        """Create the mesh from the options of `backend.parallel`.

        `replicate` and `shard` default to 1; -1 = the remaining devices. All devices of this
        process are used.

        Raises:
            BackendError: If a key is unknown, a value is not a size, or the devices do not match.
        """
        sizes = dict.fromkeys(AXES, 1) | check_parallel(options)
        rest = [axis for axis in AXES if sizes[axis] == -1]
        if len(rest) == len(AXES):
            raise BackendError(
                "backend.parallel: replicate and shard are both -1, but only one can be -1 (the "
                "remaining devices). Set the size of the other."
            )
        if rest:
            (given,) = set(AXES).difference(rest)
            sizes[rest[0]] = num_devices // sizes[given]
        mesh_shape = cls(**sizes)
        if mesh_shape.num_devices != num_devices:
            raise BackendError(_misfit(options, num_devices))
        return mesh_shape


def check_parallel(options: Mapping[str, Any]) -> dict[str, int]:
    """Check the sizes in the options of `backend.parallel`.

    Raises:
        BackendError: If a key is unknown, or a value is not a size.
    """
    if not isinstance(options, Mapping):
        raise BackendError(
            f"backend.parallel: expected a dict of sizes, as in {{replicate: -1}}, got {options!r}."
        )
    for key, value in options.items():
        where = f"backend.parallel.{key}"
        if key not in _KEYS:
            raise BackendError(f"{where}: no such axis. {suggest(str(key), AXES)}")
        if type(value) is not int or value < -1 or value == 0:
            raise BackendError(
                f"{where}: expected a number of devices, or -1 for the rest, got {value!r}."
            )
        if key in _REFUSED and value != 1:
            raise BackendError(
                f"{where} is {value}, but {_REFUSED[key]} is not supported on XLA. "
                f"Use replicate and shard."
            )
    return {axis: options[axis] for axis in AXES if axis in options}


def _misfit(options: Mapping[str, Any], num_devices: int) -> str:
    given = ", ".join(f"{key}: {value}" for key, value in options.items())
    shards = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    fits = ", ".join(f"{num_devices // size} x {size}" for size in shards)
    return (
        f"backend.parallel: {{{given}}} does not match {num_devices} XLA devices, all of which "
        f"are used. Valid replicate x shard: {fits}; -1 is the rest."
    )


def start_spmd() -> int:
    """Switch this process to SPMD permanently, and return the number of its devices.

    Nothing may have used a torch_xla device before. Idempotent. Also mutes XLA's warning about the
    replacement of its partitioner, shown at each compilation.

    Raises:
        BackendError: If the process already uses a single device, or there are other processes with
            devices.
    """
    import torch_xla
    import torch_xla.runtime as xr

    if not xr.is_spmd():  # `use_spmd` warns if called again
        if torch_xla._XLAC._xla_get_spmd_config_is_locked():
            # torch_xla only warns, and the next sharded tensor is a segmentation fault.
            raise BackendError(
                "backend.parallel is set, but this process has already used XLA without it, and "
                "that cannot be changed. Start a new process."
            )
        xr.use_spmd()
        if os.environ.get(_LOG_LEVEL) == "1":  # torch_xla's default; read at the first message
            os.environ[_LOG_LEVEL] = "2"
    num_devices = int(xr.global_runtime_device_count())
    own = int(xr.addressable_runtime_device_count())
    if own != num_devices:
        raise BackendError(
            f"backend.parallel: this process has {own} of {num_devices} XLA devices, but needs "
            f"all of them: several hosts are not supported on XLA."
        )
    return num_devices


class Spmd:
    """Shard tensors over the mesh of devices.

    A parameter is sharded over `shard` along its largest divisible dimension, and so is its
    optimizer state; small and indivisible tensors, scalars and buffers are replicated. A batch is
    sharded over both axes. Nothing is wrapped: names are unchanged. Results do not depend on the
    mesh, except for rounding.

    Call `start_spmd` first.

    Parameters and states of fewer than `smallest` elements are replicated.
    """

    def __init__(self, mesh_shape: MeshShape, *, smallest: int = SMALLEST_SHARDED) -> None:
        import numpy as np
        import torch_xla
        import torch_xla.distributed.spmd as xs

        self.mesh_shape = mesh_shape
        self.smallest = smallest
        sizes = (mesh_shape.replicate, mesh_shape.shard)
        self.mesh = xs.Mesh(np.arange(mesh_shape.num_devices), sizes, AXES)
        self._xla = torch_xla._XLAC
        self._sharding_spec = xs.ShardingSpec
        self._placed: dict[Partition, str] = {}
        self._specs: dict[Partition, Any] = {}

    # ---- model and optimizer

    def partition(self, shape: Sequence[int]) -> Partition:
        """Return the mesh axis of each dimension; None = not sharded.

        `shape`: of a parameter, or of its optimizer state.
        """
        num = self.mesh_shape.shard
        nowhere: Partition = (None,) * len(shape)
        dims = [dim for dim, size in enumerate(shape) if size % num == 0]
        if num == 1 or not dims or torch.Size(shape).numel() < self.smallest:
            return nowhere
        largest = max(dims, key=lambda dim: shape[dim])
        return (*nowhere[:largest], "shard", *nowhere[largest + 1 :])

    def shard_model(self, model: Module) -> None:
        """Place a model's parameters and buffers, which are already on the device.

        If called right after the move, before any execution, each device receives only its shard.
        May be called again: tensors with a placement are unchanged.
        """
        for param in model.parameters():
            self.place(param)
        for buffer in model.buffers():
            self._place(buffer, (None,) * buffer.dim())

    def shard_optimizer(self, optimizer: Optimizer) -> None:
        """Place an optimizer's state; call again after new state.

        State is new when it was created or loaded: loaded state is replicated.
        """
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    self.place(value)

    def place(self, tensor: Tensor) -> None:
        """Place a parameter, or its state, by its shape; no-op for a host tensor."""
        self._place(tensor, self.partition(tensor.shape))

    def spec(self, tensor: Tensor) -> Any:
        """Return the sharding with which to send a parameter, or its state.

        Returns:
            For `torch_xla._XLAC._xla_tensors_from_aten`; None = replicate.
        """
        return self._spec(tensor, self.partition(tensor.shape))

    def _place(self, tensor: Tensor, partition: Partition) -> None:
        if tensor.device.type != "xla":
            return
        place = self._xla._get_xla_sharding_spec(tensor)  # "" = none yet
        if place and place == self._placed.get(partition):
            return
        if place:
            self._xla._xla_clear_sharding(tensor)  # required before setting another one
        self._xla._xla_mark_sharding(tensor, self.mesh.get_op_sharding(partition))
        self._placed[partition] = self._xla._get_xla_sharding_spec(tensor)

    # ---- batches

    def batch_spec(self, tensor: Tensor) -> Any:
        """Return the sharding with which to send a batch's tensor: dimension 0 over all devices.

        Returns:
            For `torch_xla._XLAC._xla_tensors_from_aten`; None = replicate, for 0-d tensors and for
            indivisible ones: if such a tensor is an index (of an embedding), the partitioner aborts
            the process in the backward pass.
        """
        if tensor.dim() == 0 or tensor.shape[0] % self.mesh_shape.num_devices:
            return None
        return self._spec(tensor, (AXES, *(None,) * (tensor.dim() - 1)))

    def _spec(self, tensor: Tensor, partition: Partition) -> Any:
        if not any(partition):
            return None
        spec = self._specs.get(partition)
        if spec is None:
            spec = self._specs[partition] = self._sharding_spec(self.mesh, partition)
        return spec.xla_spec(tensor)

    # ---- values

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return full copies in host memory. Waits for the device.

        Tensors that are not executed yet are executed now.

        Cost:
            At most two transfers, and no compilation; torch_xla compiles a program to gather each
            sharded tensor, each time.
        """
        kinds = map(self._xla._get_xla_sharding_type, tensors)
        is_whole = [kind is None or kind == _REPLICATED for kind in kinds]
        whole = [tensor for tensor, yes in zip(tensors, is_whole, strict=True) if yes]
        spread = [tensor for tensor, yes in zip(tensors, is_whole, strict=True) if not yes]
        copies = iter(self._xla._xla_get_cpu_tensors(whole) if whole else ())
        joined = iter(self._join(spread) if spread else ())
        return [next(copies if yes else joined) for yes in is_whole]

    def _join(self, tensors: list[Tensor]) -> list[Tensor]:
        shards = self._xla._get_local_shards(tensors)
        places = self._xla._get_local_shard_replica_and_indices(tensors)
        return [
            _joined(tensor, parts, where)
            for tensor, parts, where in zip(tensors, shards, places, strict=True)
        ]


def _joined(tensor: Tensor, parts: Sequence[Any], places: Sequence[Any]) -> Tensor:
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for (part, _), (replica, indices) in zip(parts, places, strict=True):
        if replica == 0:
            # An uneven division leaves padding at the end of a shard.
            whole[tuple(indices)] = part[tuple(slice(i.stop - i.start) for i in indices)]
    return whole
