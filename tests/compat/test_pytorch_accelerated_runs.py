"""What a run of pytorch-accelerated does besides callbacks, in our spelling: PA-37 to PA-52."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from modelzoo_trainer import Callback, Checkpoint, ConfigError, MixedPrecision, checkpointing
from modelzoo_trainer.callbacks.load_checkpoint_states import LoadCheckpointStates
from modelzoo_trainer.callbacks.save_checkpoint_state import SaveCheckpointState
from modelzoo_trainer.optim.composed import SequentialLR
from modelzoo_trainer.optim.decay import CosineDecayLR, LinearLR
from modelzoo_trainer.optim.weight_decay import CosineDecayWD
from modelzoo_trainer.tools.report.run_history import RunHistory
from modelzoo_trainer.zoo.models.freezing import ModelFreezer
from tests.doubles import (
    History,
    Scale,
    TinyModel,
    constant_batches,
    differing,
    run_trainer,
    sgd,
    tiny_batches,
    weights_of,
)


def weight_of(trainer: Any) -> float:
    return trainer.model.weight.item()


def test_pa_37_losses_are_averaged_over_samples(trainer_of) -> None:
    history, own = History(), RunHistory()
    batches = [torch.full((4,), 1.0), torch.full((4,), 2.0), torch.full((1,), 12.0)]
    trainer = trainer_of(own, model=Scale, loggers=history, grad_accum_steps=3)
    trainer.validate(batches)
    trainer.fit(batches)
    mean = (4 * 1 + 4 * 2 + 12) / 9
    assert [value for _, value in history.of("validate_0/loss")] == [pytest.approx(mean)]
    assert [value for _, value in history.of("loss")] == [pytest.approx(mean)]
    assert own.get_latest_metric("train_loss_epoch") == pytest.approx(mean)
    assert weight_of(trainer) == pytest.approx(1 - 0.1 * mean)


@pytest.mark.parametrize(
    ("settings", "weight"),
    [
        ({}, 1 - 0.1 * 2 - 0.1 * 4),
        ({"schedulers": lambda optimizer: StepLR(optimizer, 1, 0.5)}, 1 - 0.1 * 2 - 0.05 * 4),
        ({"precision": MixedPrecision(enabled=False, max_gradient_value=0.5)}, 1 - 0.1 * 1.0),
    ],
    ids=["plain", "scheduled", "clipped by value"],
)
def test_pa_38_accumulation(trainer_of, settings, weight) -> None:
    history = History()
    trainer = trainer_of(model=Scale, loggers=history, grad_accum_steps=3, **settings)
    trainer.fit(constant_batches(1, 2, 3, 4))
    assert trainer.global_step == 2  # the second window is short
    assert weight_of(trainer) == pytest.approx(weight)


def test_pa_38_the_loss_is_reported_undivided(trainer_of) -> None:
    history = History()
    trainer = trainer_of(model=Scale, loggers=history, grad_accum_steps=4, optimizer=still)
    trainer.fit(constant_batches(1, 1, 1, 1, 1))
    assert history.of("loss") == [(1, 1.0), (2, 1.0)]


def still(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0)


class Tokens(nn.Module):
    """Its loss is a mean over the tokens that count: those above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        num = (batch > 0).sum()
        return {"loss": self.weight * batch.sum() / num, "num_items": num}


@pytest.mark.parametrize(
    ("model", "update"), [(Tokens, 8 / 4), (Scale, 8 / 8)], ids=["tokens", "samples"]
)
def test_pa_39_tokens_count_alike_wherever_they_are(trainer_of, model, update) -> None:
    history = History()
    trainer = trainer_of(model=model, loggers=history, grad_accum_steps=2)
    trainer.fit([torch.tensor([1.0, 2.0, 1.0, 0.0]), torch.tensor([4.0, 0.0, 0.0, 0.0])])
    assert weight_of(trainer) == pytest.approx(1 - 0.1 * update)
    assert history.of("loss") == [(1, pytest.approx(update))]


@pytest.mark.parametrize("num", [1, 3, 4, 5, 9])
def test_pa_40_a_run_has_as_many_steps_as_it_may(trainer_of, num) -> None:
    trainer = trainer_of(max_steps=num)
    trainer.fit(tiny_batches(4))
    assert trainer.global_step == trainer.schedule.total_steps == num


