"""What a subclass of the trainer trains besides: saved, restored, or reported."""

from __future__ import annotations

import copy
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop, checkpointing
from modelzoo_trainer.core.attribute_states import saved_parts
from modelzoo_trainer.errors import CheckpointMismatch, ConfigError
from tests.doubles import TinyModel, differing, sgd, tiny_batches, weights_of

BATCHES = tiny_batches(20)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.01)


class Gan(Trainer):
    """Trains a second model with an optimizer and a schedule of its own, before the first."""

    def __init__(self, model_dir: Path, max_steps: int, **settings: Any) -> None:
        super().__init__(
            **{
                "device": "cpu",
                "model": TinyModel,
                "optimizer": adam,
                "model_dir": model_dir,
                "loop": TrainingLoop(max_steps=max_steps),
                "checkpoint": Checkpoint(steps=5),
                "seed": 0,
                **settings,
            }
        )
        torch.manual_seed(1)
        self.make_others()

    def make_others(self) -> None:
        self.critic = TinyModel()
        self.critic_optimizer = adam(self.critic)
        self.critic_schedules = [StepLR(self.critic_optimizer, 3)]

    @property
    def second_optimizer(self) -> torch.optim.Optimizer:
        return self.critic_optimizer

    def training_step(self, batch):
        inputs, targets = batch
        with torch.no_grad():
            made = self.model(batch)[1]
        loss, _ = self.critic((inputs, targets - made))
        loss.backward()
        self.second_optimizer.step()
        self.second_optimizer.zero_grad()
        for schedule in getattr(self, "critic_schedules", ()):
            schedule.step()
        with torch.no_grad():
            targets = targets + 0.1 * self.critic(batch)[1]
        return super().training_step((inputs, targets))


class InModel(Gan):
    """Has the second optimizer within the model, deep inside."""

    def make_others(self) -> None:
        self.critic = TinyModel()
        self.model.head.optimizers = {"critic": adam(self.critic)}

    @property
    def second_optimizer(self) -> torch.optim.Optimizer:
        return self.model.head.optimizers["critic"]


class Hidden(Gan):
    """Has the second optimizer where nobody finds it."""

    def make_others(self) -> None:
        self.critic = TinyModel()
        optimizer = adam(self.critic)
        self.find = lambda: optimizer

    @property
    def second_optimizer(self) -> torch.optim.Optimizer:
        return self.find()


def run(kind: type[Gan], folder: Path, max_steps: int, **settings: Any) -> Gan:
    with kind(folder, max_steps, **settings) as trainer:
        trainer.fit(BATCHES)
    return trainer


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


# ---- saved and restored


@pytest.mark.parametrize("kind", [Gan, InModel])
def test_a_second_optimizer_is_resumed_exactly(tmp_path, caplog, kind) -> None:
    whole = run(kind, tmp_path / "whole", 10)
    run(kind, tmp_path / "run", 5)
    resumed = run(kind, tmp_path / "run", 10)
    assert differing(weights_of(resumed), weights_of(whole)) == []
    assert differing(resumed.critic.state_dict(), whole.critic.state_dict()) == []
    first, second = (one.second_optimizer.state_dict() for one in (resumed, whole))
    assert first["param_groups"] == second["param_groups"]
    assert torch.equal(first["state"][0]["exp_avg"], second["state"][0]["exp_avg"])
    assert warnings_in(caplog) == []


def test_what_is_saved_has_the_names_of_the_attributes(tmp_path) -> None:
    def attributes(kind: type[Gan]) -> dict[str, Any]:
        trainer = run(kind, tmp_path / kind.__name__, 1)
        return checkpointing.load(trainer.model_dir / "checkpoint_1")["attributes"]

    saved = attributes(Gan)
    assert {name: entry["kind"] for name, entry in saved.items()} == {
        "critic": "TinyModel",
        "critic_optimizer": "Adam",
        "critic_schedules.0": "StepLR",
    }
    assert list(attributes(InModel)) == ["critic", "model.head.optimizers.critic"]


def test_a_plain_trainer_saves_no_attributes(trainer_of) -> None:
    trainer = trainer_of(
        checkpoint=Checkpoint(steps=1),
        max_steps=1,
        schedulers=lambda optimizer: StepLR(optimizer, 3),
    )
    trainer.fit(BATCHES)
    assert "attributes" not in checkpointing.load(trainer.model_dir / "checkpoint_1")


def test_what_is_the_models_own_or_not_to_be_saved_is_not_saved(trainer_of) -> None:
    class Listening(Callback, nn.Module):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.layer = nn.Linear(2, 2)

    listening = Listening()
    trainer = trainer_of(listening)
    trainer.teacher = TinyModel().requires_grad_(False)
    trainer.unsaved_attributes = ["teacher"]
    trainer.wrapped = nn.ModuleDict({"inner": trainer.model})
    trainer.head = trainer.model.head
    trainer.listening = listening
    trainer.loss = nn.CrossEntropyLoss()
    trainer.same = trainer.optimizer
    assert saved_parts(trainer) == {}


