"""The first steps of a lazy device's run record what log steps do, though nothing is logged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from backends.fake import FakeBackend
from modelzoo_trainer import Callback, Logging, Trainer
from modelzoo_trainer.callback import CoreCallback, hook_names
from tests.doubles import History, Scale, constant_batches, make_trainer, sgd

NUM_STEPS = 13
TRACED = "on_before_optimizer_step"
OUTSIDE = "on_train_batch_end"


class LazyBackend(FakeBackend):
    """The fake device as one that records, which notes what it is to keep and to bring soon."""

    caps = dataclasses.replace(FakeBackend.caps, lazy=True)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.held: list[list[Any]] = []
        self.num_expedited = 0
        self.reads.expedite = self.note_expedited

    @override
    def hold(self, values: Iterable[Any]) -> None:
        self.held.append(list(values))

    def note_expedited(self) -> None:
        self.num_expedited += 1


class LogStepOnly(Callback):
    """Notes the steps in which its hooks are called; two of them are for log steps."""

    log_step_hooks = frozenset({TRACED, "on_train_batch_end"})

    def __init__(self) -> None:
        self.calls: dict[str, list[int]] = {TRACED: [], OUTSIDE: [], "on_after_backward": []}

    def on_after_backward(self, trainer, model, outputs):
        self.calls["on_after_backward"].append(trainer.logging.step)

    def on_before_optimizer_step(self, trainer, model, optimizer):
        self.calls[TRACED].append(trainer.logging.step)

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.calls[OUTSIDE].append(trainer.logging.step)


class Logs(Callback):
    """Logs a metric within each step."""

    def on_after_forward(self, trainer, model, outputs, batch):
        trainer.log_metrics(double=outputs["loss"].detach() * 2, step=trainer.logging.step)


class Held(Callback):
    """Notes after each batch what the device was to keep until the step's end."""

    def __init__(self) -> None:
        self.held: list[tuple[int, list[Any]]] = []
        self.rehearsed: list[bool] = []

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        values = [value for held in trainer.backend.held for value in held]
        trainer.backend.held.clear()
        self.rehearsed.append(trainer.rehearses)
        if values:
            found = [value.item() if isinstance(value, Tensor) else value for value in values]
            self.held.append((trainer.logging.step, found))


