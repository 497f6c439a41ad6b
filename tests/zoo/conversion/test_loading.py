"""`ckpt_path` of a folder of Hugging Face, for a decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo_trainer import Trainer
from modelzoo_trainer.checkpointing.lazy_tensors import LazyTensor
from modelzoo_trainer.checkpointing.weight_readers import read_weights_for
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.conversion.hugging_face import plan_export, write_export
from modelzoo_trainer.zoo.models.dpo import Dpo
from modelzoo_trainer.zoo.models.gpt2 import Gpt2
from tests.zoo.conversion.test_command import MODEL
from tests.zoo.hugging_face.conversions import InMemory

UNTIED = MODEL | {"share_embedding_weights": False, "layer_norm_epsilon": 1e-6}
GPT2 = {
    name: MODEL[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads")
}


def folder_of(model: Gpt2, folder: Path) -> Path:
    source = InMemory(dict(model.state_dict()))
    write_export(plan_export(source, model, where="the model"), folder)
    return folder


@pytest.mark.parametrize("settings", [MODEL, UNTIED, GPT2], ids=["tied", "untied", "gpt2"])
def test_weights_of_a_folder_are_translated(settings: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = Gpt2(**settings)
    state = read_weights_for(Gpt2(**settings), folder_of(saved, tmp_path / "hf"))
    assert all(isinstance(tensor, LazyTensor) for tensor in state.values())
    expected = saved.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in state.items():
        assert isinstance(tensor, LazyTensor)
        assert torch.equal(tensor.read_rows(1, 3), expected[name][1:3])
        assert torch.equal(tensor.read(), expected[name])


def test_a_trainer_takes_the_weights_of_a_folder(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = Gpt2(**MODEL)
    folder = folder_of(saved, tmp_path / "hf")
    batch = {"input_ids": torch.arange(4)[None], "labels": torch.arange(4)[None]}
    for length in (8, 16):  # rotary positions have no weights
        model = Gpt2(**(MODEL | {"max_position_embeddings": length, "dropout_rate": 0.5}))
        trainer = Trainer(model=model, device="cpu", model_dir=tmp_path / str(length))
        trainer.validate([batch], ckpt_path=folder)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, saved.state_dict()[name])


def test_dpo_takes_them_for_both_models(tmp_path: Path) -> None:
    saved = Gpt2(**MODEL)
    dpo = Dpo(policy_model={"name": "llama", **MODEL})
    state = dpo.complete_state(read_weights_for(dpo, folder_of(saved, tmp_path / "hf")))
    assert state.keys() == dpo.state_dict().keys()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"layer_norm_epsilon": 1e-3}, "has layer_norm_epsilon: 0.001, but .* 1e-05"),
        ({"nonlinearity": "geglu"}, "has nonlinearity: geglu, but .* swiglu"),
        ({"num_heads": 4, "rotary_dim": 2}, "has rotary_dim: 2, but .* 4"),
        ({"embeddings_scale": 2.0}, "embeddings_scale: 2.0 has no counterpart"),
        ({"vocab_size": 21}, "has vocab_size: 21, but .* 20"),
    ],
)
def test_other_settings_are_refused_by_name(
    changed: dict[str, Any], text: str, tmp_path: Path
) -> None:
    folder = folder_of(Gpt2(**MODEL), tmp_path / "hf")
    with pytest.raises(ConfigError, match=text):
        read_weights_for(Gpt2(**(MODEL | changed)), folder)


def test_our_names_beside_a_config_are_ours_and_other_models_take_theirs(tmp_path: Path) -> None:
    model = Gpt2(**MODEL)
    folder = folder_of(model, tmp_path / "hf")
    other = read_weights_for(torch.nn.Linear(1, 1), folder)
    assert "model.embed_tokens.weight" in other
    (folder / "config.json").write_text(json.dumps({"model_type": "mine"}))
    with pytest.raises(ConfigError, match="'mine' has no decoder here"):
        read_weights_for(model, folder)
