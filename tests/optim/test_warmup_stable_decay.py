"""Warmup, stable learning rate and decay, compared with formulas written out here."""

from __future__ import annotations

import math

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import scheduler_class
from modelzoo_trainer.optim.warmup_stable_decay import WarmupStableDecay


def test_it_rises_stays_and_falls():
    schedule = WarmupStableDecay(None, 0.8, 20, warmup_steps=4, decay_ratio=0.2)
    rates = [schedule.value(step) for step in range(22)]
    rise, fall = [0.0, 0.2, 0.4, 0.6], [0.8, 0.6, 0.4, 0.2]
    assert rates == pytest.approx([*rise, *[0.8] * 12, *fall, 0.0, 0.0])


SHAPES = {
    "linear": lambda share: 0.9 + (0.1 - 0.9) * share,
    "cosine": lambda share: 0.1 + 0.4 * (1 + math.cos(math.pi * share)),
    "sqrt": lambda share: 0.9 - 0.8 * math.sqrt(share),
    "inverse": lambda share: 1 / (share / 0.1 + (1 - share) / 0.9),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_decay_has_its_shape(shape):
    schedule = scheduler_class("warmupstabledecay")(
        None, 0.9, 100, decay_ratio=0.5, end_learning_rate=0.1, decay_shape=shape
    )
    given = [schedule.value(step) for step in range(50, 101)]
    assert given == pytest.approx([SHAPES[shape](idx / 50) for idx in range(51)], rel=1e-12)


def test_after_each_decay_but_the_last_the_rate_is_whole_again():
    schedule = WarmupStableDecay(None, 1.0, 40, decay_ratio=0.2, checkpoint_steps=[10, 20])
    assert schedule.get_checkpoint_steps() == [(8, 10), (16, 20), (32, 40)]
    rates = {step: schedule.value(step) for step in (7, 8, 9, 10, 15, 18, 20, 31, 36, 40, 99)}
    expected = [1.0, 1.0, 0.5, 1.0, 1.0, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    assert list(rates.values()) == pytest.approx(expected)


def test_it_decays_by_ratio():
    assert WarmupStableDecay(None, 1.0, 20, decay_ratio=0.2).get_checkpoint_steps() == [(16, 20)]


def test_without_a_decay_it_ends_at_once():
    schedule = WarmupStableDecay(None, 1.0, 5, decay_ratio=0.0)
    assert [schedule.value(step) for step in (4, 5)] == [1.0, 0.0]


def test_a_longer_run_resumes_from_before_the_decay(sgd):
    first = WarmupStableDecay(sgd, 1.0, 20, decay_ratio=0.2)
    for _ in range(16):
        first.step()
    state = first.state_dict()
    first.release()
    longer = WarmupStableDecay(sgd, 1.0, 40, decay_ratio=0.2)
    longer.load_state_dict(state)
    rates = []
    for _ in range(20):
        longer.step()
        rates.append(sgd.param_groups[0]["lr"])
    assert rates == pytest.approx([1.0] * 16 + [0.875, 0.75, 0.625, 0.5])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rate": 0.0}, r"learning_rate: expected [^,]*> 0.*, got 0.0"),
        ({"total_iters": 0}, r"total_iters: expected [^,]*> 0.*, got 0"),
        ({"decay_ratio": 1.0}, r"decay_ratio: expected .*\[0, 1\).*, got 1.0"),
        ({"warmup_steps": -1}, r"warmup_steps: expected .*, got -1"),
        (
            {"decay_shape": "linaer"},
            r"decay_shape: expected .*, got 'linaer'\. Did you mean 'linear'",
        ),
        ({"decay_shape": "inverse"}, r"end_learning_rate is 0"),
        ({"checkpoint_steps": [20]}, r"checkpoint_steps is \[20\]; they must be .* \(20\)"),
        ({"checkpoint_steps": [8, 8]}, r"checkpoint_steps is \[8, 8\]; they must be > 0"),
        ({"checkpoint_steps": [0]}, r"checkpoint_steps is \[0\]"),
        (
            {"warmup_steps": 19},
            r"ends at step 20 would begin at step 18, before the warmup ends at step 19",
        ),
        (
            {"checkpoint_steps": [15], "decay_ratio": 0.5},
            r"begin at step 10, before the previous .* at step 15. Decrease decay_ratio \(0.5\)",
        ),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        WarmupStableDecay(None, **({"learning_rate": 1.0, "total_iters": 20} | arguments))
