"""Arguments of optimizers that do not fit are refused, in words of ours."""

from __future__ import annotations

import math

import pytest
from torch import nn

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import OPTIMIZERS

LAYER = nn.Linear(2, 2)
NUMBER = "it must be a number from 0 on"
BETAS = ("Adam", "AdamBase", "AdamW", "Adamax", "Lamb", "Lion", "Muon", "NAdam", "RAdam")


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("lr", [-0.1, math.nan, math.inf])
def test_a_learning_rate_that_is_no_number_from_zero_on_is_refused(name, lr):
    with pytest.raises(ConfigError, match=rf"^{name}\.lr is {lr}; {NUMBER}\.$"):
        OPTIMIZERS[name](LAYER, lr=lr)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"Rprop"}))
def test_a_weight_decay_below_zero_is_refused(name):
    with pytest.raises(ConfigError, match=rf"^{name}\.weight_decay is -0.1; {NUMBER}\.$"):
        OPTIMIZERS[name](LAYER, weight_decay=-0.1)


@pytest.mark.parametrize("name", BETAS)
@pytest.mark.parametrize("betas", [(0.9, 1.0), (-0.1, 0.9)])
def test_betas_outside_of_zero_and_one_are_refused(name, betas):
    text = rf"^{name}\.betas is \[{betas[0]}, {betas[1]}\]; each must be at least 0 and below 1\.$"
    with pytest.raises(ConfigError, match=text):
        OPTIMIZERS[name](LAYER, betas=betas)


@pytest.mark.parametrize("name", BETAS)
def test_betas_are_two(name):
    with pytest.raises(ConfigError, match=rf"^{name}\.betas is \[\]; it must have two numbers\.$"):
        OPTIMIZERS[name](LAYER, betas=())


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("AdamBase", {"l2_regularization_rate": -1.0}, r"l2_regularization_rate is -1\.0; it must"),
        ("AdamW", {"eps": -1.0}, r"AdamW\.eps is -1\.0; it must be a number from 0 on"),
        ("NAdam", {"momentum_decay": -1.0}, r"NAdam\.momentum_decay is -1\.0"),
        ("SGD", {"momentum": -1.0}, r"SGD\.momentum is -1\.0"),
        ("SGD", {"nesterov": True}, r"SGD\.nesterov is true with momentum 0\.0 and dampening 0\.0"),
        ("Adagrad", {"lr_decay": -1.0}, r"Adagrad\.lr_decay is -1\.0"),
        ("Adadelta", {"rho": 1.0}, r"Adadelta\.rho is 1\.0; it must be at least 0 and below 1"),
        ("RMSprop", {"alpha": 1.0}, r"RMSprop\.alpha is 1\.0"),
        (
            "Rprop",
            {"etas": (0.5, 0.9)},
            r"Rprop\.etas is \[0\.5, 0\.9\]; the first must be between",
        ),
        ("Rprop", {"step_sizes": (-1.0, 1.0)}, r"Rprop\.step_sizes is \[-1\.0, 1\.0\]; each must"),
        ("ASGD", {"t0": -1.0}, r"ASGD\.t0 is -1\.0"),
        (
            "Adafactor",
            {"clip_threshold": 0.0},
            r"Adafactor\.clip_threshold is 0\.0; it must be abov",
        ),
        ("Adafactor", {"decay_rate": 0.8}, r"Adafactor\.decay_rate is 0\.8; it must be below 0"),
        ("Adafactor", {"beta1": 1.0}, r"Adafactor\.beta1 is 1\.0"),
        (
            "Adafactor",
            {"eps": (1e-30, -1.0)},
            r"Adafactor\.eps is \[1e-30, -1\.0\]; each must be a",
        ),
        (
            "Adafactor",
            {"relative_step": True, "learning_rate": 0.1},
            r"Adafactor\.relative_step is true and lr is 0\.1; they exclude each other",
        ),
        ("Adafactor", {"warmup_init": True}, r"Adafactor\.warmup_init is true; it needs relative"),
        ("Muon", {"ns_steps": 0}, r"Muon\.ns_steps is 0; it must be above 0"),
        ("Muon", {"ns_steps": 100}, r"Muon\.ns_steps is 100; it must be below 100"),
        ("Muon", {"momentum": 1.0}, r"Muon\.momentum is 1\.0; it must be at least 0 and below 1"),
        (
            "Muon",
            {"adjust_lr_fn": "orignal"},
            r"Muon\.adjust_lr_fn is 'orignal'\. Did you mean 'ori",
        ),
    ],
)
def test_other_arguments_that_do_not_fit_are_refused(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        OPTIMIZERS[name](LAYER, **arguments)
