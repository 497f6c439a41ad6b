"""Globs of published files select the parameters that have other names here."""

from __future__ import annotations

import logging

import pytest
import torch

from modelzoo_trainer.optim.sparsity.selection import select
from modelzoo_trainer.zoo.models.published_names import published_name
from modelzoo_trainer.zoo.models.registry import model_class

ATTENTION = "transformer_decoder.layers.1.self_attn.proj_"
PUBLISHED = ("*proj_[qkv]_dense_layer.weight", "*proj_output_dense_layer.weight")


def decoder(name: str = "gpt3", **settings):
    sizes = {"hidden_size": 16, "num_heads": 2, "num_hidden_layers": 2, "filter_size": 32}
    with torch.device("meta"):
        return model_class(name)(vocab_size=32, max_position_embeddings=8, **sizes | settings)


def names(model, *globs: str) -> set[str]:
    return set(select(model, dict(model.named_parameters()), globs, "sparsity"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.1.attention.q_proj.weight", f"model.{ATTENTION}q_dense_layer.weight"),
        ("layers.1.attention.o_proj.bias", f"model.{ATTENTION}output_dense_layer.bias"),
        (
            "layers.12.ffn.gate_proj.weight",
            "model.transformer_decoder.layers.12.ffn.ffn.0.linear_layer_for_glu.weight",
        ),
        ("final_norm.weight", "model.transformer_decoder.norm.weight"),
        ("something.weight", None),
    ],
)
def test_a_parameter_has_a_published_name(name, expected) -> None:
    assert published_name(name) == expected


def test_every_parameter_of_a_dense_decoder_has_one_of_its_own() -> None:
    model = decoder(
        embedding_layer_norm=True, nonlinearity="swiglu", position_embedding_type="learned"
    )
    found = [published_name(name) for name, _ in model.named_parameters()]
    assert None not in found
    assert len(set(found)) == len(found)


def test_published_globs_select_what_they_mean(caplog) -> None:
    caplog.set_level(logging.INFO, "modelzoo_trainer.sparsity")
    model = decoder(nonlinearity="swiglu")
    layers = [f"layers.{number}" for number in (0, 1)]
    attention = {f"{one}.attention.{part}_proj.weight" for one in layers for part in "qkvo"}
    assert names(model, *PUBLISHED) == attention
    assert names(model, "*linear_layer.weight") == {
        f"{one}.ffn.{part}_proj.weight" for one in layers for part in ("up", "down")
    }
    assert "matches 6 parameters: layers.0.attention.k_proj.weight" in caplog.text


def test_a_glob_that_matches_a_name_here_means_that_name(caplog) -> None:
    model = decoder()
    assert names(model, "*norm.weight") == {
        name for name, _ in model.named_parameters() if name.endswith("norm.weight")
    }
    assert names(model, "*o_proj.weight", "*no_such_layer*") == {
        "layers.0.attention.o_proj.weight",
        "layers.1.attention.o_proj.weight",
    }
    assert "'*no_such_layer*' matches no parameter" in caplog.text
