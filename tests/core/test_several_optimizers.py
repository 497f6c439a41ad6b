"""Several optimizers: stepped by a `training_step`, saved, restored, logged; refused where not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from modelzoo_trainer import (
    Checkpoint,
    CheckpointMismatch,
    ConfigError,
    MixedPrecision,
    Trainer,
    TrainingLoop,
    checkpointing,
)
from modelzoo_trainer.callbacks import (
    CheckLoss,
    ComputeNorm,
    ComputeNormGNS,
    LoadCheckpointStates,
    LogInputSummaries,
    LogOptimizerParamGroup,
    ModelEma,
    NaNChecker,
    ScopedTrainFlags,
    SpikeDetection,
    TerminateOnNaN,
)
from modelzoo_trainer.optim.decay import LinearLR
from tests.doubles import History, Recorder, differing, run_trainer, weights_of

NAMES = ("critic", "maker")


class Pair(nn.Module):
    """Two layers that are trained against each other."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(3, 2)
        self.critic = nn.Linear(2, 1)

    def forward(self, batch: Tensor) -> Tensor:
        return self.critic(self.maker(batch)).mean()


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.05)


BOTH = {"maker": lambda model: adam(model.maker), "critic": lambda model: adam(model.critic)}


def critic_loss(model: Pair, batch: Tensor) -> Tensor:
    real, made = model.critic(batch[:, :2]), model.critic(model.maker(batch).detach())
    return ((real - 1) ** 2 + made**2).mean()


def maker_loss(model: Pair, batch: Tensor) -> Tensor:
    return ((model.critic(model.maker(batch)) - 1) ** 2).mean()


class Adversaries(Trainer):
    """Steps the critic with each batch, the maker with every `every`-th."""

    every = 1

    def training_step(self, batch: Tensor) -> Any:
        loss = critic_loss(self.model, batch)
        self.manual_backward(loss)
        self.optimizer_step("critic")
        if self.data.num_batches % self.every == 0:
            loss = maker_loss(self.model, batch)
            self.manual_backward(loss)
            self.optimizer_step("maker")
        return loss


def batches(num: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 3, generator=generator) for _ in range(num)]


def make(folder: Path, *callbacks: Any, kind: type[Trainer] = Adversaries, **settings: Any) -> Any:
    loop = {key: settings.pop(key) for key in ("max_steps", "grad_accum_steps") if key in settings}
    arguments = {
        "device": "cpu",
        "model_dir": folder,
        "model": Pair,
        "optimizer": BOTH,
        "loop": TrainingLoop(**{"max_steps": 6, **loop}),
        "callbacks": callbacks,
        "seed": 0,
    }
    return kind(**{**arguments, **settings})


def run(folder: Path, *callbacks: Any, data: Any = None, **settings: Any) -> Any:
    with make(folder, *callbacks, **settings) as trainer:
        trainer.fit(batches() if data is None else data)
    return trainer


def by_hand(num: int, every: int = 1, step_size: int | None = None) -> dict[str, Tensor]:
    """Return the weights of a plain loop."""
    torch.manual_seed(0)
    model = Pair()
    critic, maker = adam(model.critic), adam(model.maker)
    schedule = None if step_size is None else StepLR(maker, step_size)
    for idx, batch in enumerate(batches()[:num], 1):
        model.zero_grad()
        critic_loss(model, batch).backward()
        critic.step()
        if idx % every == 0:
            model.zero_grad()
            maker_loss(model, batch).backward()
            maker.step()
            if schedule is not None:
                schedule.step()
    return model.state_dict()


# ---- what is computed


@pytest.mark.parametrize("every", [1, 3])
def test_the_weights_are_those_of_a_plain_loop(tmp_path, every) -> None:
    kind = type("Rarely", (Adversaries,), {"every": every})
    assert differing(weights_of(run(tmp_path, kind=kind)), by_hand(6, every)) == []


def test_a_schedule_is_stepped_after_its_own_optimizer(tmp_path) -> None:
    kind = type("Rarely", (Adversaries,), {"every": 2})
    schedulers = {"maker": lambda optimizer: StepLR(optimizer, 2)}
    trainer = run(tmp_path, kind=kind, schedulers=schedulers)
    assert trainer.schedulers[0].last_epoch == 3
    assert differing(weights_of(trainer), by_hand(6, 2, step_size=2)) == []


