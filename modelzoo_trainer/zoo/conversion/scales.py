"""Factors on embeddings, scores and logits, multiplied into the weights.

muP and the options of our decoders have them, most families of Hugging Face do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from modelzoo_trainer.zoo.conversion.engine import OUR_EMBEDDING, OUR_HEAD, TensorSource
from modelzoo_trainer.zoo.conversion.weights_folder import Shape
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings
from modelzoo_trainer.zoo.models.parametrization import attention_scale, logits_scale

FACTORS: Final[dict[str, Any]] = {
    "attention_logits_alpha": 1.0,
    "attention_type": "scaled_dot_product",
    "embeddings_scale": 1.0,
    "mup_base_filter_size": None,
    "mup_base_hidden_size": None,
    "output_logits_alpha": None,
    "output_logits_scale": None,
    "scale_output_logits_by_d": True,
    "scale_qk_dot_by_d": None,
}
"""The settings that give factors, with the values that give none."""
_CLOSE: Final = 1e-12


def without_factors(
    settings: DecoderSettings, arguments: Mapping[str, Any], *, of_embedding: bool
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the arguments of a decoder without factors, and the factors of the weights instead.

    The output layer gets its own weights if it shares the weights of an embedding with another
    factor.

    Args:
        settings: Of the decoder.
        arguments: Of its constructor.
        of_embedding: Whether the factor on the embeddings is removed too.

    Returns:
        The arguments, and factors by the name of the layer; empty if all are 1.
    """
    first = settings.embeddings_scale if of_embedding else 1.0
    starts = ["token_embeddings", "position_embeddings"]
    if settings.embedding_layer_norm:
        starts = ["embedding_norm"]
    queries = "q_norm" if settings.attention_qk_norm else "q_proj"
    scores = attention_scale(settings) * math.sqrt(settings.head_dim)
    layers = range(settings.num_hidden_layers)
    factors = {
        "lm_head": logits_scale(settings),
        **dict.fromkeys(starts, first),
        **dict.fromkeys((f"layers.{one}.attention.{queries}" for one in layers), scores),
    }
    is_shared = settings.share_embedding_weights
    is_shared &= factors["lm_head"] == factors.get("token_embeddings", 1.0)
    plain = {key: value for key, value in FACTORS.items() if key in arguments}
    if not of_embedding:
        plain["embeddings_scale"] = settings.embeddings_scale
    return (
        {**arguments, **plain, "share_embedding_weights": is_shared},
        {name: one for name, one in factors.items() if abs(one - 1) > _CLOSE},
    )


class Scaled:
    """Our tensors, multiplied by the factors of their layers.

    Args:
        source: The tensors; a missing output layer shares the weights of the embedding.
        factors: As of `without_factors`.
    """

    def __init__(self, source: TensorSource, factors: Mapping[str, float]) -> None:
        self._source = source
        self._factors = factors

    def names(self) -> list[str]:
        """Return the names of all tensors, including the output layer's."""
        return list(dict.fromkeys([*self._source.names(), OUR_HEAD]))

    def shape(self, name: str) -> Shape:
        """Return the shape of a tensor, without reading it."""
        return self._source.shape(self._stored(name))

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, without reading it."""
        return self._source.dtype(self._stored(name))

    def read(self, name: str) -> Tensor:
        """Read a tensor, on the host; the product is rounded to its dtype."""
        tensor = self._source.read(self._stored(name))
        factor = self._factors.get(name.rpartition(".")[0], 1.0)
        return tensor if factor == 1 else tensor * factor

    def _stored(self, name: str) -> str:
        is_missing = name == OUR_HEAD and name not in self._source.names()
        return OUR_EMBEDDING if is_missing else name
