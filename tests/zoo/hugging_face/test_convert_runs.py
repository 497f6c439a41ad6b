"""`checkpoint convert --to hf` of runs with models of transformers, with adapters, and averaged."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import HuggingFaceCheckpoint, Lora, ModelEma
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.dpo import Dpo
from modelzoo_trainer.zoo.models.registry import model_class
from tests.zoo.hugging_face.dpo_cases import batch_of
from tests.zoo.hugging_face.hf_cases import config_of, language_batch
from tests.zoo.hugging_face.test_export import LORA, OURS, loaded, logits, save_base

transformers = pytest.importorskip("transformers", reason="needs transformers")
peft = pytest.importorskip("peft", reason="needs peft")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

CALLBACK: dict[str, Any] = {"lora_params": {"r": 3, "alpha": 5, "target_modules": ["q_proj"]}}
LLAMA: dict[str, Any] = {"name": "hf_causal_lm", "config": config_of("llama")}
DECODER: dict[str, Any] = {"name": "llama", **OURS}
RUNS: dict[str, tuple[dict[str, Any], bool]] = {
    "all weights": (LLAMA, False),
    "adapters": (LLAMA | {"peft_config": LORA}, False),
    "callback": (LLAMA, True),
    "tied": (
        LLAMA
        | {
            "config": config_of("llama") | {"tie_word_embeddings": True},
            "peft_config": {"r": 3, "target_modules": ["embed_tokens"], "use_rslora": True},
        },
        False,
    ),
    "copies": (LLAMA | {"peft_config": LORA | {"modules_to_save": ["lm_head"]}}, False),
    "pissa": (LLAMA | {"peft_config": LORA | {"init_lora_weights": "pissa"}}, False),
    "experts": ({"name": "hf_causal_lm", "config": config_of("mixtral")}, False),
    "dpo": ({"name": "dpo", "policy_model": LLAMA | {"peft_config": LORA}}, False),
    "dpo, callback": ({"name": "dpo", "policy_model": LLAMA}, True),
    "decoder": (DECODER, True),
    "dpo of a decoder": ({"name": "dpo", "policy_model": DECODER}, True),
    "dpo of a copy": ({"name": "dpo", "policy_model": LLAMA}, False),
}


def convert(*words: object) -> int:
    return main(["checkpoint", "convert", *map(str, words)])


def run(
    folder: Path, model: dict[str, Any], *callbacks: Any, lora: bool = False, batch: Any = None
) -> Trainer:
    """Train for two steps, write the configuration, and return the trainer."""
    arguments = {key: one for key, one in model.items() if key != "name"}
    section = {"model": model, "callbacks": [{"Lora": CALLBACK}] if lora else []}
    folder.mkdir(exist_ok=True)
    (folder / "params.yaml").write_text(json.dumps({"trainer": {"init": section}}))
    torch.manual_seed(0)
    trainer = Trainer(
        device="cpu",
        model=lambda: model_class(model["name"])(**arguments),
        optimizer=lambda one: torch.optim.AdamW(one.parameters(), lr=0.1),
        loop=TrainingLoop(max_steps=2),
        checkpoint=Checkpoint(steps=2),
        model_dir=folder,
        seed=1,
        progress="none",
        callbacks=[*([Lora(**CALLBACK)] if lora else []), *callbacks],
    )
    is_language = batch is None
    before = logits(policy_of(trainer)) if is_language else torch.zeros(())
    trainer.fit([batch or (batch_of() if model["name"] == "dpo" else language_batch())] * 2)
    trainer.model.eval()
    assert not is_language or (logits(policy_of(trainer)) - before).abs().max() > 1e-3
    return trainer


def policy_of(trainer: Trainer) -> Any:
    return trainer.model.policy_model if isinstance(trainer.model, Dpo) else trainer.model


@pytest.mark.filterwarnings("ignore:.*dropout:UserWarning")
@pytest.mark.parametrize("kind", RUNS)
def test_the_folder_computes_what_the_model_did(kind: str, tmp_path: Path, capsys: Any) -> None:
    model, lora = RUNS[kind]
    trainer = run(tmp_path / "run", model, lora=lora)
    source = tmp_path / "run/checkpoint_2"
    words = ("--to", "hf", "--params", tmp_path / "run/params.yaml")
    assert convert(source, tmp_path / "hf", *words) == 0
    torch.testing.assert_close(
        logits(loaded(tmp_path / "hf")), logits(policy_of(trainer)), rtol=0, atol=1e-5
    )
    has_adapters = lora or "peft_config" in str(model)
    assert ("with merged adapters" in capsys.readouterr().out) == has_adapters


def test_merged_weights_of_a_decoder_go_to_the_names_of_the_model_zoo(tmp_path: Path) -> None:
    trainer = run(tmp_path / "run", DECODER, lora=True)
    params = ("--params", tmp_path / "run/params.yaml")
    assert (
        convert(tmp_path / "run/checkpoint_2", tmp_path / "zoo", "--to", "cerebras", *params) == 0
    )
    words = ("--from", "cerebras", "--to", "hf", *params)
    assert convert(tmp_path / "zoo", tmp_path / "hf", *words) == 0
    found = logits(loaded(tmp_path / "hf"))
    torch.testing.assert_close(found, logits(policy_of(trainer)), rtol=0, atol=1e-5)


def test_a_classifier_of_a_folder_whose_weights_are_gone(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=3
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    model = {
        "name": "hf_model",
        "auto_class": "AutoModelForSequenceClassification",
        "pretrained_model_name_or_path": str(tmp_path / "bert"),
        "config_overrides": {"num_labels": 5},
        "pretrained": False,
        "peft_config": {"r": 2, "target_modules": ["query"], "modules_to_save": ["classifier"]},
    }
    batch = {"input_ids": language_batch()["input_ids"], "labels": torch.tensor([0, 4, 2, 1])}
    trainer = run(tmp_path / "run", model, batch=batch)
    (tmp_path / "bert/model.safetensors").unlink()
    words = ("--to", "hf", "--params", tmp_path / "run/params.yaml")
    assert convert(tmp_path / "run/checkpoint_2", tmp_path / "hf", *words) == 0
    made = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    ids = language_batch()["input_ids"].long()
    with torch.no_grad():
        expected: Tensor = trainer.model({"input_ids": ids})["logits"]
        torch.testing.assert_close(made(ids).logits, expected, rtol=0, atol=1e-5)
    assert made.config.num_labels == 5


@pytest.mark.parametrize("kind", ["all weights", "adapters", "tied output", "decoder"])
def test_averaged_weights(kind: str, tmp_path: Path, caplog: Any, capsys: Any) -> None:
    caplog.set_level(logging.INFO)
    tied = LLAMA | {"config": config_of("llama") | {"tie_word_embeddings": True}}
    model, lora = RUNS.get(kind, (tied, False))
    callbacks = [
        HuggingFaceCheckpoint(folder="own_{step}"),
        HuggingFaceCheckpoint(folder="average_{step}", averaged=True),
    ]
    trainer = run(tmp_path / "run", model, ModelEma(0.5, validate=False), *callbacks, lora=lora)
    assert "Saved run/own_2 (weights, not averaged)." in caplog.text.replace(f"{tmp_path}/", "")
    assert "Saved run/average_2 (averaged weights)." in caplog.text.replace(f"{tmp_path}/", "")
    ema = trainer.get_callback(ModelEma)
    assert ema is not None
    own = logits(policy_of(trainer))
    with ema.swap():
        average = logits(policy_of(trainer))
    assert (own - average).abs().max() > 1e-3
    source, params = tmp_path / "run/checkpoint_2", tmp_path / "run/params.yaml"
    words = ("--to", "hf", "--params", params, "--averaged")
    assert convert(source, tmp_path / "hf", *words) == 0
    assert ", averaged weights" in capsys.readouterr().out
    for folder, expected in (("run/own_2", own), ("run/average_2", average), ("hf", average)):
        found = logits(loaded(tmp_path / folder))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_averaged_weights_that_do_not_exist_are_refused(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(ConfigError, match=r"averaged requires the callback ModelEma"):
        run(tmp_path / "no", LLAMA, HuggingFaceCheckpoint(averaged=True))
    run(tmp_path / "run", LLAMA)
    source, params = tmp_path / "run/checkpoint_2", tmp_path / "run/params.yaml"
    words = ("--to", "hf", "--params", params, "--averaged")
    said = refused(capsys, source, tmp_path / "hf", *words)
    assert "no callback ModelEma" in said
    weights = source / "model.safetensors"
    assert "is not a checkpoint" in refused(capsys, weights, tmp_path / "hf", *words)


@pytest.mark.parametrize("way", ["peft_config", "callback"])
def test_adapters_alone(way: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    model = {"name": "hf_causal_lm", "pretrained_model_name_or_path": str(base)}
    lora = way == "callback"
    trainer = run(tmp_path / "run", model | ({} if lora else {"peft_config": LORA}), lora=lora)
    source, params = tmp_path / "run/checkpoint_2", tmp_path / "run/params.yaml"
    assert convert(source, tmp_path / "merged", "--to", "hf", "--params", params) == 0
    generation = json.loads((tmp_path / "merged/generation_config.json").read_text())
    assert generation["max_length"] == 33
    words = ("--to", "hf", "--params", params, "--no-merge-adapters")
    assert convert(source, tmp_path / "adapters", *words) == 0
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapters").eval()
    torch.testing.assert_close(logits(again), logits(policy_of(trainer)), rtol=0, atol=1e-6)
    assert not (tmp_path / "adapters/model.safetensors").exists()


def refused(capsys: Any, *words: object) -> str:
    """Return the only line that a command prints that writes nothing."""
    capsys.readouterr()
    assert convert(*words) == 2
    said: str = capsys.readouterr().err
    assert said.count("\n") == 1
    assert not Path(str(words[1])).exists()
    return said


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "another family": ({}, ("--family", "llama"), "--family"),
    "no base": ({}, ("--no-merge-adapters",), "did not start from the weights"),
    "no folder": (
        {"config": None, "pretrained_model_name_or_path": "./gone"},
        (),
        "pretrained_model_name_or_path: there is no folder './gone'",
    ),
    "other rank": ({"peft_config": LORA | {"r": 5}}, (), "have r: 5"),
    "no adapters": ({"peft_config": None}, (), "Pass the configuration of the run"),
    "other sizes": (
        {"config": config_of("llama") | {"hidden_size": 16}},
        (),
        "has the shape [100, 32]",
    ),
    "unknown": ({"peftconfig": {}}, (), "peftconfig"),
}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with adapters."""
    folder = tmp_path_factory.mktemp("adapted")
    run(folder, LLAMA | {"peft_config": LORA})
    return folder


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_converted_is_refused(
    kind: str, adapted: Path, tmp_path: Path, capsys: Any
) -> None:
    changes, words, message = REFUSED[kind]
    model = LLAMA | {"peft_config": LORA} | changes
    params = tmp_path / "params.yaml"
    params.write_text(json.dumps({"trainer": {"init": {"model": model}}}))
    given = (adapted / "checkpoint_2", tmp_path / "hf", "--params", params)
    assert message in refused(capsys, *given, "--to", "hf", *words)
    if kind == "another family":
        assert "Pass --to hf" in refused(capsys, *given, "--to", "cerebras")


