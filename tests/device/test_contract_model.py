"""What every backend promises of models, optimizers and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backends import Backend, BackendError, CompileOptions

Make = Callable[..., Backend]


class Tied(nn.Module):
    """Two blocks that share their weight, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.blocks[1].weight = self.blocks[0].weight
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x).sum()


BLOCKS = CompileOptions(target="blocks", backend="eager")


# torch 2.14's compiler looks at the gradients of a block's inputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("compile_options", [None, BLOCKS], ids=["plain", "compiled"])
def test_a_prepared_model_keeps_its_names_and_ties(
    kind: str, open_backend: Make, compile_options: CompileOptions | None
) -> None:
    if kind == "xla" and compile_options:
        pytest.skip("refuses torch.compile")
    backend = open_backend(kind, compile=compile_options)
    names = list(Tied().state_dict())
    model = backend.prepare_model(Tied())
    assert list(model.state_dict()) == names
    assert model.blocks[0].weight is model.blocks[1].weight
    assert {p.device.type for p in model.parameters()} == {backend.device.type}
    with backend.step(0):
        model(torch.ones(2, 4, device=backend.device)).backward()
    assert model.head.weight.grad is not None


def test_blocks_cannot_be_compiled_where_there_are_none(kind: str, open_backend: Make) -> None:
    if kind == "xla":
        pytest.skip("refuses torch.compile")
    backend = open_backend(kind, compile=BLOCKS)
    with pytest.raises(BackendError, match=r"Linear has no ModuleList.*target: model"):
        backend.prepare_model(nn.Linear(2, 2))


@pytest.mark.parametrize("optimizer_cls", ["SGD", "Adam", "AdamW", "Adagrad"])
@pytest.mark.slow_cases(every=4)
def test_a_whole_step_runs_and_trains(kind: str, open_backend: Make, optimizer_cls: str) -> None:
    backend = open_backend(kind)
    with backend.building():
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
    module = backend.prepare_model(model)
    optimizer = getattr(torch.optim, optimizer_cls)(model.parameters(), lr=0.05)
    optimizer = backend.prepare_optimizer(optimizer)
    losses: list[Any] = []
    source = torch.arange(24.0).view(6, 4) / 24
    for index, batch in enumerate(backend.batches([source] * 12)):
        with backend.step(index):
            with backend.accumulating():
                loss = (module(batch) - 1.0).square().mean()
                loss.backward()
            backend.norms.clip_grad_norm(list(model.parameters()), 1.0)
            backend.optimizer_step(optimizer)
            optimizer.zero_grad()
            backend.read([loss], losses.extend)
    backend.flush()
    assert len(losses) == 12
    assert losses[-1] < losses[0] or not backend.caps.holds_values


def test_clipping_follows_the_formula(valued: Backend) -> None:
    parameters = [torch.zeros(2, device=valued.device), torch.zeros(1, device=valued.device)]
    parameters[0].grad = torch.tensor([2.0, 3.0], device=valued.device)
    parameters[1].grad = torch.tensor([6.0], device=valued.device)
    with valued.step(0):
        norm = valued.norms.clip_grad_norm(parameters, 3.5)
    assert norm.item() == pytest.approx(7.0)
    grads = valued.host_state([p.grad for p in parameters])
    torch.testing.assert_close(grads, [torch.tensor([1.0, 1.5]), torch.tensor([3.0])])


def test_gradients_that_are_not_finite_do_not_raise(valued: Backend) -> None:
    parameter = torch.zeros(2, device=valued.device)
    parameter.grad = torch.tensor([float("nan"), 1.0], device=valued.device)
    with valued.step(0):
        norm = valued.norms.clip_grad_norm([parameter], 1.0)
    assert norm.isnan().item()


def test_gradient_elements_are_clipped(valued: Backend) -> None:
    parameter = torch.zeros(3, device=valued.device)
    parameter.grad = torch.tensor([-2.0, 0.5, 2.0], device=valued.device)
    with valued.step(0):
        valued.norms.clip_grad_value([parameter], 1.0)
    assert valued.host_state(parameter.grad).tolist() == [-1.0, 0.5, 1.0]


def test_autocast_computes_in_the_dtypes_that_the_facts_name(valued: Backend) -> None:
    factor = torch.ones(2, 2, device=valued.device)
    dtypes = sorted(valued.caps.autocast_dtypes, key=str)
    made = []
    for dtype in dtypes:
        with valued.autocast(dtype):
            made.append((factor @ factor).dtype)
    assert made == dtypes
    assert torch.bfloat16 in made


def test_a_scaler_is_there_where_a_dtype_needs_one(backend: Backend) -> None:
    assert (backend.grad_scaler(init_scale=8.0) is not None) == bool(backend.caps.needs_scaler)


def test_inference_records_no_graph(backend: Backend) -> None:
    weight = torch.ones(2, device=backend.device, requires_grad=True)
    with backend.inference():
        assert not (weight * 2).requires_grad
