"""What callbacks and hooks of pytorch-accelerated do, in our spelling: PA-01 to PA-22."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from modelzoo_trainer import (
    HOOKS,
    Callback,
    CoreCallback,
    HookError,
    StopTraining,
    Trainer,
    TrainingLoop,
    register_global_callback,
)
from modelzoo_trainer.callbacks.log_metrics import LogMetrics
from modelzoo_trainer.callbacks.terminate_on_nan import TerminateOnNaN
from modelzoo_trainer.tools.report.run_history import RunHistory
from tests.doubles import (
    History,
    Recorder,
    Scale,
    TinyModel,
    constant_batches,
    tiny_batches,
)

# Their hooks, each with ours; the page has the same list.
HOOK_OF = {
    "on_init_end": "post_setup",
    "on_training_run_start": "on_fit_start",
    "on_train_epoch_start": "on_train_epoch_start",
    "on_train_step_start": "on_train_batch_start",
    "on_train_step_end": "on_before_backward",
    "on_train_epoch_end": "on_train_epoch_end",
    "on_eval_epoch_start": "on_validate_start",
    "on_eval_step_start": "on_validate_batch_start",
    "on_eval_step_end": "on_validate_batch_end",
    "on_eval_epoch_end": "on_validate_end",
    "on_training_run_epoch_end": "run_validation",
    "on_training_run_end": "on_fit_end",
    "on_evaluation_run_start": "on_enter_validate",
    "on_evaluation_run_end": "on_validate_end",
    "on_stop_training_error": "on_fit_end",
}


def heard(recorder: Any) -> list[str]:
    """Return which of the hooks above were called, in order."""
    return [name for name in recorder.names if name in HOOK_OF.values()]


def test_pa_01_fifteen_hooks(trainer_of) -> None:
    recorder = Recorder()
    trainer_of(recorder).fit(tiny_batches(1), tiny_batches(1))
    assert len(HOOK_OF) == 15
    assert set(HOOK_OF.values()) <= HOOKS.keys()
    assert set(heard(recorder)) == set(HOOK_OF.values())


def test_pa_02_hook_order_of_training(trainer_of) -> None:
    recorder = Recorder()
    trainer_of(recorder).fit(tiny_batches(2), tiny_batches(2))
    assert heard(recorder) == [
        "post_setup",
        "on_fit_start",
        "on_train_epoch_start",
        *["on_train_batch_start", "on_before_backward"] * 2,
        "on_train_epoch_end",
        "on_enter_validate",
        "on_validate_start",
        *["on_validate_batch_start", "on_validate_batch_end"] * 2,
        "on_validate_end",
        "run_validation",
        "on_fit_end",
    ]


def test_pa_03_hook_order_of_a_validation(trainer_of) -> None:
    recorder = Recorder()
    trainer = trainer_of(recorder)
    recorder.names.clear()
    trainer.validate(tiny_batches(2))
    assert heard(recorder) == [
        "on_enter_validate",
        "on_validate_start",
        *["on_validate_batch_start", "on_validate_batch_end"] * 2,
        "on_validate_end",
    ]


class Noting(Trainer):
    """Notes which of its methods are called."""

    def __init__(self, order: list[str], **settings: Any) -> None:
        self.order = order
        super().__init__(**settings)

    def training_step(self, batch):
        self.order.append("training_step")
        return super().training_step(batch)

    def compute_loss(self, outputs, batch):
        self.order.append("compute_loss")
        return super().compute_loss(outputs, batch)

    def backward(self, outputs, batch):
        self.order.append("backward")
        super().backward(outputs, batch)

    def optimizer_step(self):
        self.order.append("optimizer_step")
        super().optimizer_step()

    def schedulers_step(self):
        self.order.append("schedulers_step")
        super().schedulers_step()

    def optimizer_zero_grad(self):
        self.order.append("optimizer_zero_grad")
        super().optimizer_zero_grad()

    def validation_step(self, batch, loop, batch_idx=0):
        self.order.append("validation_step")
        return super().validation_step(batch, loop, batch_idx)


def test_pa_04_methods_come_before_hooks(tmp_path) -> None:
    order: list[str] = []
    shown = {
        "on_train_step_start",
        "on_after_forward",
        "on_before_backward",
        "on_before_optimizer_step",
        "on_before_optimizer_zero_grad",
        "on_before_scheduler_step",
        "on_validate_step_start",
    }
    trainer = Noting(
        order,
        model_dir=tmp_path,
        device="cpu",
        model=Scale,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        schedulers=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        callbacks=Recorder(lambda name, passed: order.append(name) if name in shown else None),
    )
    with trainer:
        trainer.fit(constant_batches(1), constant_batches(1))
    assert order == [
        "training_step",
        "on_train_step_start",
        "compute_loss",
        "on_after_forward",
        "backward",
        "on_before_backward",
        "optimizer_step",
        "on_before_optimizer_step",
        "optimizer_zero_grad",
        "on_before_optimizer_zero_grad",
        "schedulers_step",
        "on_before_scheduler_step",
        "validation_step",
        "on_validate_step_start",
        "compute_loss",
        "on_after_forward",
    ]


def test_pa_04_hooks_see_what_the_trainer_has_done(trainer_of) -> None:
    class Look(Callback):
        def __init__(self) -> None:
            self.modes: list[bool] = []

        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            self.modes.append(model.training)

        def on_validate_start(self, trainer, model, val_dataloader, loop):
            self.modes.append(model.training)

        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            self.steps = trainer.global_step

    look = Look()
    trainer_of(look).fit(tiny_batches(1), tiny_batches(1))
    assert (look.modes, look.steps) == ([True, False], 1)


def test_pa_05_the_end_of_a_forward_pass_comes_before_backward(trainer_of) -> None:
    class Look(Callback):
        def __init__(self) -> None:
            self.grads: list[Any] = []

        def on_before_backward(self, trainer, model, outputs):
            self.weight = model.weight.detach().clone()
            self.grads.append(model.weight.grad)

        def on_after_backward(self, trainer, model, outputs):
            self.grads.append(model.weight.grad.item())

    look = Look()
    trainer = trainer_of(look, model=Scale)
    trainer.fit(constant_batches(2))
    assert look.grads == [None, 2.0]
    assert (look.weight.item(), trainer.model.weight.item()) == (1.0, pytest.approx(0.8))


class Rescale(Callback):
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def on_before_backward(self, trainer, model, outputs):
        outputs["loss"] = outputs["loss"] * self.factor


@pytest.mark.parametrize(("factor", "weight"), [(0.0, 1.0), (2.0, 0.6)])
def test_pa_06_a_loss_that_is_rewritten_changes_the_update(trainer_of, factor, weight) -> None:
    trainer = trainer_of(Rescale(factor), model=Scale)
    trainer.fit(constant_batches(2))
    assert trainer.model.weight.item() == pytest.approx(weight)


def test_pa_06_the_recorded_loss_is_the_new_one_and_the_old_one_can_be_logged(trainer_of) -> None:
    class LogBoth(Callback):
        def on_before_backward(self, trainer, model, outputs):
            trainer.log_metrics(model_loss=outputs["loss"].detach())
            outputs["loss"] = outputs["loss"] * 0.5

    history = RunHistory()
    trainer_of(LogBoth(), history, model=Scale).fit(constant_batches(2))
    names = ("loss", "train_loss_epoch", "model_loss")
    assert [history.get_latest_metric(name) for name in names] == [1.0, 1.0, 2.0]


def test_pa_07_hooks_are_called_with_what_they_declare(trainer_of) -> None:
    got: dict[str, Any] = {}
    trainer = trainer_of(Recorder(got.setdefault))
    train, val = tiny_batches(1), tiny_batches(1, seed=2)
    trainer.fit(train, val)
    assert {name: len(passed) for name, passed in got.items() if name in HOOK_OF.values()} == {
        name: len(HOOKS[name].parameters) for name in set(HOOK_OF.values())
    }
    assert got["on_train_batch_start"][0] is trainer
    assert got["on_train_batch_start"][3] == 0
    assert torch.equal(got["on_validate_batch_end"][3][0], val[0][0])


def test_pa_07_other_parameters_are_refused_when_a_class_is_defined() -> None:
    with pytest.raises(HookError, match=r"takes \(trainer, batch\), but the hook passes \(trai"):

        class Wrong(Callback):
            def on_before_backward(self, trainer, batch): ...


def test_pa_08_instances_for_a_trainer_classes_for_all() -> None:
    @register_global_callback
    class Counted(Callback):
        num = 0

        def post_setup(self, trainer):
            Counted.num += 1

    try:
        trainer = Trainer(device="meta", model=TinyModel, callbacks=iter([Rescale(1.0)]))
        trainer.close()
    finally:
        Counted.global_callback_handle.remove()
    assert Counted.num == 1
    assert "Rescale" in trainer.callbacks
    with pytest.raises(HookError, match=r"got the class Counted. Pass an instance: Counted\(\)"):
        Trainer(device="meta", model=TinyModel, callbacks=[Counted])


def test_pa_09_several_of_a_class_but_an_object_once(trainer_of) -> None:
    class Half(Rescale): ...

    trainer = trainer_of(Rescale(2.0), Rescale(3.0), Half(0.5), model=Scale)
    assert [*trainer.callbacks][-5:-2] == ["Rescale", "Rescale_2", "Half"]
    trainer.fit(constant_batches(1))
    assert trainer.model.weight.item() == pytest.approx(1 - 0.1 * 3)
    same = Rescale(2.0)
    with pytest.warns(UserWarning, match="the same Rescale object was given twice; it runs once"):
        trainer = trainer_of(same, same, model=Scale)
    trainer.fit(constant_batches(1), ckpt_path=None)
    assert trainer.model.weight.item() == pytest.approx(0.8)


def test_pa_10_what_is_not_asked_for_is_not_there(trainer_of) -> None:
    off: dict[str, Any] = {"check_loss": False, "progress": "none"}
    bare, given = trainer_of(**off), trainer_of(Rescale(1.0), **off)
    assert all(isinstance(callback, CoreCallback) for callback in bare.callbacks.values())
    assert [*given.callbacks] == [*bare.callbacks, "Rescale"]
    defaults = ["CheckLoss", "ProgressLogger"]
    assert [*trainer_of(Rescale(1.0)).callbacks] == [*given.callbacks, *defaults]
    assert bare.loggers == []


def test_pa_11_an_event_that_nobody_has(trainer_of) -> None:
    trainer = trainer_of(Rescale(1.0))
    assert trainer.call("nope", a=1) is None
    with pytest.raises(HookError, match="Did you mean 'on_train_batch_end'"):
        trainer.call("on_train_batch_edn")


class Misspelt(Callback):
    """Reads what it has not, in one hook; the others have to go through."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def read_in(self, hook):
        return self.typo if hook == self.hook else None

    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
        self.read_in("on_fit_start")

    def on_before_backward(self, trainer, model, outputs):
        self.read_in("on_before_backward")

    def on_validate_start(self, trainer, model, val_dataloader, loop):
        self.read_in("on_validate_start")


