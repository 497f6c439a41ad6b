"""Schedules of a run that is resumed: with the same settings, with others, of another class."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.swa_utils import SWALR

from modelzoo_trainer import Callback, Checkpoint
from modelzoo_trainer.errors import CheckpointMismatch, ConfigError
from modelzoo_trainer.optim.decay import ConstantLR, LinearLR
from tests.doubles import TinyModel, tiny_batches

BATCHES = tiny_batches(20)
Make = Callable[[torch.optim.Optimizer], Any]


class Rates(Callback):
    """Notes what each step is trained with."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.momenta: list[float] = []

    def on_before_optimizer_step(self, trainer, model, optimizer):
        [group] = optimizer.param_groups
        self.rates.append(float(group["lr"]))
        self.momenta.append(group["momentum"])


class Older(Callback):
    """Takes out of a checkpoint what the first formats do not have."""

    def preprocess_checkpoint(self, trainer, state_dict):
        for state in state_dict["schedulers"]:
            del state["scheduler_class"], state["scheduler_settings"]
        for name in ("kind", "names", "settings"):
            del state_dict["optimizer"][name]


class Partly(Callback):
    """Takes the optimizer out of a checkpoint."""

    def preprocess_checkpoint(self, trainer, state_dict):
        del state_dict["optimizer"]


class Halving(torch_schedulers.LRScheduler):
    """A user's: halves the rate every `every` steps."""

    def __init__(self, optimizer, every):
        self.every = every
        super().__init__(optimizer)

    def get_lr(self):
        halves = self.last_epoch > 0 and self.last_epoch % self.every == 0
        return [group["lr"] * (0.5 if halves else 1.0) for group in self.optimizer.param_groups]


def cosine(length: int) -> Make:
    return lambda optimizer: torch_schedulers.CosineAnnealingLR(optimizer, length)


def exponential(gamma: float) -> Make:
    return lambda optimizer: torch_schedulers.ExponentialLR(optimizer, gamma)


def one_cycle(length: int, max_lr: float = 0.2) -> Make:
    return lambda optimizer: torch_schedulers.OneCycleLR(optimizer, max_lr, length)


def halving(every: int) -> Make:
    return lambda optimizer: Halving(optimizer, every)


def in_turn(length: int, last: Any = torch_schedulers.CosineAnnealingLR) -> Make:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        warm_up = torch_schedulers.LinearLR(optimizer, 0.1, total_iters=3)
        members = [warm_up, last(optimizer, length)]
        return torch_schedulers.SequentialLR(optimizer, members, milestones=[3])

    return make


def chained(gamma: float) -> Make:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        warm_up = torch_schedulers.LinearLR(optimizer, 0.1, total_iters=3)
        return torch_schedulers.ChainedScheduler([warm_up, exponential(gamma)(optimizer)])

    return make


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture
def run(trainer_of, tmp_path):
    """A function that trains to a step, in a folder, and returns what it was trained with."""

    def train(
        name: str, schedulers: Any, max_steps: int, *callbacks: Any, path: Any = ...
    ) -> Rates:
        rates = Rates()
        trainer_of(
            rates,
            *callbacks,
            model_dir=tmp_path / name,
            schedulers=schedulers,
            optimizer=momentum,
            max_steps=max_steps,
            checkpoint=Checkpoint(steps=5),
        ).fit(BATCHES, ckpt_path=path)
        return rates

    return train


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (cosine(10), cosine(20), "T_max is 20 (checkpoint: 10)"),
        (exponential(0.9), exponential(0.5), "gamma is 0.5 (checkpoint: 0.9)"),
        (one_cycle(10), one_cycle(20), "total_steps is 20 (checkpoint: 10)"),
        (one_cycle(20), one_cycle(20, 0.3), "max_lr is 0.3 (checkpoint: 0.2)"),
        (in_turn(7), in_turn(17), "_schedulers[1].T_max is 17 (checkpoint: 7)"),
        (chained(0.9), chained(0.8), "_schedulers[1].gamma is 0.8 (checkpoint: 0.9)"),
    ],
)
def test_the_settings_given_now_hold_as_if_from_the_start(run, caplog, before, now, told) -> None:
    whole = run("whole", now, 20)
    run("run", before, 10)
    caplog.clear()
    resumed = run("run", now, 20)
    assert resumed.rates == whole.rates[10:]
    assert resumed.momenta == whole.momenta[10:]
    [warning] = warnings_in(caplog)
    assert warning.startswith("schedulers[0] (")
    assert told in warning


