"""The family gpt_bigcode of Hugging Face: StarCoder and SantaCoder."""

from __future__ import annotations

from typing import Any, Final

from modelzoo_trainer.zoo.conversion.families.gpt2 import (
    PLAIN_ACTIVATIONS,
    common_config,
    common_settings,
)
from modelzoo_trainer.zoo.conversion.family import Family
from modelzoo_trainer.zoo.conversion.readers import ConfigReader, SettingsReader
from modelzoo_trainer.zoo.conversion.rules import Rule, blocks_by_group, fused_qkv, linear
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings

_ACTIVATIONS: Final = PLAIN_ACTIVATIONS | {"gelu_new": "gelu_pytorch_tanh"}  # as published


def _settings_of(config: ConfigReader) -> dict[str, Any]:
    # How scores are computed, and buffers for inference.
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    config.ignore("inference_runner", "validate_runner_input", "pre_allocate_kv_cache")
    config.ignore("max_batch_size", "max_sequence_length", "pad_key_length")
    config.ignore("num_key_value_heads")  # follows from the next
    settings = common_settings(config, "gelu_pytorch_tanh")
    if config.flag("multi_query", True):
        settings["attention_module"] = "multiquery_attention"
        settings["extra_attention_params"] = {"num_kv_groups": 1}
    return settings


def _config_of(settings: SettingsReader) -> dict[str, Any]:
    num_heads, num_groups = settings.take("num_heads"), settings.num_kv_groups()
    if num_groups not in (1, num_heads):
        settings.refuse("extra_attention_params", f"supported: 1 or {num_heads} groups")
    return common_config(settings, _ACTIVATIONS) | {"multi_query": num_groups == 1}


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
