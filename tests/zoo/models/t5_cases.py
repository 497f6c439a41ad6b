"""Encoder-decoder models for the tests of engines: what each option is tried with."""

from typing import Any, Final

import torch
from torch import Tensor

from modelzoo_trainer.zoo.models.t5.model import T5

SIZES: Final[dict[str, Any]] = {
    "src_vocab_size": 47,
    "extra_ids": 4,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_heads": 4,
    "encoder_num_hidden_layers": 2,
    "src_max_position_embeddings": 12,
    "tgt_max_position_embeddings": 7,
}
NO_DROPOUT: Final[dict[str, Any]] = {"dropout_rate": 0.0}
TRANSFORMER: Final[dict[str, Any]] = {
    "position_embedding_type": "fixed",
    "norm_type": "layernorm",
    "use_ffn_bias": True,
    "relu_dropout_rate": 0.0,
    "use_pre_encoder_decoder_dropout": True,
    "use_pre_encoder_decoder_layer_norm": False,
    "use_dropout_outside_residual_path": False,
    "use_transformer_initialization": True,
}
CASES: Final[dict[str, dict[str, Any]]] = {
    "t5": {},
    "transformer": TRANSFORMER,
    "untied, learned": {
        "position_embedding_type": "learned_absolute",
        "tgt_vocab_size": 39,
        "share_encoder_decoder_embedding": False,
        "share_embedding_weights": False,
        "encoder_nonlinearity": "geglu",
        "decoder_nonlinearity": "gelu",
        "decoder_num_hidden_layers": 1,
        "use_projection_bias_in_attention": True,
    },
    "alibi, groups": {
        "position_embedding_type": "alibi",
        "attention_module": "multiquery_attention",
        "extra_attention_params": {"num_kv_groups": 2},
    },
    "muP": {"mup_base_d_model": 8, "mup_base_d_ff": 32, "output_logits_alpha": 3.0},
}


def batch_of(size: int = 4, length: int = 12, num_labels: int = 7) -> dict[str, Tensor]:
    """Return a batch with padding in inputs and labels."""
    ids = torch.arange(size * length).view(size, length) * 7 % 37 + 3
    labels = torch.arange(size * num_labels).view(size, num_labels) * 5 % 37 + 1
    rows = torch.arange(size)[:, None]
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(length) < length - rows).int(),
        "decoder_input_ids": torch.cat((torch.ones_like(labels[:, :1]), labels[:, :-1]), dim=1),
        "labels": labels,
        "decoder_attention_mask": (torch.arange(num_labels) < num_labels - rows).int(),
    }


def make(case: str, **changes: Any) -> T5:
    """Return the model of a case."""
    torch.manual_seed(3)
    return T5(**{**SIZES, **CASES[case], **changes})
