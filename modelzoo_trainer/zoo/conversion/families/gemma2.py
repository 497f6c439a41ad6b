"""The family gemma2 of Hugging Face: norms before and after, bounded scores, every other window."""

from __future__ import annotations

import math
from typing import Any, Final

from modelzoo_trainer.zoo.conversion.families.llama import (
    ROTARY_BUFFERS,
    Defaults,
    attention_rules,
    ffn_rules,
    read_shared,
    write_shared,
)
from modelzoo_trainer.zoo.conversion.family import Family
from modelzoo_trainer.zoo.conversion.readers import ConfigReader, SettingsReader
from modelzoo_trainer.zoo.conversion.rules import Offset, Rule, linear
from modelzoo_trainer.zoo.conversion.windows import (
    FULL,
    SLIDING,
    read_windows,
    write_windows,
)
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings

_DEFAULTS: Final = Defaults(
    is_tied=True,
    head_dim=256,
    num_groups=4,
    act_key="hidden_activation",
    act="gelu_pytorch_tanh",
)
_NORMS: Final = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
_CLOSE: Final = 1e-6  # relative; a factor in YAML has fewer digits than its formula


def _settings_of(config: ConfigReader) -> dict[str, Any]:
    config.ignore("hidden_act", "cache_implementation")  # hidden_activation is the one in use
    config.expect("use_bidirectional_attention", False)
    settings = read_shared(config, _DEFAULTS)
    inner = settings.get("attention_inner_dim", settings["hidden_size"])
    head_dim = inner // settings["num_heads"]
    divisor = config.number("query_pre_attn_scalar", 256.0)
    if not divisor > 0:
        config.refuse("query_pre_attn_scalar", "supported: a number > 0")
    alpha = math.sqrt(head_dim / divisor)
    bias = config.flag("attention_bias", False)
    num_layers = settings["num_hidden_layers"]
    usual = [SLIDING if number % 2 == 0 else FULL for number in range(num_layers)]
    window = config.integer("sliding_window", None if config.is_given("sliding_window") else 4096)
    return settings | {
        **read_windows(config, window, usual),
        "embeddings_scale": math.sqrt(settings["hidden_size"]),
        "attention_logits_alpha": alpha,
        "attention_logit_softcapping": _bound(config, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _bound(config, "final_logit_softcapping", 30.0),
        "norm_first_sandwich": True,
        "use_projection_bias_in_attention": bias,
        "use_ffn_bias_in_attention": bias,
        "use_ffn_bias": False,
    }


def _bound(config: ConfigReader, key: str, usual: float) -> float | None:
    """Return the bound of scores or logits; null means none."""
    bound: float | None = config.number(key, None if config.is_given(key) else usual)
    return bound


def _config_of(settings: SettingsReader) -> dict[str, Any]:
    settings.expect_no_experts()
    settings.expect("norm_first_sandwich", True)
    settings.expect("use_ffn_bias", False)
    bias = settings.take("use_projection_bias_in_attention")
    settings.expect("use_ffn_bias_in_attention", bias)
    settings.expect_plain_logits()
    size = settings.take("hidden_size")
    scale = settings.take("embeddings_scale")
    if not math.isclose(scale, math.sqrt(size), rel_tol=_CLOSE):
        settings.refuse("embeddings_scale", f"supported: the root of hidden_size, {size**0.5}")
    window, kinds = write_windows(settings)
    return write_shared(settings, act_key="hidden_activation") | {
        "attention_bias": bias,
        "query_pre_attn_scalar": _score_divisor(settings),
        "attn_logit_softcapping": _as_float(settings.take("attention_logit_softcapping")),
        "final_logit_softcapping": _as_float(settings.take("final_logit_softcapping")),
        # Required there; without a window here, one that no sequence exceeds.
        "sliding_window": window or settings.take("max_position_embeddings"),
        "layer_types": kinds,
        "use_bidirectional_attention": None,
        "cache_implementation": "hybrid",
    }


def _as_float(bound: float | None) -> float | None:
    return None if bound is None else float(bound)  # transformers refuses an integer


def _score_divisor(settings: SettingsReader) -> int:
    """Return the integer by whose root scores are divided.

    Raises:
        ConfigError: If there is none.
    """
    scale = settings.scores_scale()
    divisor = round(scale**-2) if scale > 0 else 0
    if divisor < 1 or not math.isclose(scale, divisor**-0.5, rel_tol=_CLOSE):
        why = f"scores are multiplied by {scale}, which is not 1 / root of an integer"
        settings.refuse("attention_logits_alpha", why)
    return divisor


def _rules(settings: DecoderSettings) -> list[Rule]:
    rules = linear("token_embeddings", "model.embed_tokens", bias=False)
    for number in range(settings.num_hidden_layers):
        rules += attention_rules(settings, number)
        for ours, theirs in _NORMS.items():
            our, their = f"layers.{number}.{ours}.weight", f"model.layers.{number}.{theirs}.weight"
            rules.append(Offset(our, their))
    rules += ffn_rules(settings)
    rules.append(Offset("final_norm.weight", "model.norm.weight"))
    if not settings.share_embedding_weights:
        rules += linear("lm_head", "lm_head", bias=False)
    return rules


FAMILIES: Final = (
    Family(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        model_name="gemma2",
        settings_of=_settings_of,
        config_of=_config_of,
        rules=_rules,
        base_prefix="model.",
        embedding="model.embed_tokens.weight",
        dropped=ROTARY_BUFFERS,
    ),
)
