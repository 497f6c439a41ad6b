"""The default length of samples: the length of the model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError

log = logging.getLogger("modelzoo_trainer.data")

LENGTH: Final = {"max_sequence_length": "max_position_embeddings"}
"""The argument of data processors, and the attribute of a model that it is compared with."""
PAIR_LENGTHS: Final = {
    "src_max_sequence_length": "src_max_position_embeddings",
    "tgt_max_sequence_length": "tgt_max_position_embeddings",
}
NO_LIMIT: Final = 2**31 - 1
"""The value of models without a limit."""

_MODEL: ContextVar[Any] = ContextVar("model_of_the_data", default=None)


@contextmanager
def lengths_of(model: Any) -> Iterator[None]:
    """Let data processors that are created inside take lengths from a model."""
    token = _MODEL.set(model)
    try:
        yield
    finally:
        _MODEL.reset(token)


def model_length(argument: str, owner: str) -> int | None:
    """Return the model's length as the default of an argument, and log it.

    None if no model is known, or it has no limit. `owner`: the data, for the log.
    """
    name = (LENGTH | PAIR_LENGTHS)[argument]
    found = getattr(_MODEL.get(), name, None)
    if type(found) is not int or found >= NO_LIMIT:
        return None
    log.info("%s: %s is %d, %s of the model.", owner, argument, found, name)
    return found


def given_or_model_length(given: int | None, argument: str, owner: str) -> int:
    """Return a length, or the model's if it is left out.

    Raises:
        ConfigError: If neither is known.
    """
    length = model_length(argument, owner) if given is None else given
    if length is None:
        raise ConfigError(
            f"{owner}.{argument} is missing. Set it; or create the data in a function that fit "
            f"calls, fit(lambda: {owner}(...).create_dataloader()), to use "
            f"{(LENGTH | PAIR_LENGTHS)[argument]} of the model, if it has one."
        )
    return length
