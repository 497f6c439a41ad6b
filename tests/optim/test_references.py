"""Optimizers whose step is not torch's, compared with their papers' formulas in float64."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from modelzoo_trainer.optim import OPTIMIZERS
from tests.optim.conftest import OWN_STEP, OWN_UPDATE

NUM_STEPS = 6
SHAPES = ((5, 3), (4,), (2, 3, 4))


def start():
    generator = np.random.default_rng(0)
    weights = [generator.normal(size=shape) for shape in SHAPES]
    weights[1][:] = 0.0  # a norm of zero
    grads = [
        [generator.normal(size=shape) * 3.0**step for shape in SHAPES] for step in range(NUM_STEPS)
    ]
    return weights, grads


def trained(name, lrs=None, **settings):
    """Return the parameters after steps with given gradients."""
    weights, grads = start()
    params = [nn.Parameter(torch.tensor(weight)) for weight in weights]
    optimizer = OPTIMIZERS[name](params, **settings)
    for step, given in enumerate(grads):
        for param, grad in zip(params, given, strict=True):
            param.grad = torch.tensor(grad)
        if lrs is not None:
            optimizer.param_groups[0]["lr"] = lrs[step]
        optimizer.step()
    return [param.detach().numpy() for param in params]


def expected(update):
    """Return the parameters after applying `update(weight, grad, memory, step)`."""
    weights, grads = start()
    memories = [{} for _ in weights]
    for step, given in enumerate(grads, start=1):
        for idx, grad in enumerate(given):
            weights[idx] = update(weights[idx], grad, memories[idx], step)
    return weights


def check(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def lion(weight_decay):
    def update(weight, grad, memory, step):
        average = memory.get("m", 0.0)
        sign = np.sign(0.8 * average + 0.2 * grad)
        memory["m"] = 0.7 * average + 0.3 * grad
        return weight - 0.01 * (sign + weight_decay * weight)

    return update


def lamb(weight_decay, adam):
    def update(weight, grad, memory, step):
        memory["m"] = 0.8 * memory.get("m", 0.0) + 0.2 * grad
        memory["v"] = 0.7 * memory.get("v", 0.0) + 0.3 * grad**2
        change = memory["m"] / (np.sqrt(memory["v"]) + 1e-4) + weight_decay * weight
        norm, length = np.linalg.norm(weight), np.linalg.norm(change)
        ratio = 1.0 if adam or norm == 0 else min(norm, 10.0) / length
        return weight - 0.5 * ratio * change

    return update


def rms(array):
    return np.sqrt(np.mean(array**2))


def adafactor(size_at, beta1=None, weight_decay=0.0, threshold=1.0, scales=True):
    def update(weight, grad, memory, step):
        forget = step**-0.8
        square = grad**2 + 1e-30
        if weight.ndim >= 2:
            for key, axis in (("r", -1), ("c", -2)):
                mean = square.mean(axis=axis, keepdims=True)
                memory[key] = (1 - forget) * memory.get(key, 0.0) + forget * mean
            rows = memory["r"]
            moment = rows * memory["c"] / rows.mean(axis=-2, keepdims=True)
        else:
            memory["v"] = (1 - forget) * memory.get("v", 0.0) + forget * square
            moment = memory["v"]
        change = grad / np.sqrt(moment)
        change = change / max(1.0, rms(change) / threshold)
        size = size_at(step) * (max(1e-3, rms(weight)) if scales else 1.0)
        change = size * change
        if beta1 is not None:
            memory["m"] = beta1 * memory.get("m", 0.0) + (1 - beta1) * change
            change = memory["m"]
        return weight - size * weight_decay * weight - change

    return update


def adam(weight_decay=0.0, l2=0.0, corrects=True, after=False):
    def update(weight, grad, memory, step):
        grad = grad + l2 * weight
        memory["m"] = 0.8 * memory.get("m", 0.0) + 0.2 * grad
        memory["v"] = 0.7 * memory.get("v", 0.0) + 0.3 * grad**2
        eps, root = 1e-4, np.sqrt(memory["v"])
        if not corrects:
            change = memory["m"] / (root + eps)
        elif after:
            change = memory["m"] / (1 - 0.8**step) / (root / np.sqrt(1 - 0.7**step) + eps)
        else:  # the Model Zoo has powers of betas in float32
            first, second = (1 - float(np.float32(beta)) ** step for beta in (0.8, 0.7))
            change = memory["m"] / (root + eps) * np.sqrt(second) / first
        return weight - 0.05 * (change + weight_decay * weight)

    return update


def of_adam():
    """Yield rows of the Adams: with and without correction, eps after it and before."""
    betas = {"lr": 0.05, "betas": (0.8, 0.7), "eps": 1e-4}
    rows = (
        ("AdamW", {"weight_decay": 0.3}, {"weight_decay": 0.3}),
        ("Adam", {"weight_decay": 0.3}, {"l2": 0.3}),
        (
            "AdamBase",
            {"weight_decay": 0.3, "l2_regularization_rate": 0.2},
            {"weight_decay": 0.3, "l2": 0.2},
        ),
        ("AdamBase", {}, {}),
    )
    for (name, settings, formula), corrects, after in product(rows, BOTH, BOTH):
        given = {"correct_bias": corrects, "eps_after_correction": after, **betas, **settings}
        yield name, given, adam(corrects=corrects, after=after, **formula)


BOTH = (False, True)
LION = {"lr": 0.01, "betas": (0.8, 0.7)}
LAMB = {"lr": 0.5, "betas": (0.8, 0.7), "eps": 1e-4}
FORMULAS = [
    *(("Lion", {**LION, "weight_decay": decay}, lion(decay)) for decay in (0.0, 0.3)),
    *(
        ("Lamb", {**LAMB, "weight_decay": decay, "adam": is_adam}, lamb(decay, is_adam))
        for decay in (0.0, 0.3)
        for is_adam in BOTH
    ),
    ("Adafactor", {"lr": 0.1}, adafactor(lambda step: 0.1)),
    (
        "Adafactor",
        {"lr": 0.1, "scale_parameter": False},
        adafactor(lambda step: 0.1, scales=False),
    ),
    (
        "Adafactor",
        {"lr": 0.1, "beta1": 0.9, "weight_decay": 0.3, "clip_threshold": 0.5},
        adafactor(lambda step: 0.1, beta1=0.9, weight_decay=0.3, threshold=0.5),
    ),
    ("Adafactor", {"relative_step": True}, adafactor(lambda step: min(0.01, step**-0.5))),
    (
        "Adafactor",
        {"relative_step": True, "warmup_init": True},
        adafactor(lambda step: min(1e-6 * step, step**-0.5)),
    ),
    *of_adam(),
]
"""Name, settings and update of one parameter; an optimizer with a step of its own has a row."""
COMPARED_WITH_TORCHS = {"ASGD", "Muon"}  # below, and in test_muon.py


@pytest.mark.parametrize(("name", "settings", "update"), FORMULAS)
def test_an_optimizer_follows_its_formula(name, settings, update):
    check(trained(name, **settings), expected(update))


def test_every_step_of_our_own_is_compared_with_another_implementation():
    compared = {name for name, _, _ in FORMULAS} | COMPARED_WITH_TORCHS
    assert sorted({*OWN_STEP} - compared) == [], "add the formula of the paper to FORMULAS"


def test_the_norm_of_a_parameter_counts_at_most_ten_in_lamb():
    param = nn.Parameter(torch.full((4,), 100.0, dtype=torch.float64))
    param.grad = torch.ones_like(param)
    OPTIMIZERS["Lamb"]([param], lr=1.0).step()
    assert param.tolist() == pytest.approx([95.0] * 4)  # 10 / norm(1, 1, 1, 1)


def test_adafactor_keeps_rows_and_columns_of_a_matrix_only():
    param = nn.Parameter(torch.ones(5, 3))
    param.grad = torch.ones_like(param)
    optimizer = OPTIMIZERS["Adafactor"]([param])
    optimizer.step()
    tensors = {key: value.shape for key, value in optimizer.state[param].items() if key != "step"}
    assert tensors == {"exp_avg_sq_row": (5,), "exp_avg_sq_col": (3,)}


def test_a_large_beta_is_not_corrected_either():
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    param.grad = torch.ones_like(param)
    betas = (0.9, 1 - 1e-9)
    OPTIMIZERS["AdamW"]([param], lr=1.0, betas=betas, eps=1.0, correct_bias=False).step()
    assert param.item() == pytest.approx(-0.1 / (1 + 1e-9**0.5), rel=1e-9)


@pytest.fixture
def float64():
    """Make torch keep the counters of its ASGD in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("float64")