@pytest.mark.parametrize(("num", "steps"), [(3, 3), (9, 4)])
def test_pa_40_of_steps_and_epochs_the_sooner_counts(trainer_of, num, steps) -> None:
    trainer = trainer_of(max_steps=num, num_epochs=1)
    trainer.fit(tiny_batches(4))
    assert trainer.global_step == steps


class Rates(Callback):
    """Keeps the learning rate and the weight decay of each update."""

    def __init__(self) -> None:
        self.lrs: list[float] = []
        self.decays: list[float] = []

    def on_before_optimizer_step(self, trainer, model, optimizer):
        self.lrs.append(optimizer.param_groups[0]["lr"])
        self.decays.append(optimizer.param_groups[0]["weight_decay"])


def warmed_up_cosine(optimizer: torch.optim.Optimizer) -> SequentialLR:
    return SequentialLR(
        optimizer, [LinearLR(None, 0.01, 0.16, 20), CosineDecayLR(None, 0.16, 0.0, 80)]
    )


def test_pa_42_schedules_are_curves_without_jumps(trainer_of) -> None:
    rates = Rates()
    trainer = trainer_of(rates, schedulers=warmed_up_cosine, max_steps=101, grad_accum_steps=2)
    trainer.fit(tiny_batches(6))
    assert rates.lrs[0] == pytest.approx(0.01)
    assert max(rates.lrs) == rates.lrs[20] == pytest.approx(0.16)
    assert rates.lrs[100] == pytest.approx(0.0, abs=1e-9)
    assert rates.lrs[60] == pytest.approx(0.08)
    steepest = max(abs(after - before) for before, after in pairwise(rates.lrs))
    assert steepest <= max(0.15 / 20, math.pi / 2 * 0.16 / 80) * 1.001


