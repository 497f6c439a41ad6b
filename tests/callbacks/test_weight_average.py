"""The average of weights whose parameters are replaced, added, frozen or unfrozen meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from modelzoo_trainer import Callback, TrainingLoop
from modelzoo_trainer.callbacks.model_ema import ModelEma, WeightAverage
from modelzoo_trainer.errors import ConfigError


def model():
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2))


def average_of(average):
    return average.state_dict()["average"]


def give_data(changed):
    for param in changed.parameters():
        param.data = param.data.clone()


def give_a_vector(changed):
    vector_to_parameters(parameters_to_vector(changed.parameters()).clone(), changed.parameters())


def replace(changed):
    changed[0].weight = nn.Parameter(changed[0].weight.detach().clone())


def replace_a_module(changed):
    before, changed[0] = changed[0], nn.Conv2d(1, 2, 2)
    changed[0].load_state_dict(before.state_dict())


CHANGES = {
    "param.data = ...": give_data,
    "vector_to_parameters": give_a_vector,
    "channels_last": lambda changed: changed.to(memory_format=torch.channels_last),
    "a replaced parameter": replace,
    "a replaced module": replace_a_module,
    "other dtype": lambda changed: changed.bfloat16(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_in_other_tensors_are_followed_and_swapped(change):
    changed = model()
    average = WeightAverage(changed, 0.5)
    average.update()
    change(changed)
    with torch.no_grad():
        for param in changed.parameters():
            param.fill_(1.0)
    average.set()
    with torch.no_grad():
        for param in changed.parameters():
            param.fill_(3.0)
    average.update()
    assert average_of(average)["0.weight"].unique().tolist() == [2.0]
    with average.swap():
        assert changed[0].weight.unique().tolist() == [2.0]
    assert changed[0].weight.unique().tolist() == [3.0]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_that_move_within_a_swap_are_restored(change):
    changed = model()
    average = WeightAverage(changed, 0.5)
    before = changed[0].weight.detach().clone()
    with torch.no_grad():
        changed[0].weight.fill_(0.0)
    average.set()
    with torch.no_grad():
        changed[0].weight.copy_(before)
    with average.swap():
        change(changed)
        assert changed[0].weight.unique().tolist() == [0.0]
    torch.testing.assert_close(changed[0].weight.detach().float(), before, rtol=0.01, atol=0)


def test_what_is_added_is_averaged_and_what_is_removed_no_longer():
    changed = model()
    average = WeightAverage(changed, 0.5)
    changed.append(nn.Linear(1, 1, bias=False))
    changed[0].bias = None
    nn.init.ones_(changed[2].weight)
    average.update()
    nn.init.zeros_(changed[2].weight)
    average.update()
    assert "0.bias" not in average_of(average)
    assert average_of(average)["2.weight"].item() == 0.5
    with average.swap():
        assert changed[2].weight.item() == 0.5


def test_another_shape_begins_again_with_a_warning(caplog):
    changed = model()
    average = WeightAverage(changed, 0.5)
    changed[0].weight = nn.Parameter(torch.ones(2, 1, 3, 3))
    average.update()
    assert average_of(average)["0.weight"].unique().tolist() == [1.0]
    assert "0.weight changed from (2, 1, 2, 2) to (2, 1, 3, 3)" in caplog.text


class Unfreeze(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if trainer.global_step >= self.step:
            model.requires_grad_(True)


def test_a_run_that_unfreezes_and_resumes_has_the_average_of_the_unbroken_one(
    make, batches, net, tmp_path
):
    class HeadOnly(net):
        def __init__(self):
            super().__init__()
            self.requires_grad_(False)
            self.head.requires_grad_(True)

    found = []
    for folder, lengths in (("unbroken", [6]), ("parts", [3, 4, 6])):
        for length in lengths:
            ema = ModelEma(0.8)
            trainer = make(
                Unfreeze(2),
                ema,
                model=HeadOnly,
                model_dir=tmp_path / folder,
                loop=TrainingLoop(max_steps=length),
            )
            trainer.fit(batches)
            trainer.save_checkpoint()
        found.append({name: value.clone() for name, value in average_of(ema.average).items()})
    assert found[0].keys() == dict(trainer.model.named_parameters()).keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


# ---- saving and loading while the average is in the model


class Save(Callback):
    def on_validate_end(self, trainer, model, loop):
        trainer.save_checkpoint()


def test_what_is_saved_in_a_validation_of_the_average_has_the_trained_weights(
    make, batches, tmp_path
):
    loop = TrainingLoop(max_steps=4, eval_frequency=2)
    whole = make(ModelEma(0.5), model_dir=tmp_path / "whole", loop=loop)
    whole.fit(batches, batches[:1])
    first = TrainingLoop(max_steps=2, eval_frequency=2)
    make(ModelEma(0.5), Save(), loop=first).fit(batches, batches[:1])
    resumed = make(ModelEma(0.5), loop=loop)
    resumed.fit(batches, batches[:1])
    assert resumed.checkpoint.begun_with[0].name == "checkpoint_2_2"
    expected = whole.model.state_dict()
    assert all(torch.equal(expected[k], v) for k, v in resumed.model.state_dict().items())


def test_saving_inside_swap_leaves_the_average_in_the_model(make, batches):
    ema = ModelEma(0.5)
    trainer = make(ema)
    trainer.fit(batches)
    with ema.swap():
        averaged = trainer.model.head.weight.detach().clone()
        path = trainer.save_checkpoint()
        assert torch.equal(trainer.model.head.weight, averaged)
    assert not torch.equal(trainer.model.head.weight, averaged)
    trained = trainer.model.head.weight.detach().clone()
    trainer.load_checkpoint(path)
    assert torch.equal(trainer.model.head.weight, trained)


def test_loading_inside_swap_is_refused(make, batches):
    ema = ModelEma(0.5)
    trainer = make(ema)
    trainer.fit(batches)
    path = trainer.save_checkpoint()
    with ema.swap(), pytest.raises(ConfigError, match="averaged weights of ModelEma"):
        trainer.load_checkpoint(path)
    trainer.load_checkpoint(path)


def test_in_another_trainer_it_averages_that_ones_model(make, batches, tmp_path):
    ema = ModelEma(0.5)
    make(ema, model_dir=tmp_path / "first").fit(batches)
    second = make(ema, model_dir=tmp_path / "second")
    second.fit(batches)
    alone = ModelEma(0.5)
    make(alone, model_dir=tmp_path / "third").fit(batches)
    assert ema.average.model is second.model
    expected = average_of(alone.average)
    assert all(torch.equal(value, expected[k]) for k, value in average_of(ema.average).items())
