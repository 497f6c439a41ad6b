"""The distribution of tokens over experts, as metrics."""

import logging

import pytest
import torch
from torch import nn

from modelzoo_trainer import TrainingLoop
from modelzoo_trainer.callbacks import LogExpertLoad


class WithExperts(nn.Module):
    """Has two layers of experts with given shares."""

    def __init__(self, has_loss=True):
        super().__init__()
        self.head = nn.Linear(4, 1)
        self.has_loss = has_loss

    def forward(self, batch):
        inputs, targets = batch
        loss = (self.head(inputs) - targets).square().mean()
        outputs = {"loss": loss, "expert_shares": torch.tensor([[0.5, 0.5], [0.9, 0.1]])}
        if self.has_loss:
            outputs["load_balancing_loss"] = torch.tensor(1.25)
        return outputs


def test_the_shares_of_experts_are_logged(make, batches, history):
    make(LogExpertLoad(), model=WithExperts, max_steps=2).fit(batches)

    assert history.of("expert_load/expert_0") == [(step, pytest.approx(0.7)) for step in (1, 2)]
    assert history.of("expert_load/expert_1") == [(step, pytest.approx(0.3)) for step in (1, 2)]
    assert history.of("expert_load/largest") == [(step, pytest.approx(0.9)) for step in (1, 2)]
    assert history.of("expert_load/smallest") == [(step, pytest.approx(0.1)) for step in (1, 2)]
    assert history.of("load_balancing_loss") == [(1, 1.25), (2, 1.25)]


def test_a_window_logs_once_and_without_a_loss_there_is_none(make, batches, history):
    loop = TrainingLoop(max_steps=2, grad_accum_steps=2)
    make(LogExpertLoad(), model=lambda: WithExperts(has_loss=False), loop=loop).fit(batches)

    assert [step for step, _ in history.of("expert_load/largest")] == [1, 2]
    assert history.of("load_balancing_loss") == []


def test_a_model_without_experts_is_said_once(make, batches, caplog):
    with caplog.at_level(logging.WARNING, logger="modelzoo_trainer.metrics"):
        make(LogExpertLoad(), max_steps=2).fit(batches)

    (line,) = [one.getMessage() for one in caplog.records if "LogExpertLoad" in one.getMessage()]
    assert "no experts" in line
