"""The policies of CheckLoss, and invalid arguments."""

import logging
import math

import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback, Checkpoint, ConfigError, Logger, TrainingLoop
from modelzoo_trainer.callbacks import CheckLoss
from modelzoo_trainer.callbacks.step_guard import StepGuard

DEVICES = ["cpu", "fake"]
LOGGER = "modelzoo_trainer.check_loss"


class Spoil(Callback):
    """Multiply the loss of some batches, counted from 1, or one of their gradients."""

    def __init__(self, *batches, factor=math.nan, gradient=False):
        self.batches, self.factor, self.gradient = batches, factor, gradient

    def is_due(self, trainer):
        return trainer.data.num_batches in self.batches

    def on_after_forward(self, trainer, model, outputs, batch):
        if model.training and self.is_due(trainer) and not self.gradient:
            outputs["loss"] = outputs["loss"] * self.factor

    def on_after_backward(self, trainer, model, outputs):
        if self.gradient and self.is_due(trainer):
            model.head.bias.grad.fill_(self.factor)


def run(make, batches, check, *others, **settings):
    trainer = make(*others, check, **settings)
    trainer.fit(batches)
    return trainer


# ---- invalid arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "ignore"}, r"policy: expected .*raise.*skip.*rollback.*, got 'ignore'"),
        ({"spike_window": 7}, r"spike_window is 7; .* at least 8 losses"),
        ({"spike_window": 0}, r"spike_window: expected .*> 0.*, got 0"),
        ({"spike_window": 9.5}, r"spike_window: expected .*> 0.*, got 9\.5"),
        ({"spike_threshold": 0}, r"spike_threshold: expected .*> 0.*, got 0"),
        ({"spike_threshold": math.inf}, r"spike_threshold: expected .*> 0.*, got inf"),
        ({"spike_threshold": True}, r"spike_threshold: expected .*> 0.*, got true"),
        ({"spike_threshold": "6"}, r"spike_threshold: expected .*> 0.*, got '6'"),
        ({"max_skips": 0}, r"max_skips: expected .*> 0.*, got 0"),
        ({"max_rollbacks": -1}, r"max_rollbacks: expected .*> 0.*, got -1"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=rf"CheckLoss\.{message}"):
        CheckLoss(**arguments)


def test_two_of_them_that_do_more_than_raise_are_refused(make, batches):
    trainer = make(CheckLoss("skip"), CheckLoss(spike_window=8))
    with pytest.raises(ConfigError, match="two CheckLoss"):
        trainer.fit(batches)
    assert trainer.get_callback(StepGuard) is None


# ---- raise


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_looked_at_if_requested(make, batches, device):
    trainer = make(
        Spoil(3, factor=math.inf, gradient=True), CheckLoss(check_gradients=True), device=device
    )
    with pytest.raises(FloatingPointError) as caught:
        trainer.fit(batches)
    assert caught.match(
        r"the gradient norm is inf at global_step 3 \(epoch 1, batch 2\); the loss is \d\S*\. "
        r"Last finite loss: \d\S* at step 2\."
    )


@pytest.mark.parametrize("device", DEVICES)
def test_a_spike_ends_the_run_where_spikes_are_looked_for(make, batches, device):
    check = CheckLoss(spike_window=8, spike_threshold=50)
    trainer = make(Spoil(15, factor=1e3), check, device=device, max_steps=20)
    with pytest.raises(
        FloatingPointError, match=r"at global_step 15 \(epoch 2, batch 4\), a spike"
    ):
        trainer.fit(batches)


def test_a_spike_before_the_window_is_full_is_none(make, batches):
    assert run(make, batches, CheckLoss(spike_window=8), Spoil(7, factor=1e3)).global_step == 4


def test_a_spike_is_none_unless_spikes_are_looked_for(make, batches):
    assert (
        run(make, batches, CheckLoss("skip"), Spoil(15, factor=1e3), max_steps=20).global_step == 20
    )


# ---- skip


