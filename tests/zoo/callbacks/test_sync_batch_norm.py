"""Batch normalization over several processes, simulated by one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from modelzoo_trainer.zoo.callbacks.sync_batch_norm import SharedBatchNorm, share_batch_norms


def alone(tensor):
    return tensor.detach().clone()


def pair(kind, shape, **settings):
    torch.manual_seed(0)
    theirs = kind(shape[1], **settings)
    ours = SharedBatchNorm(copy.deepcopy(theirs), alone)
    inputs = torch.randn(shape, dtype=torch.float32) * 2 + 1
    return theirs, ours, inputs


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.BatchNorm1d, (5, 3)),
        (nn.BatchNorm1d, (5, 3, 4)),
        (nn.BatchNorm2d, (2, 3, 4, 4)),
        (nn.BatchNorm3d, (2, 3, 2, 2, 2)),
    ],
)
@pytest.mark.parametrize(
    "settings", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}]
)
def test_of_one_process_it_is_torchs(kind, shape, settings):
    theirs, ours, inputs = pair(kind, shape, **settings)
    weights = torch.randn(shape)
    results = []
    for layer in (theirs, ours):
        given = inputs.clone().requires_grad_()
        for _ in range(2):
            out = layer(given)
        (out * weights).sum().backward()
        grads = [param.grad for param in layer.parameters()]
        layer.eval()
        results.append([out, given.grad, *grads, *layer.buffers(), layer(inputs)])
    torch.testing.assert_close(*results)


def test_of_two_processes_it_is_torchs_over_both_batches():
    theirs, _, inputs = pair(nn.BatchNorm1d, (6, 3))
    halves, answers, asked = inputs.chunk(2), [], []

    def record(tensor):
        asked.append(tensor.detach().clone())
        return answers[len(asked) - 1] if len(asked) <= len(answers) else asked[-1]

    for _ in range(2):  # first the sums of each are known, then the squares around their mean
        found = []
        for half in halves:
            asked.clear()
            SharedBatchNorm(copy.deepcopy(theirs), record)(half)
            found.append(list(asked))
        answers = [sum(parts) for parts in zip(*found, strict=True)]
    outs = []
    for half in halves:
        asked.clear()
        outs.append(SharedBatchNorm(copy.deepcopy(theirs), record)(half))
    torch.testing.assert_close(torch.cat(outs), theirs(inputs))


def test_half_inputs_come_out_as_half():
    _, ours, inputs = pair(nn.BatchNorm1d, (5, 3))
    assert ours(inputs.bfloat16()).dtype is torch.bfloat16


def test_layers_are_replaced_with_names_and_values_kept():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm1d(2)))
    model[2][0].eval()
    before, params = model.state_dict(), list(model.parameters())
    model, num = share_batch_norms(model, alone)
    after = model.state_dict()
    assert num == 2
    assert isinstance(model[1], SharedBatchNorm)
    assert before.keys() == after.keys()
    assert all(first is second for first, second in zip(params, model.parameters(), strict=True))
    assert (model[1].training, model[2][0].training) == (True, False)


def test_a_layer_in_two_places_stays_one():
    norm = nn.BatchNorm1d(2)
    model, num = share_batch_norms(nn.Sequential(norm, nn.Linear(2, 2), norm), alone)
    assert num == 1
    assert model[0] is model[2]


def test_a_model_that_is_a_layer_itself():
    model, num = share_batch_norms(nn.BatchNorm1d(2), alone)
    assert (type(model), num) == (SharedBatchNorm, 1)


def test_a_copy_shares_the_function_and_nothing_else():
    _, ours, _ = pair(nn.BatchNorm1d, (5, 3))
    other = copy.deepcopy(ours)
    assert other._reduce.function is alone
    assert other.weight is not ours.weight


def test_an_input_without_channels_is_refused():
    _, ours, _ = pair(nn.BatchNorm1d, (5, 3))
    with pytest.raises(ValueError, match="at least 2 dimensions, got 1"):
        ours(torch.ones(3))
