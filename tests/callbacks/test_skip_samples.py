"""Skipping of data, and counting of samples."""

import logging
import math

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from modelzoo_trainer import Callback, Checkpoint, ConfigError, StopTraining, TrainingLoop
from modelzoo_trainer.callbacks import CheckLoss
from modelzoo_trainer.callbacks.samples_streamed_info import SamplesStreamedInfo
from modelzoo_trainer.callbacks.skip_samples import SkipSamples

INFO = "modelzoo_trainer.samples_streamed"


class Places(Callback):
    def __init__(self):
        self.found = []
        self.firsts = []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.found.append((trainer.data.epoch, batch_idx))
        self.firsts.append(batch[0][0, 0].item())


def loader(batches, **options):
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return DataLoader(TensorDataset(inputs, targets), batch_size=8, **options)


def places(make, data, *callbacks, steps=4, every=None, **settings):
    found = Places()
    if every is not None:
        settings["checkpoint"] = Checkpoint(steps=every)
    trainer = make(found, *callbacks, max_steps=steps, **settings)
    trainer.fit(data)
    return found.found


@pytest.mark.parametrize("value", [0, -1, 2.5, True, None])
def test_what_does_not_fit_is_refused(value):
    with pytest.raises(ConfigError, match=r"SkipSamples\.n: expected .*> 0.*, got .*"):
        SkipSamples(value)


@pytest.mark.parametrize(("n", "first"), [(8, 1), (16, 2), (17, 3), (1, 1)])
def test_a_new_run_begins_behind_them(make, batches, n, first):
    found = places(make, loader(batches), SkipSamples(n))
    assert found == [(0, first + idx) for idx in range(4)]


def test_a_list_of_batches_is_counted_by_its_first(make, batches):
    assert places(make, batches, SkipSamples(24))[0] == (0, 3)


def test_they_may_end_in_a_later_pass(make, batches):
    assert places(make, loader(batches), SkipSamples(80 * 2 + 16))[:2] == [(2, 2), (2, 3)]


def test_a_number_far_beyond_the_data_is_no_work_and_is_reported(make, batches, caplog):
    def trainer(num):
        return make(SkipSamples(num), loop=TrainingLoop(num_epochs=2))

    over = trainer(80 * 10**15)  # skipping epoch by epoch would take forever
    over.fit(loader(batches))
    assert (over.global_step, over.data.epoch) == (0, 10**15)
    assert caplog.text.count("no data is left") == 1


def test_a_loop_whose_end_is_reached_is_not_reported(make, batches, caplog):
    trainer = make(SkipSamples(80 + 72), loop=TrainingLoop(num_epochs=2))
    trainer.fit(loader(batches))
    assert trainer.global_step == 1
    assert "no data is left" not in caplog.text


def test_the_order_is_that_of_a_run_that_takes_them(make, batches):
    whole, skipping = Places(), Places()
    data = loader(batches, shuffle=True)
    make(whole, max_steps=6).fit(data)
    make(skipping, SkipSamples(16), max_steps=4).fit(loader(batches, shuffle=True))
    assert skipping.firsts == whole.firsts[2:]


def test_one_line_says_what_is_skipped(make, batches, caplog):
    with caplog.at_level(logging.INFO):
        places(make, loader(batches), SkipSamples(40))
    assert [r.getMessage() for r in caplog.records if "skip" in r.name] == [
        "Skipped 40 samples: from batch 0 of epoch 1 to batch 5 of epoch 1."
    ]
    assert not any("passed over" in r.getMessage() for r in caplog.records)


@pytest.mark.slow
def test_a_run_that_resumes_continues_behind_them_and_not_twice(make, batches):
    saved = {"every": 2}
    assert places(make, loader(batches), steps=2, **saved) == [(0, 0), (0, 1)]
    assert places(make, loader(batches), SkipSamples(16), steps=4, **saved) == [(0, 4), (0, 5)]
    assert places(make, loader(batches), SkipSamples(16), steps=6, **saved) == [(0, 6), (0, 7)]
    assert places(make, loader(batches), SkipSamples(8), steps=7, **saved) == [(0, 9)]
    assert places(make, loader(batches), steps=8, **saved) == [(1, 0)]


