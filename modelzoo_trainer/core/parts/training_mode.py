"""Training and evaluation mode of a model, module by module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch.nn import Module

STAYS_EVAL: Final = "_stays_in_evaluation_mode"
"""Attribute of a module: whether it keeps its mode in training."""


def set_training_mode(model: Module) -> None:
    """Put a model into training mode, except modules that were frozen in eval mode."""
    model.train()
    for module in model.modules():
        if vars(module).get(STAYS_EVAL, False):
            module.training = False


@contextmanager
def in_evaluation_mode(model: Module) -> Iterator[None]:
    """Context manager for eval mode; afterwards each module has its previous mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
