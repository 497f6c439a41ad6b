"""A loss spike ends the run; the next run skips its batches."""

import json
import math

import pytest
import torch

from modelzoo_trainer import Callback, Checkpoint, ConfigError, TrainingLoop, TrainingSpike
from modelzoo_trainer.callbacks.spike_detection import SpikeDetection

DEVICES = ["cpu", "fake"]


class Losses(Callback):
    """Replace the losses of batches, counted from 0, without changing the graph of gradients."""

    def __init__(self, *values):
        self.values = values

    def on_after_forward(self, trainer, model, outputs, batch):
        if model.training:
            value = self.values[trainer.data.batch_idx - 1]
            outputs["loss"] = outputs["loss"] * 0 + value


class Places(Callback):
    def __init__(self):
        self.found = []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.found.append((trainer.data.epoch, batch_idx))


def run(make, batches, losses, *others, device="cpu", steps=None, **settings):
    spikes = SpikeDetection(**settings)
    callbacks = (Losses(*losses), spikes, *others)
    steps = steps or len(losses)
    trainer = make(*callbacks, device=device, max_steps=steps, check_loss=spikes.finite_only)
    trainer.fit(batches[: len(losses)])
    return trainer


def file_of(trainer_or_folder):
    return json.loads((trainer_or_folder / "skip_batches.json").read_text())


# ---- spikes


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("losses", "settings", "step"),
    [
        ((1, 1, 1, 3), {}, 4),  # |3 - 1| >= 2 * 1
        ((1, 3), {}, 2),
        ((1, 1, 1, 2.9, 9), {}, 5),  # mean (3 + 2.9) / 4
        ((1, 1, 4, 1), {"atol": 3.0}, 3),
        ((1, 1, 3, 9), {"atol": 3.0, "rtol": None}, 4),
        ((1, 9, 2, 7), {"warmup": 2, "window": 1}, 4),
        ((4, 4, 4, 1), {"mode": "max", "rtol": 0.75}, 4),
        ((-4, -4, -4, 6), {}, 4),
        ((1, 1, math.nan), {}, 3),
        ((1, 1, math.inf), {}, 3),
        ((1, 1, -math.inf), {}, 3),
        ((math.nan, 1), {}, 1),
        ((1, 1, math.inf), {"finite_only": False}, 3),
        ((1, math.nan, 1, 3), {"finite_only": False}, 4),
    ],
)
@pytest.mark.slow_cases(every=4)
def test_it_ends_the_run_with_its_step(make, batches, device, losses, settings, step):
    with pytest.raises(TrainingSpike, match=rf"at global_step {step}, a spike") as caught:
        run(make, batches, losses, device=device, **settings)
    assert caught.value.step == step
    first = [(0, step - 2)] if step > 1 else []
    assert caught.value.batches == [*first, (0, step - 1)]


@pytest.mark.parametrize(
    ("losses", "settings"),
    [
        ((1, 1, 1, 2.99), {}),
        ((9, 1), {"rtol": 0.1}),  # better than the previous one
        ((1, 9), {"warmup": 2}),
        ((1, 1, 3, 1), {"atol": 3.0}),
        ((1, 1, 9, 1), {"atol": 3.0, "rtol": 10.0}),
        ((1, 4, 4, 4), {"mode": "max", "rtol": 0.1}),
        ((1, math.nan, 1, 1), {"finite_only": False}),
        ((1, -math.inf, 1, 1), {"finite_only": False}),
    ],
)
def test_others_are_none(make, batches, losses, settings):
    assert run(make, batches, losses, **settings).global_step == len(losses)


def test_the_mean_is_of_the_last_few(make, batches):
    losses = (10, 10, 1, 1, 3)
    assert run(make, batches, losses, window=5).global_step == 5
    with pytest.raises(TrainingSpike, match="the mean of the last 2 is 1"):
        run(make, batches, losses, window=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "low"}, r"SpikeDetection\.mode: expected .*min.*max.*, got 'low'"),
        ({"window": 0}, r"SpikeDetection\.window: expected .*\[1, 1000000000\], got 0"),
        ({"warmup": -1}, r"SpikeDetection\.warmup: expected .*>= 0.*, got -1"),
        ({"warmup": True}, r"SpikeDetection\.warmup: expected .*, got true"),
        (
            {"atol": -1.0},
            r"SpikeDetection\.atol: expected .*>= 0 or null, got -1\.0",
        ),
        ({"rtol": math.nan}, r"SpikeDetection\.rtol: expected .*, got nan"),
        (
            {"exclude_batches_path": 3},
            "exclude_batches_path: expected a path or null, got 3",
        ),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        SpikeDetection(**arguments)


# ---- the file


@pytest.mark.parametrize("device", DEVICES)
def test_the_next_run_skips_the_batches_of_the_step_and_of_the_one_before(
    make, batches, tmp_path, device
):
    with pytest.raises(TrainingSpike) as caught:
        run(make, batches, (1, 1, 1, 9, 1, 1), device=device)
    assert file_of(tmp_path / "run") == {"batches": [[0, 2], [0, 3]], "num_shards": 1}
    assert "the next run skips the batches in" in caught.value.__notes__[0]
    places = Places()
    run(make, batches, (1, 1, 1, 9, 1, 1), places, device=device, steps=4)
    assert places.found == [(0, 0), (0, 1), (0, 4), (0, 5)]