def test_a_second_fit_does_not_skip_as_many_again(make, batches):
    found = Places()
    trainer = make(found, SkipSamples(16), loop=TrainingLoop(num_steps=2))
    trainer.fit(loader(batches))
    trainer.fit(loader(batches))
    assert found.found == [(0, 2), (0, 3), (1, 0), (1, 1)]


def test_a_run_that_goes_back_to_before_them_leaves_them_out_again(make, batches):
    saved = {"every": 2}
    places(make, loader(batches), steps=2, **saved)
    bad = [(x * math.nan if idx == 5 else x, y) for idx, (x, y) in enumerate(batches)]
    found = places(make, loader(bad), SkipSamples(16), CheckLoss("rollback"), steps=5, **saved)
    assert found == [(0, 4), (0, 5), (0, 4), (0, 6), (0, 7)]


def test_between_the_batches_of_a_step_the_step_is_begun_again(make, batches):
    class Break(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if batch_idx == 2:
                trainer.save_checkpoint()
                raise ZeroDivisionError

    def loop():
        return TrainingLoop(max_steps=3, grad_accum_steps=2)

    with pytest.raises(ZeroDivisionError):
        make(Break(), loop=loop()).fit(loader(batches))
    found = Places()
    trainer = make(found, SkipSamples(16), loop=loop())
    trainer.fit(loader(batches))
    assert found.found == [(0, 4), (0, 5), (0, 6), (0, 7)]
    assert trainer.global_step == 3


class Streamed(IterableDataset):
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def test_a_loader_that_does_not_tell_its_batch_size_is_refused(make, batches):
    with pytest.raises(ConfigError, match=r"samples cannot be skipped: .*train_dataloader"):
        places(make, DataLoader(Streamed(batches), batch_size=None), SkipSamples(8))


def test_of_a_stream_they_are_loaded_and_dropped(make, batches):
    samples = [(x, y) for xs, ys in batches for x, y in zip(xs, ys, strict=True)]
    assert places(make, DataLoader(Streamed(samples), batch_size=8), SkipSamples(16))[0] == (0, 2)


# ---- counting


def test_samples_are_counted_over_a_restart(make, batches):
    saved = {"every": 2}
    first = SamplesStreamedInfo()
    places(make, loader(batches), first, steps=2, **saved)
    second = SamplesStreamedInfo()
    places(make, loader(batches), second, steps=5, **saved)
    assert (first.num_samples, second.num_samples) == (16, 40)


@pytest.mark.parametrize(("device", "late"), [("cpu", 0), ("fake", 1)])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.slow_cases(every=4)
def test_the_number_that_is_suggested_goes_past_the_bad_batch(
    make, batches, caplog, device, late, gradients
):
    bad = [(x * math.nan if idx == 4 else x, y) for idx, (x, y) in enumerate(batches)]
    saved = {"every": 3, "device": device}
    check = CheckLoss("raise", check_gradients=gradients)
    with pytest.raises(FloatingPointError):
        places(make, loader(bad), SamplesStreamedInfo(), check, steps=8, **saved)
    (message,) = [r.getMessage() for r in caplog.records if r.name == INFO]
    n = 16 + 8 * late
    assert f"after {24 + n} samples, {n} of them since the newest" in message
    assert message.endswith(f"add the callback SkipSamples(n={n}).")
    found = places(
        make, loader(bad), SamplesStreamedInfo(), CheckLoss(), SkipSamples(n), steps=5, **saved
    )
    assert found == [(0, 5 + late), (0, 6 + late)]


def test_another_error_is_none_of_its_business(make, batches, caplog):
    class Raises(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        places(make, loader(batches), SamplesStreamedInfo(), Raises())
    assert not [r for r in caplog.records if r.name == INFO]


def test_a_step_that_a_stop_cuts_off_is_not_counted(make, batches):
    info = SamplesStreamedInfo()
    trainer = make(info, loop=TrainingLoop(max_steps=3, grad_accum_steps=2))

    def data():
        yield from batches[:3]
        raise StopTraining("enough")

    trainer.fit(data)
    assert (trainer.global_step, info.num_samples) == (1, 16)
