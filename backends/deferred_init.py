"""Initialize the weights of a model that was built on `meta`, after it was sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import Module, Parameter

from .errors import BackendError

_RESETS = ("reset_parameters", "_reset_parameters")

Step = tuple[Module, Callable[[], None]]
Part = tuple[slice, ...]
PartOf = Callable[[torch.Size, DeviceMesh, tuple[Placement, ...]], Part]


def is_on_meta(model: Module) -> bool:
    """Return whether a parameter or buffer of a model is on `meta`."""
    return any(tensor.is_meta for tensor in _all_tensors(model))


@torch.no_grad()
def materialize(model: Module, device: torch.device) -> None:
    """Allocate and initialize a model that is on `meta`, in place. Collective.

    The values are the same as in a model built on the host with the same generator, on any number
    of ranks: modules are reset in the order of their constructors, children before parents, by
    `reset_parameters()`. A module may also have `reset_steps()`, which yields pairs of a part of it
    and a function that initializes it; then only one part at a time is unsharded. With
    `resets_parts`, these also initialize the modules within it. No-op if no tensor is on `meta`.

    Raises:
        BackendError: If a parameter or buffer got no value.

    Cost:
        Every rank draws all values on the host. One step's module is unsharded in host memory while
        it is initialized. Parameters that a later step initializes again are gathered first.
    """
    if not is_on_meta(model):
        return
    _check_other_tensors(model)
    _share_generator()
    _allocate(model, device)
    written: set[int] = set()
    part_of = cache(_part)  # layers repeat, and torch makes an index of all rows
    for module, draw in _steps(model):
        with _whole(module, written, part_of):
            draw()
    _check_written(model, written)


def _steps(model: Module) -> Iterator[Step]:
    """Yield the functions to call, in the order of the constructors."""
    for module in _children_first(model, set()):
        steps: Callable[[], Iterator[Step]] | None = getattr(module, "reset_steps", None)
        if steps is not None:
            yield from steps()
            continue
        for name in _RESETS:
            if hasattr(module, name):
                yield module, getattr(module, name)
                break


def _children_first(module: Module, seen: set[Module]) -> Iterator[Module]:
    if module in seen:
        return
    seen.add(module)
    if not getattr(module, "resets_parts", False):
        for child in module.children():
            yield from _children_first(child, seen)
    yield module


def _slots(model: Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield each reference to a parameter or buffer."""
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    yield own, name, tensor


def _all_tensors(model: Module) -> Iterator[Tensor]:
    return (tensor for _, _, tensor in _slots(model))


def _allocate(model: Module, device: torch.device) -> None:
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for own, name, tensor in _slots(model):
        places.setdefault(id(tensor), []).append((own, name))
    model.to_empty(device=device)
    for (first, name), *others in places.values():
        for own, other_name in others:
            own[other_name] = first[name]


def _share_generator() -> None:
    """Make all ranks draw the same numbers as rank 0."""
    if dist.is_initialized():
        state = torch.get_rng_state()
        dist.broadcast(state, src=0)
        torch.set_rng_state(state)


@contextmanager
def _whole(module: Module, written: set[int], part_of: PartOf) -> Iterator[None]:
    """Replace a module's tensors by full ones on the host; then keep this rank's shard of them.

    `written`: ids of initialized tensors; others are filled with NaN first, and added if they have
    changed. `part_of`: `_part`.
    """
    kept = list(_slots(module))
    wholes = {id(target): _host_copy(target, id(target) in written) for _, _, target in kept}
    versions = {key: whole._version for key, whole in wholes.items()}
    for own, name, target in kept:
        own[name] = wholes[id(target)]
    try:
        yield
        for own, name, target in kept:
            value, key = own[name], id(target)
            is_new = value is not wholes[key] or value._version != versions[key]
            if is_new or not _is_untouched(value):
                written.add(key)
                _keep_part(target, value, part_of)
    finally:
        for own, name, target in kept:
            own[name] = target


def _host_copy(target: Tensor, has_value: bool) -> Tensor:
    if has_value:
        value = target.full_tensor() if isinstance(target, DTensor) else target
        whole = value.detach().to("cpu", copy=True)
    else:
        whole = torch.empty(target.shape, dtype=target.dtype)
        if whole.is_floating_point() or whole.is_complex():
            whole.fill_(torch.nan)
    return Parameter(whole, target.requires_grad) if isinstance(target, Parameter) else whole


def _is_untouched(value: Tensor) -> bool:
    """Return whether a tensor is full of NaN; version counters miss some writes."""
    return not (value.is_floating_point() or value.is_complex()) or bool(value.isnan().all())


def _keep_part(target: Tensor, value: Tensor, part_of: PartOf) -> None:
    if isinstance(target, DTensor):
        part = part_of(target.shape, target.device_mesh, target.placements)
        target.to_local().copy_(value[part])
    else:
        target.copy_(value)


def _part(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Part:
    """Return the indices of this rank's shard."""
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def _check_written(model: Module, written: set[int]) -> None:
    missing = [
        f"{name} ({type(model.get_submodule(name.rpartition('.')[0])).__name__})"
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if id(tensor) not in written
    ]
    if missing:
        raise BackendError(
            f"backend.sharding.meta_init: nothing initializes {', '.join(missing)}. Add a method "
            f"reset_parameters() that fills the module's parameters and buffers, or set "
            f"meta_init: false."
        )


def _check_other_tensors(model: Module) -> None:
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise BackendError(
                    f"backend.sharding.meta_init: {f'{name}.{key}'.lstrip('.')} is a tensor, but "
                    f"neither a parameter nor a buffer, so it cannot be initialized. Register it "
                    f"as a buffer that reset_parameters() fills, or set meta_init: false."
                )
