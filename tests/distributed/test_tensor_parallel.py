"""Layers that are split over processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from backends.errors import BackendError
from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.decoder_names import Gpt2
from tests.distributed.engines import make_net, spread, whole
from tests.distributed.ranks import run_ranks
from tests.zoo.models.llama_settings import LLAMA

SPLIT = {"parallel": {"tensor": -1}}
GROUPED = {
    "attention_module": "multiquery_attention",
    "extra_attention_params": {"num_kv_groups": 2},
}
SETTINGS = {
    "vocab_size": 51,  # odd: parts of the vocabulary differ in size
    "hidden_size": 32,
    "max_position_embeddings": 12,
    "num_hidden_layers": 2,
    "dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
    "num_heads": 4,
    "filter_size": 64,
}
TOKENS = torch.arange(4 * 12).view(4, 12) * 7 % 51


def make_decoder(kind: type[Decoder], changes: dict[str, Any]) -> Decoder:
    torch.manual_seed(3)
    model = kind(**{**SETTINGS, **changes}).double()
    model.requested_outputs = ("logits",)
    return model


def learn(model: Decoder) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    losses = []
    for _ in range(2):
        outputs = model({"input_ids": TOKENS, "labels": TOKENS})
        assert type(outputs["logits"]) is Tensor
        losses.append(outputs["loss"].item())
        outputs["logits"].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = model({"input_ids": TOKENS, "labels": TOKENS})["logits"]
    return {
        "losses": losses,
        "logits": logits.numpy(),
        "weights": {name: whole(param).numpy() for name, param in model.named_parameters()},
    }


def learn_split(rank: int, kind: type[Decoder], changes: dict[str, Any]) -> dict[str, Any]:
    model = make_decoder(kind, changes)
    spread(model, SPLIT)
    key = model.layers[0].attention.k_proj.weight
    assert isinstance(key, DTensor)
    assert key.to_local().shape[0] == key.shape[0] // 2
    assert model.token_embeddings.weight.to_local().shape[0] in (25, 26)
    return learn(model)


@pytest.mark.slow_cases("gpt2", "llama, grouped")
@pytest.mark.parametrize(
    ("kind", "changes"), [(Gpt2, {}), (Gpt2, {**LLAMA, **GROUPED})], ids=["gpt2", "llama, grouped"]
)
def test_a_shipped_decoder_is_split_by_its_own_plan(
    kind: type[Decoder], changes: dict[str, Any]
) -> None:
    expected = learn(make_decoder(kind, changes))

    found = run_ranks(2, learn_split, kind, changes)

    torch.testing.assert_close(found, [expected] * 2, rtol=1e-9, atol=1e-9)


class Odd(nn.Module):
    """Has a parameter of its own, a frozen layer and one that cannot take DTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.up = nn.Linear(4, 6).requires_grad_(False)
        self.down = nn.Linear(6, 4)
        self.gate = nn.Bilinear(4, 4, 4)

    def forward(self, values: Tensor) -> Tensor:
        values = self.down(self.up(values * self.scale))
        return self.gate(values, values)


def odd_gradients(model: nn.Module) -> list[tuple[bool, list[float]]]:
    model(torch.ones(2, 4)).sum().backward()
    return [
        (
            param.requires_grad,
            [] if param.grad is None else whole(param.grad).flatten().tolist(),
        )
        for param in model.parameters()
    ]


def odd_split(rank: int) -> tuple[list[tuple[bool, list[float]]], bool]:
    torch.manual_seed(0)
    model = Odd()
    spread(model, SPLIT | {"tensor_plan": {"up": "colwise", "down": "rowwise"}})
    gradients = odd_gradients(model)
    return gradients, all(isinstance(param, DTensor) for param in model.parameters())


def test_what_the_plan_leaves_out_is_whole_everywhere() -> None:
    torch.manual_seed(0)
    expected = odd_gradients(Odd())

    (found, are_of_one_kind), _ = run_ranks(2, odd_split)

    assert are_of_one_kind
    for mine, theirs in zip(found, expected, strict=True):
        assert mine[0] == theirs[0]
        assert mine[1] == pytest.approx(theirs[1], rel=1e-5)


def refusals(rank: int) -> list[str]:
    dist.init_process_group("gloo")
    messages = []
    for model, plan in (
        (nn.Linear(2, 2), None),
        (make_net(), {"layers.*.upp": "colwise"}),
        (make_net(), {"layers.*.up": "own_part"}),
        (make_net(), {"layers.*": "colwise", "layers.*.down": "rowwise"}),
        (make_net(), {"embedding": "rowwise"}),
        (nn.Sequential(nn.Linear(2, 3)), {"0": "colwise"}),
        (nn.Sequential(nn.Linear(3, 2)), {"0": "rowwise"}),
        (nn.Sequential(nn.Embedding(2, 3)), {"0": "colwise"}),
        (make_decoder(Gpt2, {"num_heads": 1}), None),
    ):
        with pytest.raises(BackendError) as caught:
            spread(model, SPLIT | ({} if plan is None else {"tensor_plan": plan}))
        messages.append(str(caught.value))
    return messages


@pytest.mark.slow
def test_what_cannot_be_split_is_refused() -> None:
    facts = [
        ("backend.parallel.tensor is 2", "Linear", "'tensor_plan'", "colwise_gather, rowwise"),
        ("backend.tensor_plan['layers.*.upp']", "Net", "Did you mean 'layers.*.up'?"),
        ("layers.*.up'] (own_part) matches no LayerNorm or RMSNorm of Net",),
        ("layers.0.down", "'layers.*' (colwise)", "'layers.*.down' (rowwise)"),
        ("embedding.weight: by dimension 0", "head.weight: whole"),
        ("backend.parallel.tensor is 2", "0 has 3 outputs"),
        ("backend.parallel.tensor is 2", "0 has 3 inputs"),
        ("backend.parallel.tensor is 2", "0 has 3 columns"),
        ("is 2", "heads of layers.0.attention.q_proj is 1 (32 outputs, 32 per head)"),
    ]
    messages = run_ranks(2, refusals)[0]
    for message, expected in zip(messages, facts, strict=True):
        assert [fact for fact in expected if fact not in message] == []


def test_the_plan_of_a_decoder_names_its_layers_only() -> None:
    plain = make_decoder(Gpt2, {}).tensor_plan
    gated = make_decoder(Gpt2, LLAMA).tensor_plan
    assert gated.keys() - plain.keys() == {"layers.*.ffn.gate_proj"}
    assert plain.keys() - gated.keys() == set()
