"""What the shipped callbacks of pytorch-accelerated do, in our spelling: PA-23 to PA-36."""

from __future__ import annotations

import math
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import StepLR

from modelzoo_trainer import Callback, Checkpoint, ConfigError, checkpointing
from modelzoo_trainer.callbacks.early_stopping import EarlyStopping
from modelzoo_trainer.callbacks.extra_checkpoint import ExtraCheckpoint
from modelzoo_trainer.callbacks.keep_n_checkpoints import KeepNCheckpoints
from modelzoo_trainer.callbacks.limit_batches import LimitBatches, LimitEvalSteps
from modelzoo_trainer.callbacks.model_ema import ModelEma, WeightAverage
from modelzoo_trainer.callbacks.save_best import SaveBest
from modelzoo_trainer.callbacks.step_based_evaluation import StepBasedEvaluation
from modelzoo_trainer.callbacks.wsd_checkpoint import WSDCheckpoint
from modelzoo_trainer.optim.warmup_stable_decay import WarmupStableDecay
from modelzoo_trainer.tools.report.run_history import RunHistory
from modelzoo_trainer.zoo.callbacks.move_modules import ConvertSyncBatchNorm, MoveModulesToDevice
from modelzoo_trainer.zoo.callbacks.sync_batch_norm import SharedBatchNorm
from tests.doubles import (
    Crash,
    History,
    Interrupted,
    Scale,
    TinyModel,
    constant_batches,
    differing,
    run_trainer,
    tiny_batches,
    weights_of,
)


class Score(Callback):
    """Logs `score` in each validation: the values in turn."""

    def __init__(self, *values: float) -> None:
        self.values = iter(values)

    def on_validate_end(self, trainer, model, loop):
        trainer.log_metrics(score=next(self.values))


def scored(trainer_of: Any, *callbacks: Any, values: Any, steps: int, **settings: Any) -> Any:
    """Return a trainer with these callbacks that validates after each step."""
    loop = {"num_steps": steps, "eval_frequency": 1}
    return trainer_of(Score(*values), *callbacks, **loop, **settings)


def names(folder: Any) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


SCORE = "validate_0/score"
VALUES = (3.0, 2.0, 5.0, 1.5, 4.0)


class Weights(Callback):
    """Keeps the weights after each step."""

    def __init__(self) -> None:
        self.at: dict[int, Any] = {}

    def on_step_boundary(self, trainer):
        self.at[trainer.global_step] = weights_of(trainer)


@pytest.mark.parametrize(("mode", "best"), [("min", 4), ("max", 3)])
def test_pa_23_the_best_is_saved_and_loaded_at_the_end(trainer_of, mode, best) -> None:
    weights = Weights()
    own = SaveBest(SCORE, mode, load_best=True)
    trainer = scored(trainer_of, weights, own, values=VALUES, steps=5)
    trainer.fit(tiny_batches(), tiny_batches(1))
    assert own.best == [{"name": f"best_{best}", "step": best, "value": VALUES[best - 1]}]
    state = checkpointing.load(trainer.model_dir / f"best_{best}")
    assert differing(state["model"], weights.at[best]) == []
    assert {"optimizer", "schedulers"} <= state.keys()
    assert differing(weights_of(trainer), weights.at[best]) == []
    assert differing(weights.at[best], weights.at[5]) != []


def test_pa_23_of_equal_values_the_first_is_the_best(trainer_of) -> None:
    own = SaveBest(SCORE, checkpoint_states=["model"])
    trainer = scored(trainer_of, own, values=(2.0, 2.0, math.nan), steps=3)
    trainer.fit(tiny_batches(), tiny_batches(1))
    assert [entry["step"] for entry in own.best] == [1]
    assert "optimizer" not in checkpointing.load(trainer.model_dir / "best_1")


