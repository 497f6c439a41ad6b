"""Apply replication, sharding and tensor parallelism to a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from ..blocks import CompileOptions, compile_model
from ..coordination.world import host_group
from ..deferred_init import is_on_meta
from ..placement import move_model
from .config import ParallelSettings, Sizes
from .fsdp import set_gradient_sync, shard_fully
from .tensor_parallel import split_layers

_HOST: Final = torch.device("cpu")
_BROADCAST_BYTES: Final = 250 * 2**20  # per broadcast, as in torch's DistributedDataParallel


def make_mesh(sizes: Sizes, device_type: str) -> DeviceMesh:
    """Create the mesh of parameters, with the axes "replicate", "shard" and "tensor".

    Ranks along `context` are along "shard" if parameters are sharded, else along "replicate".
    Adjacent ranks share a tensor-parallel group. Collective.
    """
    own = sizes.of_parameters
    shape = (own.replicate, own.shard, own.tensor)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard", "tensor"))


def make_mesh_of_rows(sizes: Sizes, device_type: str) -> DeviceMesh | None:
    """Create the mesh of data, with the axes "data", "context" and "tensor". Collective.

    None if no rows are split.
    """
    if sizes.context == 1:
        return None
    shape = (sizes.num_data_shards, sizes.context, sizes.tensor)
    return init_device_mesh(device_type, shape, mesh_dim_names=("data", "context", "tensor"))


def parallelize(  # noqa: PLR0913  # what a backend has
    model: Module,
    settings: ParallelSettings,
    sizes: Sizes,
    mesh: DeviceMesh,
    device: torch.device,
    compile: CompileOptions | None,  # the YAML key
    initialize: Callable[[Module], object],
) -> Module:
    """Distribute a model over the ranks, on the device, and compile it if enabled. Collective.

    If weights differ between ranks, rank 0's are used. `initialize` allocates and initializes a
    model on `meta`. Activation checkpointing must come first.

    The model is on the host, on the device or on `meta`; it is changed in place, and its parameters
    keep their names.

    Returns:
        The module to call.

    Raises:
        BackendError: If the settings do not fit the model.
    """
    sizes = sizes.of_parameters
    is_sharded = sizes.shard > 1 or (sizes.tensor > 1 and sizes.replicate > 1)
    is_deferred = is_on_meta(model)
    if (is_sharded or sizes.tensor > 1) and not is_deferred:
        _broadcast(model, device)
    if sizes.tensor > 1:
        split_layers(
            model, settings.tensor_plan, mesh["tensor"], positions=settings.sequence_parallel
        )
    if compile is not None:
        compile_model(model, compile, is_sharded=is_sharded)
    if is_sharded:
        shard_fully(model, settings, sizes, mesh)
    if is_deferred:
        initialize(model)
    elif not is_sharded:
        move_model(model, device)
    if is_sharded or sizes.replicate == 1:
        return model
    return _copy(model, settings, mesh, device)


@contextmanager
def accumulating(module: Module, model: Module) -> Iterator[None]:
    """Do not synchronize gradients in backward passes inside.

    `module`: the result of `parallelize` for `model`.

    Cost:
        With a sharded model, each rank keeps full gradients until the next synchronization.
    """
    if isinstance(module, DistributedDataParallel):
        with module.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        set_gradient_sync(model, is_on=False)
        try:
            yield
        finally:
            set_gradient_sync(model, is_on=True)
    else:
        yield


def _broadcast(model: Module, device: torch.device = _HOST) -> None:
    """Broadcast rank 0's weights in place, through a device or the host."""
    group = host_group() if device == _HOST else dist.group.WORLD
    tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
    for bucket in _buckets(tensors):
        sent = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(device)
        dist.broadcast(sent, src=0, group=group)
        values = torch.split(sent, [tensor.numel() for tensor in bucket])
        for tensor, value in zip(bucket, values, strict=True):
            tensor.copy_(value.view_as(tensor))


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one dtype, in order, that are sent together."""
    bucket: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        num_bytes += tensor.nbytes
        if bucket and (tensor.dtype != bucket[0].dtype or num_bytes > _BROADCAST_BYTES):
            yield bucket
            bucket, num_bytes = [], tensor.nbytes
        bucket.append(tensor)
    if bucket:
        yield bucket


def _copy(
    model: Module, settings: ParallelSettings, mesh: DeviceMesh, device: torch.device
) -> Module:
    if not any(param.requires_grad for param in model.parameters()):
        return model  # no gradients to synchronize
    # Non-persistent buffers are equal everywhere: no broadcast per step.
    saved = model.state_dict(keep_vars=True)
    temporary = [name for name, _ in model.named_buffers() if name not in saved]
    # What torch's `_set_params_and_buffers_to_ignore_for_model` sets.
    model._ddp_params_and_buffers_to_ignore = temporary  # type: ignore[assignment]
    replica = DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device],
        process_group=mesh.get_group("replicate"),
        gradient_as_bucket_view=True,
        find_unused_parameters=settings.find_unused_parameters,
    )
    if not settings.find_unused_parameters:
        fix_bucket_order(replica)
    return replica


def fix_bucket_order(replica: DistributedDataParallel) -> None:
    """Fix the packing of gradients into buckets from the first step on, with a zero pass.

    torch rebuilds its buckets after the first backward pass. The position in a message determines
    the order in which more than two ranks sum a number: without this, the first step after a
    restart would differ in some bits from the same step without one. Collective.
    """
    model = replica.module
    replica.module = _Nothing()
    replica.require_forward_param_sync = False  # no buffer broadcast in this call
    try:
        replica(None)  # prepare a backward pass; without any input, torch would find no device
    finally:
        replica.module = model
    sparse = {id(module.weight) for module in model.modules() if getattr(module, "sparse", False)}
    for param in reversed([param for param in model.parameters() if param.requires_grad]):
        zeros = torch.zeros_like(param)
        torch.autograd.backward([param], [zeros.to_sparse(1) if id(param) in sparse else zeros])
    replica.zero_grad(set_to_none=True)


class _Nothing(Module):
    """Stands for a model whose gradients are computed elsewhere."""

    def forward(self, nothing: None) -> None:
        pass
