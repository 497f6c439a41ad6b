"""Norms and limits of gradients of which each process may hold a part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..fast_step import grad_norm as plain_grad_norm

_Axes = tuple[DeviceMesh, tuple[int, ...]]


def grad_norm(params: Iterable[Tensor], device: torch.device | None = None) -> Tensor:
    """Return the joint 2-norm of all gradients: the same on all processes. Collective.

    Parameters may be whole or sharded, on any meshes; those without a gradient are left out. The
    result is on `device`; None = where the parameters are.

    Shapes:
        Returns: (), float32, or float64 if a gradient is double.

    Cost:
        One all-reduce of a number for each mesh axis that gradients are sharded over.
    """
    params = list(params)
    if device is None:
        device = params[0].device if params else torch.device("cpu")
    sharded: dict[_Axes, list[Tensor]] = {}
    plain = []
    for param in params:
        if isinstance(param.grad, DTensor):
            axes, part = _own_part(param.grad)
            sharded.setdefault(axes, []).append(part)
        elif param.grad is not None:
            plain.append(param)
    norm = plain_grad_norm(plain, device)
    if not sharded:
        return norm
    squares = [norm.square()] if plain else []
    squares += [_joint_square(parts, axes, device) for axes, parts in sharded.items()]
    wide = max((square.dtype for square in squares), key=lambda dtype: dtype.itemsize)
    return torch.stack([square.to(wide) for square in squares]).sum().sqrt()


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor: the same on all processes. Collective.

    Tensors may be whole or sharded, of floating point.

    Shapes:
        Returns: each (), float32, or float64 if one is double.

    Cost:
        One all-reduce of a number a tensor for each mesh axis that tensors are sharded over.
    """
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


def clip_grad_norm(params: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale gradients down to a joint 2-norm of at most `max_norm`. Collective.

    Returns:
        The norm before, as `grad_norm`. Not finite gradients do not raise.
    """
    params = list(params)
    if not any(isinstance(param.grad, DTensor) for param in params):
        return torch.nn.utils.clip_grad_norm_(params, max_norm)
    norm = grad_norm(params)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parts in _by_kind(params):
        torch._foreach_mul_(parts, factor.to(parts[0].device))
    return norm


def clip_grad_value(params: Iterable[Tensor], max_value: float) -> None:
    """Limit each gradient's elements to [-max_value, max_value]."""
    for parts in _by_kind(list(params)):
        torch._foreach_clamp_min_(parts, -max_value)
        torch._foreach_clamp_max_(parts, max_value)


def _own_part(grad: DTensor) -> tuple[_Axes, Tensor]:
    """Return the axes that a gradient is sharded over, and this process's part of it."""
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
    if all(part.dtype is torch.float32 for part in parts):
        norms = list(torch._foreach_norm(parts))
    else:
        wide = [part.to(torch.promote_types(part.dtype, torch.float32)) for part in parts]
        norms = [torch.linalg.vector_norm(part) for part in wide]
    # Every process of the mesh has the same parameters, so the types agree too.
    dtype = max((norm.dtype for norm in norms), key=lambda dtype: dtype.itemsize)
    joint = torch.stack([norm.to(device, dtype) for norm in norms]).square().sum()
    mesh, sharded_axes = axes
    for axis in sharded_axes:
        dist.all_reduce(joint, group=mesh.get_group(axis))
    return joint


def _by_kind(params: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the elements of the gradients that are here, by type and device."""
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