def test_pa_42_a_schedule_goes_on_where_it_was_and_may_be_of_another_field(trainer_of) -> None:
    def make(*callbacks: Any, steps: int) -> Any:
        schedulers = [warmed_up_cosine, CosineDecayWD(None, 0.4, 0.0, 8)]
        return trainer_of(*callbacks, schedulers=schedulers, max_steps=steps)

    first, rest = Rates(), Rates()
    start = make(first, steps=3)
    start.fit(tiny_batches())
    path = start.save_checkpoint()
    make(rest, steps=8).fit(tiny_batches(), ckpt_path=path)
    assert first.lrs + rest.lrs == pytest.approx([0.01 + 0.0075 * step for step in range(8)])
    assert first.decays + rest.decays == pytest.approx(
        [0.2 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    )


def test_pa_44_dataloaders_are_the_users(trainer_of) -> None:
    class Seen(Callback):
        def __init__(self) -> None:
            self.batches: list[list[float]] = []

        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            self.batches.append(batch.tolist())

    def collated(samples: list[Any]) -> torch.Tensor:
        return torch.stack([sample for (sample,) in samples]) * 10

    data = TensorDataset(torch.arange(8.0))
    sampler = SubsetRandomSampler([1, 3, 5, 7, 2], generator=torch.Generator().manual_seed(1))
    loader = DataLoader(data, 2, sampler=sampler, drop_last=True, collate_fn=collated)
    seen = Seen()
    trainer_of(seen, model=Scale).fit(loader)
    assert [len(batch) for batch in seen.batches] == [2, 2]
    assert {value for batch in seen.batches for value in batch} < {10.0, 30.0, 50.0, 70.0, 20.0}
    again = Seen()
    trainer_of(again, model=Scale).fit(lambda: DataLoader(data, 3, collate_fn=collated))
    assert [len(batch) for batch in again.batches] == [3, 3, 2]


class Extra(Callback):
    """Puts a field of its own into checkpoints, and takes it back."""

    found: Any = None

    def on_save_checkpoint(self, trainer, state_dict):
        state_dict["labels"] = ["cat", "dog"]

    def on_load_checkpoint(self, trainer, state_dict):
        self.found = state_dict["labels"]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def halving(optimizer: torch.optim.Optimizer) -> StepLR:
    return StepLR(optimizer, 1, 0.5)


def test_pa_45_a_checkpoint_has_all_of_it(trainer_of, tmp_path) -> None:
    settings = {"optimizer": adam, "schedulers": halving, "max_steps": 2}
    first = run_trainer(tmp_path / "first", Extra(), **settings)
    path = first.save_checkpoint()
    extra = Extra()
    second = trainer_of(extra, seed=1, **settings)
    assert differing(weights_of(second), weights_of(first)) != []
    second.load_checkpoint(path)
    assert differing(weights_of(second), weights_of(first)) == []
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    states = [
        [state["exp_avg"] for state in trainer.optimizer.state.values()]
        for trainer in (first, second)
    ]
    assert all(map(torch.equal, *states))
    assert len(states[0]) == 4
    assert second.schedulers[0].last_epoch == 2
    assert extra.found == ["cat", "dog"]
    first.close()


def test_pa_45_parts_can_be_left_out_when_it_is_saved_or_loaded(trainer_of, tmp_path) -> None:
    settings = {"optimizer": adam, "schedulers": halving, "max_steps": 2}
    first = run_trainer(
        tmp_path / "first",
        SaveCheckpointState(1, "model"),
        checkpoint=Checkpoint(steps=2),
        **settings,
    )
    weights_only = [
        path for path in first.model_dir.iterdir() if path.name.startswith("model_checkpoint")
    ]
    assert [sorted(checkpointing.load(path)) for path in weights_only] == [["model"]]
    second = trainer_of(LoadCheckpointStates("model"), seed=1, **(settings | {"max_steps": 1}))
    second.fit(tiny_batches(), ckpt_path=first.model_dir / "checkpoint_2")
    assert second.global_step == 1  # it began at step 0, with a learning rate of 0.1
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    first.close()


def test_pa_45_without_an_optimizer_there_is_nothing_to_train(trainer_of, tmp_path) -> None:
    first = run_trainer(tmp_path / "first", max_steps=1)
    trainer = trainer_of(optimizer=None, seed=1)
    trainer.load_checkpoint(first.save_checkpoint())
    assert differing(weights_of(trainer), weights_of(first)) == []
    with pytest.raises(ValueError, match="optimizer"):
        trainer.fit(tiny_batches())
    first.close()


def test_pa_46_a_compiled_model_is_saved_under_its_own_names(trainer_of, tmp_path) -> None:
    model = torch.compile(TinyModel(), backend="eager")
    first = trainer_of(model=model, optimizer=sgd(model), model_dir=tmp_path / "first")
    path = first.save_checkpoint()
    assert sorted(checkpointing.load(path)["model"]) == sorted(TinyModel().state_dict())
    second = trainer_of(seed=1)
    second.load_checkpoint(path)
    assert torch.equal(second.model.head.weight, model.head.weight)


def test_pa_47_validation_data_may_be_small_but_not_empty(trainer_of) -> None:
    history = History()
    trainer = trainer_of(model=Scale, loggers=history)
    data = torch.tensor([1.0, 2.0, 6.0])
    trainer.validate(DataLoader(data, batch_size=8))
    assert history.of("validate_0/loss") == [(0, 3.0)]
    with pytest.raises(ConfigError, match="val_dataloader yields no batch"):
        trainer.validate(DataLoader(data, batch_size=8, drop_last=True))


def test_pa_48_gathering_in_one_process(trainer_of) -> None:
    backend = trainer_of().backend
    [only] = backend.gather_object(torch.arange(3))
    assert only.tolist() == [0, 1, 2]


def test_pa_49_the_first_process_alone(trainer_of) -> None:
    class Write(Callback):
        order = ()

        def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
            if trainer.backend.is_main:
                self.order += ("first",)
            trainer.backend.barrier("written")
            self.order += ("all",)

    write = Write()
    trainer_of(write).fit(tiny_batches(1))
    assert write.order == ("first", "all")


class Grouped(nn.Module):
    """Three layer groups, the second with a batch normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 1)

    def forward(self, batch):
        return ((self.head(torch.tanh(self.body(self.stem(batch[0])))) - batch[1]) ** 2).mean()


def trainable(model: nn.Module) -> list[str]:
    return [name for name, param in model.named_parameters() if param.requires_grad]


NORM = ["body.1.weight", "body.1.bias"]
HEAD = ["head.weight", "head.bias"]
STEM = ["stem.weight", "stem.bias"]


@pytest.mark.parametrize(
    ("freezes_norms", "arguments", "left"),
    [
        (False, {}, NORM + HEAD),
        (True, {}, HEAD),
        (True, {"set_modules_as_eval": True}, HEAD),
        (True, {"from_index": 1, "to_index": 1}, STEM + HEAD),
        (True, {"to_index": -1}, []),
    ],
)
def test_pa_50_freezing_by_groups(freezes_norms, arguments, left) -> None:
    model = Grouped()
    ModelFreezer(model, freezes_norms).freeze(**arguments)
    assert trainable(model) == left
    assert model.body[1].training != arguments.get("set_modules_as_eval", False)
    assert model.head.training


@pytest.mark.parametrize("is_training", [True, False])
def test_pa_50_unfreezing_returns_what_became_trainable(is_training) -> None:
    model = Grouped()
    freezer = ModelFreezer(model)
    freezer.freeze(set_modules_as_eval=True)
    thawed = freezer.unfreeze(0, 1, set_modules_as_training=is_training)
    assert {name: len(params) for name, params in thawed.items()} == {"stem": 2, "body": 2}
    assert trainable(model) == [name for name, _ in model.named_parameters()]
    assert model.stem.training == is_training


@pytest.mark.parametrize("is_training", [True, False])
def test_pa_50_groups_frozen_as_eval_stay_in_evaluation_mode_in_a_fit(
    trainer_of, is_training
) -> None:
    class Modes(Callback):
        def __init__(self):
            self.seen = []

        def on_train_step_end(self, trainer, model, outputs, batch):
            self.seen.append((model.stem.training, model.body[1].training, model.head.training))

    modes, model = Modes(), Grouped()
    freezer = ModelFreezer(model, freeze_batch_norms=True)
    freezer.freeze(1, 1, set_modules_as_eval=True)
    statistics = model.body[1].running_mean.clone()
    trainer = trainer_of(
        modes, model=model, optimizer=sgd(model), max_steps=2, num_epochs=None, eval_frequency=1
    )
    trainer.fit(tiny_batches(2), tiny_batches(1))
    assert modes.seen == [(True, False, True)] * 2
    assert torch.equal(model.body[1].running_mean, statistics)
    freezer.unfreeze(set_modules_as_training=is_training)
    trainer.loop.max_steps = 3
    trainer.fit(tiny_batches(2), ckpt_path=None)
    assert modes.seen[2] == (True, is_training, True)


def test_pa_50_frozen_groups_are_trained_when_they_thaw(trainer_of) -> None:
    class Thaw(Callback):
        def setup(self, trainer):
            self.freezer = ModelFreezer(trainer.model)
            self.freezer.freeze()

        def on_train_epoch_end(self, trainer, epoch):
            self.stem = trainer.model.stem.weight.detach().clone()
            self.freezer.unfreeze()

    thaw, model = Thaw(), Grouped()
    before = model.stem.weight.detach().clone()
    trainer = trainer_of(thaw, model=model, optimizer=sgd(model))
    trainer.fit(tiny_batches(2))
    assert torch.equal(thaw.stem, before)
    trainer.fit(tiny_batches(2), ckpt_path=None)
    assert not torch.equal(thaw.stem, before)


RUN = """\
trainer:
  init:
    device: cpu
    model: {name: fc_mnist, hidden_sizes: [4], input_size: 64}
    optimizer: {SGD: {lr: 0.1, momentum: 0.9}}
    loop: {num_epochs: 2, grad_accum_steps: 3}
  fit:
    train_dataloader: {data_processor: DigitsProcessor, batch_size: 32}
"""


def test_pa_52_what_a_run_was_told_is_fixed_and_can_be_written_down(tmp_path) -> None:
    from modelzoo_trainer.config.build import load_plans
    from modelzoo_trainer.config.provenance import describe_run
    from modelzoo_trainer.config.shipped import shipped_names

    file = tmp_path / "run.yaml"
    file.write_text(RUN, encoding="utf-8")
    [plan] = load_plans(file, shipped_names, changes=["init.loop.num_epochs=5"])
    with pytest.raises(FrozenInstanceError):
        plan.mode = "eval"
    assert plan.resolved["trainer"]["init"]["loop"] == {"num_epochs": 5, "grad_accum_steps": 3}
    file.write_text(describe_run(plan, ["run.py"]), encoding="utf-8")
    [again] = load_plans(file, shipped_names)
    assert again.resolved == plan.resolved
