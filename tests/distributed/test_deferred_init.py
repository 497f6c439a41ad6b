"""Weights that are drawn after the model was shared out, or are loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from backends.deferred_init import materialize
from backends.errors import BackendError
from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.decoder_names import Gpt2, GptJ
from tests.core.test_initial_values import BATCH, trainer_in
from tests.distributed.engines import CPU, spread, whole
from tests.distributed.ranks import run_ranks
from tests.distributed.test_tensor_parallel import SETTINGS
from tests.zoo.models.drawn_alike import check_drawn_alike
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
def test_a_decoder_starts_the_same_on_any_number_of_processes(
    num: int, kind: type[Decoder], changes: dict[str, Any], options: dict[str, Any]
) -> None:
    alone = make(kind, changes, "meta")
    torch.manual_seed(3)
    materialize(alone, CPU)
    expected = values(alone), torch.rand(()).item(), alone.share_embedding_weights

    assert run_ranks(num, draw, kind, changes, options) == [expected] * num
    check_drawn_alike(alone, make(kind, changes, "cpu"))


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
    with torch.device("meta"):
        alone = Usual()
    materialize(alone, CPU)
    assert run_ranks(2, draw_usual) == [values(alone)] * 2
    check_drawn_alike(alone, Usual())


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


def start(rank: int, folder: Path, backend: dict[str, Any], num_steps: int) -> tuple[Any, ...]:
    """Train to a step, and return how many numbers were drawn, and the weights."""
    options = {"backend": {"timeout": 60, **backend}}
    with trainer_in(folder, max(num_steps, 1), **options) as trainer:
        drawn = trainer.backend.initial_values.num_drawn
        if num_steps:
            trainer.fit([BATCH])
        return drawn, values(trainer.model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [{}, {"parallel": {"shard": -1}}, {"parallel": {"tensor": 2}}],
    ids=["copies", "sharded", "split"],
)
def test_processes_draw_their_parts_and_nothing_in_a_restart(
    backend: dict[str, Any], tmp_path: Path
) -> None:
    with trainer_in(tmp_path / "one") as trainer:
        num_numbers = sum(param.numel() for param in trainer.model.parameters())
        expected = values(trainer.model)
        norms = [m for m in trainer.model.modules() if isinstance(m, nn.RMSNorm)]
        num_on_both = {
            "shard": 0,
            "tensor": sum(m.weight.numel() for m in norms),
            None: num_numbers,
        }
    whole = run_ranks(2, start, tmp_path / "whole", backend, 4)
    first = run_ranks(2, start, tmp_path / "run", backend, 2)
    second = run_ranks(2, start, tmp_path / "run", backend, 4)
    assert [drawn for drawn, _ in second] == [0, 0]
    assert [found for _, found in second] == [found for _, found in whole]
    on_both = num_on_both[next(iter(backend.get("parallel", {})), None)]
    assert sum(drawn for drawn, _ in first) == num_numbers + on_both
    assert run_ranks(2, start, tmp_path / "none", backend, 0)[0][1] == expected
