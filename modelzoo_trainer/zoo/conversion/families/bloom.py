"""The family bloom of Hugging Face: ALiBi, whose slopes are no tensors there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.errors import CheckpointError
from modelzoo_trainer.zoo.conversion.family import Family
from modelzoo_trainer.zoo.conversion.readers import ConfigReader, SettingsReader
from modelzoo_trainer.zoo.conversion.rules import Read, Rule, blocks_by_group, fused_qkv, linear
from modelzoo_trainer.zoo.conversion.weights_folder import Shape
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings
from modelzoo_trainer.zoo.models.position_bias import alibi_slopes

OUR_SLOPES: Final = "position_bias.slopes.weight"


@dataclass(frozen=True, slots=True)
class Slopes(Rule):
    """Our slopes of ALiBi, which follow from the number of heads there."""

    num_heads: int
    ours: tuple[str, ...] = (OUR_SLOPES,)
    theirs: tuple[str, ...] = ()

    @override
    def their_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return []

    @override
    def to_theirs(self, read: Read) -> Iterator[Tensor]:
        found, expected = read(0), self._made()
        if not torch.equal(found, expected.to(found.dtype)):
            raise CheckpointError(
                f"{OUR_SLOPES} differs from the slopes of ALiBi for {self.num_heads} heads, which "
                "models of the family bloom of Hugging Face have always. Were they trained?"
            )
        yield from ()

    @override
    def to_ours(self, read: Read, shapes: Sequence[Shape]) -> Iterator[Tensor]:
        yield self._made()

    def _made(self) -> Tensor:
        return torch.tensor(alibi_slopes(self.num_heads), dtype=torch.float32)[:, None]


def _settings_of(config: ConfigReader) -> dict[str, Any]:
    size = config.integer("hidden_size", 64, alias="n_embed")
    config.expect("apply_residual_connection_post_layernorm", False)
    # How products are cut and fused when training or with tensor parallelism.
    config.ignore("pretraining_tp", "slow_but_exact", "skip_bias_add", "skip_bias_add_qkv")
    config.ignore("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion")
    config.ignore("offset_alibi")
    return {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": size,
        "num_hidden_layers": config.integer("n_layer", alias="num_hidden_layers"),
        "num_heads": config.integer("n_head", alias="num_attention_heads"),
        "filter_size": 4 * size,
        # Not a limit there: that of training, if the file has it.
        "max_position_embeddings": config.integer("seq_length", 2048),
        "position_embedding_type": "alibi",
        "embedding_layer_norm": True,
        "norm_type": "layernorm",
        "layer_norm_epsilon": config.number("layer_norm_epsilon", 1e-5),
        "nonlinearity": "gelu_new",
        "share_embedding_weights": config.flag("tie_word_embeddings", True),
        "dropout_rate": config.number("hidden_dropout", 0.0),
        "embedding_dropout_rate": 0.0,
        "attention_dropout_rate": config.number("attention_dropout", 0.0),
        "use_projection_bias_in_attention": True,
        "use_ffn_bias_in_attention": True,
        "use_ffn_bias": True,
        "use_bias_in_output": False,
        "initializer_range": config.number("initializer_range", 0.02),
    }


def _config_of(settings: SettingsReader) -> dict[str, Any]:
    settings.expect("position_embedding_type", "alibi")
    settings.expect("embedding_layer_norm", True)
    settings.expect("norm_type", "layernorm")
    settings.expect("use_bias_in_output", False)
    settings.expect("nonlinearity", "gelu_new", "gelu_fast")
    for name in ("projection_bias_in_attention", "ffn_bias_in_attention", "ffn_bias"):
        settings.expect(f"use_{name}", True)
    if settings.num_kv_groups() != settings.take("num_heads"):
        settings.refuse("extra_attention_params")
    settings.expect_no_experts()
    settings.expect_plain_scales()
    size = settings.take("hidden_size")
    settings.expect("filter_size", 4 * size)
    return {
        "hidden_size": size,
        "n_layer": settings.take("num_hidden_layers"),
        "n_head": settings.take("num_heads"),
        "seq_length": settings.take("max_position_embeddings"),
        "layer_norm_epsilon": settings.take("layer_norm_epsilon"),
        "tie_word_embeddings": settings.take("share_embedding_weights"),
        "hidden_dropout": settings.take("dropout_rate"),
        "attention_dropout": settings.dropout("attention_dropout_rate"),
        "apply_residual_connection_post_layernorm": False,
        "initializer_range": settings.take("initializer_range"),
        "use_cache": True,
    }


def _rules(settings: DecoderSettings) -> list[Rule]:
    blocks = blocks_by_group(settings.num_heads, settings.num_heads, settings.head_dim)
    rules: list[Rule] = [Slopes(settings.num_heads)]
    rules += linear("token_embeddings", "transformer.word_embeddings", bias=False)
    rules += linear("embedding_norm", "transformer.word_embeddings_layernorm", bias=True)
    for number in range(settings.num_hidden_layers):
        our, their = f"layers.{number}", f"transformer.h.{number}"
        fused = f"{their}.self_attention.query_key_value"
        rules += fused_qkv(f"{our}.attention", fused, blocks, bias=True)
        rules += linear(f"{our}.attention.o_proj", f"{their}.self_attention.dense", bias=True)
        rules += linear(f"{our}.ffn.up_proj", f"{their}.mlp.dense_h_to_4h", bias=True)
        rules += linear(f"{our}.ffn.down_proj", f"{their}.mlp.dense_4h_to_h", bias=True)
        rules += linear(f"{our}.attention_norm", f"{their}.input_layernorm", bias=True)
        rules += linear(f"{our}.ffn_norm", f"{their}.post_attention_layernorm", bias=True)
    rules += linear("final_norm", "transformer.ln_f", bias=True)
    if not settings.share_embedding_weights:
        rules += linear("lm_head", "lm_head", bias=False)
    return rules


FAMILIES: Final = (
    Family(
        name="bloom",
        architecture="BloomForCausalLM",
        model_name="bloom",
        settings_of=_settings_of,
        config_of=_config_of,
        rules=_rules,
        base_prefix="transformer.",
        embedding="transformer.word_embeddings.weight",
    ),
)
