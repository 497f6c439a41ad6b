"""Properties of all shipped optimizers and schedules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from backends.fast_step import fuse_optimizer
from backends.sync_guard import SyncGuard
from modelzoo_trainer import Checkpoint, checkpointing
from modelzoo_trainer.optim import OPTIMIZERS, SCHEDULERS, OptimizerFactory, scheduler_class
from modelzoo_trainer.optim.decay import ConstantLR, LinearLR
from modelzoo_trainer.optim.first_state import bytes_to_come
from modelzoo_trainer.optim.weight_decay import ConstantWD, LinearWD
from tests.doubles import TinyModel, make_trainer, tiny_batches, weights_of
from tests.optim.conftest import OWN_STEP, OWN_UPDATE

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in OPTIMIZERS),
    ("Adam", {"correct_bias": False, "amsgrad": True}),
    ("AdamW", {"correct_bias": False}),
    ("AdamBase", {"l2_regularization_rate": 0.1, "weight_decay": 0.1, "correct_bias": False}),
    ("ASGD", {"t0": 1.0}),
    ("Adafactor", {"beta1": 0.9, "weight_decay": 0.1}),
    ("Adafactor", {"relative_step": True, "warmup_init": True}),
    ("Lamb", {"weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
]
LINE = {"initial_learning_rate": 0.01, "end_learning_rate": 0.001, "total_iters": 4}
WD_LINE = {"initial_val": 0.3, "end_val": 0.1, "total_iters": 4}
START: dict[str, Any] = {"initial_learning_rate": 0.01}
WD_START: dict[str, Any] = {"initial_val": 0.3}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "ChainedScheduler": {"schedulers": lambda: [LinearLR(None, **LINE), ConstantLR(None, 0.5)]},
    "ChainedWD": {"schedulers": lambda: [LinearWD(None, **WD_LINE), ConstantWD(None, 0.5)]},
    "ConstantLR": {"learning_rate": 0.01},
    "ConstantWD": {"val": 0.3},
    "CosineAnnealingLR": START | {"T_max": 4},
    "CosineAnnealingWD": WD_START | {"T_max": 4},
    "CosineAnnealingWarmRestarts": START | {"T_0": 2},
    "CosineAnnealingWarmRestartsWD": WD_START | {"T_0": 2},
    "CosineDecayLR": LINE,
    "CosineDecayWD": WD_LINE,
    "CyclicLR": {"base_lr": 0.001, "max_lr": 0.01, "step_size_up": 2},
    "CyclicWD": {"base_val": 0.1, "max_val": 0.3, "step_size_up": 2},
    "ExponentialLR": START | {"total_iters": 4, "decay_rate": 0.5},
    "ExponentialWD": WD_START | {"total_iters": 4, "decay_rate": 0.5},
    "InverseExponentialTimeDecayLR": START
    | {"step_exponent": 1, "total_iters": 4, "decay_rate": 0.5},
    "InverseExponentialTimeDecayWD": WD_START
    | {"step_exponent": 1, "total_iters": 4, "decay_rate": 0.5},
    "InverseSquareRootDecayLR": {},
    "InverseSquareRootDecayWD": {},
    "LambdaLR": START | {"lr_lambda": lambda: lambda step: 0.5**step},
    "LambdaWD": WD_START | {"val_lambda": lambda: lambda step: 0.5**step},
    "LinearLR": LINE,
    "LinearWD": WD_LINE,
    "MultiStepLR": START | {"gamma": 0.5, "milestones": [2]},
    "MultiStepWD": WD_START | {"gamma": 0.5, "milestones": [2]},
    "MultiplicativeLR": START | {"coefficient": 0.5},
    "MultiplicativeWD": WD_START | {"coefficient": 0.5},
    "OneCycleLR": START | {"max_lr": 0.1, "total_steps": 8},
    "OneCycleWD": WD_START | {"max_val": 0.4, "total_steps": 8},
    "PiecewiseConstantLR": {"learning_rates": [0.1, 0.01], "milestones": [2]},
    "PiecewiseConstantWD": {"vals": [0.1, 0.2], "milestones": [2]},
    "PolynomialLR": LINE | {"power": 2.0},
    "PolynomialWD": WD_LINE | {"power": 2.0},
    "ScalePerParamLR": {"scheduler": lambda: LinearLR(None, **LINE)},
    "SequentialLR": {"schedulers": lambda: [LinearLR(None, **LINE), ConstantLR(None, 0.5)]},
    "SequentialWD": {"schedulers": lambda: [LinearWD(None, **WD_LINE), ConstantWD(None, 0.5)]},
    "StepLR": START | {"step_size": 2, "gamma": 0.5},
    "WarmupStableDecay": {"learning_rate": 0.1, "total_iters": 6, "decay_ratio": 0.5},
    "StepWD": WD_START | {"step_size": 2, "gamma": 0.5},
}


def schedule_of(name, optimizer):
    """Return a schedule with its arguments; callables among them are called."""
    arguments = {
        key: value() if callable(value) else value for key, value in ARGUMENTS[name].items()
    }
    return scheduler_class(name)(optimizer, **arguments)


class Net(nn.Module):
    """Vectors, matrices and more dimensions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(5, 4)
        self.hidden = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.conv = nn.Conv1d(6, 3, 1)
        self.unused = nn.Linear(2, 2)

    def used(self):
        return [param for name, param in self.named_parameters() if "unused" not in name]


def steps(model, optimizer, which):
    for seed in which:
        generator = torch.Generator().manual_seed(seed)
        for param in model.used():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
