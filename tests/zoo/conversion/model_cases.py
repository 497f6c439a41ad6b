"""Small models besides the decoders, whose weights are converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
import yaml

from modelzoo_trainer.checkpointing.weights import write_weights
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.zoo.models.registry import model_class

SIZES: Final[dict[str, Any]] = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "filter_size": 12,
    "max_position_embeddings": 16,
}
_T5: Final[dict[str, Any]] = {
    "src_vocab_size": 20,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 12,
    "encoder_num_hidden_layers": 2,
    "num_heads": 2,
}
_LABELS: Final[dict[str, Any]] = {
    "num_labels": 3,
    "problem_type": "single_label_classification",
    "task_dropout": 0.1,
}
MODELS: Final[dict[str, dict[str, Any]]] = {
    "bert": SIZES,
    "bert/classifier": SIZES | _LABELS,
    "bert/extractive_summarization": SIZES,
    "bert/token_classifier": SIZES | {"num_classes": 3, "encoder_output_dropout_rate": 0.1},
    "esm2": SIZES
    | {
        "disable_nsp": True,
        "position_embedding_type": "rotary",
        "rotary_dim": 4,
        "use_final_layer_norm": True,
    },
    "t5": _T5,
    "transformer": _T5
    | {
        "tgt_vocab_size": 22,
        "share_encoder_decoder_embedding": False,
        "position_embedding_type": "fixed",
        "src_max_position_embeddings": 16,
        "tgt_max_position_embeddings": 16,
        "norm_type": "layernorm",
        "encoder_nonlinearity": "geglu",
    },
    "vision_transformer": {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_heads": 2,
        "filter_size": 12,
        "image_size": [8, 8],
        "patch_size": [4, 4],
        "num_classes": 3,
    },
}


def convert(*words: object) -> int:
    """Run `checkpoint convert`."""
    return main(["checkpoint", "convert", *map(str, words)])


def made(name: str, folder: Path, **changes: Any) -> tuple[Any, Path, Path]:
    """Return a model with other weights than a new one, their file and that of its settings."""
    settings = MODELS[name] | changes
    model = model_class(name)(**settings)
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor)
    params, file = folder / "params.yaml", folder / "ours.safetensors"
    params.write_text(yaml.safe_dump({"model": {"name": name, **settings}}))
    write_weights(model.state_dict(), file)
    return model, file, params
