"""The families qwen2 (also 2.5) and qwen3 of Hugging Face."""

from __future__ import annotations

from typing import Any, Final

from modelzoo_trainer.zoo.conversion.families.llama import (
    ROTARY_BUFFERS,
    Defaults,
    ffn_rules,
    read_shared,
    shared_rules,
    write_shared,
)
from modelzoo_trainer.zoo.conversion.family import Family
from modelzoo_trainer.zoo.conversion.readers import ConfigReader, SettingsReader
from modelzoo_trainer.zoo.conversion.rules import Rule, linear
from modelzoo_trainer.zoo.conversion.windows import FULL, SLIDING, read_windows, write_windows
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings

_QWEN2: Final = Defaults(num_groups=32)
_QWEN3: Final = Defaults(num_groups=32, head_dim=128)


def _windows(config: ConfigReader, num_layers: int) -> dict[str, Any]:
    """Return our settings of the sliding window: later layers have it, unless listed."""
    usual = 4096 if not config.is_given("sliding_window") else None
    window = config.integer("sliding_window", usual)
    if not config.flag("use_sliding_window", False):
        window = None
    first = config.integer("max_window_layers", 28, least=0)
    has_window = [window is not None and number >= first for number in range(num_layers)]
    return read_windows(config, window, [SLIDING if one else FULL for one in has_window])


def _write_windows(settings: SettingsReader) -> dict[str, Any]:
    window, kinds = write_windows(settings)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": 0 if window is not None else len(kinds),
        "layer_types": kinds,
    }


def _qwen2_settings(config: ConfigReader) -> dict[str, Any]:
    shared = read_shared(config, _QWEN2)
    return shared | {
        **_windows(config, shared["num_hidden_layers"]),
        "use_projection_bias_in_attention": True,
        "use_ffn_bias_in_attention": False,
        "use_ffn_bias": False,
    }


def _qwen2_config(settings: SettingsReader) -> dict[str, Any]:
    settings.expect("use_projection_bias_in_attention", True)
    settings.expect("use_ffn_bias_in_attention", False)
    settings.expect("use_ffn_bias", False)
    settings.expect_no_experts()
    settings.expect_plain_scales()
    return write_shared(settings) | _write_windows(settings)


def _qwen3_settings(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("attention_bias", False)
    shared = read_shared(config, _QWEN3)
    return shared | {
        **_windows(config, shared["num_hidden_layers"]),
        "attention_qk_norm": "rmsnorm",
        "use_projection_bias_in_attention": bias,
        "use_ffn_bias_in_attention": bias,
        "use_ffn_bias": False,
    }


def _qwen3_config(settings: SettingsReader) -> dict[str, Any]:
    settings.expect("attention_qk_norm", "rmsnorm")
    bias = settings.take("use_projection_bias_in_attention")
    settings.expect("use_ffn_bias_in_attention", bias)
    settings.expect("use_ffn_bias", False)
    settings.expect_no_experts()
    settings.expect_plain_scales()
    return write_shared(settings) | {"attention_bias": bias, **_write_windows(settings)}


def _qwen2_rules(settings: DecoderSettings) -> list[Rule]:
    return [*shared_rules(settings), *ffn_rules(settings)]


def _qwen3_rules(settings: DecoderSettings) -> list[Rule]:
    rules = _qwen2_rules(settings)
    for number in range(settings.num_hidden_layers):
        our, their = f"layers.{number}.attention", f"model.layers.{number}.self_attn"
        for one in ("q_norm", "k_norm"):
            rules += linear(f"{our}.{one}", f"{their}.{one}", bias=False)
    return rules


_SHARED: Final[dict[str, Any]] = {
    "model_name": "llama",
    "base_prefix": "model.",
    "embedding": "model.embed_tokens.weight",
    "dropped": ROTARY_BUFFERS,
}
FAMILIES: Final = (
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        settings_of=_qwen2_settings,
        config_of=_qwen2_config,
        rules=_qwen2_rules,
        **_SHARED,
    ),
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        settings_of=_qwen3_settings,
        config_of=_qwen3_config,
        rules=_qwen3_rules,
        **_SHARED,
    ),
)
