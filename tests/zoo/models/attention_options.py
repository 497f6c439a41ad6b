"""Decoders with each option of attention and positions, and batches for them."""

from typing import Any

import torch
from torch import Tensor

from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.gpt2 import Gpt2
from modelzoo_trainer.zoo.models.gptj import GptJ

VOCAB, LENGTH = 50, 12
ALIBI: dict[str, Any] = {"position_embedding_type": "alibi"}
RELATIVE: dict[str, Any] = {
    "position_embedding_type": "relative",
    "num_relative_attention_buckets": 6,
}
ROTARY: dict[str, Any] = {"position_embedding_type": "rotary", "rotary_dim": 4}
WINDOW: dict[str, Any] = {"attention_sliding_window_length": 3}
EVERY_OTHER: dict[str, Any] = WINDOW | {"sliding_window_every_other_decoder_layer": True}
GROUPED: dict[str, Any] = {
    "attention_module": "multiquery_attention",
    "extra_attention_params": {"num_kv_groups": 2},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "alibi": ALIBI,
    "trained slopes": ALIBI | {"alibi_trainable_slopes": True, "pos_scaling_factor": 2.0},
    "relative": RELATIVE,
    "fixed": {"position_embedding_type": "fixed"},
    "window": ROTARY | WINDOW | GROUPED,
    "every other": ROTARY | EVERY_OTHER,
    "alibi, window": ALIBI | EVERY_OTHER | GROUPED,
    "softcap": {"attention_logit_softcapping": 2.0} | ROTARY | EVERY_OTHER | GROUPED,
    "softcap, alibi": {"attention_logit_softcapping": 2.0} | ALIBI,
    "layer index": {"scale_qk_dot_by_layer_idx": True},
    "gptj, sinks": {"kind": GptJ, "attention_sink_tokens": 2, "rotary_dim": 4} | WINDOW | GROUPED,
    "gptj, relative": {"kind": GptJ} | RELATIVE,
}


def make(kind: type[Decoder] = Gpt2, **changes: Any) -> Decoder:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "max_position_embeddings": LENGTH,
        "num_hidden_layers": 2,
        "dropout_rate": 0.0,
        "embedding_dropout_rate": 0.0,
        "attention_dropout_rate": 0.0,
        "num_heads": 4,
        "filter_size": 64,
        "initializer_range": 0.3,
    }
    return kind(**{**settings, **changes})


def tokens(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(sum(shape)))


def packed(lengths: list[list[int]]) -> dict[str, Tensor]:
    """Return rows of sequences of these lengths, one after the other, then padding."""
    ids = tokens(len(lengths), LENGTH)
    spans, positions = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, parts in enumerate(lengths):
        start = 0
        for length in parts:
            spans[row, start : start + length] = torch.arange(length - 1, -1, -1)
            positions[row, start : start + length] = torch.arange(length)
            start += length
    return {"input_ids": ids, "labels": ids, "attention_span": spans, "position_ids": positions}


def batch_for(changes: dict[str, Any]) -> dict[str, Tensor]:
    """Return packed sequences, or plain ones for a model with a window."""
    if "attention_sliding_window_length" in changes:
        return {"input_ids": tokens(2, LENGTH), "labels": tokens(2, LENGTH)}
    return packed([[5, 4], [12]])
