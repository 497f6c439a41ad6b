"""A decoder as a part of another model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.registry import MODELS, model_class


def decoder_of(
    argument: str, given: Mapping[str, Any], *, others: Collection[str] = ()
) -> tuple[type[Decoder], dict[str, Any]]:
    """Return the class of a decoder, and its arguments.

    Args:
        argument: What has its settings, for messages.
        given: `name`, or `model_name`, of a decoder, and its settings.
        others: Names of other models that the argument may have, for messages.

    Raises:
        ConfigError: If it names none.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"model.{argument}: expected a mapping of settings, got {given!r}.")
    arguments = dict(given)
    name = arguments.pop("name", None) or arguments.pop("model_name", None)
    if not isinstance(name, str):
        raise ConfigError(f"model.{argument}.name is missing. Set it to a decoder, such as gpt2.")
    if name.lower() not in MODELS or not issubclass(model_class(name), Decoder):
        decoders = [one for one in MODELS if issubclass(model_class(one), Decoder)]
        raise ConfigError(
            f"model.{argument}.name: {name!r} is not a decoder. "
            f"{suggest(name, [*decoders, *others])}"
        )
    cls: Any = model_class(name)
    return cls, arguments
