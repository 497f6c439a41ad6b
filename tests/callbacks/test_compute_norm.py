import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback, TrainingLoop
from modelzoo_trainer.callbacks import ComputeNorm


class Expected(Callback):
    """Compute the norms of each step in a simple, slow way."""

    def __init__(self):
        self.params, self.grads, self.layers = [], [], []

    def on_before_backward(self, trainer, model, outputs):
        whole = torch.cat([p.flatten() for p in model.parameters() if p.requires_grad])
        self.params.append(whole.double().norm().item())

    def on_before_optimizer_step(self, trainer, model, optimizer):
        grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        self.grads.append(torch.cat(grads).double().norm().item())
        layer = [p.grad.flatten() for p in model.layers[1].parameters()]
        self.layers.append(torch.cat(layer).double().norm().item())


def values(history, name):
    return [value for _, value in history.of(name)]


def test_the_norms_are_those_of_parameters_and_gradients(make, batches, history):
    expected = Expected()
    make(ComputeNorm(), expected).fit(batches)
    assert values(history, "model_wise_params_norm") == pytest.approx(expected.params)
    assert values(history, "model_wise_grad_norm") == pytest.approx(expected.grads)
    assert values(history, "per_layer_grad_norm/layer_1") == pytest.approx(expected.layers)
    assert not values(history, "per_layer_grad_norm/layer_2")


def test_only_log_steps_have_norms(make, batches, history):
    make(ComputeNorm(), log_steps=3, max_steps=7).fit(batches)
    assert [step for step, _ in history.of("model_wise_grad_norm")] == [3, 6, 7]
    assert [step for step, _ in history.of("model_wise_params_norm")] == [3, 6, 7]


def test_an_accumulated_step_has_one_norm_of_the_whole_gradient(make, batches, history):
    loop = TrainingLoop(max_steps=2, grad_accum_steps=2)
    expected = Expected()
    make(ComputeNorm(), expected, loop=loop).fit(batches)
    assert values(history, "model_wise_grad_norm") == pytest.approx(expected.grads)
    assert len(values(history, "model_wise_params_norm")) == 2


class Freeze(Callback):
    """Freeze a layer and replace a parameter before the second train stage."""

    def on_validate_end(self, trainer, model, loop):
        model.layers[0].requires_grad_(False)
        model.head.weight = nn.Parameter(torch.full((1, 4), 100.0))


def test_what_changes_before_a_train_stage_changes_the_norms(make, batches, history):
    expected = Expected()
    loop = TrainingLoop(max_steps=4, eval_frequency=2)
    make(ComputeNorm(), expected, Freeze(), loop=loop).fit(batches, batches[:1])
    assert [step for step, _ in history.of("per_layer_grad_norm/layer_0")] == [1, 2]
    assert values(history, "model_wise_params_norm")[2] > 200
    assert values(history, "model_wise_params_norm") == pytest.approx(expected.params)
    assert values(history, "model_wise_grad_norm") == pytest.approx(expected.grads)


@pytest.mark.parametrize("place", ["h", "blocks", "layers"])
def test_layers_are_found_under_their_usual_names(make, batches, history, place):
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Module()
            setattr(self.inner, place, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)))

        def forward(self, batch):
            return getattr(self.inner, place)(batch[0]).square().mean()

    make(ComputeNorm(), model=Stack).fit(batches)
    assert len(values(history, "per_layer_grad_norm/layer_1")) == 4


class Lookup(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.full((1,), 2.0, dtype=dtype))

    def forward(self, batch):
        return (self.table(batch[0].argmax(1)) * self.scale.float()).square().mean()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sparse_missing_and_mixed_gradients_have_norms(make, batches, history, dtype):
    make(ComputeNorm(), model=lambda: Lookup(dtype)).fit(batches)
    norms = values(history, "model_wise_grad_norm")
    assert len(norms) == 4
    assert min(norms) > 0


class ReplaceInStep(Callback):
    """Freeze a layer and replace a parameter, with its value, before the third step."""

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if trainer.global_step == 2:
            model.layers[0].requires_grad_(False)
            model.head.weight = nn.Parameter(torch.full((1, 4), 100.0))


def test_parameters_that_change_within_a_stage_are_looked_up(make, batches, history):
    expected = Expected()
    make(ReplaceInStep(), ComputeNorm(), expected).fit(batches)
    assert values(history, "model_wise_params_norm") == pytest.approx(expected.params)
    assert values(history, "model_wise_grad_norm")[2:] == pytest.approx(expected.grads[2:])