@pytest.mark.parametrize("hook", ["on_fit_start", "on_before_backward", "on_validate_start"])
def test_pa_12_a_misspelt_attribute_in_a_hook_is_an_error(trainer_of, hook) -> None:
    with pytest.raises(AttributeError, match="typo") as caught:
        trainer_of(Misspelt(hook)).fit(tiny_batches(1), tiny_batches(1))
    assert f"raised in Misspelt.{hook}" in caught.value.__notes__[0]


def test_pa_13_callbacks_are_plain_objects() -> None:
    history = RunHistory()
    history.update_metric("loss", 1.5, 3)
    assert not hasattr(history, "x")
    assert getattr(history, "x", 7) == 7
    for twin in (copy.deepcopy(history), pickle.loads(pickle.dumps(history))):
        twin.update_metric("loss", 2.5, 4)
        assert twin.get_metric_values("loss") == [1.5, 2.5]
    assert history.get_metric_values("loss") == [1.5]


def test_pa_14_adding_while_it_runs(trainer_of) -> None:
    class Add(Callback):
        def __init__(self, added: Any) -> None:
            self.added = added

        def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
            self.handle = trainer.add_callback(self.added)

        def on_train_epoch_end(self, trainer, epoch):
            self.handle.remove()

    recorder = Recorder()
    trainer = trainer_of(Add(recorder), num_epochs=2)
    trainer.fit(tiny_batches(2))
    assert recorder.names[:3] == ["pre_setup", "setup", "post_setup"]
    assert recorder.count("on_train_batch_start") == 2
    assert recorder.count("on_fit_end") == 0


