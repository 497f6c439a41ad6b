"""How engines and globs of files select the parts of an encoder-decoder model."""

from __future__ import annotations

from typing import Final

from modelzoo_trainer.zoo.models.feed_forward import GATED
from modelzoo_trainer.zoo.models.published_names import renamed
from modelzoo_trainer.zoo.models.t5.layers import Stack

_LAYER: Final = r"(encoder|decoder)\.layers\.(\d+)\."
_THEIR_LAYER: Final = r"\1.layers.\2."
_NAMES: Final = {
    r"token_embeddings\.": "encoder_embeddings.word_embeddings.",
    r"target_embeddings\.": "decoder_embeddings.word_embeddings.",
    r"(encoder|decoder)\.position_embeddings\.": r"\1_embeddings.position_embeddings.embed.",
    r"(encoder|decoder)\.position_bias\.slopes\.weight": (
        r"\1_embeddings.position_embed_helper.slopes"
    ),
    r"(encoder|decoder)\.position_bias\.buckets\.": (
        r"\1_embeddings.position_embed_helper.relative_attention_bias."
    ),
    rf"{_LAYER}attention\.([qkv])_proj\.": rf"{_THEIR_LAYER}self_attn.proj_\3_dense_layer.",
    rf"{_LAYER}attention\.o_proj\.": rf"{_THEIR_LAYER}self_attn.proj_output_dense_layer.",
    rf"{_LAYER}cross_attention\.([qkv])_proj\.": (
        rf"{_THEIR_LAYER}multihead_attn.proj_\3_dense_layer."
    ),
    rf"{_LAYER}cross_attention\.o_proj\.": (
        rf"{_THEIR_LAYER}multihead_attn.proj_output_dense_layer."
    ),
    rf"{_LAYER}attention_norm\.": rf"{_THEIR_LAYER}norm1.",
    rf"{_LAYER}cross_attention_norm\.": rf"{_THEIR_LAYER}norm2.",
    r"encoder\.layers\.(\d+)\.ffn_norm\.": r"encoder.layers.\1.norm2.",
    r"decoder\.layers\.(\d+)\.ffn_norm\.": r"decoder.layers.\1.norm3.",
    rf"{_LAYER}ffn\.up_proj\.": rf"{_THEIR_LAYER}ffn.ffn.0.linear_layer.",
    rf"{_LAYER}ffn\.gate_proj\.": rf"{_THEIR_LAYER}ffn.ffn.0.linear_layer_for_glu.",
    rf"{_LAYER}ffn\.down_proj\.": rf"{_THEIR_LAYER}ffn.ffn.1.linear_layer.",
    r"(encoder|decoder)\.final_norm\.": r"\1.norm.",
    r"lm_head\.": "lm_head.",
}


def published_name(name: str) -> str | None:
    """Return the name of a parameter in the Cerebras Model Zoo, None if it has none.

    `name`: as of `named_parameters()`.
    """
    return renamed(name, _NAMES)


def stack_tensor_plan(stack: Stack, name: str) -> dict[str, str]:
    """Return how the layers of an encoder or a decoder, `name`, are split."""
    layers = f"{name}.layers.*."
    plan: dict[str, str] = {}
    for attention in ("attention", "cross_attention") if stack.is_decoder else ("attention",):
        plan |= {f"{layers}{attention}.{letter}_proj": "colwise" for letter in "qkv"}
        plan[f"{layers}{attention}.o_proj"] = "rowwise"
    plan |= {f"{layers}ffn.up_proj": "colwise", f"{layers}ffn.down_proj": "rowwise"}
    if stack.settings.nonlinearity(is_decoder=stack.is_decoder) in GATED:
        plan[f"{layers}ffn.gate_proj"] = "colwise"
    if stack.position_bias is not None:
        own = stack.position_bias.tensor_plan.items()
        plan |= {f"{name}.position_bias.{part}": style for part, style in own}
    return plan
