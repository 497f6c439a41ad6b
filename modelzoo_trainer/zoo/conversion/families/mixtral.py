"""The family mixtral of Hugging Face: a llama whose feed-forward networks are experts."""

from __future__ import annotations

from typing import Any, Final

from modelzoo_trainer.zoo.conversion.families.llama import (
    ROTARY_BUFFERS,
    Defaults,
    read_shared,
    shared_rules,
    write_shared,
)
from modelzoo_trainer.zoo.conversion.family import Family
from modelzoo_trainer.zoo.conversion.readers import ConfigReader, SettingsReader
from modelzoo_trainer.zoo.conversion.rules import Rule, Stacked, linear
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings
from modelzoo_trainer.zoo.models.moe_settings import MoeSettings

_DEFAULTS: Final = Defaults(theta=1e6, epsilon=1e-5, num_groups=8)
_MATRICES: Final = {"gate": "w1", "down": "w2", "up": "w3"}
"""Our stacked matrices, each with the name of an expert's matrix there."""
_FREE: Final = frozenset(
    {
        *("num_experts", "top_k", "load_balancing_loss_coef", "load_balancing_loss_over"),
        *("router_fp32", "gate_initializer", "moe_implementation", "sinkhorn_n_iters"),
    }
)
"""Settings of experts that are written, or do not change the logits; others are at defaults."""


def _settings_of(config: ConfigReader) -> dict[str, Any]:
    config.expect("router_jitter_noise", 0.0)
    # Their loss has the term only with router scores among the outputs.
    is_balanced = config.flag("output_router_logits", False)
    coef = config.number("router_aux_loss_coef", 0.001)
    return read_shared(config, _DEFAULTS) | {
        "attention_sliding_window_length": config.integer("sliding_window", None),
        "use_projection_bias_in_attention": False,
        "use_ffn_bias_in_attention": False,
        "use_ffn_bias": False,
        "moe": {
            "num_experts": config.integer("num_local_experts", 8, alias="num_experts"),
            "top_k": config.integer("num_experts_per_tok", 2),
            **(
                {"load_balancing_loss_coef": coef, "load_balancing_loss_over": "batch"}
                if is_balanced
                else {}
            ),
        },
    }


def _config_of(settings: SettingsReader) -> dict[str, Any]:
    experts = settings.experts()
    if experts is None:
        settings.refuse("moe", "supported: a mixture of experts")
    _check_experts(settings, experts)
    settings.expect_plain_scales()
    for name in ("projection_bias_in_attention", "ffn_bias_in_attention", "ffn_bias"):
        settings.expect(f"use_{name}", False)
    return write_shared(settings) | {
        "sliding_window": settings.take("attention_sliding_window_length"),
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "output_router_logits": experts.load_balancing_loss_coef > 0,
        "router_aux_loss_coef": float(experts.load_balancing_loss_coef),
        "router_jitter_noise": 0.0,
    }


def _check_experts(settings: SettingsReader, experts: MoeSettings) -> None:
    """Refuse the first setting of experts that their router does not have."""
    usual = MoeSettings()
    for name in MoeSettings.__dataclass_fields__:
        if name not in _FREE and (getattr(experts, name) or None) != (getattr(usual, name) or None):
            settings.refuse("moe", f"{name}: {getattr(experts, name)}")


def _rules(settings: DecoderSettings) -> list[Rule]:
    rules = shared_rules(settings)
    experts = settings.experts
    assert experts is not None
    for number in range(settings.num_hidden_layers):
        our, their = f"layers.{number}.ffn", f"model.layers.{number}.block_sparse_moe"
        rules += linear(f"{our}.router", f"{their}.gate", bias=False)
        for ours, theirs in _MATRICES.items():
            names = (f"{their}.experts.{one}.{theirs}.weight" for one in range(experts.num_experts))
            rules.append(Stacked(f"{our}.experts.{ours}", tuple(names)))
    return rules


FAMILIES: Final = (
    Family(
        name="mixtral",
        architecture="MixtralForCausalLM",
        model_name="mixtral",
        settings_of=_settings_of,
        config_of=_config_of,
        rules=_rules,
        base_prefix="model.",
        embedding="model.embed_tokens.weight",
        dropped=ROTARY_BUFFERS,
    ),
)