def test_pa_15_listing_and_clearing(trainer_of) -> None:
    first, second = Recorder(), Rescale(0.0)
    trainer = trainer_of(first, second, model=Scale, check_loss=False, progress="none")
    own = [one for one in trainer.all_callbacks if not isinstance(one, CoreCallback)]
    assert own == [first, second]
    assert trainer.get_callback(Rescale) is second
    assert trainer.get_callback_name(second) == "Rescale"
    first.names.clear()
    for callback in own:
        trainer.remove_callback(callback)
    trainer.fit(constant_batches(1))
    assert first.names == []
    assert trainer.model.weight.item() == pytest.approx(0.9)
    assert trainer.get_callbacks(Rescale) == []


def test_pa_16_events_of_ones_own(tmp_path) -> None:
    class Verifying(Trainer):
        def training_step(self, batch):
            self.call("verify_train_batch", batch=batch, model=self.model)
            return super().training_step(batch)

    class Verify(Callback):
        def __init__(self) -> None:
            self.shapes: list[tuple[int, ...]] = []

        def verify_train_batch(self, trainer, batch):
            inputs, targets = batch
            assert len(inputs) == len(targets), f"at batch {trainer.data.num_batches}"
            self.shapes.append(tuple(inputs.shape))

    verify = Verify()
    with Verifying(
        model_dir=tmp_path,
        device="cpu",
        model=TinyModel,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(num_steps=3),
        callbacks=[verify, Recorder()],
    ) as trainer:
        trainer.fit(tiny_batches(2))
        assert verify.shapes == [(4, 3)] * 3
        with pytest.raises(AssertionError, match="at batch 4"):
            trainer.fit([(torch.ones(4, 3), torch.ones(3, 1))], ckpt_path=None)