@pytest.mark.parametrize(
    "given",
    [
        BOTH,
        lambda model: {name: make_one(model) for name, make_one in BOTH.items()},
        "instances",
    ],
)
def test_optimizers_are_given_as_callables_instances_or_all_at_once(tmp_path, given) -> None:
    torch.manual_seed(0)
    model = Pair()
    if given == "instances":
        given = {name: make_one(model) for name, make_one in BOTH.items()}
    trainer = run(tmp_path, model=model, optimizer=given)
    assert sorted(trainer.optimizers) == ["critic", "maker"]
    assert differing(weights_of(trainer), by_hand(6)) == []


def test_gradients_are_clipped_for_each_optimizer_by_itself(tmp_path) -> None:
    norms = {}

    class Looks(Adversaries):
        def optimizer_step(self, name=None):
            super().optimizer_step(name)
            params = self.optimizers[name].param_groups[0]["params"]
            norms[name] = float(torch.cat([param.grad.flatten() for param in params]).norm())

    precision = MixedPrecision(enabled=False, max_gradient_norm=1e-3)
    run(tmp_path, kind=Looks, precision=precision, max_steps=1)
    assert norms == {name: pytest.approx(1e-3, rel=1e-3) for name in NAMES}


def test_a_half_type_is_used_in_the_forward_pass_and_not_in_steps(tmp_path) -> None:
    seen = []

    class Looks(Adversaries):
        def training_step(self, batch):
            seen.append(self.model.maker(batch).dtype)
            return super().training_step(batch)

        def optimizer_step(self, name=None):
            super().optimizer_step(name)
            seen.append(torch.is_autocast_enabled("cpu"))

    trainer = run(tmp_path, kind=Looks, precision=MixedPrecision(), max_steps=2)
    assert seen == [torch.bfloat16, True, True] * 2  # around it, as it was
    assert not torch.is_autocast_enabled("cpu")
    torch.manual_seed(0)
    model = Pair()
    critic, maker = adam(model.critic), adam(model.maker)
    for batch in batches()[:2]:
        for loss, one in ((critic_loss, critic), (maker_loss, maker)):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                found = loss(model, batch)
            found.backward()
            one.step()  # a kept copy of the old weights would give another loss next time
    assert differing(weights_of(trainer), model.state_dict()) == []


def test_the_steps_of_an_optimizer_are_taken_outside_of_autocast(tmp_path) -> None:
    seen = []

    class Looks(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().step(closure)

    optimizers = {
        name: lambda model, n=name: Looks(getattr(model, n).parameters()) for name in BOTH
    }
    run(tmp_path, optimizer=optimizers, precision=MixedPrecision(), max_steps=2)
    assert seen == [False] * 4


def test_a_loss_scale_changes_once_after_all_steps_of_a_batch(tmp_path) -> None:
    scales: list[Tensor] = []

    class Looks(Adversaries):
        def optimizer_step(self, name=None):
            super().optimizer_step(name)
            scales.append(self.precision.scaler._scale.clone())

    precision = MixedPrecision(
        fp16_type="float16",
        loss_scaling_factor="dynamic",
        initial_loss_scale=8.0,
        steps_per_increase=1,
    )
    history = History()
    with make(
        tmp_path, kind=Looks, device="fake", precision=precision, max_steps=3, loggers=history
    ) as trainer:
        trainer.fit(batches())
    assert [float(scale) for scale in scales] == [8.0, 8.0, 16.0, 16.0, 32.0, 32.0]
    assert [value for _, value in history.of("loss_scale")] == [16.0, 32.0, 64.0]


# ---- checkpoints


def schedulers() -> dict[str, Any]:
    return {
        "maker": [lambda optimizer: StepLR(optimizer, 2)],
        "critic": lambda optimizer: LinearLR(optimizer, 0.05, 0.0, 9),
    }


def test_all_states_are_resumed_exactly(tmp_path) -> None:
    settings = {"checkpoint": Checkpoint(steps=3)}
    whole = run(tmp_path / "whole", schedulers=schedulers(), **settings)
    run(tmp_path / "run", max_steps=3, schedulers=schedulers(), **settings)
    reordered = {name: BOTH[name] for name in reversed(BOTH)}
    resumed = run(tmp_path / "run", schedulers=schedulers(), optimizer=reordered, **settings)
    assert differing(weights_of(resumed), weights_of(whole)) == []
    for name in NAMES:
        first, second = (one.optimizers[name].state_dict() for one in (resumed, whole))
        assert first["param_groups"] == second["param_groups"]
        for key, state in second["state"].items():
            assert all(torch.equal(state[what], first["state"][key][what]) for what in state)


def test_a_checkpoint_has_the_states_by_name_once(tmp_path) -> None:
    run(tmp_path, checkpoint=Checkpoint(steps=6))
    state = checkpointing.load(tmp_path / "checkpoint_6")
    assert sorted(state["optimizers"]) == ["critic", "maker"]
    assert state["optimizers"]["critic"]["kind"] == "Adam"
    assert state["optimizers"]["maker"]["names"] == [["maker.weight", "maker.bias"]]
    assert {"optimizer", "attributes"}.isdisjoint(state)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {**BOTH, "third": lambda model: adam(model)},
            "critic, maker, .* critic, maker, third",
        ),
        ({"a": BOTH["maker"], "critic": BOTH["critic"]}, "critic, maker, .* has a, critic"),
        ({**BOTH, "critic": lambda m: torch.optim.SGD(m.critic.parameters())}, "Adam.*SGD"),
        (
            {"maker": BOTH["critic"], "critic": BOTH["maker"]},
            r"optimizers\['\w+'\].param_groups\[0",
        ),
    ],
)
def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path, other, words) -> None:
    run(tmp_path, checkpoint=Checkpoint(steps=6))
    with pytest.raises(CheckpointMismatch, match=words):
        run(tmp_path, optimizer=other, max_steps=8)


