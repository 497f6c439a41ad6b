"""Activations that are computed again: the same numbers with less kept."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from backends.blocks import CompileOptions, checkpoint_activations, compile_model
from backends.errors import BackendError

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.narrow = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, *, scale: float = 1.0) -> Tensor:
        parts = self.project(hidden).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(
            *parts, dropout_p=0.25 if self.training else 0.0
        )
        mixed = self.dropout(mixed.transpose(1, 2).flatten(-2))
        return hidden + scale * self.dropout(torch.sigmoid(self.narrow(torch.tanh(mixed))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.inner = Block()

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden, scale=0.5)
        return self.inner(hidden).square().mean()


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def run(model: Model) -> tuple[Tensor, list[Tensor | None], int]:
    """Return the loss, the gradients, and how many elements were kept for the backward pass."""
    torch.manual_seed(1)
    inputs = torch.randn(2, 4, WIDTH)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(inputs)
    loss.backward()
    return loss, [param.grad for param in model.parameters()], sum(kept.values())


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_losses_and_gradients_are_the_same_bits_with_dropout(mode: Any) -> None:
    expected = run(make_model())
    model = make_model()

    checkpoint_activations(model, mode)
    found = run(model)

    torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=0)
    assert found[2] < 0.7 * expected[2]


class CountProducts(TorchDispatchMode):
    """Counts the products of projections that are really computed."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "num_again"), [("full", 3 * 2), ("selective", 0)])
def test_selective_computes_no_matrix_product_twice(mode: Any, num_again: int) -> None:
    model = make_model()
    checkpoint_activations(model, mode)

    with CountProducts() as count:
        run(model)

    assert count.num == 4 * 2 + num_again


def test_names_and_validation_stay_as_they_are() -> None:
    plain, model = make_model().eval(), make_model().eval()
    checkpoint_activations(model, "full")

    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(model(torch.ones(1, 4, WIDTH)), plain(torch.ones(1, 4, WIDTH)))


def test_blocks_can_be_named() -> None:
    model = make_model()
    checkpoint_activations(model, "full", ("Linear",))
    assert "forward" in vars(model.inner.narrow)
    assert "forward" not in vars(model.blocks[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_computes_with_its_own_weights(copied: Any) -> None:
    model = make_model()
    checkpoint_activations(model, "full")
    other = copied(model)
    for param in model.parameters():
        param.data.zero_()

    found, expected = run(other), run(make_model())

    torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_block_is_computed_again() -> None:
    model, expected = make_model(), run(make_model())
    checkpoint_activations(model, "full")
    compile_model(model, CompileOptions(target="blocks", backend="aot_eager", fullgraph=True))

    found = run(model)

    torch.testing.assert_close(found[:2], expected[:2])


def test_it_works_without_values() -> None:
    model = make_model().to("meta")
    checkpoint_activations(model, "full")
    model(torch.empty(2, 4, WIDTH, device="meta")).backward()
    assert all(param.grad is not None for param in model.parameters())


def test_a_wrong_mode_is_refused() -> None:
    with pytest.raises(BackendError, match=r"'ful'\. Did you mean 'full'\?"):
        checkpoint_activations(make_model(), "ful")  # type: ignore[arg-type]


def test_a_misspelt_block_is_refused() -> None:
    with pytest.raises(BackendError, match=r"'Blok'\. Did you mean 'Block'"):
        checkpoint_activations(make_model(), "full", ("Blok",))


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(BackendError, match="Linear has no ModuleList"):
        checkpoint_activations(nn.Linear(2, 2), "full")
