"""A name that is logged twice, and metrics that deliveries log."""

from __future__ import annotations

import pytest
import torch

from modelzoo_trainer import Callback, Logging
from tests.doubles import History, tiny_batches


class LogsIn(Callback):
    """Logs a metric in hooks of a batch."""

    def __init__(self, *hooks: str, name: str = "mine", scope: str = "") -> None:
        self.hooks, self.name, self.scope = hooks, name, scope

    def _log(self, trainer, hook):
        if hook not in self.hooks:
            return
        if self.scope:
            with trainer.name_scope(self.scope):
                trainer.log_metrics(**{self.name: 1.0})
        else:
            trainer.log_metrics(**{self.name: 1.0})

    def on_train_step_end(self, trainer, model, outputs, batch):
        self._log(trainer, "step")

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self._log(trainer, "batch")

    def on_step_boundary(self, trainer):
        self._log(trainer, "boundary")


@pytest.mark.parametrize("device", ["cpu", "fake", "meta"])
def test_a_name_logged_by_two_in_one_batch_is_refused(trainer_of, device) -> None:
    trainer = trainer_of(LogsIn("step"), LogsIn("batch"), device=device)
    with pytest.raises(
        ValueError, match=r"^the metric 'mine' was logged twice in one batch \(step "
    ):
        trainer.fit(tiny_batches())


def test_a_name_of_ours_is_refused_as_well(trainer_of) -> None:
    with pytest.raises(ValueError, match="'loss' was logged twice"):
        trainer_of(LogsIn("batch", name="loss")).fit(tiny_batches())


def test_a_scoped_name_is_another_one_and_is_refused_twice(trainer_of) -> None:
    history = History()
    trainer_of(LogsIn("step"), LogsIn("batch", scope="a"), loggers=history).fit(tiny_batches(1))
    assert {"mine", "a/mine"} <= history.lines[0][1].keys()
    with pytest.raises(ValueError, match="'a/mine' was logged twice"):
        trainer_of(LogsIn("step", "batch", scope="a")).fit(tiny_batches(1))


def test_after_the_delivery_the_name_is_free(trainer_of) -> None:
    history = History()
    trainer_of(LogsIn("batch", "boundary"), loggers=history).fit(tiny_batches(3))
    assert history.of("mine") == [(1, 1.0), (1, 1.0), (2, 1.0), (2, 1.0), (3, 1.0), (3, 1.0)]


def test_each_step_may_log_it_with_windows_and_parts_of_batches(trainer_of) -> None:
    history = History()
    trainer = trainer_of(LogsIn("step"), loggers=history, grad_accum_steps=2)
    trainer.split_train_batches(2)
    trainer.fit(tiny_batches(4))
    assert history.of("mine") == [(1, 1.0), (2, 1.0)]


def test_steps_that_are_not_logged_check_nothing(trainer_of) -> None:
    trainer = trainer_of(LogsIn("step"), LogsIn("batch"), logging=Logging(log_steps=0))
    with pytest.raises(ValueError, match=r"\(step 3\)"):
        trainer.fit(tiny_batches(3))


# ---- metrics that deliveries log


class Derives(Callback):
    """Logs what follows from the loss, when that has arrived; `depth` times over."""

    def __init__(self, depth: int = 1, value: float | torch.Tensor = 2.0) -> None:
        self.names = ["loss", *(f"derived_{number}" for number in range(depth))]
        self.value = value

    def on_metrics(self, trainer, metrics, step):
        for name, derived in zip(self.names, self.names[1:], strict=False):
            if name in metrics:
                trainer.log_metrics(**{derived: self.value})


@pytest.mark.parametrize("device", ["cpu", "fake", "meta"])
@pytest.mark.parametrize("value", [2.0, torch.tensor(2.0)], ids=["number", "tensor"])
def test_what_deliveries_log_is_delivered_by_the_end(trainer_of, device, value) -> None:
    history = History()
    trainer_of(Derives(3, value), loggers=history, device=device).fit(tiny_batches(2))
    assert [step for step, _ in history.of("derived_2")] == [1, 2]
    if device != "meta":
        assert history.of("derived_2") == [(1, 2.0), (2, 2.0)]
        assert type(history.of("derived_2")[0][1]) is float


def test_draining_delivers_what_deliveries_log(trainer_of) -> None:
    class Saves(Callback):
        def on_step_boundary(self, trainer):
            trainer.log_metrics(loss_again=1.0)
            trainer.drain()
            known.append([name for _, line in history.lines for name in line])

    history, known = History(), []
    derives = Derives(2)
    derives.names[0] = "loss_again"
    trainer_of(Saves(), derives, loggers=history).fit(tiny_batches(1))
    assert known[0][-3:] == ["loss_again", "derived_0", "derived_1"]


def test_deliveries_without_an_end_are_refused(trainer_of) -> None:
    class Endless(Callback):
        def on_metrics(self, trainer, metrics, step):
            trainer.log_metrics(more=1.0)

        def on_step_boundary(self, trainer):
            trainer.drain()

    with pytest.raises(
        RuntimeError, match=r"on_metrics logged new metrics \d+ times in a row \(more\)"
    ):
        trainer_of(Endless()).fit(tiny_batches(1))


class LogsForAnotherStep(Callback):
    """Logs something of step 7 between two metrics of the batch at hand."""

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        trainer.log_metrics(first=1.0)
        trainer.log_metrics_dict({"first": 7.0}, step=7)
        trainer.log_metrics(second=2.0)


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_what_is_logged_for_another_step_leaves_those_of_the_batch_theirs(
    trainer_of, device
) -> None:
    history = History()
    trainer = trainer_of(LogsForAnotherStep(), logging=Logging(), loggers=history, device=device)
    trainer.fit(tiny_batches(2))
    steps = {name: [s for s, m in history.lines if name in m] for name in ("first", "second")}
    assert sorted(steps["first"]) == [1, 2, 7, 7]
    assert steps["second"] == [1, 2]
