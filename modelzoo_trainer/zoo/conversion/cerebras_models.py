"""The names of the Cerebras Model Zoo for the weights of encoders, T5 and ViT, in both directions.

They come from `published_name` of each model. Weights that are tied there are in its files under
each of their names.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.conversion.engine import tied_names
from modelzoo_trainer.zoo.conversion.rules import Copy, InterleavedRows, Rule

_PREFIX: Final = "model."
_UNKNOWN: Final = re.compile(r"\.(attention|ffn)_scale\.")  # their names there are not known
_KINDS: Final = ("weight", "bias")
_EMBEDDINGS: Final = tuple(
    f"{stack}_embeddings.word_embeddings.weight" for stack in ("encoder", "decoder")
)
"""Of T5 there: the same where both are shared."""


def rules_of_model(model: Any, shapes: Collection[str], prefix: str) -> list[Rule]:
    """Return the rules of a model's tensors.

    Args:
        model: Ours, also on `meta`.
        shapes: The names of its tensors without tied ones.
        prefix: What precedes the names there.

    Raises:
        ConfigError: If a tensor has no published name.
    """
    return [_rule(model, name, prefix + _their_name(model, name)) for name in shapes]


def _rule(model: Any, name: str, their: str) -> Rule:
    is_rotary = getattr(model, "position_embedding_type", None) == "rotary"
    if is_rotary and name.endswith(tuple(f".{x}_proj.{kind}" for x in "qk" for kind in _KINDS)):
        return InterleavedRows(name, their, model.head_dim, model.turning_dim)
    return Copy(name, their)


def _their_name(model: Any, name: str) -> str:
    published: str | None = type(model).published_name(name)
    if published is None or _UNKNOWN.search(name):
        raise ConfigError(
            f"The tensor {name!r} of the model has no name in the Cerebras Model Zoo, so its "
            f"weights cannot be converted to or from it."
        )
    return published.removeprefix(_PREFIX)


def aliases_of_model(model: Any) -> dict[str, str]:
    """Return further names of tensors there, without the prefix: tied weights."""
    found = {
        _their_name(model, alias): _their_name(model, name)
        for alias, name in tied_names(model).items()
    }
    if getattr(model, "share_encoder_decoder_embedding", False):
        first, second = _EMBEDDINGS
        found[second] = first
    return found
