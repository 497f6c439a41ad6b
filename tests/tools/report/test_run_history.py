"""The metrics of a run in memory: read, limited, reset and restored."""

import math
import sys

import pytest
import torch

from modelzoo_trainer import Callback, Checkpoint, ConfigError, TrainingLoop, checkpointing
from modelzoo_trainer.callbacks import EarlyStopping, SaveBest
from modelzoo_trainer.tools.report.run_history import RunHistory
from tests.doubles import Scale

# ---- reading and writing


def test_values_come_back_in_order():
    history = RunHistory()
    history.update_metric("loss", 3)
    history.update_metric("loss", 2.5)
    history.update_metric("accuracy", 1.0)
    assert history.get_metric_names() == {"loss", "accuracy"}
    assert history.get_metric_values("loss") == [3.0, 2.5]
    assert history.get_latest_metric("loss") == 2.5


def test_a_metric_that_was_never_logged_has_no_latest_value():
    history = RunHistory()
    history.update_metric("loss", 3)
    with pytest.raises(ValueError, match=r"has no metric 'los'\. Did you mean 'loss'\?"):
        history.get_latest_metric("los")


def test_asking_for_a_metric_does_not_make_it_one():
    history = RunHistory()
    assert history.get_metric_values("loss") == []
    assert history.get_metric_steps("loss") == []
    assert history.get_metric_names() == set()


def test_a_metric_can_be_deleted_once():
    history = RunHistory()
    history.update_metric("loss", 3)
    history.delete_metric("loss")
    assert history.get_metric_names() == set()
    with pytest.raises(KeyError):
        history.delete_metric("loss")


def test_a_prefix_is_put_before_names_from_then_on():
    history = RunHistory()
    history.update_metric("loss", 3)
    history.set_metric_name_prefix("ema_")
    history.update_metric("loss", 2)
    assert history.metric_name_prefix == "ema_"
    assert history.get_metric_names() == {"loss", "ema_loss"}
    assert history.get_metric_values("loss") == [3]


def test_a_reset_keeps_the_prefix_alone():
    history = RunHistory()
    history.set_metric_name_prefix("a_")
    history.update_metric("loss", 3)
    history.reset()
    assert history.get_metric_names() == set()
    assert history.current_epoch == 1
    assert history.metric_name_prefix == "a_"


def test_what_is_not_a_number_is_refused():
    with pytest.raises(TypeError, match="'text' is a str"):
        RunHistory().update_metric("text", "a")


def test_old_values_and_late_names_go():
    history = RunHistory(max_values=2, max_metrics=1)
    for value in range(4):
        history.update_metric("loss", value)
    history.update_metric("accuracy", 1.0)
    assert history.get_metric_values("loss") == [2, 3]
    assert history.get_metric_names() == {"loss"}


@pytest.mark.parametrize("name", ["max_values", "max_metrics"])
def test_a_bound_that_is_not_positive_is_refused(name):
    with pytest.raises(ConfigError, match=rf"RunHistory\.{name}: expected an integer.*got 0"):
        RunHistory(**{name: 0})


def still(model):
    return torch.optim.SGD(model.parameters(), lr=0.0)


# ---- a run


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_it_has_what_the_loggers_have(make, batches, history, device):
    own = RunHistory()
    loop = TrainingLoop(max_steps=4, eval_frequency=2)
    make(own, loop=loop, device=device).fit(batches, batches[:2])
    for name in ("loss", "validate_0/loss"):
        pairs = list(zip(own.get_metric_steps(name), own.get_metric_values(name), strict=True))
        assert pairs == history.of(name)
        assert len(pairs) == (4 if name == "loss" else 2)


def test_epochs_are_counted_and_a_fit_begins_again_unless_disabled(make, batches):
    own = RunHistory(reset_on_fit=False)
    trainer = make(own, loop=TrainingLoop(num_epochs=1))
    trainer.fit(batches)
    assert own.current_epoch == 2
    trainer.fit(batches, ckpt_path=None)
    assert own.current_epoch == 3
    own.reset_on_fit = True
    trainer.fit(batches, ckpt_path=None)
    assert own.current_epoch == 2
    assert own.get_metric_steps("loss") == list(range(21, 31))


@pytest.mark.parametrize("is_reset", [True, False])
def test_a_validation_alone_begins_again_if_requested(make, batches, is_reset):
    own = RunHistory(reset_on_validate=is_reset)
    trainer, val = make(own), batches[:1]
    trainer.fit(batches, val)
    trainer.validate(val)
    assert ("loss" in own.get_metric_names()) != is_reset
    assert own.get_metric_steps("validate_0/loss") == ([4] if is_reset else [4, 4])


class CrashAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_boundary(self, trainer):
        if trainer.global_step == self.step:
            raise KeyError("crash")


def test_a_run_that_resumes_has_the_history_of_the_unbroken_one(make, batches, tmp_path):
    def fit(*callbacks, **settings):
        loop = TrainingLoop(num_epochs=2, eval_frequency=3)
        trainer = make(*callbacks, loop=loop, checkpoint=Checkpoint(steps=2), **settings)
        trainer.fit(batches[:5], batches[:1])
        return trainer

    whole, broken = RunHistory(), RunHistory()
    fit(whole, model_dir=tmp_path / "whole")
    with pytest.raises(KeyError):
        fit(RunHistory(), CrashAt(8))
    assert fit(broken).data.num_batches == 10
    assert broken.get_metric_names() == whole.get_metric_names()
    assert broken.current_epoch == whole.current_epoch == 3
    for name in whole.get_metric_names():
        assert broken.get_metric_values(name) == whole.get_metric_values(name)
        assert broken.get_metric_steps(name) == whole.get_metric_steps(name)


def test_values_that_are_not_finite_survive_a_checkpoint(tmp_path):
    own, fresh = RunHistory(), RunHistory()
    own.update_metric("loss", math.nan, step=1)
    own.update_metric("loss", math.inf, step=2)
    checkpointing.save(tmp_path / "saved", {"state": own.state_dict()}, step=1)
    fresh.load_state_dict(checkpointing.load(tmp_path / "saved")["state"])
    assert math.isnan(fresh.get_metric_values("loss")[0])
    assert fresh.get_metric_values("loss")[1] == math.inf
    assert fresh.get_metric_steps("loss") == [1, 2]


def test_an_empty_history_survives_one_too(tmp_path):
    checkpointing.save(tmp_path / "saved", {"state": RunHistory().state_dict()}, step=1)
    fresh = RunHistory()
    fresh.load_state_dict(checkpointing.load(tmp_path / "saved")["state"])
    assert fresh.get_metric_names() == set()


def test_a_run_that_begins_with_anothers_checkpoint_has_a_history_of_its_own(
    make, batches, tmp_path
):
    first = make(RunHistory(), checkpoint=Checkpoint(steps=2), max_steps=2)
    first.fit(batches)
    own = RunHistory()
    other = make(own, model_dir=tmp_path / "other")
    other.fit(batches, ckpt_path=first.model_dir / "checkpoint_2")
    assert own.get_metric_steps("loss") == [3, 4]


# ---- the loss of an epoch


def unequal(*values):
    """Return batches for `Scale`: of four samples, the last of one."""
    sizes = [4] * (len(values) - 1) + [1]
    return [torch.full((num,), value) for num, value in zip(sizes, values, strict=True)]


@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loss_of_an_epoch_is_weighted_by_samples(make, history, device, accumulate):
    own = RunHistory()
    loop = TrainingLoop(num_epochs=2, grad_accum_steps=accumulate)
    settings = {"model": Scale, "optimizer": still, "device": device, "log_steps": 0}
    make(own, RunHistory(), loop=loop, **settings).fit(unequal(1.0, 2.0, 12.0))
    steps = [3, 6] if accumulate == 1 else [2, 4]
    mean = pytest.approx((4 * 1 + 4 * 2 + 12) / 9)
    assert history.of("train_loss_epoch") == [(step, mean) for step in steps]
    assert own.get_metric_values("train_loss_epoch") == [mean, mean]
    assert own.get_metric_steps("train_loss_epoch") == steps


def test_an_epoch_that_was_not_completed_has_no_loss(make):
    own = RunHistory(reset_on_fit=False)
    trainer = make(own, model=Scale, optimizer=still, loop=TrainingLoop(num_steps=2))
    trainer.fit(unequal(1.0, 2.0, 12.0))
    assert "train_loss_epoch" not in own.get_metric_names()
    trainer.loop.num_steps = 3
    trainer.fit(unequal(1.0, 3.0, 12.0), ckpt_path=None)
    assert own.get_metric_values("train_loss_epoch") == [pytest.approx((4 + 12 + 12) / 9)]


def test_batches_of_unknown_size_count_alike_in_the_loss_of_an_epoch(make):
    own = RunHistory()

    class OfText(Scale):
        def forward(self, batch):
            return self.weight * float(len(batch[0]))

    loop = TrainingLoop(num_epochs=1)
    make(own, model=OfText, optimizer=still, loop=loop).fit([["a"], ["abc"]])
    assert own.get_metric_values("train_loss_epoch") == [2.0]


