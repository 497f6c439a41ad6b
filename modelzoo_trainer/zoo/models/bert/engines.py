"""How engines, optimizers and globs of files select the parts of BERT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from modelzoo_trainer.zoo.models.bert.encoder import Encoder
from modelzoo_trainer.zoo.models.bert.settings import EncoderSettings
from modelzoo_trainer.zoo.models.feed_forward import GATED
from modelzoo_trainer.zoo.models.parametrization import LrAdjustmentGroup
from modelzoo_trainer.zoo.models.published_names import renamed

_LAYER: Final = r"encoder\.layers\.(\d+)\."
_THEIR_LAYER: Final = r"bert_encoder.transformer_encoder.layers.\1."
_NAMES: Final = {
    r"encoder\.token_embeddings\.": "bert_encoder.embedding_layer.word_embeddings.",
    r"encoder\.position_embeddings\.": "bert_encoder.embedding_layer.position_embeddings.embed.",
    r"encoder\.segment_embeddings\.": "bert_encoder.embedding_layer.segment_embeddings.",
    r"encoder\.embedding_norm\.": "bert_encoder.embed_ln_f.",
    rf"{_LAYER}attention\.([qkv])_proj\.": rf"{_THEIR_LAYER}self_attn.proj_\2_dense_layer.",
    rf"{_LAYER}attention\.o_proj\.": rf"{_THEIR_LAYER}self_attn.proj_output_dense_layer.",
    rf"{_LAYER}attention_norm\.": rf"{_THEIR_LAYER}norm1.",
    rf"{_LAYER}ffn\.up_proj\.": rf"{_THEIR_LAYER}ffn.ffn.0.linear_layer.",
    rf"{_LAYER}ffn\.gate_proj\.": rf"{_THEIR_LAYER}ffn.ffn.0.linear_layer_for_glu.",
    rf"{_LAYER}ffn\.down_proj\.": rf"{_THEIR_LAYER}ffn.ffn.1.linear_layer.",
    rf"{_LAYER}ffn_norm\.": rf"{_THEIR_LAYER}norm2.",
    r"encoder\.final_norm\.": "bert_encoder.transformer_encoder.norm.",
    r"encoder\.pooler\.": "bert_encoder.pooler.pooler.ffn.0.linear_layer.",
    r"mlm_dense\.": "bert_mlm_head.mlm_transform.ffn.ffn.0.linear_layer.",
    r"mlm_norm\.": "bert_mlm_head.mlm_transform.ln.",
    r"lm_head\.": "bert_mlm_head.classifier.ffn.0.linear_layer.",
    r"nsp_head\.": "bert_cls_head.classifier.ffn.0.linear_layer.",
}


def published_name(name: str) -> str | None:
    """Return the name of a parameter in the Cerebras Model Zoo, None if it has none.

    `name`: as of `named_parameters()`.
    """
    return renamed(name, _NAMES)


def encoder_tensor_plan(encoder: Encoder) -> dict[str, str]:
    """Return how the layers of a model's `encoder` are split, by module name patterns."""
    attention, ffn = "encoder.layers.*.attention.", "encoder.layers.*.ffn."
    plan = {f"{attention}{name}_proj": "colwise" for name in "qkv"}
    plan |= {f"{attention}o_proj": "rowwise", "encoder.token_embeddings": "rowwise"}
    plan |= {f"{ffn}up_proj": "colwise", f"{ffn}down_proj": "rowwise"}
    if encoder.settings.nonlinearity in GATED:
        plan[f"{ffn}gate_proj"] = "colwise"
    own: Mapping[str, str] = getattr(encoder.position_bias, "tensor_plan", {})
    return plan | {f"encoder.position_bias.{name}": style for name, style in own.items()}


def lr_groups(settings: EncoderSettings) -> Mapping[str, LrAdjustmentGroup]:
    """Return the groups of parameters whose learning rate muP adjusts.

    With m = hidden_size / mup_base_hidden_size and f the same ratio of filter sizes: 1 / m for
    attention, the input of feed-forward layers and the pooler, 1 / f for their output.
    """
    width = (settings.mup_base_hidden_size or settings.hidden_size) / settings.hidden_size
    narrow = (settings.mup_base_filter_size or settings.filter_size) / settings.filter_size
    layers = "*encoder.layers.*"

    def group(*patterns: str, scale: float = 1.0) -> LrAdjustmentGroup:
        return LrAdjustmentGroup(param_filter_patterns=patterns, scale=scale)

    return {
        "embedding": group("*_embeddings.weight"),
        "encoder_attention": group(f"{layers}attention.*_proj.weight", scale=width),
        "encoder_input_ffn": group(
            f"{layers}ffn.up_proj.weight", f"{layers}ffn.gate_proj.weight", scale=width
        ),
        "encoder_output_ffn": group(f"{layers}ffn.down_proj.weight", scale=narrow),
        "pooler": group("*encoder.pooler.weight", scale=width),
    }