@pytest.mark.parametrize(
    ("is_reset", "best", "kept"),
    [(True, 5, ["best_2", "best_5"]), (False, 2, ["best_2"])],
    ids=["reset", "goes on"],
)
def test_pa_23_a_second_run(trainer_of, is_reset, best, kept) -> None:
    own = SaveBest(SCORE, reset_on_fit=is_reset)
    trainer = scored(trainer_of, own, values=(3.0, 1.0, 5.0, 4.0, 2.0, 3.0), steps=3)
    trainer.fit(tiny_batches(), tiny_batches(1))
    trainer.fit(tiny_batches(), tiny_batches(1), ckpt_path=None)
    assert [entry["step"] for entry in own.best] == [best]
    assert [name for name in names(trainer.model_dir) if name.startswith("best")] == kept


def test_pa_23_a_run_that_resumes_is_no_second_run(trainer_of) -> None:
    def make(*callbacks: Any, values: Any) -> Any:
        own = SaveBest(SCORE, reset_on_fit=True)
        settings = {"steps": 3, "checkpoint": Checkpoint(steps=1)}
        return scored(trainer_of, own, *callbacks, values=values, **settings)

    with pytest.raises(Interrupted):
        make(Crash(2), values=(1, 2)).fit(tiny_batches(), tiny_batches(1))
    again = make(values=(2, 3))
    again.fit(tiny_batches(), tiny_batches(1))
    assert again.get_callback(SaveBest).best == [{"name": "best_1", "step": 1, "value": 1.0}]


@pytest.mark.parametrize(
    ("values", "settings", "end"),
    [
        ((3, 2, 2.5, 2.5, 1), {"patience": 1}, 3),
        ((3, 2, 2.5, 1, 2, 2, 0), {"patience": 2}, 6),
        ((3, 2.995, 2.0), {"patience": 1, "min_delta": 0.01}, 2),
        ((1, 2, 3, 2, 5), {"patience": 1, "mode": "max"}, 4),
        ((5, 4, 3, 2, 1), {"patience": 1}, 5),
    ],
    ids=["patience 1", "patience 2", "threshold", "greater", "improves"],
)
def test_pa_24_a_run_ends_when_nothing_improves(trainer_of, values, settings, end) -> None:
    own = EarlyStopping(SCORE, **settings)
    trainer = scored(trainer_of, own, values=values, steps=len(values))
    trainer.fit(tiny_batches(), tiny_batches(1))
    assert trainer.global_step == end
    assert ("EarlyStopping" in trainer.early_exit.reason) == (end < len(values))


@pytest.mark.parametrize(("is_reset", "end"), [(True, 4), (False, 3)], ids=["reset", "goes on"])
def test_pa_24_a_second_run(trainer_of, is_reset, end) -> None:
    own = EarlyStopping(SCORE, patience=1, reset_on_fit=is_reset)
    trainer = scored(trainer_of, own, values=(2, 1, 1.5, 1.2), steps=2)
    trainer.fit(tiny_batches(), tiny_batches(1))
    trainer.fit(tiny_batches(), tiny_batches(1), ckpt_path=None)
    assert trainer.global_step == end


def test_pa_24_it_keeps_nobody_from_the_last_value(trainer_of) -> None:
    for own in (
        [EarlyStopping(SCORE, patience=1, min_delta=1.0), SaveBest(SCORE)],
        [SaveBest(SCORE), EarlyStopping(SCORE, patience=1, min_delta=1.0)],
    ):
        trainer = scored(trainer_of, *own, values=(2, 1.5, 1), steps=3)
        trainer.fit(tiny_batches(), tiny_batches(1), ckpt_path=None)
        assert trainer.get_callback(SaveBest).best[0]["value"] == 1.5


def test_pa_25_the_average_follows_each_optimizer_step(trainer_of) -> None:
    ema, weights, history = ModelEma(0.9), Weights(), History()
    trainer = trainer_of(ema, weights, model=Scale, loggers=history, num_epochs=2, eval_frequency=2)
    trainer.fit(constant_batches(1, 2), constant_batches(4))
    expected = 1.0
    for step in (1, 2, 3, 4):
        expected = 0.9 * expected + 0.1 * weights.at[step]["weight"].item()
        if step == 2:
            at_two = expected
    with ema.swap():
        assert trainer.model.weight.item() == pytest.approx(expected)
    assert trainer.model.weight.item() == pytest.approx(1 - 0.6)
    assert history.of("ema/validate_0/loss") == [
        (2, pytest.approx(4 * at_two)),
        (4, pytest.approx(4 * expected)),
    ]
    assert history.of("validate_0/loss") == [(2, pytest.approx(2.8)), (4, pytest.approx(1.6))]


