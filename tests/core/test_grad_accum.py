"""A window of accumulation that is cut in the middle goes on as if it had not been."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from modelzoo_trainer import Callback, Checkpoint, CheckpointMismatch, StopTraining, checkpointing
from tests.doubles import (
    Cut,
    SaveAndCut,
    TinyModel,
    differing,
    make_trainer,
    sgd,
    tiny_batches,
    weights_of,
)


class CountingTokens(TinyModel):
    """Weighs each batch by a number on the device, as one of tokens is."""

    def forward(self, batch):
        loss, _ = super().forward(batch)
        return {"loss": loss, "num_items": (batch[0] > 0).sum()}


def uneven() -> list[Any]:
    """Seven batches of different sizes: the last window of a pass has but one."""
    return [batch for size in (4, 2, 3, 1, 5, 2, 4) for batch in tiny_batches(1, size, seed=size)]


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def runs(tmp_path, *callbacks: Any, name: str, **settings: Any) -> Any:
    """Return a trainer of two passes with three batches a step."""
    plan = {
        "model": lambda: TinyModel(dropout=0.5),
        "optimizer": momentum,
        "num_epochs": 2,
        "grad_accum_steps": 3,
    }
    return make_trainer(tmp_path / name, *callbacks, **(plan | settings))


# CI: each batch on the CPU; two on the other device.
@pytest.mark.soak_cases("fake-*", "!fake-1", "!fake-5")
@pytest.mark.slow_cases("fake-?", every=4)
@pytest.mark.parametrize("num", range(1, 15))
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_a_run_that_is_cut_after_any_batch_ends_at_the_same_weights(tmp_path, num, device) -> None:
    whole = runs(tmp_path, name="whole", device=device)
    whole.fit(uneven())
    with pytest.raises(Cut):
        runs(tmp_path, SaveAndCut(num), name="cut", device=device).fit(uneven())
    torch.rand(9)
    resumed = runs(tmp_path, name="cut", device=device)
    resumed.fit(uneven())
    assert resumed.global_step == whole.global_step == 6
    assert resumed.data.num_batches == 14
    assert differing(weights_of(resumed), weights_of(whole)) == []


@pytest.mark.parametrize("num", [1, 2, 5, 8])
@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.slow_cases(every=4)
def test_weights_that_are_tensors_are_kept(tmp_path, num, device) -> None:
    settings = {"model": CountingTokens, "device": device}
    whole = runs(tmp_path, name="whole", **settings)
    whole.fit(uneven())
    with pytest.raises(Cut):
        runs(tmp_path, SaveAndCut(num), name="cut", **settings).fit(uneven())
    resumed = runs(tmp_path, name="cut", **settings)
    resumed.fit(uneven())
    assert differing(weights_of(resumed), weights_of(whole)) == []


@pytest.mark.parametrize("num", [1, 3, 5, 6, 8])
@pytest.mark.slow_cases(every=4)
def test_a_short_window_of_equal_batches_is_still_known_as_one(tmp_path, num) -> None:
    whole = runs(tmp_path, name="whole", grad_accum_steps=4)
    whole.fit(tiny_batches(7))
    with pytest.raises(Cut):
        runs(tmp_path, SaveAndCut(num), name="cut", grad_accum_steps=4).fit(tiny_batches(7))
    resumed = runs(tmp_path, name="cut", grad_accum_steps=4)
    resumed.fit(tiny_batches(7))
    assert differing(weights_of(resumed), weights_of(whole)) == []


def test_it_may_be_cut_twice_in_one_window(tmp_path) -> None:
    whole = runs(tmp_path, name="whole", grad_accum_steps=7)
    whole.fit(uneven())
    for num in (2, 5):
        with pytest.raises(Cut):
            runs(tmp_path, SaveAndCut(num), name="cut", grad_accum_steps=7).fit(uneven())
    resumed = runs(tmp_path, name="cut", grad_accum_steps=7)
    resumed.fit(uneven())
    assert differing(weights_of(resumed), weights_of(whole)) == []


@pytest.mark.parametrize(("num", "is_there"), [(1, True), (2, True), (3, False), (7, False)])
def test_the_window_is_in_the_checkpoint_only_while_it_is_open(tmp_path, num, is_there) -> None:
    with pytest.raises(Cut):
        runs(tmp_path, SaveAndCut(num), name="cut").fit(uneven())
    [info] = checkpointing.list_checkpoints(tmp_path / "cut")
    assert ("grad_accum" in checkpointing.load(info.path)) == is_there


def test_gradients_are_saved_by_the_names_of_their_parameters(tmp_path) -> None:
    with pytest.raises(Cut):
        runs(tmp_path, SaveAndCut(2), name="cut").fit(uneven())
    window = checkpointing.load(tmp_path / "cut" / "checkpoint_0")["grad_accum"]
    assert list(window["grads"]) == ["hidden.weight", "hidden.bias", "head.weight", "head.bias"]
    assert (window["count"], window["expected"], window["sum"]) == (2, 3, 6)


def test_a_parameter_without_a_gradient_stays_so(tmp_path) -> None:
    class Partly(TinyModel):
        def __init__(self):
            super().__init__()
            self.unused = torch.nn.Linear(2, 2)

    with pytest.raises(Cut):
        runs(tmp_path, SaveAndCut(1), name="cut", model=Partly).fit(uneven())
    resumed = runs(tmp_path, name="cut", model=Partly)
    resumed.load_checkpoint(tmp_path / "cut" / "checkpoint_0")
    assert resumed.model.unused.weight.grad is None
    assert resumed.model.head.weight.grad is not None


def test_loading_another_checkpoint_drops_the_window(tmp_path) -> None:
    with pytest.raises(Cut):
        runs(tmp_path, SaveAndCut(2), name="cut").fit(uneven())
    whole = runs(tmp_path, name="whole", checkpoint=Checkpoint(steps=100))
    whole.fit(uneven())
    trainer = runs(tmp_path, name="other")
    trainer.load_checkpoint(tmp_path / "cut" / "checkpoint_0")
    trainer.load_checkpoint(tmp_path / "whole" / "checkpoint_6")
    assert trainer.model.head.weight.grad is None


def test_a_run_that_does_not_accumulate_leaves_them_out_and_says_so(tmp_path, caplog) -> None:
    with pytest.raises(Cut):
        runs(tmp_path, SaveAndCut(2), name="cut").fit(uneven())
    trainer = runs(tmp_path, name="cut", grad_accum_steps=1)
    trainer.fit(uneven())
    assert trainer.global_step == 12
    assert "after 2 of 3 batches of a gradient accumulation" in caplog.text


def test_gradients_of_another_model_are_refused(tmp_path) -> None:
    with pytest.raises(Cut):
        runs(tmp_path, SaveAndCut(2), name="cut").fit(uneven())
    trainer = runs(tmp_path, name="other")
    state = checkpointing.load(tmp_path / "cut" / "checkpoint_0")
    state["grad_accum"]["grads"]["head.weight"] = torch.zeros(7)
    with pytest.raises(CheckpointMismatch, match=r"gradient of 'head\.weight', \(7,\)"):
        trainer.grad_accum.on_load_checkpoint(trainer, state)
    assert trainer.model.hidden.weight.grad is None


class StopAfter(Callback):
    """Has the model raise after so many batches: a callback's stop would wait for the step."""

    def __init__(self, num: int) -> None:
        self.num = num

    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
        def stop(module, args):
            if trainer.data.num_batches > self.num:
                raise StopTraining("enough")

        trainer.model.register_forward_pre_hook(stop)


