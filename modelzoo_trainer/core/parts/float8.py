"""Linear layers that multiply in float8, by torchao."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from importlib import import_module
from typing import Any, Final, Literal

from torch.nn import Linear, Module, ModuleList

from modelzoo_trainer.errors import ConfigError

log = logging.getLogger("modelzoo_trainer.precision")

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
"""Recipes of torchao: one scale for a tensor or for each row, the last one with weight gradients in
bfloat16."""

_MULTIPLE: Final = 16  # of sizes, which the kernels require


def check_float8(problem: str) -> None:
    """Check that torchao is installed, and that the device can do it.

    Args:
        problem: Why the device cannot; "" = it can.

    Raises:
        ConfigError: Otherwise.
    """
    if problem:
        raise ConfigError(f"precision.fp8: {problem}. Remove it; bfloat16 works there.")
    _library()


def _library() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return import_module("torchao.float8")
    except ImportError as error:
        raise ConfigError(
            f"precision.fp8 requires torchao, which cannot be imported ({error}). "
            f"pip install 'modelzoo-trainer[fp8]'."
        ) from error


def with_float8(recipe: Recipe, model: Module, *, emulate: bool = False) -> Module:
    """Replace the linear layers of a model's blocks, in place; parameters and names stay.

    Blocks are the elements of every `ModuleList`. Embeddings and the output layer are no blocks:
    they stay in higher precision. So do layers whose sizes are not multiples of 16.

    Args:
        recipe: Of torchao.
        model: With or without values.
        emulate: Compute in float32 with the rounding of float8, for tests.

    Raises:
        ConfigError: If there is no such layer.
    """
    library = _library()
    inside = {
        f"{name}.{inner}" if inner else name
        for name, block in _blocks(model)
        for inner, _ in block.named_modules()
    }
    chosen: list[str] = []

    def is_chosen(module: Module, name: str) -> bool:
        fits = (
            type(module) is Linear
            and name in inside
            and module.in_features % _MULTIPLE == 0
            and module.out_features % _MULTIPLE == 0
        )
        chosen.extend([name] * fits)
        return fits

    config = replace(library.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    library.convert_to_float8_training(model, module_filter_fn=is_chosen, config=config)
    if not chosen:
        raise ConfigError(
            f"precision.fp8: {type(model).__name__} has no linear layer in a ModuleList with sizes "
            f"that are multiples of {_MULTIPLE}. Remove precision.fp8."
        )
    log.info("Linear layers in float8 (%s): %d.", recipe, len(chosen))
    return model


def _blocks(model: Module) -> list[tuple[str, Module]]:
    return [
        (f"{name}.{index}".lstrip("."), block)
        for name, owner in model.named_modules()
        if isinstance(owner, ModuleList)
        for index, block in owner.named_children()
    ]
