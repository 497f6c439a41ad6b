"""Settings in a mapping inside other settings: checked one by one, and made an object."""

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from modelzoo_trainer.base.annotations import annotations_of
from modelzoo_trainer.base.constraints import check
from modelzoo_trainer.errors import ConfigError, suggest

_T = TypeVar("_T")


def made(cls: type[_T], given: object, where: str) -> _T:
    """Return a dataclass of settings.

    Args:
        cls: The dataclass.
        given: Its fields by name.
        where: The place of the mapping, for messages.

    Raises:
        ConfigError: If it is not a mapping, a key is unknown or missing, or a value is invalid.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: expected a mapping, got {given!r}.")
    kinds: dict[str, Any] = annotations_of(cls)
    known = {one.name: one for one in fields(cls)}  # type: ignore[arg-type]  # a dataclass
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"{where}.{key}: no such setting. {suggest(str(key), known)}")
        check(f"{where}.{key}", value, kinds[key])
    for key, one in known.items():
        if one.default is MISSING and one.default_factory is MISSING and key not in given:
            raise ConfigError(f"{where}.{key}: missing. Set it.")
    try:
        return cls(**given)
    except ConfigError as error:
        text = str(error)
        begins_with_key = re.match(r"(\w+)[.:\[]", text)
        is_path = begins_with_key is not None and begins_with_key[1] in known
        raise ConfigError(f"{where}{'.' if is_path else ': '}{text}") from None


def refuse_misspelt_name(given: Mapping[str, Any], where: str) -> None:
    """Refuse a mapping without `name`, but with a key that is nearly this.

    Raises:
        ConfigError: If there is one; `where`: the place of the mapping.
    """
    for key in given if "name" not in given else ():
        if suggest(str(key), ("name",)).startswith("Did"):
            raise ConfigError(f"{where}.{key}: no such key. Did you mean 'name'?")
