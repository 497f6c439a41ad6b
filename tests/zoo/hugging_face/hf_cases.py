"""Small models of `transformers`, and batches for them."""

from typing import Any

import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
GPT_SIZES: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 100,
    "n_positions": 64,
}
_SAME_HEADS = {key: one for key, one in SIZES.items() if key != "num_key_value_heads"}
_WITH_HEAD_DIM = {"head_dim": 8, "sliding_window": 4}

FAMILIES: dict[str, dict[str, Any]] = {
    "cohere2": {**SIZES, "sliding_window": 4, "num_hidden_layers": 4},
    "exaone4": {**SIZES, "num_hidden_layers": 4, "sliding_window": 4},
    "falcon": {key: one for key, one in _SAME_HEADS.items() if key != "intermediate_size"},
    "gemma": {**SIZES, "head_dim": 8},
    "gemma2": {**SIZES, **_WITH_HEAD_DIM},
    "gemma3_text": {**SIZES, **_WITH_HEAD_DIM, "num_hidden_layers": 6},
    "gpt2": GPT_SIZES,
    "gpt_bigcode": GPT_SIZES,
    "gpt_neox": _SAME_HEADS,
    "gptj": {**GPT_SIZES, "rotary_dim": 8},
    "helium": {**SIZES, "head_dim": 8},
    "ministral": {**SIZES, **_WITH_HEAD_DIM},
    "mistral": {**SIZES, "sliding_window": 4},
    "mixtral": {**SIZES, "sliding_window": 4},
    "persimmon": _SAME_HEADS,
    "phi3": {**SIZES, "sliding_window": 4, "pad_token_id": 0},
    "qwen2": {**SIZES, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {**SIZES, "head_dim": 8},
    "qwen3_moe": {**SIZES, "head_dim": 8},
    "starcoder2": {**SIZES, "sliding_window": 4},
}
"""Settings by architecture, where `SIZES` alone do not do."""


def config_of(model_type: str) -> dict[str, Any]:
    """Return the settings of a small model."""
    return {"model_type": model_type, **FAMILIES.get(model_type, SIZES)}


def documents(lengths: tuple[int, ...] = (7, 9, 5)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 100, (num,), generator=generator) for num in lengths]


def packed(docs: list[Tensor]) -> dict[str, Tensor]:
    """Return a row of documents, as the data processors pack them, but without labels."""
    return {
        "input_ids": torch.cat(docs)[None].int(),
        "position_ids": torch.cat([torch.arange(len(doc)) for doc in docs])[None].int(),
        "attention_span": torch.cat([torch.arange(len(doc)).flip(0) for doc in docs])[None].int(),
    }


def language_batch(num_rows: int = 4, length: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(1, 100, (num_rows, length + 1), generator=generator).int()
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
