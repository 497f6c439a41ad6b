"""Settings that a data processor and a model both have."""

from __future__ import annotations

from typing import Any

from modelzoo_trainer.errors import ConfigError


def followed(owner: str, name: str, given: Any, model: Any, *, default: Any) -> Any:
    """Return the value of a setting of a data processor: as given, or the model's.

    Args:
        owner: Name of the data processor.
        name: Name of the setting, in both.
        given: Value in the data processor; None = the model's.
        model: The model; one without the setting counts as not having been given.
        default: If neither has a value.

    Raises:
        ConfigError: If the values differ.
    """
    theirs = getattr(model, name, None)
    if given is None:
        return default if theirs is None else theirs
    if theirs is not None and theirs != given:
        raise ConfigError(
            f"{owner}.{name} is {_shown(given)}, but {name} of the model "
            f"{type(model).__name__} is {_shown(theirs)}. Set both to the same value, or remove "
            f"it from the data processor, which then follows the model."
        )
    return given


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