class Averaging(Gan):
    """Averages its weights in a frozen copy, as a momentum teacher."""

    def make_others(self) -> None:
        self.average = copy.deepcopy(self.model).requires_grad_(False)

    def training_step(self, batch):
        outputs = Trainer.training_step(self, batch)
        for mean, param in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mean.data.lerp_(param.data, 0.1)
        return outputs


def test_a_frozen_average_is_resumed_exactly(tmp_path) -> None:
    whole = run(Averaging, tmp_path / "whole", 10)
    run(Averaging, tmp_path / "run", 5)
    resumed = run(Averaging, tmp_path / "run", 10)
    assert differing(resumed.average.state_dict(), whole.average.state_dict()) == []


class Packed(nn.Module):
    """Has a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def get_extra_state(self):
        return {"packed": torch.float32}

    def set_extra_state(self, state):
        """Take it."""


class Growing(nn.Module):
    """Has a buffer whose shape changes, as a metric has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))


@pytest.mark.parametrize("kind", [Packed, Growing])
def test_a_frozen_module_that_does_not_fit_a_checkpoint_stops_no_run(
    tmp_path, caplog, kind
) -> None:
    class Own(Gan):
        def make_others(self) -> None:
            self.other = kind()

        def training_step(self, batch):
            if kind is Growing:
                self.other.seen = torch.cat([self.other.seen, torch.ones(1)])
            return Trainer.training_step(self, batch)

    run(Own, tmp_path, 5)
    run(Own, tmp_path, 10)
    assert {"trainer.other" in line for line in warnings_in(caplog)} == {True}


def test_unsaved_attributes_are_names_of_attributes(tmp_path, caplog) -> None:
    class Text(Gan):
        unsaved_attributes = "critic"

    class Misspelt(Gan):
        unsaved_attributes = ("critik",)

    with pytest.raises(ConfigError, match=r".*\('critic',\)"):
        run(Text, tmp_path / "text", 1)
    run(Misspelt, tmp_path / "misspelt", 1)
    assert "unsaved_attributes contains 'critik'" in caplog.text


def test_what_is_not_saved_is_trained_all_the_same(tmp_path, caplog) -> None:
    class Unsaved(Gan):
        unsaved_attributes = ("critic", "critic_optimizer", "critic_schedules")

    run(Unsaved, tmp_path, 5)
    assert "attributes" not in checkpointing.load(tmp_path / "checkpoint_5")
    assert warnings_in(caplog) == []


def test_a_checkpoint_without_attributes_loads_with_a_warning(tmp_path, caplog) -> None:
    class Older(Callback):
        def preprocess_checkpoint(self, trainer, state_dict):
            del state_dict["attributes"]

    run(Gan, tmp_path, 5)
    assert run(Gan, tmp_path, 10, callbacks=[Older()]).global_step == 10
    assert [line.split(";")[0] for line in warnings_in(caplog)] == [
        "The checkpoint has no state of trainer.critic",
        "The checkpoint has no state of trainer.critic_optimizer",
        "The checkpoint has no state of trainer.critic_schedules.0",
    ]


def test_state_of_an_attribute_that_is_made_too_late_is_reported(tmp_path, caplog) -> None:
    run(InModel, tmp_path, 5)
    trainer = Gan(tmp_path, 10)
    del trainer.critic
    trainer.load_checkpoint(tmp_path / "checkpoint_5")
    trainer.close()
    assert "state of trainer.critic, but this trainer has no such" in caplog.text


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda gan: torch.optim.SGD(gan.critic.parameters(), lr=0.1), "SGD, .* a Adam"),
        (lambda gan: adam(nn.Linear(2, 2)), r"shape \(4, 3\), .*parameter \(2, 2\)"),
        (lambda gan: adam(gan.critic.hidden), "parameter group that doesn't match"),
    ],
)
def test_state_of_another_optimizer_is_refused(tmp_path, other, told) -> None:
    class Other(Gan):
        def make_others(self) -> None:
            super().make_others()
            del self.critic_schedules
            self.critic_optimizer = other(self)

    run(Gan, tmp_path, 5)
    with pytest.raises(CheckpointMismatch, match=rf"trainer\.critic_optimizer .*{told}"):
        run(Other, tmp_path, 10)


# ---- what cannot be found


def test_an_optimizer_that_nobody_saves_is_reported_once(tmp_path, caplog) -> None:
    with Hidden(tmp_path, 3) as trainer:
        trainer.fit(BATCHES)
        trainer.fit(BATCHES)
    [warning] = warnings_in(caplog)
    assert warning.startswith("Adam steps within training_step")
    assert "4 parameters" in warning