def test_pa_25_hooks_know_whose_validation_it_is_and_the_best_is_kept(trainer_of) -> None:
    class OfAverage(Callback):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def on_validate_end(self, trainer, model, loop):
            self.seen.append(trainer.name_scope_path)

    inner, best = OfAverage(), SaveBest("ema/validate_0/loss", "max")
    trainer = trainer_of(ModelEma(0.5), inner, best, model=Scale, max_steps=2, eval_frequency=1)
    trainer.fit(constant_batches(1, 1), constant_batches(4))
    assert inner.seen == ["validate_0/", "ema/validate_0/"] * 2
    [entry] = best.best
    assert (entry["step"], entry["value"]) == (1, pytest.approx(3.8))
    state = checkpointing.load(trainer.model_dir / entry["name"])
    assert state["callbacks"]["ModelEma"]["average"]["weight"].item() == pytest.approx(0.95)
    assert state["model"]["weight"].item() == pytest.approx(0.9)


def test_pa_25_its_weights_can_be_written_each_epoch(trainer_of) -> None:
    writer = ExtraCheckpoint(epochs=1, file_format="safetensors", averaged=True, folder="mean")
    trainer = trainer_of(ModelEma(0.5), writer, model=Scale, num_epochs=2)
    trainer.fit(constant_batches(1))
    found = [load_file(trainer.model_dir / "mean" / f"extra_{n}.safetensors") for n in (1, 2)]
    assert [one["weight"].item() for one in found] == pytest.approx([0.95, 0.875])


def test_pa_26_the_average_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.zero_()
    average = WeightAverage(model, 0.9)
    with torch.no_grad():
        for value in (*model.parameters(), model[1].running_mean, model[1].running_var):
            value.fill_(1)
    average.update()
    averages = average.state_dict()["average"]
    assert sorted(averages) == [
        "0.bias",
        "0.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.weight",
    ]
    assert all(torch.allclose(value, torch.tensor(0.1)) for value in averages.values())
    assert not any(value.requires_grad for value in averages.values())
    average.set()
    assert all(bool((value == 1).all()) for value in averages.values())


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 1)

    def forward(self, batch):
        return ((self.head(self.norm(batch[0])) - batch[1]) ** 2).mean()


class AsOneOfTwo(ConvertSyncBatchNorm):
    """Is told of a second process, which there is not."""

    def pre_setup(self, trainer):
        comm = trainer.backend.comm
        comm.data_shard = (0, 2)
        super().pre_setup(trainer)
        comm.data_shard = (0, 1)


@pytest.mark.parametrize(
    ("own", "norm"), [(ConvertSyncBatchNorm, nn.BatchNorm1d), (AsOneOfTwo, SharedBatchNorm)]
)
def test_pa_27_batch_norms_are_shared_among_several_processes_only(trainer_of, own, norm) -> None:
    trainer = trainer_of(own(), model=Normed)
    assert type(trainer.model.norm) is norm
    assert sorted(trainer.model.state_dict()) == sorted(Normed().state_dict())


class Count(Callback):
    """Counts batches of training and of each validation; keeps the modes of training."""

    def __init__(self) -> None:
        self.modes: list[bool] = []
        self.val: list[tuple[str, int]] = []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.modes.append(model.training)

    def on_validate_start(self, trainer, model, val_dataloader, loop):
        self.val.append((trainer.name_scope_path, 0))

    def on_validate_batch_start(self, trainer, model, batch, batch_idx):
        assert not model.training
        scope, num = self.val[-1]
        self.val[-1] = scope, num + 1


def test_pa_28_validations_every_so_many_steps(trainer_of, tmp_path) -> None:
    plain, history, count = History(), History(), Count()
    run_trainer(tmp_path / "plain", batches=tiny_batches(6), loggers=plain).close()
    trainer = trainer_of(StepBasedEvaluation(2), count, loggers=history)
    trainer.fit(tiny_batches(6), tiny_batches(3))
    intermediate = ("validate_0/intermediate/", 3)
    assert count.val == [intermediate, intermediate, ("validate_0/", 3)]
    assert [step for step, _ in history.of("validate_0/intermediate/loss")] == [2, 4]
    assert count.modes == [True] * 6
    assert history.of("loss") == plain.of("loss")


