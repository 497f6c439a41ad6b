"""Shipped models by their names in a configuration; imported only when used."""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Final, cast

from torch import nn

from modelzoo_trainer.errors import ConfigError, suggest

MODELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fc_mnist": "modelzoo_trainer.models.fc_mnist:FcMnist",
        "gpt2": "modelzoo_trainer.models.decoder_names:Gpt2",
        "gpt3": "modelzoo_trainer.models.decoder_names:Gpt2",
        "llama": "modelzoo_trainer.models.decoder_names:Llama",
    }
)
"""Name to `module:class`. The constructor of the class is the schema of the `model` section."""


def model_class(name: str) -> type[nn.Module]:
    """Return the class of a shipped model; this imports its module.

    Args:
        name: A key of `MODELS`, case-insensitive.

    Raises:
        ConfigError: If no shipped model has this name.
    """
    place = MODELS.get(name.lower())
    if place is None:
        raise ConfigError(
            f"model name {name!r} is not a shipped model. {suggest(name, MODELS)} "
            f"Shipped: {', '.join(sorted(MODELS))}. "
            "For a custom class, give its dotted path: 'mypackage.mymodule.MyModel'."
        )
    module, _, attribute = place.partition(":")
    return cast(type[nn.Module], getattr(import_module(module), attribute))