def test_one_and_several_optimizers_refuse_each_others_checkpoints(tmp_path) -> None:
    alone = {"kind": Trainer, "optimizer": adam, "checkpoint": Checkpoint(steps=6)}
    run(tmp_path / "one", **alone)
    with pytest.raises(CheckpointMismatch, match=r"has one optimizer, .* several"):
        run(tmp_path / "one", max_steps=8)
    run(tmp_path / "both", checkpoint=Checkpoint(steps=6))
    with pytest.raises(CheckpointMismatch, match=r"critic, maker, .* one"):
        run(tmp_path / "both", **alone, max_steps=8)
    only = LoadCheckpointStates("model")
    path = tmp_path / "both" / "checkpoint_6"
    with make(tmp_path / "new", only, **{**alone, "max_steps": 1}) as trainer:
        trainer.fit(batches(), ckpt_path=path)
    assert trainer.global_step == 1


def test_a_second_fit_continues_with_all_states(tmp_path) -> None:
    with make(tmp_path, loop=TrainingLoop(num_steps=3)) as trainer:
        trainer.fit(batches()[:3])
        trainer.fit(batches()[3:6])
    assert differing(weights_of(trainer), by_hand(6)) == []


# ---- what callbacks see


def test_the_hooks_of_a_step_come_once_and_those_of_optimizers_for_each(tmp_path) -> None:
    seen = []

    def note(name: str, passed: tuple[Any, ...]) -> None:
        if "optimizer" in name:
            optimizer = passed[2]
            seen.append(f"{name} {next(n for n in NAMES if names[n] is optimizer)}")
        elif name in ("on_train_step_start", "on_before_backward", "on_train_step_end"):
            seen.append(name)

    with make(tmp_path, Recorder(note), max_steps=1) as trainer:
        names = trainer.optimizers
        trainer.fit(batches())
    assert seen == [
        "on_train_step_start",
        "on_before_backward",
        "on_before_optimizer_step critic",
        "on_after_optimizer_step critic",
        "on_before_backward",
        "on_before_optimizer_step maker",
        "on_after_optimizer_step maker",
        "on_train_step_end",
    ]


def test_rates_and_norms_are_logged_under_the_optimizers_names(tmp_path) -> None:
    history = History()
    run(tmp_path, LogOptimizerParamGroup("lr"), ComputeNorm(), loggers=history, max_steps=2)
    assert sorted(history.lines[-1][1]) == [
        "loss",
        "lr/critic/0",
        "lr/maker/0",
        *(f"model_wise_grad_norm/{name}" for name in NAMES),
        *(f"model_wise_params_norm/{name}" for name in NAMES),
    ]
    assert history.of("lr/critic/0") == [(1, 0.05), (2, 0.05)]


