"""Direct preference optimization in several processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from modelzoo_trainer.zoo.models.dpo import Dpo
from tests.distributed.engines import spread, whole
from tests.distributed.ranks import run_ranks

POLICY = {
    "name": "gpt2",
    "vocab_size": 51,
    "hidden_size": 32,
    "max_position_embeddings": 12,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "filter_size": 64,
}
POSITIONS: dict[str, Any] = {"": {}, "positions": {"sequence_parallel": True}}
IDS = torch.arange(4 * 12).view(4, 12) * 7 % 51


def make(seed: int) -> Dpo:
    torch.manual_seed(seed)
    return Dpo(policy_model=POLICY).double()


def batch_of(place: int, num: int) -> dict[str, torch.Tensor]:
    named = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "labels": IDS.roll(-1, 1)}
    pairs = {f"chosen_{name}": rows for name, rows in named.items()}
    pairs |= {f"rejected_{name}": rows.flip(1) for name, rows in named.items()}
    return {name: rows.chunk(num)[place] for name, rows in pairs.items()}


def learn(model: Dpo, module: Any, part: tuple[int, int]) -> dict[str, Any]:
    before = {name: whole(param) for name, param in model.named_parameters()}
    policy = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(policy, lr=0.01)
    model.train()
    losses = []
    for _ in range(3):
        loss = module(batch_of(*part))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        if part[1] > 1:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(total.item())
    weights = {name: whole(param) for name, param in model.named_parameters()}
    kept = all(
        torch.equal(value, before[name])
        for name, value in weights.items()
        if name.startswith("ref_model.")
    )
    named = {name: value.numpy() for name, value in weights.items()}
    return {"losses": losses, "weights": named, "kept": kept}


def learn_spread(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    model = make(seed=0 if "tensor" in options["parallel"] else rank)
    module, part = spread(model, options)
    return learn(model, module, part)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["shard", "replicate", "context", "tensor", "tensor, positions"])
def test_any_arrangement_trains_the_same_policy_against_the_same_reference(how: str) -> None:
    axis, _, positions = how.partition(", ")
    model = make(0)
    expected = learn(model, model, (0, 1))

    found = run_ranks(2, learn_spread, {"parallel": {axis: -1}} | POSITIONS[positions])

    assert expected["kept"]
    torch.testing.assert_close(found, [expected] * 2, rtol=1e-5, atol=1e-7)
