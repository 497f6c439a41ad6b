"""Weights that are drawn after the model was shared out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backends.deferred_init import materialize
from backends.errors import BackendError
from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.decoder_names import Gpt2, GptJ
from tests.distributed.engines import CPU, spread, whole
from tests.distributed.ranks import run_ranks
from tests.distributed.test_tensor_parallel import SETTINGS
from tests.zoo.models.llama_settings import LLAMA

META = {"parallel": {"shard": -1}, "sharding": {"meta_init": True}}


def make(kind: type[Decoder], changes: dict[str, Any], device: str) -> Decoder:
    torch.manual_seed(3)
    with torch.device(device):
        return kind(**{**SETTINGS, **changes})  # type: ignore[arg-type]  # of several types


def values(model: nn.Module) -> dict[str, list[float]]:
    return {name: whole(value).tolist() for name, value in model.state_dict().items()}


def draw(
    rank: int, kind: type[Decoder], changes: dict[str, Any], options: dict[str, Any]
) -> tuple[Any, ...]:
    model = make(kind, changes, "meta")
    torch.manual_seed(3 + rank)  # that of the first process counts
    spread(model, options)
    after = torch.rand(()).item()
    materialize(model, CPU)  # a second call does nothing
    is_shared = model.lm_head.weight is model.token_embeddings.weight
    return values(model), after, is_shared


@pytest.mark.slow_cases("copies", "parallel layers", "sharded", "split, sharded", "split", "uneven")
@pytest.mark.parametrize(
    ("num", "kind", "changes", "options"),
    [
        (2, Gpt2, {}, META),
        (3, Gpt2, LLAMA, META),
        (2, Gpt2, LLAMA, {}),
        (2, Gpt2, {}, {"parallel": {"tensor": 2}}),
        (4, Gpt2, {}, META | {"parallel": {"shard": 2, "tensor": 2}}),
        (2, GptJ, {}, META),
    ],
    ids=["sharded", "uneven", "copies", "split", "split, sharded", "parallel layers"],
)
def test_a_decoder_starts_as_if_it_were_built_on_one_host(
    num: int, kind: type[Decoder], changes: dict[str, Any], options: dict[str, Any]
) -> None:
    built = make(kind, changes, "cpu")
    expected = values(built), torch.rand(()).item(), built.share_embedding_weights

    assert run_ranks(num, draw, kind, changes, options) == [expected] * num


class Usual(nn.Module):
    """Of torch's modules and one that resets a part of another's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, padding_idx=1)
        self.attention = nn.MultiheadAttention(4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.seen)
        self.head.weight.data[0] = 7.0
        self.head.bias.data.mul_(0.5)


def draw_usual(rank: int) -> dict[str, list[float]]:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Usual()
    spread(model, META)
    return values(model)


@pytest.mark.slow
def test_modules_are_reset_in_the_order_of_their_constructors() -> None:
    torch.manual_seed(0)
    expected = values(Usual())
    assert run_ranks(2, draw_usual) == [expected] * 2


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("angles", torch.ones(2), persistent=False)


def test_what_nothing_draws_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Silent())
    with pytest.raises(BackendError) as caught:
        materialize(model, CPU)
    facts = ("sharding.meta_init", " 0.scale (Silent), 0.angles (Silent).", "reset_parameters()")
    assert [fact for fact in facts if fact not in str(caught.value)] == []


def test_a_tensor_that_is_neither_parameter_nor_buffer_is_named() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
        model.mask = torch.ones(2)
    with pytest.raises(BackendError, match="mask is a tensor, but neither"):
        materialize(model, CPU)