@pytest.mark.parametrize("device", DEVICES)
def test_what_was_skipped_is_reported_and_counted(make, batches, history, caplog, device):
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        trainer = run(make, batches, CheckLoss("skip"), Spoil(3, 5), device=device, max_steps=6)
    assert trainer.global_step == 6
    assert [record.getMessage() for record in caplog.records if record.name == LOGGER] == [
        "Skipped a step: loss is nan at global_step 3 (epoch 1, batch 2).",
        "Skipped a step: loss is nan at global_step 5 (epoch 1, batch 4).",
    ]
    assert history.of("skipped_steps") == [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2)]


@pytest.mark.parametrize("device", DEVICES)
def test_the_batches_of_a_window_are_named(make, batches, caplog, device):
    loop = TrainingLoop(max_steps=3, grad_accum_steps=3)
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        run(make, batches, CheckLoss("skip"), Spoil(5), device=device, loop=loop)
    assert "loss is nan at global_step 2 (epoch 1, batches 3-5)" in caplog.text


def test_the_parts_of_a_batch_are_named_as_one(make, batches, caplog):
    trainer = make(Spoil(4), CheckLoss("skip"))
    trainer.split_train_batches(4)
    with caplog.at_level(logging.WARNING, logger=LOGGER):
        trainer.fit(batches)
    assert "loss is nan at global_step 2 (epoch 1, batch 1)." in caplog.text


@pytest.mark.parametrize("device", DEVICES)
def test_a_spike_is_skipped_by_the_step_that_has_it(make, batches, history, device):
    check = CheckLoss("skip", spike_window=8, spike_threshold=50)
    trainer = run(make, batches, check, Spoil(15, factor=1e3), device=device, max_steps=20)
    assert history.of("skipped_steps")[13:15] == [(14, 0), (15, 1)]
    assert history.of("skipped_steps")[-1] == (20, 1)
    assert trainer.global_step == 20


@pytest.mark.parametrize("device", DEVICES)
def test_more_in_a_row_than_allowed_end_the_run(make, batches, device):
    trainer = make(Spoil(2, 4, 5, 6), CheckLoss("skip", max_skips=2), device=device, max_steps=10)
    with pytest.raises(FloatingPointError) as caught:
        trainer.fit(batches)
    assert caught.match(r"loss is nan at global_step 6 .* Last finite loss: \d\S* at step 3\.")
    assert (
        "The previous 2 steps were all skipped (CheckLoss.max_skips)" in caught.value.__notes__[0]
    )


def test_as_many_in_a_row_as_allowed_do_not(make, batches):
    check = CheckLoss("skip", max_skips=2)
    assert run(make, batches, check, Spoil(1, 2, 4, 5, 7, 8), max_steps=9).global_step == 9


def test_gradients_need_not_be_looked_at(make, batches):
    check = CheckLoss("skip", check_gradients=False)
    trainer = run(make, batches, check, Spoil(4, factor=math.inf, gradient=True))
    assert not torch.isfinite(trainer.model.head.bias).any()


def test_a_loss_of_shape_one_is_judged_too(make, batches, net, history):
    class OneElement(net):
        def forward(self, batch):
            return {"loss": super().forward(batch)["loss"].reshape(1)}

    run(make, batches, CheckLoss("skip"), Spoil(2), model=OneElement)
    assert history.of("skipped_steps") == [(1, 0), (2, 1), (3, 1), (4, 1)]


# ---- all policies