def resting(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that changes nothing: the loss of a batch is its mean."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


LAZY: Final = {"device": None, "model": Scale, "optimizer": resting}


def trained(
    tmp_path: Path, *callbacks: Any, log_steps: int = 10, fits: int = 1, **settings: Any
) -> Trainer:
    """Return a trainer that has trained on batches of the numbers from 1 on."""
    num = NUM_STEPS * settings.get("grad_accum_steps", 1)
    arguments = {"backend": LazyBackend()} | LAZY | settings
    trainer = make_trainer(tmp_path, *callbacks, logging=Logging(log_steps=log_steps), **arguments)
    for _ in range(fits):
        trainer.fit(constant_batches(*range(1, num + 1)))
    return trainer


# ---- hooks


def test_hooks_of_the_traced_step_are_called_in_the_first_and_the_third_step(tmp_path) -> None:
    only = LogStepOnly()
    trained(tmp_path, only)
    assert only.calls[TRACED] == [1, 3, 10, 13]


def test_hooks_outside_of_the_traced_step_are_called_on_log_steps_alone(tmp_path) -> None:
    only = LogStepOnly()
    trained(tmp_path, only)
    assert only.calls[OUTSIDE] == [10, 13]


def test_hooks_that_are_for_every_step_are_called_in_every_step(tmp_path) -> None:
    only = LogStepOnly()
    trained(tmp_path, only)
    assert only.calls["on_after_backward"] == list(range(1, 14))


@pytest.mark.parametrize(
    ("log_steps", "steps"),
    [(0, [1, 3, 13]), (2, [1, 2, 4, 6, 8, 10, 12, 13]), (3, [1, 3, 6, 9, 12, 13])],
)
def test_a_step_that_is_logged_anyway_is_no_rehearsal(tmp_path, log_steps, steps) -> None:
    only, held = LogStepOnly(), Held()
    trained(tmp_path, only, held, log_steps=log_steps)
    assert only.calls[TRACED] == steps
    assert held.rehearsed == [True, False, log_steps == 0] + [False] * 10


def test_where_every_step_is_logged_none_is_a_rehearsal(tmp_path) -> None:
    only, held = LogStepOnly(), Held()
    trained(tmp_path, only, held, Logs(), log_steps=1)
    assert only.calls[TRACED] == only.calls[OUTSIDE] == list(range(1, 14))
    assert held.held == []
    assert not any(held.rehearsed)


def test_the_only_step_of_a_run_is_logged_and_no_rehearsal(tmp_path) -> None:
    only, held = LogStepOnly(), Held()
    trained(tmp_path, only, held, max_steps=1)
    assert only.calls[OUTSIDE] == [1]
    assert held.rehearsed == [False]


def test_a_device_that_is_not_lazy_rehearses_nothing(tmp_path) -> None:
    class NotLazy(LazyBackend):
        caps = FakeBackend.caps

    only, held = LogStepOnly(), Held()
    trained(tmp_path, only, held, Logs(), backend=NotLazy())
    assert only.calls[TRACED] == [10, 13]
    assert held.held == []
    assert not any(held.rehearsed)


def test_a_second_fit_rehearses_again(tmp_path) -> None:
    only = LogStepOnly()
    trained(tmp_path, only, max_steps=5, fits=2)
    assert only.calls[TRACED] == [1, 3, 5]


def test_callbacks_that_come_later_are_rehearsed_with(tmp_path) -> None:
    class Adds(Callback):
        def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
            trainer.add_callback(only)

    only = LogStepOnly()
    trained(tmp_path, Adds())
    assert only.calls[TRACED] == [1, 3, 10, 13]


# ---- metrics


def test_metrics_of_a_rehearsal_are_kept_until_the_steps_end(tmp_path) -> None:
    class Scaled(Callback):
        def on_after_forward(self, trainer, model, outputs, batch):
            trainer.log_metrics(double=outputs["loss"].detach() * 2, fixed=7)

    held = Held()
    trained(tmp_path, Scaled(), held)
    assert held.held == [(1, [2.0, 7, 1.0]), (3, [6.0, 7, 3.0])]


def test_metrics_of_a_rehearsal_are_not_delivered(tmp_path) -> None:
    history = History()
    trained(tmp_path, Logs(), loggers=history)
    assert history.of("loss") == [(10, 10.0), (13, 13.0)]
    assert history.of("double") == [(10, 20.0), (13, 26.0)]


def test_a_rehearsal_reads_nothing(tmp_path) -> None:
    class Reads(Callback):
        def on_step_boundary(self, trainer):
            reads.append(trainer.backend.counters()["reads"])

    reads: list[int] = []
    trained(tmp_path, Logs(), Reads(), check_loss=False)
    assert reads == [0] * 9 + [1] * 3 + [2]


def test_a_rehearsal_changes_nothing_of_what_is_trained(tmp_path) -> None:
    found, expected = History(), History()
    lazy = trained(tmp_path / "lazy", loggers=found, optimizer=sgd)
    plain = trained(tmp_path / "plain", loggers=expected, optimizer=sgd, backend=FakeBackend())
    assert found.lines == expected.lines
    assert torch.equal(lazy.model.weight, plain.model.weight)


# ---- values in a hurry


@pytest.mark.parametrize(("log_steps", "num"), [(1, 13), (5, 3), (10, 2), (0, 1)])
def test_each_log_step_is_in_a_hurry_once(tmp_path, log_steps, num) -> None:
    trainer = trained(tmp_path, Logs(), log_steps=log_steps)
    assert trainer.backend.num_expedited == num


def test_reads_that_are_no_metrics_are_in_no_hurry(tmp_path) -> None:
    class Reads(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            trainer.read([outputs["loss"].detach()], seen.extend)

    seen: list[float] = []
    trainer = trained(tmp_path, Reads())
    assert seen == [float(value) for value in range(1, 14)]
    assert trainer.backend.num_expedited == 2


# ---- accumulation


def test_the_last_batch_of_a_window_alone_keeps_metrics(tmp_path) -> None:
    held = Held()
    trained(tmp_path, Logs(), held, grad_accum_steps=2)
    assert [(step, len(values)) for step, values in held.held] == [(1, 3), (3, 3)]


def test_all_batches_of_a_window_are_rehearsed(tmp_path) -> None:
    held = Held()
    trained(tmp_path, held, grad_accum_steps=2)
    assert held.rehearsed[:8] == [True, True, False, False, True, True, False, False]


def test_the_mean_of_a_rehearsed_window_has_all_of_its_batches(tmp_path) -> None:
    held = Held()
    trained(tmp_path, held, grad_accum_steps=4)
    assert held.held == [(1, [2.5]), (3, [10.5])]


def test_windows_that_are_neither_logged_nor_rehearsed_add_nothing(tmp_path) -> None:
    class Sums(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if trainer.loss_accum._train.state_dict() is not None:
                steps.append(trainer.logging.step)

    steps: list[int] = []
    trained(tmp_path, Sums(), grad_accum_steps=3)
    assert steps == [1, 1, 3, 3, 10, 10, 13, 13]


def test_the_loss_of_logged_windows_has_nothing_of_rehearsed_ones(tmp_path) -> None:
    history = History()
    trained(tmp_path, loggers=history, grad_accum_steps=2)
    assert history.lines == [(10, {"loss": 19.5}), (13, {"loss": 25.5})]


def test_hooks_of_the_traced_step_are_called_once_a_rehearsed_window(tmp_path) -> None:
    class StepEnds(Callback):
        log_step_hooks = frozenset({"on_train_step_end"})

        def on_train_step_end(self, trainer, model, outputs, batch):
            steps.append(trainer.logging.step)

    steps: list[int] = []
    trained(tmp_path, StepEnds(), grad_accum_steps=3)
    assert steps == [1, 3, 10, 13]


# ---- the end of rehearsing


class Cut(Exception):
    """Ends a run as a crash does."""


@pytest.mark.parametrize("accumulated", [1, 2])
def test_an_exception_in_a_rehearsal_ends_it(tmp_path, accumulated) -> None:
    class Raises(Callback):
        def on_train_step_end(self, trainer, model, outputs, batch):
            assert trainer.rehearses
            raise Cut

    trainer = make_trainer(
        tmp_path,
        Raises(),
        backend=LazyBackend(),
        **LAZY,
        grad_accum_steps=accumulated,
        logging=Logging(log_steps=10),
    )
    with pytest.raises(Cut):
        trainer.fit(constant_batches(*range(1, 27)))
    assert not trainer.rehearses
    assert trainer.is_log_step
    assert trainer.hooks is trainer.callbacks.log_hooks


def test_a_fit_after_an_exception_rehearses_from_the_beginning(tmp_path) -> None:
    class RaisesOnce(Callback):
        is_done = False

        def on_train_step_end(self, trainer, model, outputs, batch):
            if not self.is_done:
                self.is_done = True
                raise Cut

    only = LogStepOnly()
    trainer = make_trainer(
        tmp_path,
        RaisesOnce(),
        only,
        backend=LazyBackend(),
        **LAZY,
        logging=Logging(log_steps=10),
    )
    with pytest.raises(Cut):
        trainer.fit(constant_batches(*range(1, 14)))
    only.calls[TRACED].clear()
    trainer.fit(constant_batches(*range(1, 14)))
    assert only.calls[TRACED] == [1, 3, 10, 13]


def test_a_validation_after_a_rehearsal_is_none(tmp_path) -> None:
    class Validates(Callback):
        def on_validate_step_end(self, trainer, model, outputs, batch):
            rehearsed.append(trainer.rehearses)

    rehearsed: list[bool] = []
    held = Held()
    trainer = make_trainer(
        tmp_path,
        Validates(),
        Logs(),
        held,
        backend=LazyBackend(),
        **LAZY,
        max_steps=3,
        eval_frequency=1,
        logging=Logging(log_steps=10),
    )
    trainer.fit(constant_batches(1, 2, 3), constant_batches(4, 5))
    assert rehearsed == [False] * 6


def test_a_validation_keeps_nothing(tmp_path) -> None:
    class LogsThere(Callback):
        def on_validate_step_end(self, trainer, model, outputs, batch):
            trainer.log_metrics(seen=outputs["loss"].detach())

    trainer = make_trainer(
        tmp_path,
        LogsThere(),
        backend=LazyBackend(),
        **LAZY,
        logging=Logging(log_steps=10),
    )
    trainer.validate(constant_batches(1, 2, 3))
    assert trainer.backend.held == []
    assert not trainer.rehearses


def test_a_stop_in_a_rehearsal_ends_it(tmp_path) -> None:
    class Stops(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            trainer.early_exit.stop("enough")

    trainer = trained(tmp_path, Stops(), grad_accum_steps=2)
    assert not trainer.rehearses
    assert trainer.hooks is trainer.callbacks.log_hooks


# ---- hook tables


@pytest.mark.parametrize(
    ("gate", "called"),
    [
        ({}, [TRACED, "on_after_backward", OUTSIDE]),
        ({"is_log_step": False}, ["on_after_backward"]),
        ({"is_log_step": False, "rehearses": True}, [TRACED, "on_after_backward"]),
    ],
    ids=["logged", "quiet", "rehearsed"],
)
def test_a_table_has_the_hooks_of_its_steps(gate, called) -> None:
    names = hook_names(LogStepOnly(), **gate)
    assert sorted(names) == sorted(called)


def test_hooks_that_a_core_callback_does_without_are_not_rehearsed() -> None:
    class Idle(CoreCallback):
        idle_hooks = log_step_hooks = frozenset({TRACED})

        def on_before_optimizer_step(self, trainer, model, optimizer):
            raise AssertionError

    assert list(hook_names(Idle(), is_log_step=False, rehearses=True)) == []


def test_an_event_of_ones_own_is_heard_in_every_step(tmp_path) -> None:
    class Listens(Callback):
        log_step_hooks = frozenset({"hear"})

        def hear(self, value):
            heard.append(value)

        def on_train_step_end(self, trainer, model, outputs, batch):
            trainer.call("hear", trainer.logging.step)

    heard: list[int] = []
    trained(tmp_path, Listens(), max_steps=4)
    assert heard == [1, 2, 3, 4]
