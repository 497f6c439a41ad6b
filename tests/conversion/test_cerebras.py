"""Weights with the names of the Cerebras Model Zoo, of decoders besides llama."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from modelzoo_trainer.conversion.cerebras import plan_from_cerebras, plan_to_cerebras
from modelzoo_trainer.conversion.engine import InMemory, shapes_of
from modelzoo_trainer.errors import CheckpointError
from modelzoo_trainer.models.gpt2 import Gpt2

SLOPES = "model.embedding_layer.position_embed_helper.slopes"
SIZES: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_heads": 3,
    "max_position_embeddings": 16,
}
ALIBI = SIZES | {"position_embedding_type": "alibi", "embedding_layer_norm": True}


def there(model: Gpt2, arguments: dict[str, Any]) -> dict[str, Tensor]:
    shapes = shapes_of(Gpt2, arguments)
    source = InMemory(dict(model.state_dict()))
    return dict(plan_to_cerebras(source, model, shapes, where="the model").tensors())


def here(tensors: dict[str, Tensor], model: Gpt2, arguments: dict[str, Any]) -> dict[str, Tensor]:
    shapes = shapes_of(Gpt2, arguments)
    plan = plan_from_cerebras(InMemory(tensors), model, shapes, where="the file")
    return dict(plan.tensors())


def check(found: dict[str, Tensor], model: Gpt2) -> None:
    state = model.state_dict()
    del state["lm_head.weight"]  # shares the weights of the embedding
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("trained", [False, True])
def test_the_slopes_of_alibi_have_their_name(trained: bool) -> None:
    arguments = ALIBI | {"alibi_trainable_slopes": trained}
    model = Gpt2(**arguments)
    tensors = there(model, arguments)
    assert tensors[SLOPES].shape == (3, 1)
    check(here(tensors, model, arguments), model)


def test_slopes_that_a_file_lacks_are_made_unless_they_are_trained() -> None:
    model = Gpt2(**ALIBI)
    tensors = there(model, ALIBI)
    slopes = tensors.pop(SLOPES)
    check(here(tensors, model, ALIBI), model)
    arguments = ALIBI | {"alibi_trainable_slopes": True}
    trained = Gpt2(**arguments)
    with pytest.raises(CheckpointError, match=r"no tensor .*slopes"):
        here(tensors, trained, arguments)
    check(here(tensors | {"model.relative_pe_helper.slopes": slopes}, model, ALIBI), model)


def test_positions_of_older_versions_are_read() -> None:
    model = Gpt2(**SIZES)
    tensors = there(model, SIZES)
    name = "model.embedding_layer.position_embeddings.embed.weight"
    tensors[name.replace(".embed.", ".")] = tensors.pop(name)
    check(here(tensors, model, SIZES), model)
