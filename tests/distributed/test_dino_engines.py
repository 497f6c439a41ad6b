"""Models of DINO, split and sharded over two processes, equal those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from backends.parallel.fsdp import own_part
from modelzoo_trainer.zoo.models.vision.dino.model import Dino
from tests.distributed.engines import spread, whole
from tests.distributed.ranks import run_ranks
from tests.zoo.models.dino_cases import batch_of, make

ENGINES: dict[str, dict[str, Any]] = {
    "split": {"parallel": {"tensor": -1}},
    "sharded": {"parallel": {"shard": -1}},
    "replicated": {"parallel": {"replicate": -1}},
}
NUM_STEPS = 3


def learn(model: Dino, module: Any, part: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """Return losses, weights and buffers after some steps on a part of each batch."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=0.01, foreach=True)
    place, num = part
    losses = []

    def share(tensor: Tensor) -> Tensor:
        found = tensor.clone()
        dist.all_reduce(found)
        return found

    for step in range(NUM_STEPS):
        batch = {key: one.chunk(num)[place] for key, one in batch_of(seed=step).items()}
        batch |= {key: batch[key].double() for key in ("global_view", "local_view")}
        loss = module(batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.end_step(share if num > 1 else None, own_part)
        losses.append((share(loss.detach()) / num if num > 1 else loss.detach()).item())
    state = {name: whole(one).numpy() for name, one in model.state_dict().items()}
    return {"losses": losses, "state": state}


def learn_spread(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    model = make().double()
    module, part = spread(model, options)
    is_divided = "replicate" not in options["parallel"]
    layer = model.image_model_trunks[1].encoder.layers[0]
    assert isinstance(layer.attention.k_proj.weight, DTensor) == is_divided
    return learn(model, module, part)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_of_two_processes_equals_one(engine: str) -> None:
    model = make().double()
    expected = learn(model, model)

    found = run_ranks(2, learn_spread, ENGINES[engine])

    torch.testing.assert_close(found, [expected] * 2, rtol=1e-6, atol=1e-6)
