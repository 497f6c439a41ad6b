"""Tensor parallelism: layers that are split over ranks with the same data."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from functools import partial
from itertools import chain
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import Embedding, LayerNorm, Linear, Module, Parameter, RMSNorm

from ..errors import BackendError
from ..placement import Places, parameter_places, share_parameters
from .config import STYLES, check_style
from .local_layers import LocalLinear, norm_own_part
from .output_shards import ATTRIBUTE, OutputShards
from .plans import resolve_plan, starred
from .sequence_parallel import gathered_names, read_sequence_plan, split_positions

log = logging.getLogger("modelzoo_trainer.backends.tensor_parallel")

_LARGE: Final = 0.1  # share of all parameters

# These compute with DTensors, which can be compiled in one graph with neighbouring layers.
_TAKE_DTENSORS: Final = (LayerNorm, RMSNorm, Embedding, Linear)

_SPLIT: Final = (Linear, Embedding)
_NORMS: Final = (LayerNorm, RMSNorm)
_OWN_PART: Final = "own_part"


def split_layers(
    model: Module, plan: Mapping[str, str] | None, mesh: DeviceMesh, *, positions: bool = False
) -> None:
    """Split the layers of a model in place; their inputs and outputs stay plain tensors.

    All parameters become DTensors on the mesh, as an optimizer cannot update both kinds at once.
    Parameters outside the plan are replicated; if they are many, this is logged. Shared parameters
    stay shared and keep their names.

    The model is equal on all ranks. `plan`: patterns of module names, as in `fnmatch`, to one of
    `STYLES`; None = the model's attribute `tensor_plan`. `positions`: whether states between split
    layers are split by positions, as the model's attribute `sequence_plan` says.

    Raises:
        BackendError: If there is no plan, a pattern matches no module, or a size cannot be split.
    """
    if plan is None:
        plan = getattr(model, "tensor_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise BackendError(
            f"backend.parallel.tensor is {mesh.size()}, but {type(model).__name__} has no "
            f"attribute 'tensor_plan'. Set backend.tensor_plan to a dict with patterns of module "
            f"names as keys, and one of {', '.join(STYLES)} as each value."
        )
    styles = _resolve(model, plan)
    for name in styles:
        _check_sizes(model, name, styles, mesh.size())
    places = parameter_places(model)
    _check_shared(model, places, styles)
    norms = {model.get_submodule(name) for name, how in styles.items() if how == _OWN_PART}
    roles = read_sequence_plan(model, styles, mesh.size()) if positions else {}
    local = gathered_names(roles, styles)
    layers = {
        name: LocalLinear(how) if name in local else _make_style(model.get_submodule(name), how)
        for name, how in styles.items()
        if how != _OWN_PART
    }
    parallelize_module(model, mesh, layers, src_data_rank=None)
    for name, how in styles.items():
        layer = model.get_submodule(name)
        if how == "colwise_gather" and isinstance(layer, Linear):
            setattr(layer, ATTRIBUTE, OutputShards(layer, mesh))
    norms |= split_positions(model, roles, mesh)
    _replicate_others(places, mesh, norms)
    share_parameters(places)
    if dist.get_rank() == 0:
        _log_whole(model, styles)


def _log_whole(model: Module, styles: Mapping[str, str]) -> None:
    """Log which large parts of the model are not split."""
    whole: dict[str, int] = {}
    num = 0
    for name, param in model.named_parameters():
        num += param.numel()
        owner = name.rpartition(".")[0]
        if owner not in styles:
            pattern = starred(owner)
            whole[pattern] = whole.get(pattern, 0) + param.numel()
    large = [pattern for pattern, size in whole.items() if size > _LARGE * num]
    if large:
        log.info(
            "Tensor parallelism: %s (%.0f %% of all parameters) is not split: each process has all "
            "of it, which saves no memory.",
            ", ".join(large),
            100 * sum(whole[pattern] for pattern in large) / num,
        )


def _resolve(model: Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the style of each module in the plan, by name."""
    for pattern, style in plan.items():
        check_style(pattern, style)
    return resolve_plan(
        model, plan, "backend.tensor_plan", lambda style: _NORMS if style == _OWN_PART else _SPLIT
    )


