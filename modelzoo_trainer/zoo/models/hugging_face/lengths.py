"""The longest sequence of a model of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from types import EllipsisType
from typing import Any, Final

from modelzoo_trainer.zoo.hugging_face.folders import transformers_library
from modelzoo_trainer.zoo.models.hugging_face.settings import (
    FOLDER_KEY,
    HfSettings,
    architecture,
    uses_remote_code,
)

_LENGTH: Final = "max_position_embeddings"
# The positions of their tokens begin after the row of the padding token.
_AFTER_PADDING: Final = frozenset(
    {
        *("camembert", "data2vec-text", "ibert", "layoutlmv3", "lilt", "longformer", "luke"),
        *("markuplm", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"),
        "xmod",
    }
)


def longest_sequence(config: Any) -> int | None:
    """Return the largest number of tokens in a sequence; None = the settings have none."""
    config = config.get_text_config()
    found = getattr(config, _LENGTH, None)
    if not isinstance(found, int):
        return None
    if config.model_type in _AFTER_PADDING and isinstance(config.pad_token_id, int):
        return found - config.pad_token_id - 1
    return found


def limit_of(name: str, arguments: Mapping[str, Any]) -> int | EllipsisType | None:
    """Return a limit that a model will have; ... = known when it is built.

    Args:
        name: The attribute.
        arguments: The arguments of `HfSettings`.
    """
    if name != _LENGTH:
        return None
    settings = HfSettings(**arguments)
    if not settings.is_here:
        return ...
    folder = settings.folder()
    if uses_remote_code(transformers_library(FOLDER_KEY), settings, folder):
        return ...
    return longest_sequence(architecture(settings, folder))
