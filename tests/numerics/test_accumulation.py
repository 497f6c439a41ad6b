"""The gradient of a window is that of one batch made of all its batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelzoo_trainer import Callback
from tests.doubles import History


class Tokens(nn.Module):
    """A mean over the items with mask 1, as a language model has it; in float64.

    Args:
        counts: None = the loss is a mean over samples; "int" or "tensor": `num_items` is told.
    """

    def __init__(self, counts: str | None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1, dtype=torch.float64)
        self.counts = counts

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        inputs, mask = batch
        terms = torch.tanh(self.linear(inputs)).squeeze(-1) ** 2
        if self.counts is None:
            return {"loss": terms.mean()}
        loss = (terms * mask).sum() / mask.sum().clamp_min(1)
        num = mask.sum().to(torch.int64)
        return {"loss": loss, "num_items": int(num) if self.counts == "int" else num}


class Gradients(Callback):
    """Keeps the gradients that each step is made with."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []

    def on_before_optimizer_step(self, trainer, model, optimizer):
        self.steps.append(torch.cat([param.grad.flatten() for param in model.parameters()]))


def data(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(size, 3, generator=generator, dtype=torch.float64),
            torch.randint(0, 2, (size,), generator=generator).double(),
        )
        for size in sizes
    ]


def whole(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([x for x, _ in batches]), torch.cat([mask for _, mask in batches])


def gradients_of(trainer_of, counts, batches, num, model_dir) -> tuple[list[Tensor], History]:
    gradients, history = Gradients(), History()
    trainer_of(
        gradients,
        model=lambda: Tokens(counts),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
        loggers=history,
        grad_accum_steps=num,
        model_dir=model_dir,
    ).fit(batches)
    return gradients.steps, history


SIZES = {
    "even": [4, 4, 4, 4, 4, 4],
    "ragged": [2, 9, 4, 5, 1, 7],
    "a short last window": [2, 9, 4, 5],
    "a last window of one": [3, 3, 3, 8],
}


@pytest.mark.parametrize("counts", [None, "int", "tensor"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.slow_cases(every=4)
def test_a_window_has_the_gradient_and_the_loss_of_one_batch(
    trainer_of, tmp_path, counts, sizes
) -> None:
    batches = data(sizes)
    big = [whole(batches[:3]), whole(batches[3:])]
    parts, part_history = gradients_of(trainer_of, counts, batches, 3, tmp_path / "parts")
    ones, one_history = gradients_of(trainer_of, counts, big, 1, tmp_path / "ones")
    assert len(parts) == len(ones) == 2
    torch.testing.assert_close(parts, ones, rtol=1e-12, atol=0)
    losses = [[value for _, value in each.of("loss")] for each in (part_history, one_history)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("counts", ["int", "tensor"])
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_batch_without_items_has_no_part_in_its_window(
    trainer_of, tmp_path, counts, empty
) -> None:
    batches = data([4, 4, 4])
    batches[empty] = (batches[empty][0], torch.zeros(4, dtype=torch.float64))
    parts, _ = gradients_of(trainer_of, counts, batches, 3, tmp_path / "parts")
    ones, _ = gradients_of(trainer_of, counts, [whole(batches)], 1, tmp_path / "ones")
    torch.testing.assert_close(parts, ones, rtol=1e-12, atol=0)
