"""Small policies of `transformers`, and pairs of answers for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.zoo.models.dpo import Dpo
from tests.zoo.hugging_face.hf_cases import config_of

LENGTH = 8
LLAMA: dict[str, Any] = {"name": "hf_causal_lm", "config": config_of("llama")}
PEFT: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
POLICIES: dict[str, dict[str, Any]] = {"copy": {}, "adapters": {"peft_config": PEFT}}
"""Settings by the kind of reference."""


def rows_of(num: int = 4, seed: int = 1) -> list[dict[str, Tensor]]:
    """Return pairs of answers, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(num):
        row = {}
        for answer in ("chosen", "rejected"):
            tokens = torch.randint(1, 100, (LENGTH + 1,), generator=generator, dtype=torch.int32)
            length = LENGTH - (index + (answer == "chosen")) % 3
            tokens[length + 1 :] = 0
            mask = (torch.arange(LENGTH) < length).int()
            mask[:2] = 0  # the prompt
            row |= {
                f"{answer}_input_ids": tokens[:-1],
                f"{answer}_attention_mask": mask,
                f"{answer}_labels": tokens[1:],
            }
        rows.append(row)
    return rows


def batch_of(num: int = 4, seed: int = 1) -> dict[str, Tensor]:
    rows = rows_of(num, seed)
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def sums(model: Any, batch: dict[str, Tensor], answer: str) -> Tensor:
    """Return the log probability of each answer, of a model of `transformers`."""
    logits = model(input_ids=batch[f"{answer}_input_ids"].long(), use_cache=False).logits
    labels = batch[f"{answer}_labels"].long()
    found = logits.log_softmax(-1).gather(2, labels[..., None]).squeeze(2)
    return (found * batch[f"{answer}_attention_mask"]).sum(1)


def trainer_of(folder: Path, make: Any, steps: int, **options: Any) -> Trainer:
    return Trainer(
        device="cpu",
        model=make,
        optimizer=lambda model: torch.optim.AdamW(
            [one for one in model.parameters() if one.requires_grad], lr=1e-2
        ),
        loop=TrainingLoop(max_steps=steps),
        checkpoint=Checkpoint(steps=2),
        model_dir=folder,
        progress="none",
        seed=1,
        **options,
    )


def weights(model: Dpo) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in model.state_dict().items()}