def test_the_loss_of_an_epoch_arrives_before_the_next_step(make):
    best = SaveBest("train_loss_epoch", mode="max", k=3)
    stop = EarlyStopping("train_loss_epoch", mode="max", patience=1)
    trainer = make(best, stop, RunHistory(), model=Scale, loop=TrainingLoop(num_epochs=5))
    trainer.fit(unequal(1.0, 2.0, 12.0))
    assert [entry["step"] for entry in best.best] == [3, 6]
    assert trainer.global_step == 7  # the first step boundary at which the value is known


def test_an_epoch_in_whose_middle_a_history_was_added_has_no_loss(make, tmp_path):
    settings = {"model": Scale, "optimizer": still, "model_dir": tmp_path / "run"}
    half = make(loop=TrainingLoop(max_steps=2), checkpoint=Checkpoint(steps=2), **settings)
    half.fit(unequal(1.0, 2.0, 12.0))
    own = RunHistory()
    make(own, loop=TrainingLoop(max_steps=6), **settings).fit(unequal(1.0, 2.0, 12.0))
    assert own.get_metric_steps("train_loss_epoch") == [6]


@pytest.mark.parametrize("num", [1, 2, 3, 4])
@pytest.mark.slow_cases(every=4)
def test_the_loss_of_an_epoch_is_whole_in_a_run_that_resumes(make, tmp_path, num):
    class Cut(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if trainer.data.num_batches == num:
                trainer.save_checkpoint()
                raise KeyError("cut")

    def fit(folder, *callbacks):
        own = RunHistory()
        loop = TrainingLoop(num_epochs=1, grad_accum_steps=3)
        settings = {"model": Scale, "model_dir": tmp_path / folder}
        trainer = make(own, *callbacks, loop=loop, **settings)
        if callbacks:
            with pytest.raises(KeyError):
                trainer.fit(unequal(1.0, 2.0, 5.0, 7.0, 12.0))
        else:
            trainer.fit(unequal(1.0, 2.0, 5.0, 7.0, 12.0))
        return own.get_metric_values("train_loss_epoch")

    assert fit("cut", Cut()) == []
    assert fit("cut") == fit("whole")


# ---- plots


def test_a_plot_has_a_chart_for_each_metric(make, batches):
    history = RunHistory()
    make(history).fit(batches, batches[:2])
    figure = history.plot(["loss", "validate_0/loss"], log_y=True)
    assert [trace.name for trace in figure.data] == ["loss", "validate_0/loss"]
    assert list(figure.data[0].x) == [1, 2, 3, 4]
    assert list(figure.data[0].y) == history.get_metric_values("loss")
    assert {figure.layout.yaxis.type, figure.layout.yaxis2.type} == {"log"}


def test_a_plot_has_all_metrics_by_default_also_many():
    history = RunHistory()
    for idx in range(41):
        history.update_metric(f"m{idx:02}", idx, step=1)
    assert len(history.plot().data) == 41
    assert len(history.plot("m07").data) == 1


@pytest.mark.parametrize("num", [1, 3, 41])
@pytest.mark.slow_cases(every=4)
def test_charts_are_far_enough_apart_for_their_titles(num):
    history = RunHistory()
    for idx in range(num):
        history.update_metric(f"m{idx:02}", idx, step=1)
    layout = history.plot().layout
    axes = [layout[f"yaxis{idx or ''}"].domain for idx in (0, *range(2, num + 1))]
    starts = sorted({axis[0] for axis in axes})
    ends = sorted({axis[1] for axis in axes})
    height = layout.height - layout.margin.t - layout.margin.b
    assert all(height * (end - start) > 150 for start, end in zip(starts, ends, strict=True))
    assert all(height * (above - end) > 80 for end, above in zip(ends, starts[1:], strict=False))


def test_the_axis_of_a_constant_is_of_its_size():
    history = RunHistory()
    for step in (1, 2):
        history.update_metric("constant", 0.001, step=step)
        history.update_metric("rising", step, step=step)
    figure = history.plot()
    assert figure.layout.yaxis.rangemode == "tozero"
    assert figure.layout.yaxis2.rangemode is None
    assert history.plot("constant", log_y=True).layout.yaxis.rangemode is None


def test_a_plot_of_nothing_is_refused():
    history = RunHistory()
    with pytest.raises(ValueError, match="no metric"):
        history.plot()
    history.update_metric("loss", 1.0)
    with pytest.raises(ValueError, match=r"'los'.*'loss'"):
        history.plot("los")


def test_a_plot_without_plotly_names_the_remedy(monkeypatch):
    history = RunHistory()
    history.update_metric("loss", 1.0)
    monkeypatch.setitem(sys.modules, "plotly.subplots", None)
    with pytest.raises(ConfigError, match=r"modelzoo-trainer\[report\]"):
        history.plot()
