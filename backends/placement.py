"""Models on their way to a device."""

import torch
from torch.nn import Module


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