def test_the_batches_of_a_step_of_several_are_all_named(make, batches, tmp_path):
    trainer = make(
        Losses(1, 1, 1, 1, 9, 1),
        SpikeDetection(),
        loop=TrainingLoop(max_steps=3, grad_accum_steps=2),
    )
    with pytest.raises(TrainingSpike, match="loss is 5 at global_step 3"):
        trainer.fit(batches)
    assert file_of(tmp_path / "run")["batches"] == [[0, 2], [0, 3], [0, 4], [0, 5]]


def test_batches_of_several_runs_are_kept(make, batches, tmp_path):
    for losses in [(1, 1, 9, 1, 1, 1, 1), (1, 1, 9, 1, 1, 9, 1)]:
        with pytest.raises(TrainingSpike):
            run(make, batches, losses)
    assert file_of(tmp_path / "run")["batches"] == [[0, 1], [0, 2], [0, 4], [0, 5]]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("bad.json", "bad.json"), ("folder", "folder/skip_batches.json")],
)
def test_the_file_can_be_chosen(make, batches, tmp_path, given, wanted):
    with pytest.raises(TrainingSpike):
        run(make, batches, (1, 9), exclude_batches_path=tmp_path / given)
    assert (tmp_path / wanted).is_file()


@pytest.mark.parametrize(
    "text", ["[1, 2]", "{}", '{"batches": [3]}', '{"batches": [[0, -1]]}', "x"]
)
def test_a_file_that_says_something_else_is_refused(make, batches, tmp_path, text):
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigError, match=r"is not a list of batches to skip\. Expected "):
        run(make, batches, (1, 1), exclude_batches_path=tmp_path / "bad.json")


def test_batches_of_another_number_of_processes_are_not_skipped(make, batches, tmp_path, caplog):
    (tmp_path / "it.json").write_text('{"batches": [[0, 1]], "num_shards": 2}')
    places = Places()
    run(make, batches, (1, 1, 1), places, exclude_batches_path=tmp_path / "it.json")
    assert places.found == [(0, 0), (0, 1), (0, 2)]
    assert any(
        "from a run with 2 data-parallel processes; this run has 1" in r.getMessage()
        for r in caplog.records
    )


def test_a_file_that_cannot_be_written_does_not_hide_the_spike(make, batches, tmp_path):
    (tmp_path / "file").write_text("")
    trainer = make(
        Losses(1, 9), SpikeDetection(exclude_batches_path=tmp_path / "here"), max_steps=2
    )
    (tmp_path / "here").mkdir()
    (tmp_path / "here").joinpath(".skip_batches.json.new").mkdir()
    with pytest.raises(TrainingSpike) as caught:
        trainer.fit(batches)
    assert "the next run will not skip them" in caught.value.__notes__[0]


# ---- resuming


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_that_resumes_judges_as_one_that_was_not_broken(make, batches, accumulation):
    losses = (1, 1.5, 2, 1, 1.2, 1.1, 4, 4, 1, 1)

    def trainer(spikes, steps):
        loop = TrainingLoop(max_steps=steps, grad_accum_steps=accumulation)
        return make(Losses(*losses), spikes, loop=loop, checkpoint=Checkpoint(steps=2))

    first = SpikeDetection(rtol=1.0, window=3)
    trainer(first, 2).fit(batches)
    second = SpikeDetection(rtol=1.0, window=3)
    third = trainer(second, 10 // accumulation)
    with pytest.raises(TrainingSpike) as caught:
        third.fit(batches)
    assert caught.value.step == {1: 7, 2: 4}[accumulation]
    assert (
        caught.value.batches
        == {
            1: [(0, 5), (0, 6)],
            2: [(0, 4), (0, 5), (0, 6), (0, 7)],
        }[accumulation]
    )
    assert second.state_dict()["num_steps"] == caught.value.step - 1


class Break(Callback):
    """Write a checkpoint after a batch, and stop."""

    def __init__(self, batch_idx):
        self.batch_idx = batch_idx

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if batch_idx == self.batch_idx:
            self.batch_idx = None
            trainer.save_checkpoint()
            raise ZeroDivisionError


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_that_resumes_within_a_step_knows_its_first_batches(make, batches, device):
    def trainer(*others):
        loop = TrainingLoop(max_steps=3, grad_accum_steps=2)
        return make(Losses(1, 1, 9, 1, 1, 1), SpikeDetection(), *others, loop=loop, device=device)

    with pytest.raises(ZeroDivisionError):
        trainer(Break(2)).fit(batches)
    with pytest.raises(TrainingSpike, match="loss is 5 at global_step 2") as caught:
        trainer().fit(batches)
    assert caught.value.batches == [(0, 0), (0, 1), (0, 2), (0, 3)]


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_nothing_is_read_in_the_step(make, batches, device):
    trainer = make(SpikeDetection(rtol=1e9), device=device)
    trainer.fit(batches)
    assert trainer.global_step == 4


def test_the_loss_is_as_it_was_when_a_spike_is_looked_for(make, batches):
    plain = make(max_steps=4)
    plain.fit(batches)
    weights = [p.detach().clone() for p in plain.model.parameters()]
    watched = make(SpikeDetection(rtol=1e9), max_steps=4)
    watched.fit(batches)
    assert all(torch.equal(a, b) for a, b in zip(weights, watched.model.parameters(), strict=True))