def test_asgd_is_that_of_torch_when_it_averages_and_the_rate_changes():
    settings = {"lr": 0.05, "lambd": 0.1, "alpha": 0.5, "t0": 2.0, "weight_decay": 0.1}
    lrs = [0.05, 0.04, 0.03, 0.02, 0.01, 0.005]
    weights, grads = start()
    params = [nn.Parameter(torch.tensor(weight)) for weight in weights]
    theirs = torch.optim.ASGD(params, maximize=True, **settings)
    for lr, given in zip(lrs, grads, strict=True):
        for param, grad in zip(params, given, strict=True):
            param.grad = torch.tensor(grad)
        theirs.param_groups[0]["lr"] = lr
        theirs.step()
    ours = [nn.Parameter(torch.tensor(weight)) for weight in weights]
    optimizer = OPTIMIZERS["ASGD"](ours, maximize=True, **settings)
    for lr, given in zip(lrs, grads, strict=True):
        for param, grad in zip(ours, given, strict=True):
            param.grad = torch.tensor(grad)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    for mine, their in zip(ours, params, strict=True):
        np.testing.assert_allclose(mine.detach(), their.detach(), rtol=1e-10)
        average = theirs.state[their]["ax"]
        np.testing.assert_allclose(optimizer.state[mine]["ax"], average, rtol=1e-10)


@pytest.mark.parametrize("name", OWN_STEP)
def test_a_rate_in_a_tensor_gives_the_same(name):
    settings = {"weight_decay": 0.1}
    numbers = trained(name, lr=0.05, **settings)
    tensor = torch.tensor(0.05, dtype=torch.float64)
    check(trained(name, lr=0.05, lrs=[tensor] * NUM_STEPS, **settings), numbers)


@pytest.mark.parametrize("name", OWN_UPDATE)
def test_sparse_gradients_are_refused(name):
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=f"{name} does not support sparse gradients"):
        OPTIMIZERS[name](table).step()


@pytest.mark.parametrize("name", OWN_STEP)
def test_a_closure_is_called_with_gradients(name):
    layer = nn.Linear(2, 2)
    optimizer = OPTIMIZERS[name](layer)

    def closure():
        loss = layer(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    before = layer.weight.detach().clone()
    assert optimizer.step(closure).item() > 0
    assert not torch.equal(layer.weight, before)
