"""Weights with the names of the Cerebras Model Zoo, of encoders, T5 and ViT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modelzoo_trainer.checkpointing.weights import read_weights
from modelzoo_trainer.zoo.conversion.model_settings import OTHERS
from tests.zoo.conversion.model_cases import MODELS, convert, made

NAMES = {
    "bert": [
        "bert_encoder.embedding_layer.segment_embeddings.weight",
        "bert_encoder.transformer_encoder.layers.1.self_attn.proj_output_dense_layer.bias",
        "bert_encoder.pooler.pooler.ffn.0.linear_layer.weight",
        "bert_mlm_head.mlm_transform.ln.bias",
        "bert_mlm_head.classifier.ffn.0.linear_layer.weight",
        "bert_cls_head.classifier.ffn.0.linear_layer.bias",
    ],
    "bert/classifier": ["bert.embed_ln_f.weight", "bert.transformer_encoder.layers.0.norm2.bias"],
    "bert/extractive_summarization": ["bert.embed_ln_f.weight"],
    "bert/token_classifier": ["bert.embed_ln_f.weight"],
    "esm2": ["bert_encoder.transformer_encoder.norm.weight"],
    "t5": [
        "encoder_embeddings.word_embeddings.weight",
        "decoder_embeddings.word_embeddings.weight",
        "decoder_embeddings.position_embed_helper.relative_attention_bias.weight",
        "decoder.layers.1.multihead_attn.proj_q_dense_layer.weight",
        "decoder.layers.1.norm3.weight",
        "lm_head.weight",
    ],
    "transformer": [
        "encoder.layers.0.ffn.ffn.0.linear_layer_for_glu.weight",
        "decoder.norm.bias",
    ],
    "vision_transformer": [
        "vit_model.embedding_layer.cls_embedding",
        "vit_model.embedding_layer.position_embeddings.weight",
        "vit_model.encoder.transformer_encoder.norm.weight",
    ],
}


def test_all_models_are_here() -> None:
    assert set(MODELS) == set(OTHERS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", ["zoo", "zoo.pt"])
@pytest.mark.slow_cases(every=4)
def test_weights_go_to_the_names_of_the_model_zoo_and_back(
    name: str, target: str, tmp_path: Path
) -> None:
    model, file, params = made(name, tmp_path)
    zoo = tmp_path / target
    assert convert(file, zoo, "--to", "cerebras", "--params", params) == 0
    found = read_weights(zoo)
    assert all(one.startswith("model.") for one in found)
    assert found.keys() >= {f"model.{one}" for one in NAMES[name]}
    assert convert(zoo, tmp_path / "back", "--from", "cerebras", "--params", params) == 0
    back, state = read_weights(tmp_path / "back"), model.state_dict()
    assert back.keys() == state.keys()
    assert all(torch.equal(back[one], state[one]) for one in state)


def test_rotated_rows_of_an_encoder_are_interleaved_there(tmp_path: Path) -> None:
    model, file, params = made("esm2", tmp_path)
    assert convert(file, tmp_path / "zoo", "--to", "cerebras", "--params", params) == 0
    layer = "model.bert_encoder.transformer_encoder.layers.1.self_attn.proj"
    found, state = read_weights(tmp_path / "zoo"), model.state_dict()
    own = state["encoder.layers.1.attention.k_proj.bias"]
    assert torch.equal(found[f"{layer}_k_dense_layer.bias"][:4], own[[0, 2, 1, 3]])
    own = state["encoder.layers.1.attention.v_proj.bias"]
    assert torch.equal(found[f"{layer}_v_dense_layer.bias"], own)


@pytest.mark.parametrize(
    ("name", "alias"), [("bert", "bert_mlm_head.classifier.ffn.0.linear_layer"), ("t5", "lm_head")]
)
def test_tied_weights_that_differ_are_refused(
    name: str, alias: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, file, params = made(name, tmp_path)
    convert(file, tmp_path / "zoo.pt", "--to", "cerebras", "--params", params)
    state = torch.load(tmp_path / "zoo.pt")
    own = f"model.{alias}.weight"
    state["model"][own] = state["model"][own] + 1
    torch.save(state, tmp_path / "other.pt")
    words = ("--from", "cerebras", "--params", params)
    assert convert(tmp_path / "other.pt", tmp_path / "no", *words) == 2
    assert f"{own} differs from" in capsys.readouterr().err


def test_factors_of_channels_have_no_known_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, file, params = made("vision_transformer", tmp_path, layerscale_value=0.1)
    assert convert(file, tmp_path / "no", "--to", "cerebras", "--params", params) == 2
    assert "attention_scale.weight' of the model has no name" in capsys.readouterr().err


def test_a_setting_that_a_model_refuses_is_refused_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, file, params = made("t5", tmp_path)
    text = params.read_text()
    params.write_text(text.replace("num_heads: 2", "num_heads: 2\n  share_embedding_weights: 3"))
    assert convert(file, tmp_path / "no", "--to", "cerebras", "--params", params) == 2
    assert "params.yaml:" in capsys.readouterr().err
