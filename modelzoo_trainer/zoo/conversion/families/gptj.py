"""The family gptj of Hugging Face, whose rotated dimensions are interleaved pairs."""

from __future__ import annotations

from typing import Any, Final

from modelzoo_trainer.zoo.conversion.families.gpt2 import (
    ACTIVATIONS,
    PLAIN_ACTIVATIONS,
    SUMMARY_KEYS,
)
from modelzoo_trainer.zoo.conversion.family import Family
from modelzoo_trainer.zoo.conversion.readers import ConfigReader, SettingsReader
from modelzoo_trainer.zoo.conversion.rules import InterleavedRows, Rule, linear
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings


def _settings_of(config: ConfigReader) -> dict[str, Any]:
    size = config.integer("n_embd", 4096, alias="hidden_size")
    act = config.text("activation_function", "gelu_new")
    if act not in ACTIVATIONS:
        config.refuse("activation_function", f"supported: {', '.join(ACTIVATIONS)}")
    config.expect("rotary", True)
    config.expect("scale_attn_weights", True)
    config.ignore("n_ctx", *SUMMARY_KEYS)
    if config.is_given("rotary_dim") and not config.has("rotary_dim"):
        config.refuse("rotary_dim", "supported: a number of dimensions")
    return {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": size,
        "num_hidden_layers": config.integer("n_layer", alias="num_hidden_layers"),
        "num_heads": config.integer("n_head", alias="num_attention_heads"),
        "filter_size": config.integer("n_inner", 4 * size),
        "max_position_embeddings": config.integer("n_positions", alias="max_position_embeddings"),
        "position_embedding_type": "rotary",
        "rotary_dim": config.integer("rotary_dim", 64),
        "norm_type": "layernorm",
        "use_untied_layer_norm": False,
        "layer_norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
        "nonlinearity": ACTIVATIONS[act],
        "share_embedding_weights": config.flag("tie_word_embeddings", False),
        "dropout_rate": config.number("resid_pdrop", 0.0),
        "embedding_dropout_rate": config.number("embd_pdrop", 0.0),
        "attention_dropout_rate": config.number("attn_pdrop", 0.0),
        "use_projection_bias_in_attention": False,
        "use_ffn_bias_in_attention": False,
        "use_ffn_bias": True,
        "use_bias_in_output": True,
        "initializer_range": config.number("initializer_range", 0.02),
    }


def _config_of(settings: SettingsReader) -> dict[str, Any]:
    settings.expect("position_embedding_type", "rotary")
    settings.expect("rope_theta", 10000.0)
    settings.expect("norm_type", "layernorm")
    settings.expect("use_untied_layer_norm", False)
    settings.expect("use_projection_bias_in_attention", False)
    settings.expect("use_ffn_bias_in_attention", False)
    settings.expect("use_ffn_bias", True)
    settings.expect("use_bias_in_output", True)
    if settings.num_kv_groups() != settings.take("num_heads"):
        settings.refuse("extra_attention_params")
    settings.expect_no_experts()
    settings.expect_plain_scales()
    settings.take("rotary_dim")
    length = settings.take("max_position_embeddings")
    return {
        "n_embd": settings.take("hidden_size"),
        "n_layer": settings.take("num_hidden_layers"),
        "n_head": settings.take("num_heads"),
        "n_inner": settings.take("filter_size"),
        "n_positions": length,
        "n_ctx": length,
        "rotary": True,
        "rotary_dim": settings.settings.turning_dim,
        "layer_norm_epsilon": settings.take("layer_norm_epsilon"),
        "activation_function": settings.look_up("nonlinearity", PLAIN_ACTIVATIONS),
        "tie_word_embeddings": settings.take("share_embedding_weights"),
        "resid_pdrop": settings.take("dropout_rate"),
        "embd_pdrop": settings.dropout("embedding_dropout_rate"),
        "attn_pdrop": settings.dropout("attention_dropout_rate"),
        "scale_attn_weights": True,
        "initializer_range": settings.take("initializer_range"),
        "use_cache": True,
    }


def _rules(settings: DecoderSettings) -> list[Rule]:
    rules = linear("token_embeddings", "transformer.wte", bias=False)
    head_dim, rotary_dim = settings.head_dim, settings.turning_dim
    for number in range(settings.num_hidden_layers):
        our, their = f"layers.{number}", f"transformer.h.{number}"
        for one in "qk":
            names = f"{our}.attention.{one}_proj.weight", f"{their}.attn.{one}_proj.weight"
            rules.append(InterleavedRows(*names, head_dim=head_dim, rotary_dim=rotary_dim))
        rules += linear(f"{our}.attention.v_proj", f"{their}.attn.v_proj", bias=False)
        rules += linear(f"{our}.attention.o_proj", f"{their}.attn.out_proj", bias=False)
        rules += linear(f"{our}.ffn.up_proj", f"{their}.mlp.fc_in", bias=True)
        rules += linear(f"{our}.ffn.down_proj", f"{their}.mlp.fc_out", bias=True)
        rules += linear(f"{our}.attention_norm", f"{their}.ln_1", bias=True)
    rules += linear("final_norm", "transformer.ln_f", bias=True)
    if settings.share_embedding_weights:
        return [*rules, *linear("lm_head", "lm_head", bias=True)[1:]]
    return rules + linear("lm_head", "lm_head", bias=True)


FAMILIES: Final = (
    Family(
        name="gptj",
        architecture="GPTJForCausalLM",
        model_name="gptj",
        settings_of=_settings_of,
        config_of=_config_of,
        rules=_rules,
        base_prefix="transformer.",
        embedding="transformer.wte.weight",
        dropped=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    ),
)