@pytest.mark.slow_cases(every=4)
def test_a_state_that_was_saved_and_loaded_continues_bit_by_bit(name, settings):
    whole, first, second = Net(), Net(), Net()
    unbroken = OPTIMIZERS[name](whole, **settings)
    steps(whole, unbroken, range(7))

    stopped = OPTIMIZERS[name](first, **settings)
    steps(first, stopped, range(3))
    second.load_state_dict(first.state_dict())
    resumed = OPTIMIZERS[name](second, **settings)
    resumed.load_state_dict(copy.deepcopy(stopped.state_dict()))
    steps(second, resumed, range(3, 7))
    for mine, theirs in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
@pytest.mark.slow_cases(every=4)
def test_nothing_on_the_device_is_read_not_even_after_loading(name, settings):
    with torch.device("meta"):  # where a read raises
        model = Net()
    optimizer = OPTIMIZERS[name](model, **settings)
    for _ in range(2):
        for _ in range(3):
            for param in model.used():
                param.grad = torch.empty_like(param)
            optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(param.is_meta for param in model.used())


@pytest.mark.parametrize("name", OWN_UPDATE)
def test_what_is_not_torchs_does_not_read_on_the_host_either(name):
    model, guard = Net(), SyncGuard()
    optimizer = OPTIMIZERS[name](model, weight_decay=0.1)
    guard.arm()
    try:
        steps(model, optimizer, range(2))
    finally:
        guard.disarm()
    assert guard.num_refused == 0


def trained(tmp_path, factory, schedule=None, device="fake", **settings):
    trainer = make_trainer(
        tmp_path,
        device=device,
        optimizer=factory,
        schedulers=[] if schedule is None else [schedule],
        callbacks=[],
        **settings,
    )
    trainer.fit(tiny_batches(4), None)
    return trainer


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
@pytest.mark.slow_cases(every=4)
def test_every_optimizer_trains_without_a_read_in_the_step(tmp_path, name, settings):
    torch.manual_seed(0)
    trainer = trained(tmp_path, OptimizerFactory(OPTIMIZERS[name], settings), num_epochs=2)
    assert trainer.global_step == 8
    assert trainer.backend.counters()["host_reads"] == 0
    assert all(torch.isfinite(value).all() for value in weights_of(trainer).values())
    start = make_trainer(tmp_path / "start", device="fake").model.state_dict()
    assert any(not torch.equal(value, start[key]) for key, value in weights_of(trainer).items())


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_every_schedule_trains_and_continues_where_its_checkpoint_was(tmp_path, name):
    factory = OptimizerFactory(OPTIMIZERS["AdamW"], {"lr": 0.01, "weight_decay": 0.1})
    settings = {
        "schedule": lambda optimizer: schedule_of(name, optimizer),
        "factory": factory,
        "checkpoint": Checkpoint(steps=2),
    }
    unbroken = trained(tmp_path / "whole", max_steps=4, **settings)
    assert unbroken.backend.counters()["host_reads"] == 0
    trained(tmp_path / "broken", max_steps=2, **settings)
    resumed = trained(tmp_path / "broken", max_steps=4, **settings)
    assert resumed.global_step == 4
    (ours,), (theirs,) = resumed.schedulers, unbroken.schedulers
    assert ours.state_dict() == theirs.state_dict()
    assert (
        ours.get_last_value()
        == theirs.get_last_value()
        == [theirs.value(4)] * len(theirs.get_last_value())
    )
    key = ours.param_group_key
    assert [group[key] for group in resumed.optimizer.param_groups] == [
        group[key] for group in unbroken.optimizer.param_groups
    ]


def test_every_schedule_has_arguments_here():
    assert ARGUMENTS.keys() == SCHEDULERS.keys()


def scaled_and_plain(name, settings, fuse):
    """Return weights after steps with a loss scaler, and without one."""
    results = []
    for scale in (4.0, None):
        model = TinyModel()
        model.load_state_dict(
            {key: torch.full_like(value, 0.5) for key, value in model.state_dict().items()}
        )
        optimizer = OPTIMIZERS[name](model, lr=0.01, **settings)
        if fuse:
            assert fuse_optimizer(optimizer, torch.device("cpu"))
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for batch in tiny_batches(3):
            optimizer.zero_grad()
            scaler.scale(model(batch)[0]).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append([param.detach().clone() for param in model.parameters()])
    return results


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("AdamW", {"correct_bias": False}),
        ("Adam", {"correct_bias": False, "weight_decay": 0.1}),
        ("AdamBase", {"l2_regularization_rate": 0.3, "weight_decay": 0.1}),
    ],
)
def test_a_fused_adam_with_a_loss_scaler_takes_the_same_steps(name, settings):
    with_scale, without = scaled_and_plain(name, settings, fuse=True)
    torch.testing.assert_close(with_scale, without, rtol=1e-5, atol=1e-6)
    unfused = scaled_and_plain(name, settings, fuse=False)[1]
    torch.testing.assert_close(without, unfused, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OWN_STEP)
def test_a_loss_scaler_changes_nothing(name):
    with_scale, without = scaled_and_plain(name, {}, fuse=False)
    torch.testing.assert_close(with_scale, without, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "settings"),
    [*VARIANTS, ("RMSprop", {}), ("Adagrad", {})],
    ids=lambda value: str(value),
)
def test_the_size_of_a_state_is_known_before_the_first_step(name, settings) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    model[1].weight.requires_grad_(False)
    optimizer = OptimizerFactory(OPTIMIZERS[name], settings)(model)
    before = checkpointing.state_bytes(optimizer.state_dict())
    to_come = bytes_to_come(optimizer)
    model(torch.randn(3, 64)).sum().backward()
    optimizer.step()
    after = checkpointing.state_bytes(optimizer.state_dict())
    assert to_come is not None
    assert before + to_come <= after
    assert after - before - to_come < 4_000  # small: numbers of steps, and keys
    assert bytes_to_come(optimizer) == 0
