"""The names of parameters in the Cerebras Model Zoo, for globs in published files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_NAMES: Final = {
    r"token_embeddings\.": "embedding_layer.word_embeddings.",
    r"position_embeddings\.": "embedding_layer.position_embeddings.embed.",
    r"embedding_norm\.": "embedding_ln_f.",
    r"layers\.(\d+)\.attention_norm\.": r"transformer_decoder.layers.\1.norm1.",
    r"layers\.(\d+)\.ffn_norm\.": r"transformer_decoder.layers.\1.norm3.",
    r"layers\.(\d+)\.attention\.([qkv])_proj\.": (
        r"transformer_decoder.layers.\1.self_attn.proj_\2_dense_layer."
    ),
    r"layers\.(\d+)\.attention\.o_proj\.": (
        r"transformer_decoder.layers.\1.self_attn.proj_output_dense_layer."
    ),
    r"layers\.(\d+)\.ffn\.up_proj\.": r"transformer_decoder.layers.\1.ffn.ffn.0.linear_layer.",
    r"layers\.(\d+)\.ffn\.gate_proj\.": (
        r"transformer_decoder.layers.\1.ffn.ffn.0.linear_layer_for_glu."
    ),
    r"layers\.(\d+)\.ffn\.down_proj\.": r"transformer_decoder.layers.\1.ffn.ffn.1.linear_layer.",
    r"final_norm\.": "transformer_decoder.norm.",
    r"lm_head\.": "lm_head.",
}


def published_name(name: str) -> str | None:
    """Return the published name of a decoder's parameter, None if it has none.

    `name`: as of `named_parameters()`.
    """
    return renamed(name, _NAMES)


def renamed(name: str, names: Mapping[str, str]) -> str | None:
    """Return the published name of a parameter, None if it has none.

    `names`: Patterns of the beginning of a name here, each with its published replacement, without
    the leading `model.`.
    """
    for pattern, published in names.items():
        found = re.match(pattern, name)
        if found is not None:
            return f"model.{found.expand(published)}{name[found.end() :]}"
    return None
