"""The family gpt_neox of Hugging Face: Pythia and others."""

from __future__ import annotations

from typing import Any, Final

from modelzoo_trainer.zoo.conversion.families.gpt2 import ACTIVATIONS, PLAIN_ACTIVATIONS
from modelzoo_trainer.zoo.conversion.family import Family
from modelzoo_trainer.zoo.conversion.readers import ConfigReader, SettingsReader
from modelzoo_trainer.zoo.conversion.rope import read_rope, rotated_share, write_rope
from modelzoo_trainer.zoo.conversion.rules import Rule, blocks_by_group, fused_qkv, linear
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings


def _shared_settings(config: ConfigReader) -> dict[str, Any]:
    size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    act = config.text("hidden_act", "gelu")
    if act not in ACTIVATIONS:
        config.refuse("hidden_act", f"supported: {', '.join(ACTIVATIONS)}")
    config.ignore("classifier_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob")
    config.ignore("is_decoder")
    share = rotated_share(config, 0.25, alias="rotary_pct")
    theta = config.number("rotary_emb_base", 10000.0)
    rate = config.number("hidden_dropout", 0.0)
    bias = config.flag("attention_bias", True)
    return {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": size,
        "num_hidden_layers": config.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "filter_size": config.integer("intermediate_size"),
        "max_position_embeddings": config.integer("max_position_embeddings"),
        **read_rope(config, theta=theta, is_partial=True),
        "rotary_dim": int(size // num_heads * share),
        "norm_type": "layernorm",
        "layer_norm_epsilon": config.number("layer_norm_eps", 1e-5),
        "nonlinearity": ACTIVATIONS[act],
        "share_embedding_weights": config.flag("tie_word_embeddings", False),
        "dropout_rate": rate,
        "embedding_dropout_rate": rate,
        "attention_dropout_rate": config.number("attention_dropout", 0.0),
        "use_projection_bias_in_attention": bias,
        "use_ffn_bias_in_attention": bias,
        "use_ffn_bias": True,
        "use_bias_in_output": False,
        "initializer_range": config.number("initializer_range", 0.02),
    }


def _shared_config(settings: SettingsReader) -> dict[str, Any]:
    settings.expect("norm_type", "layernorm")
    bias = settings.take("use_projection_bias_in_attention")
    settings.expect("use_ffn_bias_in_attention", bias)
    settings.expect("use_ffn_bias", True)
    settings.expect("use_bias_in_output", False)
    if settings.num_kv_groups() != settings.take("num_heads"):
        settings.refuse("extra_attention_params")
    settings.expect_no_experts()
    settings.expect_plain_scales()
    rope = write_rope(settings)
    settings.take("rotary_dim")
    share = settings.settings.turning_dim / settings.settings.head_dim
    rope["rope_parameters"]["partial_rotary_factor"] = share
    rope["rotary_pct"] = share  # of transformers before 5, as the next
    rope["rotary_emb_base"] = rope.pop("rope_theta")
    return {
        "hidden_size": settings.take("hidden_size"),
        "intermediate_size": settings.take("filter_size"),
        "num_hidden_layers": settings.take("num_hidden_layers"),
        "num_attention_heads": settings.take("num_heads"),
        "hidden_act": settings.look_up("nonlinearity", PLAIN_ACTIVATIONS),
        "max_position_embeddings": settings.take("max_position_embeddings"),
        "layer_norm_eps": settings.take("layer_norm_epsilon"),
        "tie_word_embeddings": settings.take("share_embedding_weights"),
        "attention_bias": bias,
        "hidden_dropout": settings.take("dropout_rate"),
        "attention_dropout": settings.dropout("attention_dropout_rate"),
        "initializer_range": settings.take("initializer_range"),
        "use_cache": True,
        **rope,
    }


def _parallel_settings(config: ConfigReader) -> dict[str, Any]:
    config.expect("use_parallel_residual", True)
    return _shared_settings(config) | {"use_untied_layer_norm": True}


def _parallel_config(settings: SettingsReader) -> dict[str, Any]:
    settings.expect("use_untied_layer_norm", True)
    return _shared_config(settings) | {"use_parallel_residual": True}


def _sequential_settings(config: ConfigReader) -> dict[str, Any]:
    if config.flag("use_parallel_residual", True):
        config.refuse("use_parallel_residual")
    return _shared_settings(config)


def _sequential_config(settings: SettingsReader) -> dict[str, Any]:
    return _shared_config(settings) | {"use_parallel_residual": False}


def _rules(settings: DecoderSettings) -> list[Rule]:
    rules = linear("token_embeddings", "gpt_neox.embed_in", bias=False)
    blocks = blocks_by_group(settings.num_heads, settings.num_heads, settings.head_dim)
    bias = settings.use_projection_bias_in_attention
    for number in range(settings.num_hidden_layers):
        our, their = f"layers.{number}", f"gpt_neox.layers.{number}"
        fused = f"{their}.attention.query_key_value"
        rules += fused_qkv(f"{our}.attention", fused, blocks, bias=bias)
        rules += linear(f"{our}.attention.o_proj", f"{their}.attention.dense", bias=bias)
        rules += linear(f"{our}.ffn.up_proj", f"{their}.mlp.dense_h_to_4h", bias=True)
        rules += linear(f"{our}.ffn.down_proj", f"{their}.mlp.dense_4h_to_h", bias=True)
        rules += linear(f"{our}.attention_norm", f"{their}.input_layernorm", bias=True)
        rules += linear(f"{our}.ffn_norm", f"{their}.post_attention_layernorm", bias=True)
    rules += linear("final_norm", "gpt_neox.final_layer_norm", bias=True)
    if not settings.share_embedding_weights:
        rules += linear("lm_head", "embed_out", bias=False)
    return rules


_LAYER: Final = r"gpt_neox\.layers\.\d+\.attention"
_SHARED: Final[dict[str, Any]] = {
    "architecture": "GPTNeoXForCausalLM",
    "rules": _rules,
    "base_prefix": "gpt_neox.",
    "embedding": "gpt_neox.embed_in.weight",
    "head": "embed_out.weight",
    "dropped": (rf"{_LAYER}\.(bias|masked_bias|rotary_emb\.inv_freq)",),
}
FAMILIES: Final = (
    Family(
        name="gpt_neox",
        model_name="gpt-neox",
        settings_of=_parallel_settings,
        config_of=_parallel_config,
        **_SHARED,
    ),
    Family(
        name="gpt_neox_sequential",
        model_type="gpt_neox",
        applies=lambda config: config.get("use_parallel_residual") is False,
        model_name="gpt2",
        settings_of=_sequential_settings,
        config_of=_sequential_config,
        **_SHARED,
    ),
)
