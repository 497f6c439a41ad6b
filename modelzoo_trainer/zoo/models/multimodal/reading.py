"""Read the settings of a part of a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from modelzoo_trainer.base.annotations import annotations_of
from modelzoo_trainer.base.constraints import check
from modelzoo_trainer.errors import ConfigError, suggest


def read_settings(
    where: str,
    given: object,
    cls: type[Any],
    *,
    refused: Mapping[str, str] | None = None,
    others: Collection[str] = (),
) -> Any:
    """Return the settings of a part, an object of a dataclass.

    Args:
        where: The argument of the model that has them, for messages.
        given: A mapping.
        cls: The dataclass.
        refused: Further settings of published files that cannot be used here, each with the
            reason; they may be null.
        others: Keys that are no settings of the dataclass.

    Raises:
        ConfigError: If it is not a mapping, or a setting is unknown or invalid.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"model.{where}: expected a mapping of settings, got {given!r}.")
    kinds = annotations_of(cls)
    known = [one.name for one in fields(cls) if one.init]
    arguments = {}
    for key, value in given.items():
        if key in others:
            continue
        reason = (refused or {}).get(key)
        if reason is not None:
            if value is None:
                continue
            raise ConfigError(f"model.{where}.{key} is {value!r}, but {reason}")
        if key not in known:
            advice = suggest(str(key), [*known, *others])
            raise ConfigError(f"model.{where}.{key}: no such setting. {advice}")
        check(f"model.{where}.{key}", value, kinds[key])
        arguments[key] = value
    with naming(where, known):
        return cls(**arguments)


def check_name(where: str, given: Mapping[str, Any], names: Collection[str], what: str) -> None:
    """Check that `name` of a part, in any case, is one of some names.

    Args:
        where: The argument of the model, for messages.
        given: Its settings.
        names: The names, the usual one first.
        what: What they are, with its article.

    Raises:
        ConfigError: If it is missing, or another one.
    """
    name = given.get("name")
    usual = next(iter(names))
    if name is None:
        raise ConfigError(f"model.{where}.name is missing. Set it to {usual}, {what}.")
    if not isinstance(name, str) or name.lower() not in {one.lower() for one in names}:
        raise ConfigError(
            f"model.{where}.name is {name!r}, but must be {usual}, {what}. Change it."
        )


@contextmanager
def naming(where: str, known: Collection[str]) -> Iterator[None]:
    """Context manager: errors name the argument of the model.

    `known`: settings; a message that begins with one is of that setting.
    """
    try:
        yield
    except ConfigError as error:
        text = str(error)
        first = re.match(r"\w+", text)
        joint = "." if first is not None and first[0] in known else ": "
        raise ConfigError(f"model.{where}{joint}{text}") from error
