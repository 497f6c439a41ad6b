"""Invalid arguments of optimizers raise a ConfigError."""

from __future__ import annotations

import inspect
import math

import pytest
from torch import nn

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import OPTIMIZERS

LAYER = nn.Linear(2, 2)
NUMBER = "expected a finite number >= 0( or null)?"
BETAS = [n for n, cls in OPTIMIZERS.items() if "betas" in inspect.signature(cls).parameters]


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("lr", [-0.1, math.nan, math.inf])
def test_a_learning_rate_that_is_not_a_number_from_zero_on_is_refused(name, lr):
    with pytest.raises(ConfigError, match=rf"^{name}\.lr: {NUMBER}, got {lr}\.$"):
        OPTIMIZERS[name](LAYER, lr=lr)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"Rprop"}))
def test_a_weight_decay_below_zero_is_refused(name):
    with pytest.raises(ConfigError, match=rf"^{name}\.weight_decay: {NUMBER}, got -0.1\.$"):
        OPTIMIZERS[name](LAYER, weight_decay=-0.1)


@pytest.mark.parametrize("name", BETAS)
@pytest.mark.parametrize("betas", [(0.9, 1.0), (-0.1, 0.9)])
def test_betas_outside_of_zero_and_one_are_refused(name, betas):
    idx = betas.index(min(betas) if min(betas) < 0 else max(betas))
    text = rf"^{name}\.betas\[{idx}\]: expected a number in \[0, 1\), got {betas[idx]}\.$"
    with pytest.raises(ConfigError, match=text):
        OPTIMIZERS[name](LAYER, betas=betas)


@pytest.mark.parametrize("name", BETAS)
def test_betas_are_two(name):
    with pytest.raises(ConfigError, match=rf"^{name}\.betas: expected a list of 2 .*, got \[\]\.$"):
        OPTIMIZERS[name](LAYER, betas=())


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "AdamBase",
            {"l2_regularization_rate": -1.0},
            r"l2_regularization_rate: expected [^,]*>= 0.*, got -1\.0",
        ),
        ("AdamW", {"eps": -1.0}, r"AdamW\.eps: expected [^,]*>= 0.*, got -1\.0"),
        ("NAdam", {"momentum_decay": -1.0}, r"NAdam\.momentum_decay: expected .*, got -1\.0"),
        ("SGD", {"momentum": -1.0}, r"SGD\.momentum: expected .*, got -1\.0"),
        ("SGD", {"nesterov": True}, r"SGD\.nesterov is true with momentum 0\.0 and dampening 0\.0"),
        ("Adagrad", {"lr_decay": -1.0}, r"Adagrad\.lr_decay: expected .*, got -1\.0"),
        ("Adadelta", {"rho": 1.0}, r"Adadelta\.rho: expected .*\[0, 1\).*, got 1\.0"),
        ("RMSprop", {"alpha": 1.0}, r"RMSprop\.alpha: expected .*, got 1\.0"),
        (
            "Rprop",
            {"etas": (0.5, 0.9)},
            r"Rprop\.etas\[1\]: expected a number > 1, got 0\.9",
        ),
        (
            "Rprop",
            {"step_sizes": (-1.0, 1.0)},
            r"Rprop\.step_sizes\[0\]: expected .*>= 0, got -1\.0",
        ),
        ("ASGD", {"t0": -1.0}, r"ASGD\.t0: expected .*, got -1\.0"),
        (
            "Adafactor",
            {"clip_threshold": 0.0},
            r"Adafactor\.clip_threshold: expected [^,]*> 0.*, got 0\.0",
        ),
        (
            "Adafactor",
            {"decay_rate": 0.8},
            r"Adafactor\.decay_rate: expected a number < 0, got 0\.8",
        ),
        ("Adafactor", {"beta1": 1.0}, r"Adafactor\.beta1: expected .*, got 1\.0"),
        (
            "Adafactor",
            {"eps": (1e-30, -1.0)},
            r"Adafactor\.eps\[1\]: expected .*>= 0, got -1\.0",
        ),
        (
            "Adafactor",
            {"relative_step": True, "learning_rate": 0.1},
            r"Adafactor: set either lr or relative_step=True, .*lr=0\.1",
        ),
        (
            "Adafactor",
            {"warmup_init": True},
            r"Adafactor: warmup_init=True requires relative_step=True",
        ),
        ("Muon", {"ns_steps": 0}, r"Muon\.ns_steps: expected .*\[1, 100\), got 0"),
        ("Muon", {"ns_steps": 100}, r"Muon\.ns_steps: expected .*\[1, 100\), got 100"),
        ("Muon", {"momentum": 1.0}, r"Muon\.momentum: expected .*\[0, 1\).*, got 1\.0"),
        (
            "Muon",
            {"adjust_lr_fn": "orignal"},
            r"Muon\.adjust_lr_fn: expected .*, got 'orignal'\. Did you mean 'ori",
        ),
    ],
)
def test_other_arguments_that_do_not_fit_are_refused(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        OPTIMIZERS[name](LAYER, **arguments)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_arguments_are_settings_of_groups_and_no_attributes(name):
    optimizer = OPTIMIZERS[name](LAYER, lr=0.5)
    names = inspect.signature(OPTIMIZERS[name]).parameters
    assert all(not hasattr(optimizer, one) for one in names)
    assert all(group["lr"] == 0.5 for group in optimizer.param_groups)


def test_a_subclass_of_an_optimizer_may_have_a_constructor_of_its_own():
    class Slow(OPTIMIZERS["AdamW"]):
        used: int = 0

        def __init__(self, model):
            super().__init__(model, 1e-5, betas=(0.8, 0.9))

    optimizer = Slow(LAYER)
    assert optimizer.used == 0
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.9)}