def test_norms_are_those_of_the_optimizers_own_parameters(tmp_path) -> None:
    history = History()
    run(tmp_path, ComputeNorm(), loggers=history, max_steps=1)
    torch.manual_seed(0)
    model = Pair()
    critic_loss(model, batches()[0]).backward()
    found = {name: history.of(f"model_wise_grad_norm/{name}")[0][1] for name in NAMES}
    expected = math.hypot(*(float(param.grad.norm()) for param in model.critic.parameters()))
    assert found["critic"] == pytest.approx(expected)
    assert found["maker"] != pytest.approx(expected)


def test_of_several_steps_with_a_batch_the_first_is_logged(tmp_path) -> None:
    class Twice(Adversaries):
        def training_step(self, batch):
            self.manual_backward(critic_loss(self.model, batch))
            self.optimizer_step("critic")
            self.optimizer_zero_grad("critic")
            return super().training_step(batch)

    history = History()
    callbacks = LogOptimizerParamGroup("lr"), ComputeNorm()
    trainer = run(tmp_path, *callbacks, kind=Twice, loggers=history, max_steps=2)
    assert [step for step, _ in history.of("model_wise_grad_norm/critic")] == [1, 2]
    counts = {
        name: one.state_dict()["state"][0]["step"] for name, one in trainer.optimizers.items()
    }
    assert counts == {"critic": 4, "maker": 2}


def test_an_average_of_the_weights_takes_each_batch_in_once(tmp_path) -> None:
    ema = ModelEma(decay=0.5, validate=False)
    weights = []

    class Looks(Recorder):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            weights.append(model.critic.weight.detach().clone())

    with make(tmp_path, ema, Looks(), max_steps=3) as trainer:
        average = trainer.model.critic.weight.detach().clone()
        trainer.fit(batches())
    for value in weights:
        average = 0.5 * average + 0.5 * value
    with ema.swap():
        assert torch.allclose(trainer.model.critic.weight, average)


def test_a_loss_that_is_not_returned_is_checked_too(tmp_path) -> None:
    class Bad(Adversaries):
        def training_step(self, batch):
            self.manual_backward(critic_loss(self.model, batch) * math.nan)
            self.optimizer_step("critic")
            return maker_loss(Pair(), batch)

    with pytest.raises(FloatingPointError, match="loss is nan at global_step 1"):
        run(tmp_path, kind=Bad)


# ---- refused before the first step


class NeverSteps(Adversaries):
    def training_step(self, batch):
        pytest.fail("a step was taken")


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (lambda: SpikeDetection(), "SpikeDetection requires one optimizer"),
        (lambda: TerminateOnNaN(), "TerminateOnNaN requires one optimizer"),
        (lambda: NaNChecker(), "NaNChecker requires one optimizer"),
        (lambda: ComputeNormGNS("Linear"), "ComputeNormGNS requires one optimizer"),
        (lambda: LogInputSummaries(), "LogInputSummaries requires one optimizer"),
        (lambda: CheckLoss("skip"), r"CheckLoss.*several"),
        (
            lambda: ScopedTrainFlags(**{"csx.performance.micro_batch_size": 2}),
            "micro_batch_size is 2",
        ),
    ],
)
def test_callbacks_that_need_one_optimizer_are_refused(tmp_path, callback, words) -> None:
    with pytest.raises(ConfigError, match=words):
        run(tmp_path, callback(), kind=NeverSteps)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": Trainer}, r"critic.*Subclass Trainer and override training_step"),
        ({"grad_accum_steps": 2}, "grad_accum_steps is 2"),
        ({"sparsity": 0.5}, "sparsity"),
        ({"schedulers": lambda optimizer: StepLR(optimizer, 2)}, "dict with these names"),
        ({"schedulers": {"makr": None}}, "'makr'.*Did you mean 'maker'"),
        ({"schedulers": {"maker": StepLR}}, r"schedulers\['maker'\]\[0\] is the class StepLR"),
        ({"optimizer": {"maker": BOTH["maker"]}}, "A dict of optimizers .* has 1"),
        ({"optimizer": {}}, "A dict of optimizers .* has 0"),
        ({"optimizer": {**BOTH, "the third": adam}}, "'the third'"),
        ({"optimizer": {**BOTH, 3: adam}}, "name 3"),
        ({"optimizer": {**BOTH, "third": None}}, "optimizer got None"),
        ({"optimizer": {**BOTH, "third": torch.optim.Adam}}, "the class Adam"),
        ({"optimizer": {**BOTH, "third": lambda model: 3}}, r"optimizers\['third'\].*returned 3"),
        (
            {"optimizer": {**BOTH, "third": lambda model: adam(Pair())}},
            r"optimizers\['third'\]: none",
        ),
        (
            {"optimizer": {**BOTH, "third": adam(Pair())}, "model": Pair},
            "optimizer is an instance, but model is a function",
        ),
    ],
)
def test_what_does_not_work_with_several_is_refused(tmp_path, settings, words) -> None:
    with pytest.raises(ConfigError, match=words):
        run(tmp_path, **{"kind": NeverSteps, **settings})


