"""The family esm of Hugging Face: ESM-2, whose positions are rotary."""

from __future__ import annotations

from typing import Any, Final

from modelzoo_trainer.zoo.conversion.families.bert import (
    Zeros,
    layer_rules,
    read_encoder,
    write_encoder,
)
from modelzoo_trainer.zoo.conversion.family import Family
from modelzoo_trainer.zoo.conversion.readers import ConfigReader, ModelReader
from modelzoo_trainer.zoo.conversion.rules import Copy, Rule, linear

_THETA: Final = 10000.0


def _settings_of(config: ConfigReader) -> dict[str, Any]:
    config.expect("is_folding_model", False)
    if config.text("position_embedding_type", "absolute") != "rotary":
        config.refuse("position_embedding_type", "supported: rotary")
    config.ignore("vocab_list", "esmfold_config", "hidden_act")  # it is the exact gelu in any case
    settings = read_encoder(config)
    return settings | {
        "encoder_nonlinearity": "gelu",
        "position_embedding_type": "rotary",
        "rotary_dim": settings["hidden_size"] // settings["num_heads"],
        "rope_theta": config.number("rope_theta", _THETA),
        "norm_first": True,
        "use_final_layer_norm": True,
        "embedding_layer_norm": config.flag("emb_layer_norm_before", False),
        "disable_nsp": True,
        "num_segments": 0,
        "token_dropout": config.flag("token_dropout", False),
        "mask_token_id": config.integer("mask_token_id", None, least=0),
        "pad_token_id": config.integer("pad_token_id", 0, least=0),
        "share_embedding_weights": config.flag("tie_word_embeddings", True),
    }


def _config_of(settings: ModelReader) -> dict[str, Any]:
    settings.expect_all(
        {
            "position_embedding_type": "rotary",
            "encoder_nonlinearity": "gelu",
            "norm_first": True,
            "use_final_layer_norm": True,
            "disable_nsp": True,
            "use_ffn_bias_in_mlm": True,
            "use_output_bias_in_mlm": True,
            "rope_theta": _THETA,
        }
    )
    settings.expect("mlm_nonlinearity", None, "gelu")
    if settings.settings.segments:
        settings.refuse("num_segments", "supported: 0")
    settings.take("num_segments")
    if settings.settings.turning_dim != settings.settings.head_dim:
        settings.refuse("rotary_dim", f"supported: {settings.settings.head_dim}")
    settings.take("rotary_dim")
    settings.take("num_classes")
    return write_encoder(settings) | {
        "position_embedding_type": "rotary",
        "rope_theta": _THETA,
        "emb_layer_norm_before": settings.take("embedding_layer_norm"),
        "token_dropout": settings.take("token_dropout"),
        "mask_token_id": settings.take("mask_token_id"),
        "pad_token_id": settings.take("pad_token_id"),
        "tie_word_embeddings": settings.take("share_embedding_weights"),
        "is_folding_model": False,
    }


def _rules(model: Any) -> list[Rule]:
    rules = linear("encoder.token_embeddings", "esm.embeddings.word_embeddings", bias=False)
    if model.embedding_layer_norm:
        rules += linear("encoder.embedding_norm", "esm.embeddings.layer_norm", bias=True)
    norms = {"attention_norm": "attention.LayerNorm", "ffn_norm": "LayerNorm"}
    rules += layer_rules(model, "esm", norms)
    rules += linear("encoder.final_norm", "esm.encoder.emb_layer_norm_after", bias=True)
    rules += linear("mlm_dense", "lm_head.dense", bias=True)
    rules += linear("mlm_norm", "lm_head.layer_norm", bias=True)
    rules.append(Copy("lm_head.bias", "lm_head.bias"))
    if not model.share_embedding_weights:
        rules.append(Copy("lm_head.weight", "lm_head.decoder.weight"))
    contacts = "esm.contact_head.regression"
    num = model.num_hidden_layers * model.num_heads
    return [*rules, Zeros(f"{contacts}.weight", (1, num)), Zeros(f"{contacts}.bias", (1,))]


FAMILIES: Final = (
    Family(
        name="esm",
        architecture="EsmForMaskedLM",
        model_name="esm2",
        settings_of=_settings_of,
        config_of=_config_of,
        rules=_rules,
        base_prefix="esm.",
        head="lm_head.decoder.weight",
        embedding="esm.embeddings.word_embeddings.weight",
        dropped=(
            r"esm\.embeddings\.position_(ids|embeddings\.weight)",
            r"esm\.(encoder\.layer\.[^.]+\.attention\.self\.)?rotary_embeddings\.inv_freq",
        ),
        same={"lm_head.decoder.bias": "lm_head.bias"},
        kind="encoder",
    ),
)