def test_the_settings_that_held_are_those_of_the_next_checkpoint(run, caplog) -> None:
    run("run", cosine(10), 10)
    run("run", cosine(20), 15)
    caplog.clear()
    run("run", cosine(20), 20)
    assert warnings_in(caplog) == []


def test_another_function_of_the_step_holds_from_the_next_step_on(run, caplog) -> None:
    def falling(length):
        return lambda optimizer: torch_schedulers.LambdaLR(optimizer, lambda n: 1 - n / length)

    whole = run("whole", falling(40), 20)
    run("run", falling(20), 10)
    caplog.clear()
    assert run("run", falling(40), 20).rates[1:] == whole.rates[11:]
    assert warnings_in(caplog) == []


def test_a_schedule_of_ours_goes_on_with_the_settings_given_now(run) -> None:
    whole = run("whole", lambda optimizer: LinearLR(optimizer, 0.1, 0.0, 20), 20)
    run("run", lambda optimizer: LinearLR(optimizer, 0.1, 0.0, 10), 10)
    resumed = run("run", lambda optimizer: LinearLR(optimizer, 0.1, 0.0, 20), 20)
    assert resumed.rates == whole.rates[10:]


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (lambda optimizer: LinearLR(optimizer, 0.05, 0.0, 20), "lr is 0.025 at step 10 "),
        (lambda optimizer: LinearLR(optimizer, 0.1, 0.0, 40), "lr is 0.075 at step 10 "),
    ],
)
def test_another_rate_of_a_schedule_of_ours_is_warned_about(run, caplog, now, told) -> None:
    run("run", lambda optimizer: LinearLR(optimizer, 0.1, 0.0, 20), 10)
    caplog.clear()
    run("run", now, 15)
    [warning] = warnings_in(caplog)
    assert warning.startswith("schedulers[0] (LinearLR): ")
    assert told in warning
    assert "checkpoint: 0.05" in warning
    caplog.clear()
    run("run", now, 20)
    assert warnings_in(caplog) == []


def test_a_rate_that_differs_by_rounding_is_the_same(run, caplog) -> None:
    class Factored(ConstantLR):
        def value(self, step):
            return super().value(step) * (1 + 1e-9)

    run("run", lambda optimizer: ConstantLR(optimizer, 0.1), 10)
    caplog.clear()
    Factored.__name__ = "ConstantLR"
    run("run", lambda optimizer: Factored(optimizer, 0.1), 15)
    assert warnings_in(caplog) == []


def test_only_the_schedule_that_has_changed_is_named(trainer_of, tmp_path, caplog) -> None:
    def train(end: float, steps: int) -> None:
        def groups(model: Any) -> torch.optim.Optimizer:
            first, *rest = model.parameters()
            tagged = [{"params": [first], "tags": ["a"]}, {"params": rest, "tags": ["b"]}]
            return torch.optim.SGD(tagged, lr=0.1)

        def schedule(tag: str, end: float) -> Any:
            ends = {"initial_learning_rate": 0.1, "end_learning_rate": end, "total_iters": 10}
            return lambda _: LinearLR(param_group_tags=tag, **ends)

        trainer = trainer_of(
            optimizer=groups,
            schedulers=[schedule("a", 0.01), schedule("b", end)],
            model_dir=tmp_path / "run",
            checkpoint=Checkpoint(steps=4),
            max_steps=steps,
        )
        trainer.fit(tiny_batches(8))
        trainer.close()

    train(0.01, 4)
    caplog.clear()
    train(0.05, 8)
    [warning] = [one for one in caplog.messages if "checkpoint: " in one]
    assert "schedulers[1]" in warning
    assert "schedulers[0]" not in warning


