"""The loss of a head whose vocabulary is split over processes, without its logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from modelzoo_trainer.zoo.models.decoder_names import Gpt2
from modelzoo_trainer.zoo.models.head_chunks import HeadSettings
from modelzoo_trainer.zoo.models.language_head import is_plain, losses_of, score
from tests.distributed.engines import spread, whole
from tests.distributed.ranks import run_ranks

NUM, WIDTH, VOCAB = 20, 8, 51  # odd: parts of the vocabulary differ in size
SPLIT = {"parallel": {"tensor": -1}, "tensor_plan": {"lm_head": "colwise_gather"}}
CASES = [(1.0, None, 0.0, False), (0.3, 2.0, 0.1, True), (1.0, None, 0.1, True)]


class Head(nn.Module):
    """A head, alone."""

    def __init__(self, *, has_bias: bool) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=has_bias)


def results(head: Head, settings: HeadSettings, dtype: torch.dtype) -> list[Any]:
    torch.manual_seed(1)
    hidden = torch.randn(4, NUM // 4, WIDTH, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, VOCAB, (4, NUM // 4))
    labels[0, :2] = -100
    weights = torch.rand(4, NUM // 4)
    weights[2] = 0
    found = score(head.lm_head, hidden, labels, weights, settings, wants_hits=True)
    assert found.logits is None
    assert found.hits is not None
    of_sum = torch.autograd.grad(found.total / 7, [hidden, *head.parameters()])
    each = losses_of(head.lm_head, hidden, labels, settings)
    factors = torch.randn(4, NUM // 4, dtype=dtype)
    of_each = torch.autograd.grad((each * factors).sum(), [hidden, *head.parameters()])
    values = [found.total, found.losses, found.hits, each, *of_sum, *of_each]
    return [whole(one.detach()).double().tolist() for one in values]


def make_head(*, has_bias: bool) -> Head:
    torch.manual_seed(0)
    return Head(has_bias=has_bias).double()


def split_results(rank: int) -> list[list[Any]]:
    found = []
    for scale, softcap, smoothing, has_bias in CASES:
        head = make_head(has_bias=has_bias)
        spread(head, SPLIT)
        assert isinstance(head.lm_head.weight, DTensor)
        assert is_plain(head.lm_head)
        found.append(results(head, HeadSettings(scale, softcap, smoothing), torch.float64))
    return found


def test_parts_of_the_vocabulary_have_the_same_losses_and_gradients() -> None:
    expected = [
        results(make_head(has_bias=has_bias), HeadSettings(*given), torch.float64)
        for *given, has_bias in CASES
    ]
    for found in run_ranks(2, split_results):
        for mine, theirs in zip(found, expected, strict=True):
            for one, other in zip(mine, theirs, strict=True):
                # The losses are float32.
                torch.testing.assert_close(
                    torch.tensor(one), torch.tensor(other), rtol=1e-6, atol=1e-7
                )


class Widths(TorchDispatchMode):
    """Keeps the last dimensions of all tensors with several rows."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(one, Tensor) and one.dim() > 1 and not isinstance(one, DTensor):
                self.found |= {one.shape[-1]} if one.shape[0] > 1 else set()
        return result


MODEL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "max_position_embeddings": 12,
    "num_hidden_layers": 1,
    "num_heads": 2,
    "filter_size": 32,
    "dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
    "share_embedding_weights": True,
}
TOKENS = torch.arange(4 * 12).view(4, 12) * 7 % VOCAB
BATCH = {"input_ids": TOKENS, "labels": TOKENS.roll(-1, 1)}


def learn(model: nn.Module, module: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    widths = Widths()
    for _ in range(3):
        with widths:
            loss = module(BATCH)["loss"]
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    outputs = module(BATCH)
    assert outputs["logits"].shape == (4, 12, VOCAB)
    model.requested_outputs = ()
    alone = module(BATCH)
    assert "logits" not in alone
    torch.testing.assert_close(alone["loss"], outputs["loss"])
    assert alone["accuracy"] == outputs["accuracy"]
    return {
        "losses": losses,
        "accuracy": float(outputs["accuracy"]),
        "weights": {name: whole(one).tolist() for name, one in model.named_parameters()},
        "is full": VOCAB in widths.found,
    }


def make_model() -> Gpt2:
    torch.manual_seed(0)
    return Gpt2(**MODEL)


def learn_split(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    model = make_model()
    module, _ = spread(model, options)
    return learn(model, module)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"parallel": {"shard": -1}}], ids=["copies", "sharded"])
def test_gradients_that_are_accumulated_over_processes_are_the_same(
    options: dict[str, Any],
) -> None:
    model = make_model()
    expected = accumulated(model, model)
    for found in run_ranks(2, accumulated_spread, options):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def accumulated(model: nn.Module, module: nn.Module) -> dict[str, list[Any]]:
    for _ in range(2):
        module(BATCH)["loss"].backward()
    return {name: whole(one.grad).tolist() for name, one in model.named_parameters()}


def accumulated_spread(rank: int, options: dict[str, Any]) -> dict[str, list[Any]]:
    model = make_model()
    module, _ = spread(model, options)
    return accumulated(model, module)


@pytest.mark.parametrize("num", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_decoder_that_is_split_learns_the_same_and_no_process_has_all_logits(num: int) -> None:
    model = make_model()
    expected = learn(model, model)
    assert expected.pop("is full")  # so few tokens are one chunk
    sharded = {"parallel": {"tensor": 2, "shard": 2}}
    options = {"parallel": {"tensor": -1}} if num == 2 else sharded
    for found in run_ranks(num, learn_split, options):
        assert not found.pop("is full")
        for key, value in found.items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
