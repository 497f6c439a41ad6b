"""The language model loss compared with torch's cross entropy."""

import pytest
import torch
from torch.nn import functional

from modelzoo_trainer.zoo.models.language_loss import LossScaling, language_loss, token_accuracy

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(4, 6, 11, generator=GENERATOR)
LABELS = torch.randint(11, (4, 6), generator=GENERATOR, dtype=torch.int32)
MASK = torch.randint(2, (4, 6), generator=GENERATOR, dtype=torch.int32)


def test_without_a_mask_it_is_the_mean_and_counts_all_tokens() -> None:
    loss, num_items = language_loss(LOGITS, LABELS, None)

    expected = functional.cross_entropy(LOGITS.flatten(0, 1), LABELS.flatten().long())
    assert torch.equal(loss, expected)
    assert num_items == 24


def test_with_a_mask_it_is_the_mean_over_the_tokens_that_count() -> None:
    loss, num_items = language_loss(LOGITS, LABELS, MASK)

    expected = functional.cross_entropy(LOGITS[MASK.bool()], LABELS[MASK.bool()].long())
    torch.testing.assert_close(loss, expected)
    assert isinstance(num_items, torch.Tensor)
    assert num_items.item() == MASK.sum().item()


@pytest.mark.parametrize("loss_scaling", ["num_tokens", "batch_size"])
def test_weights_above_one_count_as_often(loss_scaling: LossScaling) -> None:
    weights = MASK.clone()
    weights[1, :3], weights[2, 0] = 3, 2

    loss, num_items = language_loss(LOGITS, LABELS, weights, loss_scaling=loss_scaling)

    repeats = weights.flatten().long()
    repeated = (
        LOGITS.flatten(0, 1).repeat_interleave(repeats, dim=0),
        LABELS.flatten().long().repeat_interleave(repeats),
    )
    expected = functional.cross_entropy(*repeated, reduction="sum") / num_items
    torch.testing.assert_close(loss, expected)
    assert num_items == (repeats.sum() if loss_scaling == "num_tokens" else 4)
    hits = (repeated[0].argmax(dim=-1) == repeated[1]).float().mean()
    torch.testing.assert_close(token_accuracy(LOGITS, LABELS, weights), hits)


def test_by_batch_size_it_is_the_weighted_sum_over_the_number_of_sequences() -> None:
    loss, num_items = language_loss(
        LOGITS, LABELS, MASK, loss_scaling="batch_size", loss_weight=0.5
    )

    total = functional.cross_entropy(
        LOGITS[MASK.bool()], LABELS[MASK.bool()].long(), reduction="sum"
    )
    torch.testing.assert_close(loss, total / 4 * 0.5)
    assert num_items == 4


def test_what_does_not_count_may_be_anything() -> None:
    logits = LOGITS.clone()
    logits[0, 0] = float("nan")
    mask = torch.full((4, 6), 2, dtype=torch.int32)
    mask[0, 0] = 0
    logits.requires_grad_()

    loss, _ = language_loss(logits, LABELS, mask)
    torch.autograd.backward(loss)

    assert loss.isfinite()
    assert logits.grad is not None
    assert logits.grad[mask.bool()].isfinite().all()


def test_a_batch_where_nothing_counts_has_loss_0() -> None:
    loss, num_items = language_loss(LOGITS, LABELS, torch.zeros_like(MASK))

    assert loss.item() == 0
    assert num_items == 0


def test_half_precision_scores_give_a_float32_loss() -> None:
    loss, _ = language_loss(LOGITS.bfloat16(), LABELS, MASK)

    assert loss.dtype == torch.float32


@pytest.mark.parametrize(("mask", "expected"), [(None, 2 / 4), ([[1, 1], [0, 1]], 2 / 3)])
def test_accuracy_is_the_share_of_counted_hits(
    mask: list[list[int]] | None, expected: float
) -> None:
    logits = functional.one_hot(torch.tensor([[3, 1], [2, 0]]), 5).float()
    labels = torch.tensor([[3, 1], [4, 4]])

    accuracy = token_accuracy(logits, labels, None if mask is None else torch.tensor(mask))

    assert accuracy.item() == pytest.approx(expected)
