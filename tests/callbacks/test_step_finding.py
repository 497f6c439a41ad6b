import math

import pytest

from modelzoo_trainer.callbacks.step_guard import StepFinding, named


def finding(**facts):
    return StepFinding(**({"step": 7, "is_bad": True, "batches": [(0, 6)], "loss": 2.5} | facts))


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([(0, 5)], "epoch 1, batch 5"),
        ([(2, 4), (2, 5), (2, 6)], "epoch 3, batches 4-6"),
        ([(0, 1), (0, 4)], "epoch 1, batches 1, 4"),
        ([(0, 8), (0, 9), (1, 0)], "epoch 1, batches 8-9; epoch 2, batch 0"),
    ],
)
def test_batches_are_named_by_epoch_and_index(batches, words):
    assert named(batches) == words


@pytest.mark.parametrize(
    ("facts", "complaint"),
    [
        ({"loss": math.nan}, "loss is nan at global_step 7 (epoch 1, batch 6)"),
        ({"loss": -math.inf, "norm": math.nan}, "loss is -inf at global_step 7 (epoch 1, batch 6)"),
        (
            {"norm": math.inf},
            "the gradient norm is inf at global_step 7 (epoch 1, batch 6); the loss is 2.5",
        ),
        (
            {"norm": 1.0, "limit": 2.0},
            "loss is 2.5 at global_step 7 (epoch 1, batch 6), a spike (limit 2)",
        ),
        (
            {"norm": 1.0, "limit": 3.0},
            "another process found a bad loss or gradient at global_step 7 (epoch 1, batch 6)",
        ),
    ],
)
def test_a_complaint_says_what_is_bad_and_where(facts, complaint):
    assert finding(**facts).complaint == complaint
