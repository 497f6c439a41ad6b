"""Models on their way to a device."""

import torch
from torch.nn import Module

from .errors import BackendError


def move_model(model: Module, device: torch.device) -> None:
    """Move a model in place; parameters that several modules share stay shared.

    `Module.to` makes new parameters where a device's tensors are of another kind than the host's
    (`meta`, lazy ones), and so unties them.
    """
    places: dict[int, list[tuple[Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    model.to(device)
    for (owner, name), *others in places.values():
        for module, other_name in others:
            module._parameters[other_name] = owner._parameters[name]


def swap_model(model: Module, device: torch.device) -> None:
    """Move a model in place, where `Module.to` would make other parameter objects.

    The objects stay and get other contents, so that parameters that are shared stay shared, and
    an optimizer that was made before has them still.

    Raises:
        BackendError: If something holds on to a parameter in a way that forbids that.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(device)
    except RuntimeError as error:
        if "Couldn't swap" not in str(error):
            raise
        raise BackendError(
            f"The model cannot be moved to {device}: {error} Pass a model that no gradient was "
            f"computed with yet and that nothing refers to weakly, or a callable that makes it."
        ) from error
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