@pytest.mark.parametrize(("intermediate_only", "lengths"), [(True, [2, 2, 5]), (False, [2, 2, 2])])
def test_pa_29_fewer_batches_of_validations(trainer_of, intermediate_only, lengths) -> None:
    count = Count()
    own = [LimitEvalSteps(2, intermediate_only), StepBasedEvaluation(2), count]
    trainer = trainer_of(*own, max_steps=6)
    trainer.fit(tiny_batches(6), tiny_batches(5))
    assert [num for _, num in count.val] == lengths
    trainer.validate(tiny_batches(5))
    assert count.val[-1][1] == (5 if intermediate_only else 2)


def test_pa_30_fewer_batches_by_callback_environment_and_with(trainer_of, monkeypatch) -> None:
    def numbers(*callbacks: Any) -> tuple[int, int, int | None]:
        count = Count()
        trainer = trainer_of(*callbacks, count, num_epochs=2)
        trainer.fit(tiny_batches(5), tiny_batches(4), ckpt_path=None)
        return len(count.modes), count.val[-1][1], trainer.schedule.total_steps

    assert numbers() == (10, 4, 10)
    assert numbers(LimitBatches(3)) == (6, 3, 6)  # the length of the run knows of it
    with LimitBatches(2):
        assert numbers() == (4, 2, 4)
    assert numbers() == (10, 4, 10)
    monkeypatch.setenv("MODELZOO_LIMIT_BATCHES", "1")
    assert numbers() == numbers(LimitBatches(3)) == (2, 1, 2)
    monkeypatch.setenv("MODELZOO_LIMIT_BATCHES", "none")
    assert numbers() == (10, 4, 10)
    monkeypatch.setenv("MODELZOO_LIMIT_BATCHES", "some")
    with pytest.raises(ConfigError, match="MODELZOO_LIMIT_BATCHES: 'some' is not "):
        numbers()


def test_pa_31_other_modules_are_moved_when_a_run_begins(trainer_of) -> None:
    class Distill(Callback):
        def __init__(self) -> None:
            self.teacher = nn.Linear(2, 2)
            self.kinds: list[str] = []

        def look(self, trainer):
            own = (trainer.critic, self.teacher)
            self.kinds += [module.weight.device.type for module in own]

        def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
            self.look(trainer)

    distill = Distill()
    trainer = trainer_of(distill, MoveModulesToDevice(), device="meta")
    trainer.critic = nn.Linear(2, 2)
    distill.look(trainer)
    trainer.fit(tiny_batches(1))
    assert distill.kinds == ["cpu", "cpu", "meta", "meta"]


@pytest.mark.parametrize(
    ("checkpoint", "keep", "steps"),
    [
        (Checkpoint(epochs=1), None, [3, 6, 7]),
        (Checkpoint(epochs=2), None, [6, 7]),
        (Checkpoint(steps=2), None, [2, 4, 6, 7]),
        (Checkpoint(steps=100), None, [7]),
        (Checkpoint(steps=1), 2, [6, 7]),
        (None, None, []),
    ],
    ids=["epoch", "second epoch", "steps", "end", "pruned", "none"],
)
@pytest.mark.slow_cases(every=4)
def test_pa_32_states_are_saved_when_it_is_due(trainer_of, checkpoint, keep, steps) -> None:
    trainer = trainer_of(KeepNCheckpoints(keep), checkpoint=checkpoint, max_steps=7)
    trainer.fit(tiny_batches(3))
    found = [info.path.name for info in checkpointing.list_checkpoints(trainer.model_dir)]
    assert sorted(found) == [f"checkpoint_{step}" for step in steps]


