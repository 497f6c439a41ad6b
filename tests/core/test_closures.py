"""Step closures: functions that run when their values are on the host."""

from __future__ import annotations

import pytest
import torch

from modelzoo_trainer import Callback, HookError, Logging, step_closure
from tests.doubles import History, tiny_batches

DEVICES = ["cpu", "fake"]


class Reporting(Callback):
    """Report two values from inside each step."""

    def __init__(self) -> None:
        self.calls = []

    @step_closure
    def report(self, trainer, word, value):
        self.calls.append((word, trainer.global_step, value))

    def on_train_step_start(self, trainer, model, batch):
        self.report(trainer, "start", torch.tensor(trainer.data.num_batches))

    def on_train_step_end(self, trainer, model, outputs, batch):
        self.report(trainer, "end", value=torch.tensor(10 * trainer.data.num_batches))


@pytest.mark.parametrize("device", DEVICES)
def test_closures_run_in_order_each_once_with_their_step(trainer_of, device) -> None:
    reporting = Reporting()
    trainer_of(reporting, device=device).fit(tiny_batches(3))
    assert reporting.calls == [
        *(("start", 1, 1), ("end", 1, 10)),
        *(("start", 2, 2), ("end", 2, 20)),
        *(("start", 3, 3), ("end", 3, 30)),
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_the_batches_of_a_window_belong_to_its_step(trainer_of, device) -> None:
    reporting = Reporting()
    trainer_of(reporting, device=device, grad_accum_steps=2).fit(tiny_batches(4))
    assert [step for _, step, _ in reporting.calls] == [1, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("device", DEVICES)
def test_all_values_are_there_before_the_end_hooks(trainer_of, device) -> None:
    reporting, num = Reporting(), []

    class Looking(Callback):
        def on_train_end(self, trainer, model, loop, loop_idx):
            num.append(len(reporting.calls))

    trainer_of(reporting, Looking(), device=device).fit(tiny_batches(3))
    assert num == [6]


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_in_containers_become_values(trainer_of, device) -> None:
    got = []

    @step_closure
    def take(trainer, *args, **kwargs):
        got.append((args, kwargs))

    class Takes(Callback):
        def on_train_step_end(self, trainer, model, outputs, batch):
            one, pair = torch.tensor(1), torch.tensor([2.0, 3.0])
            take(trainer, [one, "word"], (one, {"deep": [one]}), pair=pair)

    trainer_of(Takes(), device=device).fit(tiny_batches(1))
    [((first, second), kwargs)] = got
    assert (first, second) == ([1, "word"], (1, {"deep": [1]}))
    assert kwargs["pair"].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("device", DEVICES)
def test_a_value_is_that_at_the_time_of_the_call(trainer_of, device) -> None:
    got = []

    @step_closure
    def take(trainer, value):
        got.append(value)

    class Takes(Callback):
        def on_train_step_start(self, trainer, model, batch):
            value = torch.tensor(1.0)
            take(trainer, value)
            value.add_(1)

    trainer_of(Takes(), device=device).fit(tiny_batches(1))
    assert got == [1.0]


@pytest.mark.parametrize("device", DEVICES)
def test_a_closure_may_log_metrics_with_the_step_that_it_belongs_to(trainer_of, device) -> None:
    class Logs(Callback):
        @step_closure
        def log(self, trainer, value):
            trainer.log_metrics(doubled=2 * value)

        def on_train_step_end(self, trainer, model, outputs, batch):
            self.log(trainer, torch.tensor(trainer.data.num_batches))

    history = History()
    trainer_of(Logs(), device=device, loggers=history, logging=Logging(log_steps=1)).fit(
        tiny_batches(3)
    )
    assert history.of("doubled") == [(1, 2), (2, 4), (3, 6)]


@pytest.mark.parametrize("device", DEVICES)
def test_an_exception_in_a_closure_names_its_step(trainer_of, device) -> None:
    class Raises(Callback):
        @step_closure
        def fail(self, trainer, value):
            if value == 2:
                raise LookupError("lost")

        def on_train_step_end(self, trainer, model, outputs, batch):
            self.fail(trainer, torch.tensor(trainer.data.num_batches))

    with pytest.raises(LookupError) as caught:
        trainer_of(Raises(), device=device).fit(tiny_batches(3))
    assert caught.value.__notes__[0] == "raised while reading the values of global_step 2"


def test_outside_of_a_step_a_closure_runs_at_once(trainer_of) -> None:
    got = []

    @step_closure
    def take(trainer, value):
        got.append((trainer.global_step, value))

    take(trainer_of(), torch.tensor(3))
    assert got == [(0, 3)]


def test_a_closure_without_a_trainer_is_refused() -> None:
    with pytest.raises(HookError, match=r"take takes \(value\); one parameter must be named 'tra"):

        @step_closure
        def take(value):
            pass


def test_a_closure_keeps_name_and_documentation() -> None:
    @step_closure
    def take(trainer):
        """Take it."""

    assert (take.__name__, take.__doc__) == ("take", "Take it.")
