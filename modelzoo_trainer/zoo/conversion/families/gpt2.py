"""The family gpt2 of Hugging Face, whose projections are `Conv1D`: transposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from modelzoo_trainer.zoo.conversion.family import Family
from modelzoo_trainer.zoo.conversion.readers import ConfigReader, SettingsReader
from modelzoo_trainer.zoo.conversion.rules import Rule, conv1d, fused_qkv, linear
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings

ACTIVATIONS: Final = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_new",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "squared_relu",
    "silu": "silu",
    "swish": "silu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "linear": "linear",
    "mish": "mish",
    "relu6": "relu6",
    "leaky_relu": "leaky_relu",
}
"""The nonlinearity here by the name in families without a gate."""
PLAIN_ACTIVATIONS: Final = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_new",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "squared_relu": "relu2",
    "silu": "silu",
    "swish": "silu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "linear": "linear",
    "mish": "mish",
    "relu6": "relu6",
    "leaky_relu": "leaky_relu",
}
"""The nonlinearity there for that here."""

SUMMARY_KEYS: Final = tuple(
    f"summary_{one}"
    for one in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
)
"""Keys of other heads than a language model's."""


def common_settings(config: ConfigReader, activation: str) -> dict[str, Any]:
    """Return the settings that gpt2 and gpt_bigcode have alike.

    `activation`: the default for a file without the key.
    """
    size = config.integer("n_embd", alias="hidden_size")
    act = config.text("activation_function", activation)
    if act not in ACTIVATIONS:
        config.refuse("activation_function", f"supported: {', '.join(ACTIVATIONS)}")
    config.ignore("n_ctx", *SUMMARY_KEYS)
    settings = {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": size,
        "num_hidden_layers": config.integer("n_layer", alias="num_hidden_layers"),
        "num_heads": config.integer("n_head", alias="num_attention_heads"),
        "filter_size": config.integer("n_inner", 4 * size),
        "max_position_embeddings": config.integer("n_positions", alias="max_position_embeddings"),
        "position_embedding_type": "learned",
        "norm_type": "layernorm",
        "layer_norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
        "nonlinearity": ACTIVATIONS[act],
        "share_embedding_weights": config.flag("tie_word_embeddings", True),
        "dropout_rate": config.number("resid_pdrop", 0.1),
        "embedding_dropout_rate": config.number("embd_pdrop", 0.1),
        "attention_dropout_rate": config.number("attn_pdrop", 0.1),
        "use_projection_bias_in_attention": True,
        "use_ffn_bias_in_attention": True,
        "use_ffn_bias": True,
        "use_bias_in_output": False,
        "initializer_range": config.number("initializer_range", 0.02),
    }
    if not config.flag("scale_attn_weights", True):
        settings["attention_type"] = "dot_product"
    return settings


def common_config(settings: SettingsReader, activations: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys of config.json that gpt2 and gpt_bigcode have alike.

    `activations`: the nonlinearity there for that here.
    """
    settings.expect("position_embedding_type", "learned")
    settings.expect("norm_type", "layernorm")
    settings.expect("use_bias_in_output", False)
    for name in ("projection_bias_in_attention", "ffn_bias_in_attention", "ffn_bias"):
        settings.expect(f"use_{name}", True)
    settings.expect_no_experts()
    settings.expect("embeddings_scale", 1.0)
    settings.expect_plain_logits()
    is_scaled = settings.expect_plain_or_unscaled_scores()
    return {
        "n_embd": settings.take("hidden_size"),
        "n_layer": settings.take("num_hidden_layers"),
        "n_head": settings.take("num_heads"),
        "n_inner": settings.take("filter_size"),
        "n_positions": settings.take("max_position_embeddings"),
        "layer_norm_epsilon": settings.take("layer_norm_epsilon"),
        "activation_function": settings.look_up("nonlinearity", activations),
        "tie_word_embeddings": settings.take("share_embedding_weights"),
        "resid_pdrop": settings.take("dropout_rate"),
        "embd_pdrop": settings.dropout("embedding_dropout_rate"),
        "attn_pdrop": settings.dropout("attention_dropout_rate"),
        "scale_attn_weights": is_scaled,
        "initializer_range": settings.take("initializer_range"),
        "use_cache": True,
    }


def _settings_of(config: ConfigReader) -> dict[str, Any]:
    config.expect("reorder_and_upcast_attn", False, True)  # only the precision of the scores
    settings = common_settings(config, "gelu_new")
    if config.flag("scale_attn_by_inverse_layer_idx", False):
        settings["scale_qk_dot_by_layer_idx"] = True
    return settings


def _config_of(settings: SettingsReader) -> dict[str, Any]:
    if settings.num_kv_groups() != settings.take("num_heads"):
        settings.refuse("extra_attention_params")
    return common_config(settings, PLAIN_ACTIVATIONS) | {
        "n_ctx": settings.take("max_position_embeddings"),
        "scale_attn_by_inverse_layer_idx": settings.take("scale_qk_dot_by_layer_idx"),
    }


def _rules(settings: DecoderSettings) -> list[Rule]:
    size = settings.hidden_size
    rules = linear("token_embeddings", "transformer.wte", bias=False)
    rules += linear("position_embeddings", "transformer.wpe", bias=False)
    for number in range(settings.num_hidden_layers):
        our, their = f"layers.{number}", f"transformer.h.{number}"
        blocks = [(one, size) for one in range(3)]
        rules += fused_qkv(
            f"{our}.attention", f"{their}.attn.c_attn", blocks, bias=True, is_transposed=True
        )
        rules += conv1d(f"{our}.attention.o_proj", f"{their}.attn.c_proj", bias=True)
        rules += conv1d(f"{our}.ffn.up_proj", f"{their}.mlp.c_fc", bias=True)
        rules += conv1d(f"{our}.ffn.down_proj", f"{their}.mlp.c_proj", bias=True)
        rules += linear(f"{our}.attention_norm", f"{their}.ln_1", bias=True)
        rules += linear(f"{our}.ffn_norm", f"{their}.ln_2", bias=True)
    rules += linear("final_norm", "transformer.ln_f", bias=True)
    if not settings.share_embedding_weights:
        rules += linear("lm_head", "lm_head", bias=False)
    return rules


FAMILIES: Final = (
    Family(
        name="gpt2",
        architecture="GPT2LMHeadModel",
        model_name="gpt2",
        settings_of=_settings_of,
        config_of=_config_of,
        rules=_rules,
        base_prefix="transformer.",
        embedding="transformer.wte.weight",
        dropped=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    ),
)