def test_a_mapping_of_schedulers_needs_several_optimizers(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"dict \('optimizer'\).*has one"):
        run_trainer(tmp_path, schedulers={"optimizer": lambda optimizer: StepLR(optimizer, 2)})


# ---- refused within a step


def returning(value: Any) -> type[Trainer]:
    return type("Returns", (Adversaries,), {"training_step": lambda self, batch: value})


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (None, "None"),
        ({}, "empty dict"),
        ({"loss": 3.0, "x": 1}, "dict with 'loss': float, 'x': int"),
        ({"loss": torch.ones(2)}, r"'loss': Tensor of shape \(2,\)"),
        (torch.ones(3), r"Tensor of shape \(3,\)"),
    ],
)
def test_a_step_returns_the_loss_to_log(tmp_path, value, described) -> None:
    with pytest.raises(ConfigError, match=rf"Returns\.training_step.*{described}.*as 'loss'"):
        run(tmp_path, kind=returning(value))


def test_gradients_that_nobody_uses_are_reported(tmp_path) -> None:
    class Accumulates(Adversaries):
        def training_step(self, batch):
            loss = maker_loss(self.model, batch)
            self.manual_backward(loss)
            return loss

    with pytest.raises(ConfigError, match=r"manual_backward, but not .*optimizer_step"):
        run(tmp_path, kind=Accumulates)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda trainer: trainer.optimizer_step("makr"), ConfigError, "Did you mean 'maker'"),
        (lambda trainer: trainer.optimizer_zero_grad("x"), ConfigError, "no optimizer 'x'"),
        (lambda trainer: trainer.optimizer_step(), AttributeError, r"\(maker, critic\)"),
        (lambda trainer: trainer.optimizer, AttributeError, r"trainer\.optimizers\[name\]"),
    ],
)
def test_an_optimizer_is_named(tmp_path, call, error, words) -> None:
    class Asks(Adversaries):
        def training_step(self, batch):
            call(self)

    with pytest.raises(error, match=words):
        run(tmp_path, kind=Asks)


def test_steps_are_for_training_step_and_for_several_optimizers(tmp_path) -> None:
    with make(tmp_path / "several") as trainer:
        with pytest.raises(ConfigError, match=r"manual_backward.*outside"):
            trainer.manual_backward(torch.ones((), requires_grad=True))
        with pytest.raises(ConfigError, match=r"optimizer_step.*outside"):
            trainer.optimizer_step("maker")
    with make(tmp_path / "one", kind=Trainer, optimizer=adam) as trainer:
        assert list(trainer.optimizers) == ["optimizer"]
        assert trainer.optimizers["optimizer"] is trainer.optimizer
        with pytest.raises(ConfigError, match="manual_backward requires several optimizers"):
            trainer.manual_backward(torch.ones(()))
        with pytest.raises(ConfigError, match=r"optimizer_step\(name\) requires several"):
            trainer.optimizer_step("maker")


def test_a_trainer_without_an_optimizer_has_none(tmp_path) -> None:
    with make(tmp_path, kind=Trainer, optimizer=None) as trainer:
        assert dict(trainer.optimizers) == {}
        assert not trainer.has_optimizer