def test_a_validation_does_not_warn_about_another_rate(trainer_of, tmp_path, caplog) -> None:
    def trainer(rate, **settings):
        return trainer_of(
            optimizer=momentum,
            schedulers=lambda optimizer: ConstantLR(optimizer, rate),
            checkpoint=Checkpoint(steps=2),
            **settings,
        )

    trainer(0.1, max_steps=2).fit(BATCHES)
    caplog.clear()
    path = tmp_path / "run" / "checkpoint_2"
    other = trainer(0.2)
    other.validate(BATCHES[:1], path)
    assert warnings_in(caplog) == []


def test_only_a_restored_optimizer_is_compared(run, caplog, tmp_path) -> None:
    run("run", lambda optimizer: LinearLR(optimizer, 0.1, 0.0, 20), 10)
    caplog.clear()
    path = tmp_path / "run" / "checkpoint_10"
    run("other", lambda optimizer: LinearLR(optimizer, 0.1, 0.0, 20), 12, Partly(), path=path)
    assert warnings_in(caplog) == []


@pytest.mark.parametrize(
    "schedulers",
    [
        lambda optimizer: LinearLR(optimizer, 0.1, 0.0, 20),
        lambda optimizer: ConstantLR(optimizer, 0.1),
        cosine(20),
        exponential(0.9),
        one_cycle(20),
        in_turn(17),
        chained(0.9),
        halving(3),
        lambda optimizer: torch_schedulers.LambdaLR(optimizer, lambda n: 0.9**n),
        lambda optimizer: torch_schedulers.MultiplicativeLR(optimizer, lambda n: 0.9),
        lambda optimizer: torch_schedulers.MultiStepLR(optimizer, [3, 12, 12]),
        lambda optimizer: torch_schedulers.StepLR(optimizer, 4),
        lambda optimizer: torch_schedulers.PolynomialLR(optimizer, 20),
        lambda optimizer: torch_schedulers.CosineAnnealingWarmRestarts(optimizer, 4, 2),
        lambda optimizer: torch_schedulers.CyclicLR(optimizer, 0.01, 0.1, 3),
        lambda optimizer: SWALR(optimizer, 0.05, anneal_epochs=15),
        [cosine(20), lambda optimizer: torch_schedulers.LambdaLR(optimizer, lambda n: 1.0)],
    ],
)
@pytest.mark.slow_cases(every=4)
def test_a_schedule_that_is_not_changed_goes_on_exactly_and_silently(
    run, caplog, schedulers
) -> None:
    whole = run("whole", schedulers, 20)
    run("run", schedulers, 10)
    caplog.clear()
    resumed = run("run", schedulers, 20)
    assert resumed.rates == whole.rates[10:]
    assert resumed.momenta == whole.momenta[10:]
    assert warnings_in(caplog) == []


def test_a_class_derived_from_torchs_takes_the_settings_of_the_checkpoint(run, caplog) -> None:
    whole = run("whole", halving(3), 20)
    run("run", halving(3), 10)
    caplog.clear()
    assert run("run", halving(5), 20).rates == whole.rates[10:]
    [warning] = warnings_in(caplog)
    assert "every is 5 (checkpoint: 3)" in warning


def test_the_settings_of_an_older_checkpoint_are_found_in_its_state(run, caplog) -> None:
    whole = run("whole", cosine(20), 20)
    run("run", cosine(10), 10)
    caplog.clear()
    assert run("run", cosine(20), 20, Older()).rates == whole.rates[10:]
    [warning] = warnings_in(caplog)
    assert "T_max is 20 (checkpoint: 10)" in warning


def test_an_older_checkpoint_with_the_same_settings_is_resumed_silently(run, caplog) -> None:
    whole = run("whole", one_cycle(20), 20)
    run("run", one_cycle(20), 10)
    caplog.clear()
    assert run("run", one_cycle(20), 20, Older()).rates == whole.rates[10:]
    assert warnings_in(caplog) == []


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (exponential(0.9), cosine(20), r"schedulers\[0\] is CosineAnnealingLR, .* ExponentialLR"),
        (cosine(20), lambda optimizer: LinearLR(optimizer, 0.1, 0.0, 20), "LinearLR"),
        (in_turn(20), in_turn(20, torch_schedulers.StepLR), r"SequentialLR\(LinearLR, StepLR\)"),
        (cosine(20), None, "the checkpoint has 1, but this run has 0"),
        (one_cycle(20), one_cycle(5), "ends before step 10 "),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(run, before, now, message) -> None:
    run("run", before, 10)
    with pytest.raises(CheckpointMismatch, match=message) as refused:
        run("run", now, 20)
    if "ends before" not in message:
        for remedy in ("model_dir", "ckpt_path=None", "null", "LoadCheckpointStates('model')"):
            assert remedy in str(refused.value)