@pytest.mark.parametrize("policy", ["raise", "skip", "rollback"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_validation_whose_loss_is_not_a_number_ends_the_run(make, batches, policy, device):
    class SpoilValidation(Callback):
        def on_after_forward(self, trainer, model, outputs, batch):
            if not model.training:
                outputs["loss"] = outputs["loss"] * math.nan

    trainer = make(SpoilValidation(), CheckLoss(policy), device=device)
    with pytest.raises(FloatingPointError, match=r"validate_0/loss is nan at global_step 4\."):
        trainer.fit(batches, batches[:2])


@pytest.mark.parametrize("policy", ["raise", "skip", "rollback"])
def test_nothing_is_read_in_the_step(make, batches, policy):
    check = CheckLoss(policy, check_gradients=True, spike_window=8, spike_threshold=50)
    trainer = run(make, batches, check, device="fake", max_steps=12)
    assert trainer.backend.counters()["host_reads"] == 0


@pytest.mark.parametrize("policy", ["raise", "skip", "rollback"])
@pytest.mark.slow_cases(every=4)
def test_a_dry_run_finds_nothing(make, batches, policy):
    check = CheckLoss(policy, check_gradients=True, spike_window=8, spike_threshold=50)
    assert run(make, batches, check, device="meta", max_steps=12).global_step == 12


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_what_is_found_is_reported_exactly_as_late_as_the_device_is(make, batches, lag):
    told = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            told.append(trainer.global_step)

    check = CheckLoss(check_gradients=True)
    backend = {"lag": lag}
    trainer = make(Watch(), Spoil(3), check, device="fake", backend=backend, max_steps=10)
    with pytest.raises(FloatingPointError, match="at global_step 3"):
        trainer.fit(batches)
    assert told[-1] + 1 == 3 + lag


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.slow_cases(every=4)
def test_no_checkpoint_is_written_on_top_of_a_bad_step(make, batches, device, every, gradient):
    trainer = make(
        Spoil(5, gradient=gradient),
        CheckLoss(check_gradients=gradient),
        device=device,
        max_steps=10,
        checkpoint=Checkpoint(steps=every),
    )
    with pytest.raises(FloatingPointError):
        trainer.fit(batches)
    saved = sorted(path.name for path in trainer.model_dir.rglob("checkpoint_*"))
    assert saved == [f"checkpoint_{step}" for step in range(every, 5, every)]


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_the_guard_is_there_for_the_length_of_a_fit(make, batches, policy):
    trainer = run(make, batches, CheckLoss(policy), loop=TrainingLoop(num_steps=2))
    assert trainer.get_callback(StepGuard) is None
    trainer.fit(batches)
    assert trainer.global_step == 4


def test_the_plain_one_adds_nothing_to_the_step(make, batches):
    seen = []

    class Watch(Callback):
        def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
            seen.append(trainer.get_callback(StepGuard))

    run(make, batches, CheckLoss(), Watch())
    assert seen == [None]


def test_a_check_that_an_error_cut_off_is_not_that_of_the_next_run(make, batches):
    found = []

    class Fail(Logger):  # loggers are called last
        def log_metrics(self, metrics, step):
            pass

        def on_before_optimizer_step(self, trainer, model, optimizer):
            found.append(trainer.precision._check)
            raise ZeroDivisionError

    trainer = make(CheckLoss("skip"), loggers=Fail())
    with pytest.raises(ZeroDivisionError):
        trainer.fit(batches)
    assert found != [None]
    assert trainer.precision._check is None


class Counter(nn.Module):
    """Counts its calls in a buffer, which it may create in the first one."""

    def __init__(self, *, is_lazy):
        super().__init__()
        self.register_buffer("size" if is_lazy else "count", torch.zeros(1))

    def forward(self, hidden):
        if "count" not in self._buffers:
            self.register_buffer("count", torch.full((1,), 100.0))
        self.count += 1
        return hidden


def test_buffers_that_a_skipped_step_creates_leave_the_others_restored(make, batches):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.new, self.old = Counter(is_lazy=True), Counter(is_lazy=False)
            self.head = nn.Linear(4, 1)

        def forward(self, batch):
            self.old(batch[0])
            if self.old.count == 2:
                self.new(batch[0])
                return self.head(batch[0]).mean() * torch.nan
            return self.head(batch[0]).square().mean()

    trainer = make(CheckLoss("skip", max_skips=1), model=Net, max_steps=2)
    trainer.fit(batches)
    assert trainer.model.old.count.item() == 1
