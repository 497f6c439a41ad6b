"""The weights and losses are, bit by bit, those of a loop written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import StepLR

from backends import Stream, step_seed
from modelzoo_trainer import MixedPrecision
from modelzoo_trainer.optim.decay import LinearLR
from tests.doubles import History, TinyModel, tiny_batches, weights_of

SEED = 11


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def halving(optimizer: torch.optim.Optimizer) -> StepLR:
    return StepLR(optimizer, step_size=2, gamma=0.5)


@dataclass
class ByHand:
    """A loop as one writes it without a trainer."""

    dropout: float = 0.0
    num_accumulated: int = 1
    autocast: bool = False
    max_norm: float | None = None
    max_value: float | None = None
    scheduler: Callable[[Any], Any] | None = None
    lrs: list[float] | None = None
    num_epochs: int = 2
    losses: list[float] = field(default_factory=list)

    def train(self, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        torch.manual_seed(SEED)
        model = TinyModel(self.dropout)
        optimizer = adamw(model)
        scheduler = self.scheduler(optimizer) if self.scheduler else None
        window: list[float] = []
        for idx, batch in enumerate(batches * self.num_epochs, 1):
            torch.manual_seed(step_seed(SEED, idx, Stream.TRAIN))
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
                loss, _ = model(batch)
            (loss / self.num_accumulated).backward()
            window.append(loss.item())
            if len(window) < self.num_accumulated:
                continue
            self.losses.append(sum(window) / len(window))
            window.clear()
            if self.lrs is not None:
                optimizer.param_groups[0]["lr"] = self.lrs[len(self.losses) - 1]
            if self.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
            if self.max_value is not None:
                torch.nn.utils.clip_grad_value_(model.parameters(), self.max_value)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
        return dict(model.state_dict())


CASES: dict[str, tuple[ByHand, dict[str, Any]]] = {
    "plain": (ByHand(), {}),
    "dropout": (ByHand(dropout=0.5), {}),
    "accumulation": (ByHand(num_accumulated=2, dropout=0.5), {"grad_accum_steps": 2}),
    "bfloat16": (ByHand(autocast=True), {"precision": MixedPrecision()}),
    "bfloat16, accumulation": (
        ByHand(autocast=True, num_accumulated=2, dropout=0.5),
        {"precision": MixedPrecision(), "grad_accum_steps": 2},
    ),
    "clipped norm": (
        ByHand(max_norm=0.1),
        {"precision": MixedPrecision(enabled=False, max_gradient_norm=0.1)},
    ),
    "clipped values": (
        ByHand(max_value=0.01),
        {"precision": MixedPrecision(enabled=False, max_gradient_value=0.01)},
    ),
    "a scheduler of torch": (ByHand(scheduler=halving), {"schedulers": halving}),
    "a scheduler of ours": (
        ByHand(lrs=[0.5, 0.375, 0.25, 0.125, 0.0, 0.0, 0.0, 0.0]),
        {"schedulers": lambda optimizer: LinearLR(optimizer, 0.5, 0.0, 4)},
    ),
    "all at once": (
        ByHand(dropout=0.5, num_accumulated=2, autocast=True, max_norm=0.1, scheduler=halving),
        {
            "grad_accum_steps": 2,
            "precision": MixedPrecision(max_gradient_norm=0.1),
            "schedulers": halving,
        },
    ),
}


@pytest.fixture(params=CASES)
def both(request, trainer_of) -> tuple[Any, History, dict[str, Tensor], ByHand]:
    loop, settings = CASES[request.param]
    by_hand = ByHand(**{**loop.__dict__, "losses": []})
    expected = by_hand.train(tiny_batches(4, size=8))
    history = History()
    trainer = trainer_of(
        model=lambda: TinyModel(by_hand.dropout),
        optimizer=adamw,
        loggers=history,
        seed=SEED,
        num_epochs=2,
        **settings,
    )
    trainer.fit(tiny_batches(4, size=8), tiny_batches(2, seed=5))
    return trainer, history, expected, by_hand


@pytest.mark.slow_cases(every=4)
def test_the_weights_are_equal_bit_by_bit(both) -> None:
    trainer, _, expected, _ = both
    found = weights_of(trainer)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.slow_cases(every=4)
def test_the_logged_losses_are_equal_bit_by_bit(both) -> None:
    _, history, _, by_hand = both
    assert [value for _, value in history.of("loss")] == by_hand.losses


def test_a_seed_that_is_left_out_is_that_of_torch(trainer_of) -> None:
    expected = ByHand(dropout=0.5).train(tiny_batches(4))
    torch.manual_seed(SEED)
    trainer = trainer_of(model=lambda: TinyModel(0.5), optimizer=adamw, seed=None, num_epochs=2)
    trainer.fit(tiny_batches(4))
    found = weights_of(trainer)
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
