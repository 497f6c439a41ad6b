"""Decoders with experts in several processes: checkpoints, tensor parallelism."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.core import MixedPrecision
from modelzoo_trainer.zoo.models.gpt2 import Gpt2
from tests.distributed.engines import spread, whole
from tests.distributed.ranks import run_ranks

SETTINGS: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 8,
    "max_position_embeddings": 6,
    "num_hidden_layers": 2,
    "dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
    "num_heads": 2,
    "filter_size": 12,
    "nonlinearity": "swiglu",
    "moe": {"num_experts": 3, "top_k": 2, "load_balancing_loss_coef": 0.1},
}
GLOBAL_BATCH, NUM_STEPS, CUT = 8, 6, 3
CLOSE = 1e-6  # the loss is float32


def make_decoder(**changes: Any) -> Gpt2:
    torch.manual_seed(3)
    return Gpt2(**SETTINGS, **changes).double()


def rows() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(19, (GLOBAL_BATCH * NUM_STEPS, 6), generator=generator)
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return GLOBAL_BATCH * NUM_STEPS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: one[index] for key, one in rows().items()}


def fit(rank: int, folder: Path, num: int, max_steps: int, backend: Any) -> dict[str, Any]:
    trainer = Trainer(
        device="cpu",
        backend=backend,
        model_dir=folder,
        model=make_decoder,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        precision=MixedPrecision(enabled=False, max_gradient_norm=0.5),
        loop=TrainingLoop(max_steps=max_steps, eval_frequency=None),
        checkpoint=Checkpoint(steps=CUT),
        seed=1,
    )
    trainer.fit(DataLoader(Rows(), batch_size=GLOBAL_BATCH // num))
    found = trainer.backend.host_state(dict(trainer.model.named_parameters()))
    return {name: value.numpy() for name, value in found.items()}


def run(num: int, folder: Path, max_steps: int) -> dict[str, Any]:
    if num == 1:
        return fit(0, folder, 1, max_steps, None)
    return run_ranks(num, fit, folder, num, max_steps, {"parallel": {"shard": -1}})[0]


@pytest.mark.slow
def test_what_two_processes_saved_one_and_two_go_on_from(tmp_path: Path) -> None:
    whole_run = run(2, tmp_path / "whole", NUM_STEPS)
    alone = run(1, tmp_path / "alone", NUM_STEPS)
    torch.testing.assert_close(whole_run, alone, rtol=0, atol=CLOSE)
    run(2, tmp_path / "cut", CUT)
    for num in (2, 1):
        folder = tmp_path / str(num)
        shutil.copytree(tmp_path / "cut", folder, symlinks=True)
        rest = run(num, folder, NUM_STEPS)
        torch.testing.assert_close(rest, whole_run, rtol=0, atol=0 if num == 2 else CLOSE)


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def learn(model: Gpt2) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    for _ in range(2):
        model(rows())["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(param).numpy() for name, param in model.named_parameters()}


def learn_split(rank: int) -> tuple[dict[str, Any], list[str]]:
    messages, log = Messages(), logging.getLogger("modelzoo_trainer.backends.tensor_parallel")
    log.setLevel(logging.INFO)
    log.addHandler(messages)
    model = make_decoder(output_logits_scale=0.5)
    spread(model, {"parallel": {"tensor": -1}})
    assert model.layers[0].ffn.experts.up.to_local().shape == (3, 12, 8)
    return learn(model), messages.lines


@pytest.mark.slow
def test_tensor_parallelism_leaves_experts_whole_and_logs_it_once() -> None:
    expected = learn(make_decoder(output_logits_scale=0.5))

    (first, lines), (second, others) = run_ranks(2, learn_split)

    torch.testing.assert_close([first, second], [expected] * 2, rtol=1e-9, atol=1e-9)
    [line] = lines
    assert "layers.*.ffn.experts" in line
    assert "%" in line
    assert others == []