def test_an_optimizer_that_a_callback_saves_or_steps_elsewhere_is_not_reported(
    tmp_path, caplog
) -> None:
    class Probe(Callback):
        def __init__(self) -> None:
            self.probe = TinyModel()
            self.optimizer = adam(self.probe)

        def step(self) -> None:
            self.probe(BATCHES[0])[0].backward()
            self.optimizer.step()

    class CheckpointSaver(Probe):
        def on_after_forward(self, trainer, model, outputs, batch):
            self.step()

        def state_dict(self):
            return self.optimizer.state_dict()

        def load_state_dict(self, state_dict):
            self.optimizer.load_state_dict(state_dict)

    class AtBoundary(Probe):
        def on_step_boundary(self, trainer):
            self.step()

    run(Gan, tmp_path, 3, callbacks=[CheckpointSaver(), AtBoundary()])
    assert warnings_in(caplog) == []


class Outer(torch.optim.SGD):
    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, lr=0.1)
        self.inner = torch.optim.Adam(params, lr=0.1)

    def step(self, closure=None):
        self.inner.step()


class WithState(Outer):
    def state_dict(self):
        return self.inner.state_dict()


class WithSharedState(Outer):
    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params)
        self.state = self.inner.state


@pytest.mark.parametrize("kind", [WithState, WithSharedState])
def test_an_optimizer_inside_the_trainers_own_is_not_reported(trainer_of, caplog, kind) -> None:
    trainer_of(optimizer=lambda model: kind(list(model.parameters()))).fit(BATCHES)
    assert warnings_in(caplog) == []


def test_an_optimizer_inside_the_trainers_own_whose_state_is_lost_is_reported(
    trainer_of, caplog
) -> None:
    trainer_of(optimizer=lambda model: Outer(list(model.parameters()))).fit(BATCHES)
    [warning] = warnings_in(caplog)
    assert warning.startswith("Adam steps within Outer, but the state_dict of Outer does not")


def test_steps_are_watched_in_the_beginning_alone(trainer_of) -> None:
    from torch.optim import optimizer as torch_optimizer

    seen = []

    class Looking(Callback):
        def on_before_optimizer_step(self, trainer, model, optimizer):
            seen.append(len(torch_optimizer._global_optimizer_post_hooks))

    trainer = trainer_of(Looking(), max_steps=12)
    trainer.fit(BATCHES)
    assert seen == [1] * 10 + [0] * 2
    stopped = trainer_of(Looking(), max_steps=2, model_dir=trainer.model_dir / "second")
    stopped.fit(BATCHES)
    assert len(torch_optimizer._global_optimizer_post_hooks) == 0


def test_steps_are_watched_across_stages(trainer_of) -> None:
    from torch.optim import optimizer as torch_optimizer

    seen = []

    class Looking(Callback):
        def on_before_optimizer_step(self, trainer, model, optimizer):
            seen.append(len(torch_optimizer._global_optimizer_post_hooks))

        def on_validate_start(self, trainer, model, val_dataloader, loop):
            seen.append(len(torch_optimizer._global_optimizer_post_hooks) * 10)

    trainer_of(Looking(), max_steps=12, eval_frequency=4).fit(BATCHES, BATCHES[:1])
    assert seen == [1, 1, 1, 1, 0] * 2 + [1, 1, 0, 0, 0]


def test_a_fit_takes_the_hook_tables_that_are_there(trainer_of) -> None:
    trainer = trainer_of(max_steps=4, eval_frequency=2)
    tables = trainer.callbacks.log_hooks, trainer.callbacks.quiet_hooks
    trainer.fit(BATCHES, BATCHES[:1])
    after = trainer.callbacks.log_hooks, trainer.callbacks.quiet_hooks
    assert all(map(operator.is_, after, tables))


# ---- the trainer's own optimizer, beside others


def test_parameters_of_a_second_optimizer_are_not_missing(trainer_of, caplog) -> None:
    trainer = trainer_of(optimizer=lambda model: sgd(model.hidden), max_steps=1)
    trainer.head_optimizer = sgd(trainer.model.head)
    trainer.fit(BATCHES)
    assert warnings_in(caplog) == []


def test_an_optimizer_of_a_module_beside_the_model_is_taken(tmp_path, caplog) -> None:
    class Beside(Trainer):
        def __init__(self, **settings: Any) -> None:
            self.scale = nn.Linear(1, 1)
            super().__init__(optimizer=lambda model: sgd(self.scale), **settings)

        def compute_loss(self, outputs, batch):
            return self.scale(outputs["logits"]).square().mean()

    with Beside(model=TinyModel().requires_grad_(False), model_dir=tmp_path) as trainer:
        before = trainer.scale.weight.item()
        trainer.fit(BATCHES)
        assert trainer.scale.weight.item() != before
    assert warnings_in(caplog) == []
