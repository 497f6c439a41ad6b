"""Files of llm-foundry and torchtune on a tiny model: the converted file is valid, and trains."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo_trainer.cli.command import main
from modelzoo_trainer.config.loader import read_text, to_yaml
from modelzoo_trainer.config.positions import to_plain
from modelzoo_trainer.tools.foreign_configs.conversion import convert_file
from tests.zoo.rows.toys import byte_tokenizer

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("datasets", reason="needs datasets")
pytest.importorskip("peft", reason="needs peft")

FILES = Path(__file__).resolve().parents[2] / "tools" / "foreign_configs"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model with its tokenizer, and data."""
    made = tmp_path_factory.mktemp("foreign")
    byte_tokenizer(made / "tiny")
    settings = made / "tiny" / "tokenizer_config.json"
    known = json.loads(settings.read_text()) if settings.exists() else {}
    settings.write_text(json.dumps({**known, "chat_template": TEMPLATE}))
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=2048,
    )
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(made / "tiny")
    rows = [
        {
            "text": f"some text {i} " * 20,
            "prompt": f"say {i}",
            "response": f"it is {i}",
            "question": f"say {i}",
            "answer": f"it is {i}",
            "response_j": "yes",
            "response_k": "no",
            "dialog": [{"from": "human", "value": "a"}, {"from": "gpt", "value": f"b {i}"}],
        }
        for i in range(64)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("data.jsonl", "copy/train/a.jsonl", "copy/val/a.jsonl", "data/train.jsonl"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(lines)
    return made


def converted(name: str, folder: Path, *more: tuple[str, str]) -> Any:
    """Return a converted file with the folders that are here."""
    text, _ = convert_file(FILES / name, steps_per_epoch=200)
    places = [
        (
            r"meta-llama/Llama-3\.2-1B|EleutherAI/gpt-neox-20b|\./weights/llama/",
            str(folder / "tiny"),
        ),
        (r"\./my-copy-c4", str(folder / "copy")),
        (r"mosaicml/dolly_hhrlhf|lvwerra/stack-exchange-paired|\./chats", str(folder / "data")),
        (r"\ba\.jsonl", str(folder / "data.jsonl")),
        (r"data_files: data\.jsonl", f"data_files: {folder}/data.jsonl"),
        (r"\./data/", str(folder / "data")),
        (r"split: test", "split: train"),
        (r"\./runs/torchtune", str(folder / "out")),
        *more,
    ]
    for pattern, place in places:
        text = re.sub(pattern, place, text)
    return to_plain(read_text(text, name))


def written(values: Any, path: Path) -> str:
    """Write a file for one process and short rows."""
    init, fit = values["trainer"]["init"], values["trainer"]["fit"]
    init["backend"]["parallel"] = {"shard": -1}
    validation = fit.get("val_dataloader") or []
    loaders = validation if isinstance(validation, list) else [validation]
    for loader in [fit["train_dataloader"], *loaders]:
        loader |= {"max_sequence_length": 128, "num_workers": 0}
        loader["cache_dir"] = str(path.parent / "cache")
        for key in ("prefetch_factor", "persistent_workers"):
            loader.pop(key, None)
    path.write_text(to_yaml(values))
    return str(path)


@pytest.mark.parametrize(
    "name",
    [
        "llm_foundry_finetune.yaml",
        "llm_foundry_pretrain.yaml",
        "torchtune_full.yaml",
        "torchtune_lora_dpo.yaml",
    ],
)
def test_a_converted_file_is_valid(name: str, folder: Path, tmp_path: Path, capfd: Any) -> None:
    path = written(converted(name, folder), tmp_path / "ours.yaml")
    code = main(["check", path, "--device", "cpu"])
    out, err = capfd.readouterr()
    assert (code, err) == (0, "")
    assert "Verdict: trains here." in out


@pytest.mark.parametrize(
    "name", ["llm_foundry_finetune.yaml", "torchtune_full.yaml", "torchtune_lora_dpo.yaml"]
)
def test_a_converted_file_trains(name: str, folder: Path, tmp_path: Path, capfd: Any) -> None:
    values = converted(name, folder)
    init = values["trainer"]["init"]
    exports = [one for one in init["callbacks"] if "HuggingFaceCheckpoint" in one]
    assert exports
    (exports[0]["HuggingFaceCheckpoint"] or {}).pop("folder", None)
    init |= {"device": "cpu", "model_dir": str(tmp_path / "run"), "loggers": []}
    init["callbacks"] = exports
    init["model"].pop("attn_implementation", None)
    for key in ("compile", "deterministic"):
        init["backend"].pop(key, None)
    init["checkpoint"].pop("checkpoint_root", None)
    train = values["trainer"]["fit"]["train_dataloader"]
    if "global_batch_size" in train:
        train["global_batch_size"] = 4
    assert main(["fit", written(values, tmp_path / "ours.yaml"), "--max_steps", "2"]) == 0
    assert (tmp_path / "run" / "checkpoint_2").is_dir()
    written_names = {one.name for one in (tmp_path / "run" / "hf_2").iterdir()}
    is_adapter = name == "torchtune_lora_dpo.yaml"  # the other has config_overrides
    assert ("adapter_config.json" if is_adapter else "config.json") in written_names
