"""The perplexity of a small decoder on rows with unequal weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from modelzoo_trainer import Trainer
from modelzoo_trainer.callbacks import ModelEvalMetrics
from modelzoo_trainer.zoo.models.decoder_names import Gpt2
from tests.distributed.training import Metrics

SETTINGS: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 8,
    "num_heads": 2,
    "filter_size": 16,
    "num_hidden_layers": 1,
    "max_position_embeddings": 6,
    "initializer_range": 0.5,
    "dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
}


def rows(num: int) -> dict[str, Tensor]:
    """Return rows whose masks count differently many tokens, some of them twice."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(13, (num, 7), generator=generator)
    mask = (torch.arange(6) < torch.arange(num)[:, None]).int()
    mask[:, 1] *= 2
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "attention_mask": mask}


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, num: int) -> None:
        self.rows = rows(num)

    def __len__(self) -> int:
        return len(self.rows["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: part[index] for name, part in self.rows.items()}


def direct(model: nn.Module, data: dict[str, Tensor]) -> tuple[float, float]:
    """Return accuracy and perplexity, computed at once."""
    with torch.no_grad():
        scores = model.logits(data["input_ids"]).double().log_softmax(dim=-1)
    losses = -scores.gather(-1, data["labels"][..., None])[..., 0]
    hits = (scores.argmax(dim=-1) == data["labels"]).double()
    mask = data["attention_mask"].double()
    accuracy, mean = (hits * mask).sum() / mask.sum(), (losses * mask).sum() / mask.sum()
    return accuracy.item(), mean.exp().item()


def validate(rank: int, folder: Path, batch_size: int, changes: dict[str, Any]) -> list[float]:
    """Return accuracy and perplexity of a validation, then those computed at once.

    Other processes than the main one log nothing.
    """
    metrics = Metrics()
    trainer = Trainer(
        device="cpu",
        model_dir=folder,
        model=lambda: Gpt2(**SETTINGS, **changes),
        callbacks=[ModelEvalMetrics()],
        loggers=[metrics],
        seed=1,
    )
    trainer.validate(DataLoader(Rows(7), batch_size=batch_size))
    expected = direct(trainer.model, rows(7))
    trainer.close()
    found = {name: value for _, row in metrics.rows for name, value in row.items()}
    names = ("validate_0/accuracy", "validate_0/lm_perplexity")
    return [float(found[name]) for name in names if name in found] + list(expected)
