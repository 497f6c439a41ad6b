"""Move nested batches and models to a device."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import is_lazy

from .errors import BackendError

Places: TypeAlias = dict[int, list[tuple[Module, str]]]


def map_tensors(
    tree: Any, function: Callable[[Tensor], Any], movable: Callable[[Any], Any] | None = None
) -> Any:
    """Apply `function` to each tensor of a tree.

    Tuples (including named ones), lists and mappings keep their types; other values are unchanged.

    Args:
        tree: The tree.
        function: Applied to each tensor.
        movable: Applied to other objects with a method `to` (a packed sequence, a graph), which
            know which of their tensors stay on the host. None = unchanged.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        mapped = {key: map_tensors(value, function, movable) for key, value in tree.items()}
        return mapped if type(tree) is dict else _like_mapping(tree, mapped)
    if hasattr(tree, "to"):
        return tree if movable is None else movable(tree)
    if isinstance(tree, tuple):
        parts = [map_tensors(value, function, movable) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if isinstance(tree, list):
        return [map_tensors(value, function, movable) for value in tree]
    return tree


def _like_mapping(tree: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    copy = getattr(tree, "copy", None)
    if copy is None:
        return mapped
    changed = copy()
    if not hasattr(changed, "update"):
        return mapped
    changed.update(mapped)
    return changed


def has_no_values(model: Module) -> bool:
    """Return whether a parameter or buffer of a model is on `meta`; lazy ones are not."""
    tensors = (*model.parameters(), *model.buffers())
    return any(tensor.is_meta and not is_lazy(tensor) for tensor in tensors)


def move_model(model: Module, device: torch.device) -> None:
    """Move a model in place; parameters that several modules share stay shared.

    `Module.to` creates new parameters where the device's tensors are of another kind (`meta`, lazy
    ones), which unties them.
    """
    places = parameter_places(model)
    model.to(device)
    share_parameters(places)


def parameter_places(model: Module) -> Places:
    """Return where each parameter is used, by id."""
    places: Places = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return places


def share_parameters(places: Places) -> None:
    """Copy the parameter of its first place to the others, after the first was replaced."""
    for (owner, name), *others in places.values():
        for module, other_name in others:
            module._parameters[other_name] = owner._parameters[name]


def swap_model(model: Module, device: torch.device) -> None:
    """Move a model in place, where `Module.to` would create new parameter objects.

    The objects stay and get new contents, so that shared parameters stay shared, and an existing
    optimizer stays valid.

    Raises:
        BackendError: If a reference to a parameter prevents that.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(device)
    except RuntimeError as error:
        if "Couldn't swap" not in str(error):
            raise
        raise BackendError(
            f"The model cannot be moved to {device}: {error} Pass a model whose parameters "
            f"have no .grad and no weak references, or a function that creates the model."
        ) from error
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