def test_adapters_that_are_not_plain_lora_are_refused(tmp_path: Path, capsys: Any) -> None:
    run(tmp_path, LLAMA | {"peft_config": LORA | {"use_dora": True}})
    given = (tmp_path / "checkpoint_2", tmp_path / "hf", "--params", tmp_path / "params.yaml")
    assert "not plain LoRA" in refused(capsys, *given, "--to", "hf")


def test_code_that_only_a_checkpoint_names_does_not_run(tmp_path: Path, capsys: Any) -> None:
    run(tmp_path, LLAMA)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/config.json").write_text(
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}})
    )
    (tmp_path / "code/mine.py").write_text("raise SystemExit('it ran')")
    model = {
        "name": "hf_causal_lm",
        "pretrained_model_name_or_path": str(tmp_path / "code"),
        "trust_remote_code": True,
    }
    (tmp_path / "logs/latest").mkdir(parents=True, exist_ok=True)
    (tmp_path / "logs/latest/params.yaml").write_text(json.dumps({"init": {"model": model}}))
    said = refused(capsys, tmp_path / "checkpoint_2", tmp_path / "hf", "--to", "hf")
    assert "trust_remote_code" in said


@pytest.mark.parametrize("name", ["config.json", "vocab.txt", "mine.py"])
def test_links_out_of_the_folder_that_the_model_was_made_from_are_refused(
    name: str, tmp_path: Path, capsys: Any
) -> None:
    run(tmp_path, LLAMA)
    (tmp_path / "folder").mkdir()
    (tmp_path / "elsewhere").write_text("{}")
    (tmp_path / "folder" / name).symlink_to("../elsewhere")
    model = {"name": "hf_causal_lm", "pretrained_model_name_or_path": str(tmp_path / "folder")}
    params = tmp_path / "params.yaml"
    params.write_text(json.dumps({"trainer": {"init": {"model": model}}}))
    given = (tmp_path / "checkpoint_2", tmp_path / "hf", "--params", params)
    assert f"{name}' is a symbolic link" in refused(capsys, *given, "--to", "hf")
