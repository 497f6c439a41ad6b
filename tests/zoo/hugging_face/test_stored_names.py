"""Names of tensors in folders, and in models of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelzoo_trainer.checkpointing import LazyTensor, disk, lazy_state, open_weights
from modelzoo_trainer.zoo.hugging_face.stored_names import in_memory

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
GPT2: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "mixtral": SMALL | {"num_local_experts": 12},
    "gemma2": SMALL | {"head_dim": 8},
    "gpt2": GPT2,
    "gpt_neox": {key: one for key, one in SMALL.items() if key != "num_key_value_heads"},
    "gpt_bigcode": GPT2,
    "falcon": {key: SMALL[key] for key in list(SMALL)[:4]},
}


def make(family: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **(FAMILIES[family] | settings))
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_has_all_tensors_of_the_model(family: str, tmp_path: Path) -> None:
    model = make(family)
    model.save_pretrained(tmp_path)
    state = model.state_dict()
    tied = set(model.all_tied_weights_keys)

    found = in_memory(model, lazy_state(open_weights(tmp_path)))

    assert found.keys() | tied == state.keys()
    assert all(isinstance(one, LazyTensor) for one in found.values())
    for name, value in found.items():
        assert value.shape == state[name].shape
        assert torch.equal(torch.empty_like(state[name]).copy_(value), state[name]), name


def test_nothing_is_read_before_it_is_needed(tmp_path: Path, monkeypatch: Any) -> None:
    model = make("mixtral")
    model.save_pretrained(tmp_path)
    num, real = [0], disk.read_at

    def counting(fd: int, views: list[memoryview], position: int) -> int:
        num[0] += 1
        return real(fd, views, position)

    monkeypatch.setattr(disk, "read_at", counting)
    found = in_memory(model, lazy_state(open_weights(tmp_path)))
    assert num == [0]
    target = torch.empty(12, 32, 48)
    target.copy_(found["model.layers.0.mlp.experts.down_proj"])
    assert num == [12]


def test_names_of_the_model_and_unknown_ones_stay(tmp_path: Path) -> None:
    model = make("mixtral")
    state: dict[str, Tensor] = model.state_dict()
    found = in_memory(model, state | {"other": torch.ones(2)})
    assert found.keys() == {*state, "other"}
    assert all(found[name] is value for name, value in state.items())


def test_a_model_without_a_head_is_found_below_one(tmp_path: Path) -> None:
    model = make("gpt2")
    model.transformer.save_pretrained(tmp_path)
    found = in_memory(model, lazy_state(open_weights(tmp_path)))
    assert found.keys() == model.state_dict().keys() - {"lm_head.weight"}
