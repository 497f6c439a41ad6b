"""The families llama (1 to 3.2) and mistral of Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from modelzoo_trainer.zoo.conversion.family import Family
from modelzoo_trainer.zoo.conversion.readers import ConfigReader, SettingsReader
from modelzoo_trainer.zoo.conversion.rope import read_rope, write_rope
from modelzoo_trainer.zoo.conversion.rules import Rule, linear
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings

ACTIVATIONS: Final = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_new",
    "gelu_new": "geglu_new",
    "gelu_fast": "geglu_new",
    "relu": "reglu",
    "linear": "liglu",
}
"""The gated nonlinearity here for `hidden_act` there."""
GATED_ACTIVATIONS: Final = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_new": "gelu_pytorch_tanh",
    "reglu": "relu",
    "liglu": "linear",
}
"""`hidden_act` there for the nonlinearity here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a family like llama computes where config.json lacks a key."""

    theta: float = 10000.0
    epsilon: float = 1e-6
    is_tied: bool = False
    head_dim: int | None = None  # None = hidden_size / num_attention_heads
    num_groups: int | None = None  # None = num_attention_heads
    act_key: str = "hidden_act"
    act: str = "silu"


LLAMA: Final = Defaults()


def read_shared(config: ConfigReader, defaults: Defaults = LLAMA) -> dict[str, Any]:
    """Return our settings for the keys that all families like llama have."""
    size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", size // num_heads)
    if defaults.head_dim is not None and not config.is_given("head_dim"):
        head_dim = defaults.head_dim
    num_groups = config.integer("num_key_value_heads", num_heads)
    if defaults.num_groups is not None and not config.is_given("num_key_value_heads"):
        num_groups = defaults.num_groups
    act = config.text(defaults.act_key, defaults.act)
    if act not in ACTIVATIONS:
        config.refuse(defaults.act_key, f"supported: {', '.join(ACTIVATIONS)}")
    settings = {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": size,
        "num_hidden_layers": config.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "filter_size": config.integer("intermediate_size"),
        "max_position_embeddings": config.integer("max_position_embeddings"),
        **read_rope(config, theta=defaults.theta),
        "rotary_dim": head_dim,
        "norm_type": "rmsnorm",
        "layer_norm_epsilon": config.number("rms_norm_eps", defaults.epsilon),
        "nonlinearity": ACTIVATIONS[act],
        "share_embedding_weights": config.flag("tie_word_embeddings", defaults.is_tied),
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


def write_shared(settings: SettingsReader, *, act_key: str = "hidden_act") -> dict[str, Any]:
    """Return the keys of config.json that all families like llama have.

    The family itself reads the factors on embeddings, scores and logits.
    """
    settings.expect("norm_type", "rmsnorm")
    settings.expect("use_bias_in_output", False)
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
        act_key: settings.look_up("nonlinearity", GATED_ACTIVATIONS),
        "max_position_embeddings": settings.take("max_position_embeddings"),
        "rms_norm_eps": settings.take("layer_norm_epsilon"),
        "tie_word_embeddings": settings.take("share_embedding_weights"),
        "attention_dropout": settings.dropout("attention_dropout_rate"),
        "initializer_range": settings.take("initializer_range"),
        "use_cache": True,
        **rope,
    }


def attention_rules(settings: DecoderSettings, number: int) -> list[Rule]:
    """Return the rules of the projections of attention in one layer."""
    our, their = f"layers.{number}.attention", f"model.layers.{number}.self_attn"
    bias, output_bias = (
        settings.use_projection_bias_in_attention,
        settings.use_ffn_bias_in_attention,
    )
    rules: list[Rule] = []
    for one in "qkv":
        rules += linear(f"{our}.{one}_proj", f"{their}.{one}_proj", bias=bias)
    return rules + linear(f"{our}.o_proj", f"{their}.o_proj", bias=output_bias)


def shared_rules(settings: DecoderSettings) -> list[Rule]:
    """Return the rules of embeddings, norms and attention of families like llama."""
    rules = linear("token_embeddings", "model.embed_tokens", bias=False)
    for number in range(settings.num_hidden_layers):
        our, their = f"layers.{number}", f"model.layers.{number}"
        rules += attention_rules(settings, number)
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
    settings.expect_plain_scales()
    bias = settings.take("use_projection_bias_in_attention")
    settings.expect("use_ffn_bias_in_attention", bias)
    return write_shared(settings) | {
        "attention_bias": bias,
        "mlp_bias": settings.take("use_ffn_bias"),
        "pretraining_tp": 1,
    }


def _mistral_settings(config: ConfigReader) -> dict[str, Any]:
    window = 4096 if not config.is_given("sliding_window") else None
    return read_shared(config, Defaults(num_groups=8)) | {
        "attention_sliding_window_length": config.integer("sliding_window", window),
        "use_projection_bias_in_attention": False,
        "use_ffn_bias_in_attention": False,
        "use_ffn_bias": False,
    }


def _mistral_config(settings: SettingsReader) -> dict[str, Any]:
    settings.expect_no_experts()
    settings.expect_plain_scales()
    settings.expect("use_projection_bias_in_attention", False)
    settings.expect("use_ffn_bias_in_attention", False)
    settings.expect("use_ffn_bias", False)
    return write_shared(settings) | {
        "sliding_window": settings.take("attention_sliding_window_length"),
    }


ROTARY_BUFFERS: Final = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)

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
        dropped=ROTARY_BUFFERS,
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
        dropped=ROTARY_BUFFERS,
    ),
)
