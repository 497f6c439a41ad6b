"""The family falcon of Hugging Face: 7B, 40B, 180B and 11B."""

from __future__ import annotations

from typing import Any, Final

from modelzoo_trainer.zoo.conversion.families.gpt2 import ACTIVATIONS, PLAIN_ACTIVATIONS
from modelzoo_trainer.zoo.conversion.family import Family
from modelzoo_trainer.zoo.conversion.readers import ConfigReader, SettingsReader
from modelzoo_trainer.zoo.conversion.rope import read_rope, write_rope
from modelzoo_trainer.zoo.conversion.rules import Rule, blocks_by_group, fused_qkv, linear
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings


def _shared_settings(config: ConfigReader) -> dict[str, Any]:
    size = config.integer("hidden_size", alias="n_embed")
    num_heads = config.integer("num_attention_heads", alias="n_head")
    act = config.text("activation", "gelu")
    if act not in ACTIVATIONS:
        config.refuse("activation", f"supported: {', '.join(ACTIVATIONS)}")
    if config.flag("alibi", False):
        config.refuse("alibi", "transformers rounds its positions to bfloat16")
    config.expect("apply_residual_connection_post_layernorm", False)
    config.expect("ff_factor", 4)
    config.ignore("auto_map")  # code that is part of transformers now
    bias = config.flag("bias", False)
    rate = config.number("hidden_dropout", 0.0)
    settings = {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": size,
        "num_hidden_layers": config.integer("num_hidden_layers", alias="n_layer"),
        "num_heads": num_heads,
        "filter_size": config.integer("ffn_hidden_size", 4 * size),
        "max_position_embeddings": config.integer("max_position_embeddings", 2048),
        **read_rope(config),
        "rotary_dim": size // num_heads,
        "norm_type": "layernorm",
        "layer_norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
        "nonlinearity": ACTIVATIONS[act],
        "share_embedding_weights": config.flag("tie_word_embeddings", True),
        "dropout_rate": rate,
        "embedding_dropout_rate": 0.0,
        "attention_dropout_rate": config.number("attention_dropout", 0.0),
        "use_projection_bias_in_attention": bias,
        "use_ffn_bias_in_attention": bias,
        "use_ffn_bias": bias,
        "use_bias_in_output": False,
        "initializer_range": config.number("initializer_range", 0.02),
    }
    num_groups = _num_groups(config, num_heads)
    if num_groups != num_heads:
        settings["attention_module"] = "multiquery_attention"
        settings["extra_attention_params"] = {"num_kv_groups": num_groups}
    return settings


def _num_groups(config: ConfigReader, num_heads: int) -> int:
    """Return the number of heads of keys and values."""
    given: int = config.integer("num_kv_heads", num_heads, alias="n_head_kv")
    is_multi_query = config.flag("multi_query", True)
    if _is_new(config):
        return given
    if not is_multi_query and given != num_heads:
        config.refuse("num_kv_heads", "with neither multi_query nor new_decoder_architecture")
    return 1 if is_multi_query else num_heads


def _is_new(config: ConfigReader) -> bool:
    """Return whether the file is of 40B and later; files of 40B's first release lack the key."""
    is_new: bool = config.flag("new_decoder_architecture", config.has("n_head_kv"))
    return is_new


def _parallel_settings(config: ConfigReader) -> dict[str, Any]:
    config.expect("parallel_attn", True)
    num_norms = config.integer("num_ln_in_parallel_attn", 2 if _is_new(config) else 1)
    if num_norms not in ((1, 2) if _is_new(config) else (1,)):
        config.refuse("num_ln_in_parallel_attn")
    return _shared_settings(config) | {"use_untied_layer_norm": num_norms == 2}


def _sequential_settings(config: ConfigReader) -> dict[str, Any]:
    config.expect("parallel_attn", False)
    config.ignore("num_ln_in_parallel_attn")
    if _is_new(config):
        config.refuse("new_decoder_architecture", "with parallel_attn: false")
    return _shared_settings(config)