# ---- what is no scheduler, or another optimizer's


@pytest.mark.parametrize("kind", [torch_schedulers.StepLR, LinearLR])
def test_a_scheduler_class_is_refused_by_the_constructor(trainer_of, kind) -> None:
    name = kind.__name__
    with pytest.raises(ConfigError, match=rf"schedulers\[1\].* {name}\..*: {name}\(optimizer"):
        trainer_of(schedulers=[exponential(0.9), kind])


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (lambda optimizer: None, "returned None"),
        (lambda optimizer: torch_schedulers.StepLR, "returned <class .*StepLR"),
        (lambda optimizer: optimizer, "returned SGD"),
        (lambda optimizer: [exponential(0.9)(optimizer)], r"returned \[<"),
    ],
)
def test_a_scheduler_factory_that_returns_no_scheduler_is_refused(
    trainer_of, returned, told
) -> None:
    with pytest.raises(ConfigError, match=rf"schedulers\[0\].*{told}"):
        trainer_of(schedulers=returned)


@pytest.mark.parametrize(
    "make", [exponential(0.9), chained(0.9), lambda optimizer: LinearLR(optimizer, 0.1, 0.0, 20)]
)
def test_a_scheduler_of_another_optimizer_is_refused(trainer_of, make) -> None:
    other = make(momentum(TinyModel()))
    with pytest.raises(
        ConfigError, match=r"schedulers\[0\]: \w+ was created for another optimizer"
    ):
        trainer_of(schedulers=lambda optimizer: other)


def test_schedulers_of_optimizers_that_share_their_groups_with_the_trainers_are_taken(
    trainer_of,
) -> None:
    class Several(torch.optim.SGD):
        def __init__(self, *inner: torch.optim.Optimizer) -> None:
            super().__init__([param for one in inner for param in one.param_groups[0]["params"]])
            self.inner = inner
            self.param_groups = [group for one in inner for group in one.param_groups]

        def step(self, closure=None):
            for one in self.inner:
                one.step()

    model = TinyModel()
    inner = [momentum(model.hidden), momentum(model.head)]
    schedulers = [torch_schedulers.StepLR(one, 1, gamma=0.5) for one in inner]
    trainer = trainer_of(model=model, optimizer=Several(*inner), schedulers=schedulers, max_steps=1)
    rates = [one.param_groups[0]["lr"] for one in inner]
    trainer.fit(BATCHES)
    assert [one.param_groups[0]["lr"] for one in inner] == [rate / 2 for rate in rates]


def test_a_scheduler_without_a_state_is_refused(trainer_of) -> None:
    class Stepping:
        def step(self):
            """Change nothing."""

    with pytest.raises(ConfigError, match="Stepping has no state_dict and no load_state_dict"):
        trainer_of(schedulers=Stepping())


@pytest.mark.parametrize(
    ("given", "named"),
    [("cosine", "schedulers[0] is 'cosine'"), ({"a": 1}, "schedulers['a'][0] is 1")],
)
def test_what_is_no_scheduler_is_named_whole(trainer_of, given, named) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(named)}"):
        trainer_of(schedulers=given)


def test_a_scheduler_of_the_optimizer_that_another_one_wraps_is_taken(trainer_of) -> None:
    class Wrapped(torch.optim.SGD):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, lr=0.1)
            self.param_groups = inner.param_groups

    model = TinyModel()
    inner = momentum(model)
    scheduler = exponential(0.5)(inner)
    trainer = trainer_of(model=model, optimizer=Wrapped(inner), schedulers=scheduler)
    assert trainer.schedulers == [scheduler]
