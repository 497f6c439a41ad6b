"""Sequence parallelism: between layers that are split, states are split by their positions.

Korthikanti et al. 2022, arXiv:2205.05198. Norms, dropout and residual additions compute on T / N
positions; attention and feed-forward networks gather all of them.

Dimension letters: B batch, T positions, H hidden size, N ranks of the group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Dropout, LayerNorm, Module, ModuleList, RMSNorm

from ..errors import BackendError, UnsplittableBatch, suggest
from .local_layers import (
    GATHERED,
    GatheredStates,
    PositionGroup,
    all_positions,
    drop_own_positions,
    exchange,
    is_split,
    norm_own_part,
    own_positions,
    sum_of_own,
)
from .plans import Kinds, resolve_plan, starred

_SPLIT: Final = "split"
_GATHER: Final = "gather"
_OWN: Final = "own_positions"
_OWN_GATHER: Final = "own_positions_gather"
_KINDS: Final[Mapping[str, Kinds]] = {
    _SPLIT: (ModuleList,),
    _GATHER: (Module,),
    _OWN: (LayerNorm, RMSNorm, Dropout),
    _OWN_GATHER: (LayerNorm, RMSNorm),
}
"""How a module takes part, in a model's `sequence_plan`, and which classes of modules can.

split                 the first argument of its first module is split by positions.
gather                the first argument is gathered. If the tensor plan splits Linears inside, the
                      output of the rowwise ones is summed and split; else every rank computes the
                      module in full, and its output, or the first of several, is split.
own_positions         each rank computes on its positions; gradients of weights are summed.
own_positions_gather  the same, and every rank gets the output of all positions.

States and outputs are (B, T, H).
"""
_LOCAL: Final = ("colwise", "rowwise", "own_part")
_WHOLE: Final = "whole"  # of `_KINDS`: "gather" without split layers inside


def read_sequence_plan(model: Module, styles: Mapping[str, str], num: int) -> dict[str, str]:
    """Return how each module of a model's `sequence_plan` takes part, by name.

    `styles`: of tensor parallelism, by module name. `num`: ranks of the group.

    Raises:
        BackendError: If the model has no plan, or it does not fit the model and the styles.
    """
    kind = type(model).__name__
    plan = getattr(model, "sequence_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise BackendError(
            f"backend.sequence_parallel is true with backend.parallel.tensor {num}, but {kind} has "
            f"no attribute 'sequence_plan'. Remove backend.sequence_parallel."
        )
    for pattern, style in plan.items():
        if style not in _KINDS:
            raise BackendError(
                f"{kind}.sequence_plan[{pattern!r}] is {style!r}. {suggest(str(style), _KINDS)}"
            )
    roles = resolve_plan(model, plan, f"{kind}.sequence_plan", _KINDS.__getitem__)
    for name, role in list(roles.items()):
        if role == _GATHER and not any(_inside(name, styles)):
            roles[name] = _WHOLE
    _check_apart(kind, roles)
    _check_covered(model, roles, styles)
    return roles


def gathered_names(roles: Mapping[str, str], styles: Mapping[str, str]) -> set[str]:
    """Return the names of split layers whose inputs are gathered in a module around them."""
    gathered = (name for name, role in roles.items() if role == _GATHER)
    return {inner for name in gathered for inner in _inside(name, styles)}


def _inside(name: str, styles: Mapping[str, str]) -> Iterator[str]:
    return (inner for inner in styles if inner.startswith(f"{name}."))


def _check_apart(kind: str, roles: Mapping[str, str]) -> None:
    """Raise if a module inside one that has all positions has a part in the plan, too."""
    for name, role in roles.items():
        inner = next(_inside(name, roles), None) if role in (_GATHER, _WHOLE) else None
        if inner is not None:
            raise BackendError(
                f"{kind}.sequence_plan: {name} ({_GATHER}) has all positions, but {inner} inside "
                f"is {roles[inner]!r}. A * in a pattern also matches dots."
            )


def _check_covered(model: Module, roles: Mapping[str, str], styles: Mapping[str, str]) -> None:
    """Raise if a parameter of split modules would get the gradient of some positions only."""
    local, modules = gathered_names(roles, styles), dict(model.named_modules())
    blocks = tuple(f"{name}." for name, role in roles.items() if role == _SPLIT)
    whole = tuple(f"{name}." for name, role in roles.items() if role == _WHOLE)
    for name, module in modules.items():
        if not name.startswith(blocks) or not module._parameters or f"{name}.".startswith(whole):
            continue
        is_known = roles.get(name) == _OWN or (name in local and styles[name] in _LOCAL)
        if not is_known and any(param is not None for param in module._parameters.values()):
            raise BackendError(
                f"backend.sequence_parallel: {starred(name)} has parameters, but neither "
                f"{type(model).__name__}.sequence_plan nor the tensor plan says how it computes on "
                f"split positions. Remove backend.sequence_parallel, or backend.tensor_plan to use "
                f"the model's own."
            )


def split_positions(model: Module, roles: Mapping[str, str], mesh: DeviceMesh) -> set[Module]:
    """Make the modules of a plan compute on split positions, in place; return the norms."""
    group, norms = PositionGroup.of(mesh), set()
    for name, role in roles.items():
        module = model.get_submodule(name)
        if role == _SPLIT:
            assert isinstance(module, ModuleList)
            module[0].register_forward_pre_hook(partial(_split_input, group))
        elif role == _GATHER:
            module.register_forward_pre_hook(partial(_gather_input, group))
        elif role == _WHOLE:
            module.register_forward_pre_hook(partial(_complete_input, group))
            module.register_forward_hook(partial(_split_output, group))
        elif isinstance(module, Dropout):
            vars(module)["forward"] = partial(drop_own_positions, group, module)
        else:
            norms.add(module)
            module.forward = partial(norm_own_part, module)
            if role == _OWN_GATHER:
                module.register_forward_hook(partial(_gather_output, group))
    return norms


def _split_input(group: PositionGroup, _: Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    if not is_split():
        return inputs
    states, *others = inputs
    if states.shape[1] % group.num:
        raise UnsplittableBatch(
            f"backend.sequence_parallel splits positions over {group.num} processes "
            f"(backend.parallel.tensor), but a batch has {states.shape[1]} positions. Use a "
            f"max_sequence_length that is a multiple of {group.num}, or remove "
            f"backend.sequence_parallel."
        )
    return exchange(states, group, own_positions, all_positions), *others


def _gather_input(group: PositionGroup, _: Module, inputs: tuple[Any, ...]) -> Any:
    """Gather the first argument for layers that are split, which sum its gradients."""
    if not is_split():
        return inputs
    states, *others = inputs
    whole = exchange(states, group, all_positions, sum_of_own)
    if not torch.compiler.is_compiling():
        setattr(whole, GATHERED, GatheredStates(states, group))
    return whole, *others


def _complete_input(group: PositionGroup, _: Module, inputs: tuple[Any, ...]) -> Any:
    """Gather the first argument for a module that every rank computes in full."""
    if not is_split():
        return inputs
    states, *others = inputs
    return exchange(states, group, all_positions, own_positions), *others


def _split_output(group: PositionGroup, _: Module, __: Any, output: Any) -> Any:
    if not is_split():
        return output
    if isinstance(output, Tensor):
        return exchange(output, group, own_positions, all_positions)
    states, *others = output
    return exchange(states, group, own_positions, all_positions), *others


def _gather_output(group: PositionGroup, _: Module, __: Any, output: Tensor) -> Tensor:
    return exchange(output, group, all_positions, own_positions) if is_split() else output