class StopIn(Recorder):
    """Asks for the end in one hook, the first time."""

    def __init__(self, hook: str) -> None:
        self.hook = hook
        super().__init__()

    def note(self, name, passed):
        super().note(name, passed)
        if name == self.hook and self.count(name) == 1:
            raise StopTraining(f"enough in {name}")


@pytest.mark.parametrize(
    ("hook", "num_steps", "num_val"),
    [
        ("on_train_epoch_start", 1, 0),
        ("on_train_batch_start", 1, 0),
        ("on_before_forward", 1, 0),
        ("on_before_backward", 1, 0),
        ("on_train_batch_end", 1, 0),
        ("on_train_epoch_end", 2, 0),
        ("on_validate_start", 2, 0),
        ("on_validate_batch_end", 2, 1),
        ("on_validate_end", 2, 2),
        ("run_validation", 2, 2),
    ],
)
def test_pa_17_a_stop_within_the_loop_ends_the_run_in_order(
    trainer_of, hook, num_steps, num_val
) -> None:
    stop = StopIn(hook)
    trainer = trainer_of(stop, num_epochs=3, eval_frequency=2)
    trainer.fit(tiny_batches(2), tiny_batches(2))
    assert trainer.global_step == num_steps  # the step at hand is completed
    assert stop.count("on_validate_batch_end") == num_val
    assert stop.names[-2:] == ["on_fit_end", "on_fit_committed"]
    assert stop.count("on_fit_exception") == 0
    assert trainer.early_exit.reason == f"enough in {hook}"


def test_pa_17_a_stop_by_what_is_no_hook(trainer_of) -> None:
    class Stops(TinyModel):
        def forward(self, batch):
            if not self.training or batch[0].sum() > 100:
                raise StopTraining("too large")
            return super().forward(batch)

    recorder = Recorder()
    trainer = trainer_of(recorder, model=Stops)
    trainer.fit([*tiny_batches(2), (torch.full((4, 3), 99.0), torch.ones(4, 1))], tiny_batches(1))
    assert (trainer.global_step, recorder.count("on_validate_start")) == (2, 0)
    assert recorder.names[-2:] == ["on_fit_end", "on_fit_committed"]


