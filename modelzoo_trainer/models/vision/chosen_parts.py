"""Freeze the parts of a model that patterns of names choose."""

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from modelzoo_trainer.errors import ConfigError


def check_patterns(patterns: Sequence[str] | None) -> None:
    """Check the setting `freeze`.

    Raises:
        ConfigError: If one is not a regular expression.
    """
    for pattern in patterns or ():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(
                f"freeze: {pattern!r} is not a valid regular expression: {error}."
            ) from None


def freeze(model: nn.Module, patterns: Sequence[str] | None, examples: str) -> None:
    """Stop training the parameters and modules in whose names a pattern is found.

    Args:
        model: Names in the Model Zoo count as well, by its method `published_name`.
        patterns: Regular expressions.
        examples: Of patterns that fit, for the message.

    Raises:
        ConfigError: If one is found in no name.
    """
    for pattern in patterns or ():
        frozen = [
            parameter
            for name, parameter in model.named_parameters()
            if any(re.search(pattern, one) for one in _names_of(model, name))
        ]
        if not frozen:
            raise ConfigError(
                f"freeze: {pattern!r} is found in no name of a parameter or module. Examples: "
                f"{examples}."
            )
        for parameter in frozen:
            parameter.requires_grad = False


def _names_of(model: Any, name: str) -> set[str]:
    """Return the own and the published name of a parameter, and of the modules that contain it."""
    published = model.published_name(name)
    names = [name] + ([] if published is None else [published.removeprefix("model.")])
    found = set()
    for one in names:
        parts = one.split(".")
        found |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return found
