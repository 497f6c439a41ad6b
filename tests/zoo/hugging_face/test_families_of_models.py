"""Encoders, T5 and ViT from and to folders of Hugging Face: the same bits, and the same logits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modelzoo_trainer.checkpointing.weights import read_weights
from modelzoo_trainer.zoo.models.registry import model_class
from tests.zoo.conversion.model_cases import MODELS, convert, made

transformers = pytest.importorskip("transformers", reason="needs transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
}
ESM = SIZES | {"position_embedding_type": "rotary", "mask_token_id": 3, "pad_token_id": 1}
T5: dict[str, Any] = {
    "vocab_size": 20,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 2,
    "num_heads": 2,
    "num_decoder_layers": 1,
}
VIT: dict[str, Any] = {
    **{key: SIZES[key] for key in ("hidden_size", "num_hidden_layers", "intermediate_size")},
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 3,
}
# name: class there, its settings, name here
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("BertForPreTraining", SIZES, "bert"),
    "bert, one segment": (
        "BertForMaskedLM",
        SIZES | {"hidden_act": "relu", "pad_token_id": 3, "type_vocab_size": 1},
        "bert",
    ),
    "bert, tanh form": ("BertForMaskedLM", SIZES | {"hidden_act": "gelu_new"}, "bert"),
    "bert, classes": (
        "BertForSequenceClassification",
        SIZES | {"num_labels": 3},
        "bert/classifier",
    ),
    "esm": ("EsmForMaskedLM", ESM | {"token_dropout": True}, "esm2"),
    "esm, norm": ("EsmForMaskedLM", ESM | {"emb_layer_norm_before": True}, "esm2"),
    "t5": ("T5ForConditionalGeneration", T5, "t5"),
    "t5, gated": ("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}, "t5"),
    "t5, own output": (
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False},
        "t5",
    ),
    "vit": ("ViTForImageClassification", VIT, "vision_transformer"),
    "vit, no biases": (
        "ViTForImageClassification",
        VIT | {"qkv_bias": False},
        "vision_transformer",
    ),
}


def their_model(case: str) -> nn.Module:
    cls, settings, _ = CASES[case]
    kind = getattr(transformers, cls)
    config = kind.config_class(**settings)
    if settings.get("tie_word_embeddings") is False:
        config.tie_word_embeddings = False  # their constructor ignores it
    model = kind(config).eval()
    if cls.startswith("T5"):
        model.encoder.embed_tokens = model.decoder.embed_tokens = model.shared
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape) * 0.3)
    return model


def our_model(folder: Path) -> nn.Module:
    settings = yaml.safe_load((folder / "model.yaml").read_text())["model"]
    model = model_class(settings.pop("name"))(**settings).eval()
    model.load_state_dict(read_weights(folder))
    return model


def their_logits(model: Any, kind: str) -> list[Tensor]:
    ids = torch.arange(2 * 7).view(2, 7) * 5 % 17 + 3
    if kind == "vit":
        images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        return [model(pixel_values=images).logits]
    if kind == "t5":
        return [model(input_ids=ids, decoder_input_ids=ids.flip(1)).logits]
    found = model(input_ids=ids)
    if hasattr(found, "prediction_logits"):
        return [found.prediction_logits, found.seq_relationship_logits]
    return [found.logits]


def our_logits(model: Any, kind: str) -> list[Tensor]:
    ids = torch.arange(2 * 7).view(2, 7) * 5 % 17 + 3
    batch: Any = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
    batch["next_sentence_label"] = torch.zeros(2, 1, dtype=torch.long)
    if kind == "vit":
        generator = torch.Generator().manual_seed(1)
        batch = (torch.randn(2, 3, 8, 8, generator=generator), torch.zeros(2).long())
    elif kind == "t5":
        batch = {"input_ids": ids, "decoder_input_ids": ids.flip(1), "labels": ids}
    else:
        if model.segments:
            batch["token_type_ids"] = torch.zeros_like(ids)
        if hasattr(model, "num_labels"):
            batch["labels"] = torch.zeros(2).long()
    found = model(batch)
    return [found[key] for key in ("logits", "nsp_logits") if key in found]


def check_logits(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow_cases(every=4)
def test_weights_go_from_hugging_face_and_back(case: str, tmp_path: Path) -> None:
    theirs = their_model(case)
    theirs.save_pretrained(tmp_path / "theirs")
    assert convert(tmp_path / "theirs", tmp_path / "ours", "--from", "hf") == 0
    ours, kind = our_model(tmp_path / "ours"), case.partition(",")[0]
    expected = their_logits(theirs, kind)
    check_logits(our_logits(ours, kind), expected)
    assert convert(tmp_path / "ours", tmp_path / "back", "--to", "hf") == 0
    again, report = type(theirs).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert {one for one in report["missing_keys"] if "inv_freq" not in one} == set()
    assert not report["unexpected_keys"]
    check_logits(their_logits(again.eval(), kind), expected)
    assert convert(tmp_path / "back", tmp_path / "again", "--from", "hf") == 0
    state, back = read_weights(tmp_path / "ours"), read_weights(tmp_path / "again")
    assert state.keys() == back.keys()
    assert all(torch.equal(state[name], back[name]) for name in state)
    models = [(tmp_path / one / "model.yaml").read_text() for one in ("ours", "again")]
    assert models[0] == models[1]


@torch.no_grad()
@pytest.mark.parametrize("case", ["bert", "esm", "t5, gated", "vit"])
@pytest.mark.slow_cases(every=4)
def test_weights_go_from_hugging_face_to_the_names_of_the_model_zoo_and_back(
    case: str, tmp_path: Path
) -> None:
    theirs = their_model(case)
    theirs.save_pretrained(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours", "--from", "hf")
    zoo = (tmp_path / "zoo.pt", "--from", "hf", "--to", "cerebras")
    assert convert(tmp_path / "theirs", *zoo) == 0
    words = ("--from", "cerebras", "--to", "hf", "--params", tmp_path / "ours" / "model.yaml")
    assert convert(tmp_path / "zoo.pt", tmp_path / "back", *words) == 0
    again = type(theirs).from_pretrained(tmp_path / "back").eval()
    kind = case.partition(",")[0]
    check_logits(their_logits(again, kind), their_logits(theirs, kind))


def test_norms_of_older_files_are_read(tmp_path: Path) -> None:
    theirs = their_model("bert")
    theirs.save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    older = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in load_file(path).items()
    }
    assert "bert.embeddings.LayerNorm.gamma" in older
    save_file(older, path)
    assert convert(tmp_path / "theirs", tmp_path / "ours", "--from", "hf") == 0
    found = read_weights(tmp_path / "ours")["encoder.embedding_norm.weight"]
    assert torch.equal(found, theirs.bert.embeddings.LayerNorm.weight)


def test_embeddings_of_t5_that_differ_are_refused(tmp_path: Path, capsys: Any) -> None:
    their_model("t5").save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(path)
    name = "encoder.embed_tokens.weight"
    save_file(tensors | {name: tensors["shared.weight"].clone()}, path)
    assert convert(tmp_path / "theirs", tmp_path / "ours", "--from", "hf") == 0
    save_file(tensors | {name: tensors["shared.weight"] + 1}, path)
    assert convert(tmp_path / "theirs", tmp_path / "no", "--from", "hf") == 2
    assert f"{name} differs from shared.weight" in capsys.readouterr().err


def test_the_head_of_a_published_masked_model_alone_is_read(tmp_path: Path) -> None:
    theirs = their_model("bert")
    theirs.save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"architectures": ["BertForMaskedLM"]}))
    assert convert(tmp_path / "theirs", tmp_path / "ours", "--from", "hf") == 0
    model = our_model(tmp_path / "ours")
    assert model.disable_nsp
    assert "nsp_head.weight" not in model.state_dict()


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "changes", "kind", "cls"),
    [
        ("bert", {"disable_nsp": True}, "bert", "BertForMaskedLM"),
        ("vision_transformer", {}, "vit", "ViTForImageClassification"),
        (
            "bert/classifier",
            {"pooler_nonlinearity": "tanh"},
            "bert",
            "AutoModelForSequenceClassification",
        ),
    ],
)
@pytest.mark.slow_cases(every=4)
def test_models_of_this_package_are_the_same_there(
    name: str, changes: dict[str, Any], kind: str, cls: str, tmp_path: Path
) -> None:
    """Without segments, and with patches that are projected by a linear layer."""
    model, file, params = made(name, tmp_path, **changes)
    assert convert(file, tmp_path / "hf", "--to", "hf", "--params", params) == 0
    theirs = getattr(transformers, cls).from_pretrained(tmp_path / "hf").eval()
    check_logits(their_logits(theirs, kind), our_logits(model.eval(), kind))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bert", {"norm_first": True}, "norm_first: true"),
    ("bert", {"pooler_nonlinearity": "gelu"}, "pooler_nonlinearity: gelu"),
    ("bert", {"embeddings_scale": 2.0}, "embeddings_scale: 2.0"),
    ("bert", {"attention_logits_alpha": 2.0}, "attention_logits_alpha: 2.0"),
    ("bert", {"use_ffn_bias": False}, "use_ffn_bias: false"),
    ("bert", {"num_classes": 3}, "num_classes: 3"),
    ("bert", {"mlm_nonlinearity": "relu"}, "mlm_nonlinearity: relu"),
    ("bert", {"encoder_nonlinearity": "swiglu", "mlm_nonlinearity": "gelu"}, "nonlinearity"),
    ("bert/token_classifier", {}, "BertTokenClassifier"),
    ("esm2", {"rotary_dim": 2}, "rotary_dim: 2"),
    ("esm2", {"use_final_layer_norm": False}, "use_final_layer_norm: false"),
    ("esm2", {"rope_theta": 500.0}, "rope_theta: 500.0"),
    ("t5", {"norm_type": "layernorm"}, "norm_type: layernorm"),
    ("t5", {"decoder_nonlinearity": "gelu"}, "decoder_nonlinearity: gelu"),
    ("t5", {"encoder_attention_logits_alpha": 2.0}, "encoder_attention_logits_alpha: 2.0"),
    ("t5", {"embeddings_alpha": 2.0}, "embeddings_alpha: 2.0"),
    ("t5", {"mup_base_d_model": 4, "mup_base_d_ff": 6}, "mup_base_d_model: 4"),
    ("transformer", {}, "norm_type: layernorm"),
    ("vision_transformer", {"layerscale_value": 0.1}, "layerscale_value: 0.1"),
    ("vision_transformer", {"use_bias_in_output": False}, "use_bias_in_output: false"),
    ("vision_transformer", {"position_embedding_type": "fixed"}, "position_embedding_type: fixed"),
]


@pytest.mark.parametrize(("name", "changes", "fact"), REFUSED)
@pytest.mark.slow_cases(every=4)
def test_settings_without_counterpart_are_refused_by_name(
    name: str,
    changes: dict[str, Any],
    fact: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    usual = {"pooler_nonlinearity": "tanh"} if name == "bert" else {}
    _, file, params = made(name, tmp_path, **{**usual, **changes})
    assert convert(file, tmp_path / "hf", "--to", "hf", "--params", params) == 2
    assert fact in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("case", "changes", "fact"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder: true"),
        ("bert", {"hidden_act": "mish"}, "hidden_act: mish"),
        ("bert", {"something": 1}, "something: 1 .* hf_model"),
        ("esm", {"position_embedding_type": "absolute"}, "position_embedding_type: absolute"),
        ("esm", {"is_folding_model": True}, "is_folding_model: true"),
        ("t5", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj: gated-mish"),
        ("t5", {"relative_attention_max_distance": 64}, "relative_attention_max_distance: 64"),
        ("t5", {"tie_word_embeddings": False, "scale_decoder_outputs": False}, "lm_head.weight"),
        ("vit", {"image_size": "8"}, "image_size is '8'; expected an integer, or a list of two"),
    ],
)
def test_options_without_counterpart_are_refused_by_name(
    case: str, changes: dict[str, Any], fact: str, tmp_path: Path, capsys: Any
) -> None:
    their_model(case).save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert convert(tmp_path / "theirs", tmp_path / "ours", "--from", "hf") == 2
    assert re.search(fact, capsys.readouterr().err)


def test_every_converted_model_has_a_case_here_or_is_refused() -> None:
    covered = {name for _, _, name in CASES.values()} | {name for name, _, _ in REFUSED}
    assert covered | {"bert/extractive_summarization"} == set(MODELS)