@pytest.mark.parametrize(("hook", "num_steps"), [("on_fit_start", 0), ("on_fit_end", 2)])
def test_pa_18_a_stop_around_the_loop_does_not_escape(trainer_of, hook, num_steps) -> None:
    stop = StopIn(hook)
    trainer = trainer_of(stop)
    trainer.fit(tiny_batches(2))
    assert trainer.global_step == num_steps
    assert stop.names[-2:] == ["on_fit_end", "on_fit_committed"]
    trainer.fit(tiny_batches(2), ckpt_path=None)  # nothing is left of it
    assert trainer.global_step == num_steps + 2


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_before_backward"])
def test_pa_19_other_exceptions_go_through(trainer_of, hook) -> None:
    class Fail(Recorder):
        def note(self, name, passed):
            super().note(name, passed)
            if name == hook:
                raise RuntimeError("mine")

    fail, other = Fail(), Recorder()
    with pytest.raises(RuntimeError, match="mine"):
        trainer_of(fail, other).fit(tiny_batches(2))
    assert other.names[-2:] == ["on_train_exception", "on_fit_exception"]
    assert fail.count("on_fit_end") == other.count("on_fit_end") == 0


class Sick(nn.Module):
    """Its loss is what a batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch):
        return self.weight * batch.mean()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_pa_20_a_loss_that_is_no_number_ends_the_run(trainer_of, bad) -> None:
    behind = Recorder()
    trainer = trainer_of(TerminateOnNaN(), behind, model=Sick)
    trainer.fit(constant_batches(1, bad, 1))
    assert trainer.model.weight.item() == pytest.approx(0.9)
    assert "TerminateOnNaN: loss is" in trainer.early_exit.reason
    assert behind.names[-2:] == ["on_fit_end", "on_fit_committed"]
    trainer.fit(constant_batches(1), ckpt_path=None)  # the next one is not ended
    assert trainer.model.weight.item() == pytest.approx(0.8)


def test_pa_20_so_does_that_of_a_validation(trainer_of) -> None:
    recorder = Recorder()
    trainer = trainer_of(TerminateOnNaN(), recorder, model=Sick)
    trainer.validate(constant_batches(1, math.nan, 1))
    assert recorder.count("on_validate_batch_end") == 2
    assert recorder.count("on_validate_exception") == 0


class Told(LogMetrics):
    """Keeps what would be told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[list[str]] = []

    def log_metrics(self, trainer, metrics):
        self.told.append(sorted(metrics))


class Writes(Callback):
    """Logs a metric at the end of a pass and of a validation, under names that mislead."""

    def on_train_epoch_end(self, trainer, epoch):
        trainer.log_metrics(evaluated=1.0)

    def on_validate_end(self, trainer, model, loop):
        trainer.log_metrics(trained=2.0)


def test_pa_21_metrics_are_told_where_they_belong(trainer_of) -> None:
    told, val = Told(), tiny_batches(1)
    trainer = trainer_of(Writes(), told)
    trainer.fit(tiny_batches(2), val)
    of_validation = ["validate_0/loss", "validate_0/trained"]
    assert told.told == [["evaluated", "loss"], of_validation]
    trainer.validate(val)
    assert told.told[2:] == [of_validation]


@pytest.mark.parametrize("is_first", [True, False])
def test_pa_22_the_order_of_callbacks_loses_no_metric(trainer_of, is_first) -> None:
    told, history, writes = Told(), History(), Writes()
    own = [writes, told] if is_first else [told, writes]
    trainer_of(*own, loggers=history).fit(tiny_batches(2), tiny_batches(1))
    assert sorted(name for names in told.told for name in names) == [
        "evaluated",
        "loss",
        "validate_0/loss",
        "validate_0/trained",
    ]
    assert [*history.of("evaluated"), *history.of("validate_0/trained")] == [(2, 1.0), (2, 2.0)]


class AddWeight(Callback):
    def on_before_backward(self, trainer, model, outputs):
        outputs["loss"] = outputs["loss"] + model.weight


@pytest.mark.parametrize(
    ("callbacks", "weight"),
    [([Rescale(3.0), AddWeight()], 1 - 0.4), ([AddWeight(), Rescale(3.0)], 1 - 0.6)],
    ids=["scaled first", "scaled last"],
)
def test_pa_22_hooks_are_called_in_the_order_of_the_list(trainer_of, callbacks, weight) -> None:
    trainer = trainer_of(*callbacks, model=Scale)
    trainer.fit(constant_batches(1))
    assert trainer.model.weight.item() == pytest.approx(weight)
