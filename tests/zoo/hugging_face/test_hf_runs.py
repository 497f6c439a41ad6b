"""Runs of models of `transformers` that a file names."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from modelzoo_trainer import Callback, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import Lora, ModelEma
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm
from tests.zoo.hugging_face.hf_cases import config_of, language_batch

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("peft", reason="needs peft")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_folder")]

ADAPTERS: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
LLAMA = config_of("llama")


class Losses(Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_step_end(self, trainer: Any, model: Any, outputs: Any, batch: Any) -> None:
        self.found.append(outputs["loss"].item())


def train(*callbacks: Any, backend: Any = None, **options: Any) -> tuple[list[float], HfCausalLm]:
    losses = Losses()
    trainer = Trainer(
        device="cpu",
        backend=backend or {},
        model=lambda: HfCausalLm(**({"config": LLAMA} | options)),
        optimizer=lambda model: torch.optim.AdamW(
            [one for one in model.parameters() if one.requires_grad], lr=1e-2
        ),
        loop=TrainingLoop(max_steps=3),
        seed=1,
        progress="none",
        callbacks=[losses, *callbacks],
    )
    trainer.fit([language_batch()] * 3)
    model: Any = trainer.model
    return losses.found, model


@pytest.mark.parametrize(
    "backend",
    [
        {"activation_checkpointing": "full"},
        {"compile": {"target": "model", "backend": "eager", "fullgraph": True}},
    ],
)
def test_losses_are_the_same_however_the_model_runs(backend: dict[str, Any]) -> None:
    plain, _ = train()
    assert plain[0] > plain[1] > plain[2]
    assert train(backend=backend)[0] == plain


def test_average_of_weights() -> None:
    assert train(ModelEma())[0] == train()[0]


@pytest.mark.parametrize("way", ["callback", "peft_config"])
def test_adapters_alone_are_trained_and_merged_when_saved(
    way: str, folder: Path, tmp_path: Path
) -> None:
    base: dict[str, Any] = {"config": None, "pretrained_model_name_or_path": str(folder)}
    if way == "callback":
        losses, model = train(Lora(ADAPTERS | {"target_modules": ["q_proj"]}), **base)
    else:
        losses, model = train(peft_config=ADAPTERS, **base)
    assert losses[0] > losses[2]
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    assert names
    assert all("lora_" in name for name in names)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    for name, one in model.state_dict().items():
        assert torch.equal(one, before[name])
    ids = language_batch()["input_ids"]
    again = HfCausalLm(pretrained_model_name_or_path=str(tmp_path)).eval()
    torch.testing.assert_close(again.logits(ids), model.eval().logits(ids), atol=1e-6, rtol=0)
    stored = load_file(tmp_path / "model.safetensors")
    assert not any("lora" in name or "base_layer" in name for name in stored)


@pytest.mark.parametrize("init_device", ["cpu", "meta"])
@pytest.mark.parametrize("way", ["callback", "peft_config"])
def test_adapters_are_float32_with_any_type_of_the_weights(way: str, init_device: str) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "init_device": init_device}
    if way == "callback":
        losses, model = train(Lora({"r": 4, "target_modules": ["q_proj"]}), **options)
    else:
        losses, model = train(peft_config=ADAPTERS, **options)
    types = {(one.requires_grad, one.dtype) for one in model.parameters()}
    assert types == {(True, torch.float32), (False, torch.bfloat16)}
    assert losses[0] > losses[2]


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_weights_of_the_library_by_their_names(model_type: str, tmp_path: Path) -> None:
    source = HfCausalLm(config=config_of(model_type))
    source.save_pretrained(tmp_path)
    entries = load_file(tmp_path / "model.safetensors")
    target = HfCausalLm(config=config_of(model_type))
    target.load_state_dict(target.complete_state(entries))
    adapters = {"r": 2, "target_modules": "all-linear"}
    own = HfCausalLm(config=config_of(model_type), peft_config=adapters)
    own.load_state_dict(own.complete_state(entries))
    ids = language_batch()["input_ids"]
    for model in (target, own):
        torch.testing.assert_close(model.eval().logits(ids), source.eval().logits(ids))
    assert own.complete_state(own.state_dict()).keys() == own.state_dict().keys()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"peft_type": "LORRA"}, "peft_type: 'LORRA'"),
        ({"rank": 3}, r"peft_config\.rank: no such setting"),
        ({"r": 3, "target_modules": ["nothing"]}, "nothing"),
        ({"r": 0, "target_modules": ["q_proj"]}, "peft rejects"),
    ],
)
def test_invalid_adapters(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HfCausalLm(config=LLAMA, peft_config=given)


# ---- the command line


def write(path: Path, model: dict[str, Any], **init: Any) -> Path:
    data = {
        "data_processor": "SyntheticProcessor",
        "kind": "tokens",
        "vocab_size": 100,
        "batch_size": 4,
        "num_samples": 16,
    }
    trainer = {
        "init": {
            "model_dir": str(path / "run"),
            "seed": 1,
            "model": model,
            "optimizer": {"AdamW": {"learning_rate": 0.01}},
            "loop": {"max_steps": 8},
            "checkpoint": {"steps": 2},
            **init,
        },
        "fit": {"train_dataloader": data},
    }
    file = path / "params.yaml"
    file.write_text(yaml.safe_dump({"trainer": trainer}))
    return file


def command(*args: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "modelzoo_trainer", *map(str, args)]
    env = os.environ | environment
    return subprocess.run(call, capture_output=True, text=True, check=False, env=env)


def test_plan_reads_no_weights(folder: Path, tmp_path: Path, capsys: Any) -> None:
    file = write(tmp_path, {"name": "hf_causal_lm", "pretrained_model_name_or_path": str(folder)})
    assert main(["plan", str(file)]) == 0
    assert "parameters" in capsys.readouterr().out


_SETTINGS: dict[str, dict[str, Any]] = {
    "remote code": {"model_type": "mine", "auto_map": {"AutoModel": "mine.Mine"}},
    "unknown": {"model_type": "lama"},
    "no architecture": {"model_type": None},
    "other shapes": {"vocab_size": 120},
    "quantized": {"quantization_config": {"quant_method": "fp8"}},
}


def _break(folder: Path, kind: str) -> None:
    """Make a folder of a model invalid."""
    weights = folder / "model.safetensors"
    if kind in _SETTINGS:
        config = json.loads((folder / "config.json").read_text()) | _SETTINGS[kind]
        (folder / "config.json").write_text(json.dumps(config))
    elif kind == "no config":
        (folder / "config.json").unlink()
    elif kind == "no weights":
        weights.unlink()
    elif kind == "pickle":
        weights.unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    elif kind == "code":
        weights.unlink()
        torch.save({"a": subprocess.Popen}, folder / "pytorch_model.bin")
    elif kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])


@pytest.mark.parametrize("init_device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no config", "has no config.json"),
        ("no weights", "has no weights"),
        ("pickle", "not a file of torch.save"),
        ("code", "weights_only=True"),
        ("remote code", "trust_remote_code: true"),
        ("unknown", "Did you mean 'llama'"),
        ("truncated", "model.safetensors' cannot be read"),
        ("quantized", "the weights are quantized (quantization_config: fp8)"),
        ("no architecture", "config.json' has no model_type"),
        ("other shapes", "(100, 32) in the file, (120, 32) in the model"),
    ],
)
def test_invalid_folder_ends_with_one_message(
    kind: str, message: str, init_device: str, folder: Path, tmp_path: Path, capsys: Any
) -> None:
    own = tmp_path / "model"
    shutil.copytree(folder, own)
    _break(own, kind)
    model = {"name": "hf_causal_lm", "pretrained_model_name_or_path": str(own)}
    file = write(tmp_path, model | {"init_device": init_device})
    for name in ("fit", "check"):
        if name == "check" and kind in ("code", "other shapes", "truncated"):
            continue  # the weights are not read
        assert main([name, str(file)]) == 2
        captured = capsys.readouterr()
        assert message in " ".join((captured.out + captured.err).split())
        assert "Traceback" not in captured.err
        assert "trust the source" not in captured.err  # of torch


def test_a_checkpoint_without_weights_ends_with_one_message(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    _break(tmp_path / "model", "no weights")
    file = write(tmp_path, {"name": "hf_causal_lm", "config": LLAMA})
    assert main(["fit", str(file), "--set", f"trainer.fit.ckpt_path={tmp_path / 'model'}"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"ckpt_path: folder '{tmp_path / 'model'}' has no weights" in error


@pytest.mark.parametrize("is_offline", [True, False])
def test_no_network_ends_with_one_message(is_offline: bool, tmp_path: Path) -> None:
    file = write(tmp_path, {"name": "hf_causal_lm", "pretrained_model_name_or_path": "owner/name"})
    env = {"HF_HOME": str(tmp_path / "hub"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = command("fit", file, **env, **({"HF_HUB_OFFLINE": "1"} if is_offline else {}))
    assert done.returncode == 2, done.stderr
    assert "hf download owner/name --local-dir DIR" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
