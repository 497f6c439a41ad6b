"""BERT for the tests of engines: what each option of the encoder is tried with."""

from typing import Any, Final

import torch
from torch import Tensor

from modelzoo_trainer.zoo.models.bert.esm2 import Esm2
from modelzoo_trainer.zoo.models.bert.pretraining import Bert

SIZES: Final[dict[str, Any]] = {
    "vocab_size": 51,
    "hidden_size": 32,
    "max_position_embeddings": 12,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "filter_size": 64,
}
NO_DROPOUT: Final[dict[str, Any]] = {"dropout_rate": 0.0}
CASES: Final[dict[str, dict[str, Any]]] = {
    "bert": {},
    "roberta": {"disable_nsp": True, "mask_padding_in_positional_embed": True, "pad_token_id": 1},
    "pre-norm, rotary": {
        "norm_first": True,
        "use_final_layer_norm": True,
        "embedding_layer_norm": False,
        "position_embedding_type": "rotary",
        "rotary_dim": 8,
        "encoder_nonlinearity": "swiglu",
        "mlm_nonlinearity": "gelu",
        "pooler_nonlinearity": "tanh",
        "share_embedding_weights": False,
    },
    "alibi": {"position_embedding_type": "alibi"},
    "esm2": {
        "norm_first": True,
        "token_dropout": True,
        "mask_token_id": 4,
        "pad_token_id": 1,
        "disable_nsp": True,
        "use_final_layer_norm": True,
        "embedding_layer_norm": False,
        "position_embedding_type": "rotary",
        "rotary_dim": 8,
    },
    "relative": {"position_embedding_type": "relative", "num_relative_attention_buckets": 8},
}


def batch_of(
    settings: dict[str, Any], *, gathers: bool = False, size: int = 4
) -> dict[str, Tensor]:
    """Return a batch with padding; with `gathers`, 3 labels a row, the last one without weight."""
    ids = torch.arange(size * 12).view(size, 12) * 7 % 47 + 3
    mask = (torch.arange(12) < 12 - torch.arange(size)[:, None]).int()
    ids = torch.where(mask != 0, ids, settings.get("pad_token_id", 0))
    batch = {"input_ids": ids, "attention_mask": mask}
    if gathers:
        batch["masked_lm_positions"] = torch.tensor([[1, 4, 0]] * size)
        batch["masked_lm_mask"] = torch.tensor([[1, 1, 0]] * size)
        batch["labels"] = torch.arange(3 * size).view(size, 3) + 5
    else:
        batch["labels"] = torch.where(torch.arange(12) % 3 == 1, ids + 1, -100)
    if not settings.get("disable_nsp"):
        batch["token_type_ids"] = (torch.arange(12) > 5).int().expand(size, 12)
        batch["next_sentence_label"] = torch.arange(size)[:, None] % 2
    return batch


def make(case: str, **changes: Any) -> Bert:
    """Return the model of a case."""
    torch.manual_seed(3)
    made = Esm2 if case == "esm2" else Bert
    return made(**{**SIZES, **CASES[case], **changes})
