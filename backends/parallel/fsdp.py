"""Shard parameters, gradients and optimizer state: FSDP2, HSDP."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import Module, Parameter
from typing_extensions import TypeIs

from ..blocks import find_blocks
from ..errors import BackendError, suggest
from .config import ParallelSettings, Sizes


def shard_fully(model: Module, settings: ParallelSettings, sizes: Sizes, mesh: DeviceMesh) -> None:
    """Shard a model in place, block by block, then the remaining parameters.

    The model is on the host, on the mesh's device, or on `meta`; blocks move to the device one by
    one. With several replicas, each shards its own copy.

    With `param_dtype`, floating-point inputs of a block are cast to it: all of them, or only the
    arguments of its forward that its attribute `cast_inputs` names, a tuple of strings.

    Parameters are gathered for `forward`, and for the methods of the model that its attribute
    `forward_methods` names, a tuple of strings.

    Raises:
        BackendError: If no module has the class of a configured block, or a block names an
            argument that its forward lacks.
    """
    if sizes.tensor > 1:
        # The output of a split layer is a view for autograd, with its own memory.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    own = mesh["shard"] if sizes.replicate == 1 else mesh["replicate", "shard"]
    policy = MixedPrecisionPolicy(
        param_dtype=settings.param_dtype, reduce_dtype=settings.reduce_dtype
    )
    is_freed = settings.reshard_after_forward and sizes.shard > 1
    place = partial(_placement, sizes.shard)
    blocks = find_blocks(model, settings.blocks, "backend.sharding.blocks")
    owner = {part: block for block in (model, *reversed(blocks)) for part in block.modules()}
    _check_shared(model, owner)
    _check_dtypes(model, owner)
    for block in blocks:
        if any(True for _ in block.parameters()):
            chosen = choose_cast(block, policy)
            fully_shard(
                block,
                mesh=own,
                mp_policy=chosen,
                reshard_after_forward=is_freed,
                shard_placement_fn=place,
            )
    # The root is needed again at once: do not free it between forward and backward pass.
    fully_shard(
        model,
        mesh=own,
        mp_policy=policy,
        reshard_after_forward=False,
        shard_placement_fn=place,
    )
    for name in getattr(model, "forward_methods", ()):
        register_fsdp_forward_method(model, name)


def _placement(num: int, param: Parameter) -> Shard | None:
    """Return the dimension by which `num` ranks share a parameter; None = the first.

    Stacked matrices, such as experts, are split evenly where the first dimension, their number,
    is no multiple of the ranks: else some ranks would have more than others, or nothing.
    """
    if param.dim() != 3 or num == 1 or param.shape[0] % num == 0:
        return None
    taken = set()
    if isinstance(param, DTensor):  # by tensor parallelism
        taken = {place.dim for place in param.placements if isinstance(place, Shard)}
    even = (dim for dim in (1, 2) if dim not in taken and param.shape[dim] % num == 0)
    dim = next(even, None)
    return None if dim is None else Shard(dim)


def choose_cast(block: Module, policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Return the policy of a block; if it names the inputs to cast, a hook casts these alone."""
    dtype, names = policy.param_dtype, getattr(block, "cast_inputs", None)
    if dtype is None or names is None:
        return policy
    known = list(inspect.signature(type(block).forward).parameters)[1:]
    for name in names:
        if name not in known:
            raise BackendError(
                f"{type(block).__name__}.cast_inputs: {name!r} is not an argument of "
                f"its forward. {suggest(name, known)}"
            )
    block.register_forward_pre_hook(_CastNamed(dtype, names, known), with_kwargs=True)
    return replace(policy, cast_forward_inputs=False)


class _CastNamed:
    """Cast the named arguments of a forward pass; a pre-hook."""

    def __init__(self, dtype: torch.dtype, names: tuple[str, ...], known: list[str]) -> None:
        self.dtype = dtype
        self.names = names
        self.places = {known.index(name) for name in names}

    def __call__(
        self, _: Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (
            tuple(
                self._cast(value) if place in self.places else value
                for place, value in enumerate(args)
            ),
            {
                name: self._cast(value) if name in self.names else value
                for name, value in kwargs.items()
            },
        )

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.dtype) if is_float else value


def _check_shared(model: Module, owner: dict[Module, Module]) -> None:
    """Raise if a parameter belongs to two blocks: it would become two parameters."""
    first: dict[int, tuple[str, Module]] = {}
    for name, module in model.named_modules():
        for key, param in module._parameters.items():
            full_name = f"{name}.{key}".lstrip(".")
            other, block = first.setdefault(id(param), (full_name, owner[module]))
            if param is not None and block is not owner[module]:
                raise BackendError(
                    f"{other} and {full_name} are the same (shared) parameter, but belong to "
                    f"different blocks. In backend.sharding.blocks, list only classes that "
                    f"contain both or neither."
                )


def _check_dtypes(model: Module, owner: dict[Module, Module]) -> None:
    """Raise if trainable parameters that are gathered together have different dtypes."""
    first: dict[Module, tuple[str, torch.dtype]] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        block = owner[model.get_submodule(name.rpartition(".")[0])]
        other, dtype = first.setdefault(block, (name, param.dtype))
        if param.dtype != dtype:
            raise BackendError(
                f"backend.parallel.shard: {other} is {dtype} and {name} is {param.dtype}; trained "
                f"parameters of a block, and those outside of blocks, must have one dtype. Convert "
                f"one of them, or train only one."
            )


def set_gradient_sync(model: Module, *, is_on: bool) -> None:
    """Set whether the next backward pass synchronizes gradients of a sharded model.

    Cost:
        While it is off, each rank keeps full gradients.
    """
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(is_on)
    model.set_is_last_backward(is_on)


def free_gathered(model: Module) -> None:
    """Free parameters that a forward pass has gathered without a backward pass after it.

    Otherwise a state dict of the module would contain full tensors that are freed later.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_sharded(value: Any) -> TypeIs[DTensor]:
    """Return whether a value is a DTensor."""
    return isinstance(value, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor. Collective for a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Unread(Protocol):
    """A tensor of a file whose values are read later."""

    def read(self) -> Tensor:
        """Return the values."""
        ...

    def read_rows(self, start: int, stop: int, /) -> Tensor:
        """Return some of the rows, reading no more than these."""
        ...

    def converted(self, convert: Callable[[Any], Tensor], /) -> Tensor:
        """Return the tensor whose values will be `convert(self)`."""
        ...


def distribute(tensor: Tensor, like: DTensor) -> Tensor:
    """Shard a tensor that every rank has, or can read, in full like another one.

    One that is still to be read stays so, see `Unread`: of a tensor that is sharded by its rows,
    each rank will read its own.
    """
    if hasattr(tensor, "read_rows"):
        unread: Unread = cast(Any, tensor)
        return unread.converted(partial(_read_part, like=like))
    on_device = tensor.to(like.device)
    return distribute_tensor(on_device, like.device_mesh, like.placements, src_data_rank=None)


def _read_part(unread: Unread, like: DTensor) -> Tensor:
    split = [place for place in like.placements if not place.is_replicate()]
    if len(split) != 1 or type(split[0]) is not Shard or split[0].dim != 0:
        return distribute(unread.read(), like)
    (num, *_), (start, *_) = compute_local_shape_and_global_offset(
        like.shape, like.device_mesh, like.placements
    )
    return DTensor.from_local(
        unread.read_rows(start, start + num).to(like.device),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