@pytest.mark.slow
def test_pa_33_a_run_goes_on_exactly_from_any_of_its_saves(trainer_of, tmp_path) -> None:
    def make(folder: str) -> Any:
        return trainer_of(
            RunHistory(),
            model=lambda: TinyModel(dropout=0.3),
            optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
            schedulers=lambda optimizer: StepLR(optimizer, 2, 0.5),
            num_epochs=3,
            eval_frequency=2,
            checkpoint=Checkpoint(steps=1, epochs=1),
            model_dir=tmp_path / folder,
        )

    whole = make("whole")
    whole.fit(tiny_batches(3), tiny_batches(1))
    expected = whole.get_callback(RunHistory)
    for step in range(1, 10):
        folder = tmp_path / f"from {step}"
        shutil.copytree(tmp_path / "whole" / f"checkpoint_{step}", folder / f"checkpoint_{step}")
        again = make(folder.name)
        again.fit(tiny_batches(3), tiny_batches(1))
        assert again.global_step == 9
        assert differing(weights_of(again), weights_of(whole)) == []
        own = again.get_callback(RunHistory)
        assert own.current_epoch == expected.current_epoch == 4
        for name in ("loss", "validate_0/loss"):
            assert own.get_metric_values(name) == expected.get_metric_values(name)


def test_pa_34_saves_around_the_decay(trainer_of, tmp_path) -> None:
    def make(steps: int, folder: str) -> Any:
        return trainer_of(
            WSDCheckpoint(),
            schedulers=lambda opt: WarmupStableDecay(opt, 0.1, steps, decay_ratio=0.2),
            max_steps=steps,
            model_dir=tmp_path / folder,
        )

    short, longer, whole = make(20, "short"), make(30, "longer"), make(30, "whole")
    short.fit(tiny_batches())
    folder = tmp_path / "short" / "wsd"
    assert names(folder) == ["decayed_20.safetensors", "stable_16"]
    longer.fit(tiny_batches(), ckpt_path=folder / "stable_16")
    whole.fit(tiny_batches())
    assert differing(weights_of(longer), weights_of(whole)) == []
    longer.load_checkpoint(folder / "decayed_20.safetensors")
    assert differing(weights_of(longer), weights_of(short)) == []


def test_pa_34_a_scheduler_without_decays_is_refused(trainer_of) -> None:
    with pytest.raises(ValueError, match=r"get_checkpoint_steps.*StepLR"):
        trainer_of(WSDCheckpoint(), schedulers=lambda optimizer: StepLR(optimizer, 1))


def test_pa_35_the_history_can_be_asked_and_changed() -> None:
    history = RunHistory()
    with pytest.raises(ValueError, match="no metric 'loss'"):
        history.get_latest_metric("loss")
    assert history.get_metric_values("loss") == []
    assert history.get_metric_names() == set()  # asking made none
    history.update_metric("loss", 2.0)
    history.update_metric("loss", 1.0)
    history.set_metric_name_prefix("ema_model_")
    history.update_metric("loss", 3.0)
    assert history.get_metric_names() == {"loss", "ema_model_loss"}
    assert history.get_metric_values("loss") == [2.0, 1.0]
    assert history.get_latest_metric("loss") == 1.0
    history.delete_metric("loss")
    assert history.get_metric_names() == {"ema_model_loss"}
    with pytest.raises(KeyError, match="no metric 'loss'"):
        history.delete_metric("loss")
    history.reset()
    assert (history.get_metric_names(), history.current_epoch) == (set(), 1)
    assert history.metric_name_prefix == "ema_model_"


def test_pa_36_what_resets_the_history(trainer_of) -> None:
    own = RunHistory(reset_on_validate=True)
    trainer = trainer_of(own)
    trainer.fit(tiny_batches(2), tiny_batches(1))
    epochs = [own.current_epoch]
    own.reset_on_fit = False
    trainer.fit(tiny_batches(2), ckpt_path=None)
    epochs.append(own.current_epoch)
    own.reset_on_fit = True
    trainer.fit(tiny_batches(2), ckpt_path=None)
    epochs.append(own.current_epoch)
    assert epochs == [2, 3, 2]
    assert own.get_metric_steps("loss") == [5, 6]
    trainer.validate(tiny_batches(1))
    assert own.get_metric_names() == {"validate_0/loss"}
    assert own.current_epoch == 1