def _shared_config(settings: SettingsReader) -> dict[str, Any]:
    settings.expect("norm_type", "layernorm")
    bias = settings.take("use_projection_bias_in_attention")
    settings.expect("use_ffn_bias_in_attention", bias)
    settings.expect("use_ffn_bias", bias)
    settings.expect("use_bias_in_output", False)
    settings.expect_no_experts()
    settings.expect_plain_scales()
    rope = write_rope(settings)
    settings.take("rotary_dim")
    head_dim = settings.settings.head_dim
    if settings.settings.turning_dim != head_dim:
        settings.refuse("rotary_dim", f"supported: the size of a head, {head_dim}")
    return {
        "hidden_size": settings.take("hidden_size"),
        "ffn_hidden_size": settings.take("filter_size"),
        "num_hidden_layers": settings.take("num_hidden_layers"),
        "num_attention_heads": settings.take("num_heads"),
        "num_kv_heads": settings.num_kv_groups(),
        "alibi": False,
        "activation": settings.look_up("nonlinearity", PLAIN_ACTIVATIONS),
        "bias": bias,
        "max_position_embeddings": settings.take("max_position_embeddings"),
        "layer_norm_epsilon": settings.take("layer_norm_epsilon"),
        "tie_word_embeddings": settings.take("share_embedding_weights"),
        "hidden_dropout": settings.take("dropout_rate"),
        "attention_dropout": settings.dropout("attention_dropout_rate"),
        "initializer_range": settings.take("initializer_range"),
        "use_cache": True,
        **rope,
    }


def _parallel_config(settings: SettingsReader) -> dict[str, Any]:
    config = _shared_config(settings)
    num_norms = 2 if settings.take("use_untied_layer_norm") else 1
    is_multi_query = settings.num_kv_groups() == 1
    is_grouped = settings.num_kv_groups() not in (1, settings.settings.num_heads)
    is_new = num_norms == 2 or is_grouped
    return config | {
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": num_norms if is_new else None,
        "multi_query": is_multi_query or is_new,
        "parallel_attn": True,
    }


def _sequential_config(settings: SettingsReader) -> dict[str, Any]:
    config = _shared_config(settings)
    num_groups, num_heads = settings.num_kv_groups(), settings.settings.num_heads
    if num_groups not in (1, num_heads):
        settings.refuse("extra_attention_params", f"supported: 1 or {num_heads} groups")
    return config | {
        "new_decoder_architecture": False,
        "multi_query": num_groups == 1,
        "parallel_attn": False,
    }


def _rules(settings: DecoderSettings) -> list[Rule]:
    has_own_norm = getattr(settings, "use_untied_layer_norm", None)
    norms = {"attention_norm": "input_layernorm"}
    if has_own_norm:
        norms = {"attention_norm": "ln_attn", "ffn_norm": "ln_mlp"}
    elif has_own_norm is None:  # one after the other
        norms["ffn_norm"] = "post_attention_layernorm"
    num_heads, num_groups = settings.num_heads, settings.num_kv_groups
    blocks = blocks_by_group(num_heads, num_groups, settings.head_dim)
    bias = settings.use_ffn_bias
    rules = linear("token_embeddings", "transformer.word_embeddings", bias=False)
    for number in range(settings.num_hidden_layers):
        our, their = f"layers.{number}", f"transformer.h.{number}"
        fused = f"{their}.self_attention.query_key_value"
        rules += fused_qkv(f"{our}.attention", fused, blocks, bias=bias)
        rules += linear(f"{our}.attention.o_proj", f"{their}.self_attention.dense", bias=bias)
        rules += linear(f"{our}.ffn.up_proj", f"{their}.mlp.dense_h_to_4h", bias=bias)
        rules += linear(f"{our}.ffn.down_proj", f"{their}.mlp.dense_4h_to_h", bias=bias)
        for own, name in norms.items():
            rules += linear(f"{our}.{own}", f"{their}.{name}", bias=True)
    rules += linear("final_norm", "transformer.ln_f", bias=True)
    if not settings.share_embedding_weights:
        rules += linear("lm_head", "lm_head", bias=False)
    return rules


_SHARED: Final[dict[str, Any]] = {
    "architecture": "FalconForCausalLM",
    "rules": _rules,
    "base_prefix": "transformer.",
    "embedding": "transformer.word_embeddings.weight",
    "dropped": (r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq",),
    "other_model_types": ("RefinedWeb", "RefinedWebModel"),
}
FAMILIES: Final = (
    Family(
        name="falcon",
        model_name="falcon",
        settings_of=_parallel_settings,
        config_of=_parallel_config,
        **_SHARED,
    ),
    Family(
        name="falcon_sequential",
        model_type="falcon",
        applies=lambda config: config.get("parallel_attn") is False,
        model_name="gpt2",
        settings_of=_sequential_settings,
        config_of=_sequential_config,
        **_SHARED,
    ),
)