@pytest.mark.parametrize(("num", "step"), [(4, 1), (5, 1), (8, 3), (12, 4), (13, 5)])
@pytest.mark.slow_cases(every=4)
def test_a_window_that_a_stop_cuts_off_is_taken_again_as_a_whole(tmp_path, num, step) -> None:
    whole = runs(tmp_path, name="whole")
    whole.fit(uneven())
    stopped = runs(tmp_path, StopAfter(num), name="cut", checkpoint=Checkpoint(steps=100))
    stopped.fit(uneven())
    [info] = checkpointing.list_checkpoints(tmp_path / "cut")
    assert "grad_accum" not in checkpointing.load(info.path)
    resumed = runs(tmp_path, name="cut")
    resumed.fit(uneven())
    assert (stopped.global_step, resumed.global_step) == (step, 6)
    assert resumed.data.num_batches == 14
    assert differing(weights_of(resumed), weights_of(whole)) == []


def test_callbacks_drop_what_they_collected_of_a_window_that_a_stop_cuts_off(tmp_path) -> None:
    class Collecting(Callback):
        def __init__(self):
            self.held: list[int] = []
            self.dropped: list[list[int]] = []

        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            self.held.append(batch_idx)

        def on_step_committed(self, trainer):
            self.held.clear()

        def on_step_discarded(self, trainer):
            self.dropped.append(self.held.copy())

    collecting = Collecting()
    runs(tmp_path, StopAfter(5), collecting, name="cut").fit(uneven())
    assert collecting.dropped == [[3, 4]]


def test_an_exception_in_a_window_leaves_no_gradients(tmp_path) -> None:
    class Fail(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            raise Cut

    trainer = runs(tmp_path, Fail(), name="failed")
    with pytest.raises(Cut):
        trainer.fit(uneven())
    assert all(param.grad is None for param in trainer.model.parameters())


def test_nothing_is_logged_of_a_step_that_a_stop_cuts_off(tmp_path, caplog) -> None:
    class Stop(Callback):
        def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
            def stop(module, args):
                if trainer.global_step == 2:
                    trainer.log_metrics(late=1.0)
                    raise StopTraining("enough")

            trainer.model.register_forward_pre_hook(stop)

    class Seeing(Callback):
        def __init__(self):
            self.steps = []

        def on_metrics(self, trainer, metrics, step):
            self.steps.append(step)

    caplog.set_level(logging.INFO)
    seeing = Seeing()
    trainer = make_trainer(tmp_path / "run", Stop(), seeing, optimizer=sgd, max_steps=5)
    trainer.fit(tiny_batches(5))
    assert trainer.global_step == 2
    assert seeing.steps == [1, 2]