def _check_sizes(model: Module, name: str, styles: Mapping[str, str], num: int) -> None:
    """Raise if a size cannot be split into equal parts.

    Parts may differ where their results are combined at once: rows of an embedding, and outputs
    that every rank gets in full.
    """
    layer, style = model.get_submodule(name), styles[name]
    if isinstance(layer, Linear) and style == "colwise":
        what, size = "outputs", layer.out_features
        place = name.rpartition(".")[0]
        owner = model.get_submodule(place)
        for norm in ("q_norm", "k_norm"):
            is_own = styles.get(f"{place}.{norm}") == _OWN_PART
            if isinstance(getattr(owner, norm, None), Module) and not is_own:
                raise BackendError(
                    f"backend.tensor_plan splits {name}, but its heads share the weights of "
                    f"{place}.{norm} (attention_qk_norm), so each process would get another "
                    f"gradient. Add {starred(f'{place}.{norm}')}: {_OWN_PART}."
                )
        head_dim = getattr(owner, "head_dim", None)
        if isinstance(head_dim, int) and size % head_dim == 0 and size // head_dim % num:
            raise BackendError(
                f"backend.parallel.tensor is {num}, but the number of heads of {name} is "
                f"{size // head_dim} ({size} outputs, {head_dim} per head). Use a "
                f"common divisor of the numbers of attention heads and of key/value heads."
            )
    elif isinstance(layer, Linear) and style == "rowwise":
        what, size = "inputs", layer.in_features
    elif isinstance(layer, Embedding) and style == "colwise":
        what, size = "columns", layer.embedding_dim
    else:
        return
    if size % num:
        raise BackendError(
            f"backend.parallel.tensor is {num}, but {name} has {size} {what}. Use a divisor "
            f"of that number."
        )


def _check_shared(model: Module, places: Places, styles: Mapping[str, str]) -> None:
    names = {module: name for name, module in model.named_modules()}
    for users in places.values():
        cuts = {
            f"{names[module]}.{name}": _placement(module, name, styles.get(names[module]))
            for module, name in users
        }
        if len(set(cuts.values())) > 1:
            shown = ", ".join(f"{name}: {_in_words(cut)}" for name, cut in cuts.items())
            raise BackendError(
                f"backend.tensor_plan splits a shared parameter in different ways ({shown}). Split "
                f"it in the same way in all modules. For an Embedding that shares its weight with "
                f"a Linear, use rowwise for the Embedding and colwise_gather for the Linear."
            )


def _placement(module: Module, name: str, style: str | None) -> Placement:
    if style in (None, _OWN_PART) or (name == "bias" and style == "rowwise"):
        return Replicate()
    is_by_row = isinstance(module, Linear) == (style != "rowwise")
    return Shard(0) if is_by_row else Shard(1)


def _in_words(placement: Placement) -> str:
    return f"by dimension {placement.dim}" if isinstance(placement, Shard) else "whole"


def _make_style(layer: Module, style: str) -> ParallelStyle:
    if style == "rowwise":
        inputs = Replicate() if isinstance(layer, Embedding) else Shard(-1)
        return RowwiseParallel(input_layouts=inputs)
    return ColwiseParallel(output_layouts=Replicate() if style == "colwise_gather" else Shard(-1))


def _replicate_others(places: Places, mesh: DeviceMesh, norms: Set[Module]) -> None:
    """Convert parameters that are not split to replicated DTensors.

    `norms`: norms with inputs that are split over the ranks.
    """
    owners: dict[Module, list[str]] = {}
    for module, name in chain(*places.values()):
        param = module._parameters[name]
        if isinstance(param, DTensor) or param is None:
            continue
        whole = distribute_tensor(param.detach(), mesh, [Replicate()], src_data_rank=None)
        module._parameters[name] = Parameter(whole, requires_grad=param.requires_grad)
        owners.setdefault(module, []).append(name)
    for module, names in owners.items():
        if module in norms:
            module.forward = partial(norm_own_part, module)
            continue
        if type(module) in _TAKE_DTENSORS:
            module.register_forward_pre_hook(partial(_to_dtensors, mesh))
            module.register_forward_hook(_to_plain)
            continue
        swap = _PlainInside(names)
        module.register_forward_pre_hook(swap.enter)
        module.register_forward_hook(swap.leave, always_call=True)


def _to_dtensors(mesh: DeviceMesh, _: Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        DTensor.from_local(value, mesh, [Replicate()], run_check=False)
        if isinstance(value, Tensor) and not isinstance(value, DTensor)
        else value
        for value in inputs
    )


def _to_plain(_: Module, __: Any, output: Any) -> Any:
    return output.to_local() if isinstance(output, DTensor) else output


class _PlainInside:
    """Makes a module compute with the plain tensors of its parameters."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.kept: list[dict[str, Any]] = []

    def enter(self, module: Module, _: Any) -> None:
        """Replace the parameters by plain tensors."""
        own = module._parameters
        self.kept.append({name: own[name] for name in self.names})
        for name in self.names:
            own[name] = _plain(own[name])  # type: ignore[assignment]  # during the forward pass

    def leave(self, module: Module, _: Any, __: Any) -> None:
        """Restore the parameters."""
        if self.kept:
            module._parameters.update(self.kept.pop())


def _plain(param: Tensor | None) -> Tensor | None:
    if not isinstance(param, DTensor):
        return param
    return param.to_local(grad_placements=[Replicate()] * param.device_mesh.ndim)
