"""The families llama (1 to 3.2) and mistral of Hugging Face."""

from __future__ import annotations

from typing import Any, Final

from modelzoo_trainer.conversion.family import Family
from modelzoo_trainer.conversion.readers import ConfigReader, SettingsReader
from modelzoo_trainer.conversion.rope import read_rope, write_rope
from modelzoo_trainer.conversion.rules import Rule, linear
from modelzoo_trainer.models.decoder_settings import DecoderSettings

ACTIVATIONS: Final = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "relu": "reglu"}
"""The gated nonlinearity here for `hidden_act` there."""
GATED_ACTIVATIONS: Final = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
"""`hidden_act` there for the nonlinearity here."""


def read_shared(config: ConfigReader) -> dict[str, Any]:
    """Return our settings for the keys that all families like llama have."""
    size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", size // num_heads)
    num_groups = config.integer("num_key_value_heads", num_heads)
    act = config.text("hidden_act", "silu")
    if act not in ACTIVATIONS:
        config.refuse("hidden_act", f"supported: {', '.join(ACTIVATIONS)}")
    settings = {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": size,
        "num_hidden_layers": config.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "filter_size": config.integer("intermediate_size"),
        "max_position_embeddings": config.integer("max_position_embeddings"),
        **read_rope(config),
        "rotary_dim": head_dim,
        "norm_type": "rmsnorm",
        "layer_norm_epsilon": config.number("rms_norm_eps", 1e-6),
        "nonlinearity": ACTIVATIONS[act],
        "share_embedding_weights": config.flag("tie_word_embeddings", False),
        "dropout_rate": 0.0,
        "embedding_dropout_rate": 0.0,
        "attention_dropout_rate": config.number("attention_dropout", 0.0),
        "use_bias_in_output": False,
        "initializer_range": config.number("initializer_range", 0.02),
    }
    if head_dim * num_heads != size:
        settings["attention_inner_dim"] = head_dim * num_heads
    if num_groups != num_heads:
        settings["attention_module"] = "multiquery_attention"
        settings["extra_attention_params"] = {"num_kv_groups": num_groups}
    return settings


def write_shared(settings: SettingsReader) -> dict[str, Any]:
    """Return the keys of config.json that all families like llama have."""
    settings.expect("norm_type", "rmsnorm")
    settings.expect("use_bias_in_output", False)
    settings.expect_plain_scales()
    head_dim = settings.settings.head_dim
    settings.take("attention_inner_dim")
    settings.take("rotary_dim")
    rope = write_rope(settings)
    if settings.settings.turning_dim != head_dim:
        settings.refuse("rotary_dim", f"supported: the size of a head, {head_dim}")
    return {
        "hidden_size": settings.take("hidden_size"),
        "intermediate_size": settings.take("filter_size"),
        "num_hidden_layers": settings.take("num_hidden_layers"),
        "num_attention_heads": settings.take("num_heads"),
        "num_key_value_heads": settings.num_kv_groups(),
        "head_dim": head_dim,
        "hidden_act": settings.look_up("nonlinearity", GATED_ACTIVATIONS),
        "max_position_embeddings": settings.take("max_position_embeddings"),
        "rms_norm_eps": settings.take("layer_norm_epsilon"),
        "tie_word_embeddings": settings.take("share_embedding_weights"),
        "attention_dropout": settings.dropout("attention_dropout_rate"),
        "initializer_range": settings.take("initializer_range"),
        "use_cache": True,
        **rope,
    }


def shared_rules(settings: DecoderSettings) -> list[Rule]:
    """Return the rules of embeddings, norms and attention of families like llama."""
    rules = linear("token_embeddings", "model.embed_tokens", bias=False)
    for number in range(settings.num_hidden_layers):
        our, their = f"layers.{number}", f"model.layers.{number}"
        bias = settings.use_projection_bias_in_attention
        for one in "qkv":
            our_one, their_one = f"attention.{one}_proj", f"self_attn.{one}_proj"
            rules += linear(f"{our}.{our_one}", f"{their}.{their_one}", bias=bias)
        output_bias = settings.use_ffn_bias_in_attention
        rules += linear(f"{our}.attention.o_proj", f"{their}.self_attn.o_proj", bias=output_bias)
        rules += linear(f"{our}.attention_norm", f"{their}.input_layernorm", bias=False)
        rules += linear(f"{our}.ffn_norm", f"{their}.post_attention_layernorm", bias=False)
    rules += linear("final_norm", "model.norm", bias=False)
    if not settings.share_embedding_weights:
        rules += linear("lm_head", "lm_head", bias=False)
    return rules


def ffn_rules(settings: DecoderSettings) -> list[Rule]:
    """Return the rules of the gated feed-forward networks of families like llama."""
    rules: list[Rule] = []
    for number in range(settings.num_hidden_layers):
        for one in ("gate", "up", "down"):
            our, their = f"layers.{number}.ffn.{one}_proj", f"model.layers.{number}.mlp.{one}_proj"
            rules += linear(our, their, bias=settings.use_ffn_bias)
    return rules


def _rules(settings: DecoderSettings) -> list[Rule]:
    return [*shared_rules(settings), *ffn_rules(settings)]


def _llama_settings(config: ConfigReader) -> dict[str, Any]:
    config.ignore("pretraining_tp")  # how a product is cut, not what it is
    bias = config.flag("attention_bias", False)
    return read_shared(config) | {
        "use_projection_bias_in_attention": bias,
        "use_ffn_bias_in_attention": bias,
        "use_ffn_bias": config.flag("mlp_bias", False),
    }


def _llama_config(settings: SettingsReader) -> dict[str, Any]:
    settings.expect_no_experts()
    bias = settings.take("use_projection_bias_in_attention")
    settings.expect("use_ffn_bias_in_attention", bias)
    return write_shared(settings) | {
        "attention_bias": bias,
        "mlp_bias": settings.take("use_ffn_bias"),
        "pretraining_tp": 1,
    }


def _mistral_settings(config: ConfigReader) -> dict[str, Any]:
    return read_shared(config) | {
        "attention_sliding_window_length": config.integer("sliding_window", None),
        "use_projection_bias_in_attention": False,
        "use_ffn_bias_in_attention": False,
        "use_ffn_bias": False,
    }


def _mistral_config(settings: SettingsReader) -> dict[str, Any]:
    settings.expect_no_experts()
    settings.expect("use_projection_bias_in_attention", False)
    settings.expect("use_ffn_bias_in_attention", False)
    settings.expect("use_ffn_bias", False)
    return write_shared(settings) | {
        "sliding_window": settings.take("attention_sliding_window_length"),
    }


_ROTARY_BUFFERS: Final = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)

FAMILIES: Final = (
    Family(
        name="llama",
        architecture="LlamaForCausalLM",
        model_name="llama",
        settings_of=_llama_settings,
        config_of=_llama_config,
        rules=_rules,
        base_prefix="model.",
        embedding="model.embed_tokens.weight",
        dropped=_ROTARY_BUFFERS,
    ),
    Family(
        name="mistral",
        architecture="MistralForCausalLM",
        model_name="mistral",
        settings_of=_mistral_settings,
        config_of=_mistral_config,
        rules=_rules,
        base_prefix="model.",
        embedding="model.embed_tokens.weight",
        dropped=_ROTARY_BUFFERS,
    ),
)
