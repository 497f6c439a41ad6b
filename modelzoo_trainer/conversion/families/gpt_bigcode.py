"""The family gpt_bigcode of Hugging Face: StarCoder and SantaCoder."""

from __future__ import annotations

from typing import Any, Final

from modelzoo_trainer.conversion.families.gpt2 import (
    ACTIVATIONS,
    PLAIN_ACTIVATIONS,
    SUMMARY_KEYS,
)
from modelzoo_trainer.conversion.family import Family
from modelzoo_trainer.conversion.readers import ConfigReader, SettingsReader
from modelzoo_trainer.conversion.rules import Rule, blocks_by_group, fused_qkv, linear
from modelzoo_trainer.models.decoder_settings import DecoderSettings

_ACTIVATIONS: Final = PLAIN_ACTIVATIONS | {"gelu_new": "gelu_pytorch_tanh"}  # as published


def _settings_of(config: ConfigReader) -> dict[str, Any]:
    size = config.integer("n_embd", alias="hidden_size")
    act = config.text("activation_function", "gelu_pytorch_tanh")
    if act not in ACTIVATIONS:
        config.refuse("activation_function", f"supported: {', '.join(ACTIVATIONS)}")
    # How scores are computed, and buffers for inference.
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "n_ctx")
    config.ignore("inference_runner", "validate_runner_input", "pre_allocate_kv_cache")
    config.ignore("max_batch_size", "max_sequence_length", "pad_key_length", *SUMMARY_KEYS)
    config.ignore("num_key_value_heads")  # follows from the next
    is_multi_query = config.flag("multi_query", True)
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
    if is_multi_query:
        settings["attention_module"] = "multiquery_attention"
        settings["extra_attention_params"] = {"num_kv_groups": 1}
    if not config.flag("scale_attn_weights", True):
        settings["attention_type"] = "dot_product"
    return settings


def _config_of(settings: SettingsReader) -> dict[str, Any]:
    settings.expect("position_embedding_type", "learned")
    settings.expect("norm_type", "layernorm")
    settings.expect("use_bias_in_output", False)
    for name in ("projection_bias_in_attention", "ffn_bias_in_attention", "ffn_bias"):
        settings.expect(f"use_{name}", True)
    num_heads, num_groups = settings.take("num_heads"), settings.num_kv_groups()
    if num_groups not in (1, num_heads):
        settings.refuse("extra_attention_params", f"supported: 1 or {num_heads} groups")
    settings.expect_no_experts()
    settings.expect("embeddings_scale", 1.0)
    settings.expect_plain_logits()
    is_scaled = settings.expect_plain_or_unscaled_scores()
    return {
        "n_embd": settings.take("hidden_size"),
        "n_layer": settings.take("num_hidden_layers"),
        "n_head": num_heads,
        "n_inner": settings.take("filter_size"),
        "n_positions": settings.take("max_position_embeddings"),
        "multi_query": num_groups == 1,
        "layer_norm_epsilon": settings.take("layer_norm_epsilon"),
        "activation_function": settings.look_up("nonlinearity", _ACTIVATIONS),
        "tie_word_embeddings": settings.take("share_embedding_weights"),
        "resid_pdrop": settings.take("dropout_rate"),
        "embd_pdrop": settings.dropout("embedding_dropout_rate"),
        "attn_pdrop": settings.dropout("attention_dropout_rate"),
        "scale_attn_weights": is_scaled,
        "initializer_range": settings.take("initializer_range"),
        "use_cache": True,
    }


def _rules(settings: DecoderSettings) -> list[Rule]:
    blocks = blocks_by_group(settings.num_heads, settings.num_kv_groups, settings.head_dim)
    rules = linear("token_embeddings", "transformer.wte", bias=False)
    rules += linear("position_embeddings", "transformer.wpe", bias=False)
    for number in range(settings.num_hidden_layers):
        our, their = f"layers.{number}", f"transformer.h.{number}"
        rules += fused_qkv(f"{our}.attention", f"{their}.attn.c_attn", blocks, bias=True)
        rules += linear(f"{our}.attention.o_proj", f"{their}.attn.c_proj", bias=True)
        rules += linear(f"{our}.ffn.up_proj", f"{their}.mlp.c_fc", bias=True)
        rules += linear(f"{our}.ffn.down_proj", f"{their}.mlp.c_proj", bias=True)
        rules += linear(f"{our}.attention_norm", f"{their}.ln_1", bias=True)
        rules += linear(f"{our}.ffn_norm", f"{their}.ln_2", bias=True)
    rules += linear("final_norm", "transformer.ln_f", bias=True)
    if not settings.share_embedding_weights:
        rules += linear("lm_head", "lm_head", bias=False)
    return rules


FAMILIES: Final = (
    Family(
        name="gpt_bigcode",
        architecture="GPTBigCodeForCausalLM",
        model_name="starcoder",
        settings_of=_settings_of,
        config_of=_config_of,
        rules=_rules,
        base_prefix="transformer.",
        embedding="transformer.wte.weight",
        dropped=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)", r"transformer\.bias"),
    ),
)
