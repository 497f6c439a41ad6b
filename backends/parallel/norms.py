"""Norms and clipping of gradients that may be sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from typing_extensions import override

from ..norms import Norms, joint_grad_norm, part_norms

_Axes = tuple[DeviceMesh, tuple[int, ...]]


class ShardedNorms(Norms):
    """Norms of full or sharded tensors, on any meshes.

    Cost: One all-reduce per mesh axis over which tensors are sharded, of one number for all
        gradients, or one for each of `tensor_norms`.
    """

    @override
    def grad_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the joint 2-norm of all gradients, on the parameters' device."""
        parameters = list(parameters)  # may be a generator
        device = parameters[0].device if parameters else torch.device("cpu")
        sharded: dict[_Axes, list[Tensor]] = {}
        plain = []
        for param in parameters:
            if isinstance(param.grad, DTensor):
                axes, part = _own_part(param.grad)
                sharded.setdefault(axes, []).append(part)
            elif param.grad is not None:
                plain.append(param)
        norm = joint_grad_norm(plain, device)
        if not sharded:
            return norm
        squares = [norm.square()] if plain else []
        squares += [_joint_square(parts, axes, device) for axes, parts in sharded.items()]
        wide = max((square.dtype for square in squares), key=lambda dtype: dtype.itemsize)
        return torch.stack([square.to(wide) for square in squares]).sum().sqrt()

    @override
    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        parameters = list(parameters)
        if not any(isinstance(param.grad, DTensor) for param in parameters):
            return super().clip_grad_norm(parameters, max_norm)
        norm = self.grad_norm(parameters)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parts in _by_kind(parameters):
            torch._foreach_mul_(parts, factor.to(parts[0].device))
        return norm

    @override
    def clip_grad_value(self, parameters: Sequence[Tensor], max_value: float) -> None:
        for parts in _by_kind(parameters):
            torch._foreach_clamp_min_(parts, -max_value)
            torch._foreach_clamp_max_(parts, max_value)

    @override
    def tensor_norms(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the 2-norm of each tensor, (); if one is sharded, all in the widest dtype."""
        if not any(isinstance(tensor, DTensor) for tensor in tensors):
            return super().tensor_norms(tensors)
        wide = torch.float32
        squares: list[Tensor] = []
        groups: dict[_Axes, list[int]] = {}
        for idx, tensor in enumerate(tensors):
            part = tensor.detach()
            if isinstance(part, DTensor):
                axes, part = _own_part(part)
                groups.setdefault(axes, []).append(idx)
            wide = torch.promote_types(wide, part.dtype)
            squares.append(torch.linalg.vector_norm(part.to(wide)).square())
        squares = [square.to(wide) for square in squares]
        for (mesh, sharded_axes), members in groups.items():
            joint = torch.stack([squares[idx] for idx in members])
            for axis in sharded_axes:
                dist.all_reduce(joint, group=mesh.get_group(axis))
            for idx, square in zip(members, joint.unbind(), strict=True):
                squares[idx] = square
        return [square.sqrt() for square in squares]


def _own_part(grad: DTensor) -> tuple[_Axes, Tensor]:
    """Return the axes over which a gradient is sharded, and this rank's part of it."""
    grad = _summed(grad)
    axes = tuple(axis for axis, place in enumerate(grad.placements) if not place.is_replicate())
    return (grad.device_mesh, axes), grad.to_local().detach()


def _summed(grad: DTensor) -> DTensor:
    if not any(place.is_partial() for place in grad.placements):
        return grad
    return grad.redistribute(
        placements=[Replicate() if place.is_partial() else place for place in grad.placements]
    )


def _joint_square(parts: list[Tensor], axes: _Axes, device: torch.device) -> Tensor:
    norms = part_norms(parts)
    # Every rank of the mesh has the same parameters, so dtypes agree too.
    dtype = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    joint = torch.stack([norm.to(device, dtype) for norm in norms]).square().sum()
    mesh, sharded_axes = axes
    for axis in sharded_axes:
        dist.all_reduce(joint, group=mesh.get_group(axis))
    return joint


def _by_kind(params: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the local elements of the gradients, by dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for param in params:
        grad = param.grad
        if grad is None:
            continue
        if isinstance(grad, DTensor):
            if _summed(grad) is not grad:
                param.grad = grad = _summed(grad)
            part = grad.to_local().detach()
        else:
            part = grad._values() if grad.is_sparse else grad.detach()
        kinds.setdefault((part.dtype, part.device), []).append(part)
    return list(kinds.values())
