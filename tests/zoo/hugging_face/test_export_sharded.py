"""Sharded runs of an imported Llama with adapters, exported and served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import HuggingFaceCheckpoint, Lora
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.conversion.hugging_face import plan_import
from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm
from modelzoo_trainer.zoo.models.registry import model_class
from tests.distributed.ranks import run_ranks
from tests.zoo.hugging_face.harness import TEXT, make_llama, make_tokenizer

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("tokenizers", reason="needs tokenizers")
pytest.importorskip("peft", reason="needs peft")
pytestmark = pytest.mark.slow

PROMPT = "the cat sat on"
NUM_NEW = 12
PEFT = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
LORA: list[Any] = [
    {"r": 4, "alpha": 8, "target_modules": [one]} for one in ("q_proj", "v_proj", "down_proj")
]


def rows(tokens: list[int]) -> list[dict[str, torch.Tensor]]:
    """Return texts as the data processors make them."""
    parts = [torch.tensor(tokens[start : start + 17]) for start in range(0, 16 * 17, 17)]
    return [{"input_ids": one[:-1].int(), "labels": one[1:].int()} for one in parts]


def fit(rank: int, folder: Path, way: str) -> dict[str, Any]:
    """Train for four steps; return how the model continues the prompt, and what was refused."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "llama")
    tokens = tokenizer(TEXT * 10)["input_ids"]
    imported = plan_import(folder / "llama", key="ckpt_path")
    makes = {
        "peft_config": lambda: HfCausalLm(
            pretrained_model_name_or_path=str(folder / "llama"),
            init_device="meta",
            peft_config=PEFT,
        ),
        "ours": lambda: model_class("llama")(**imported.arguments),
    }
    trainer = Trainer(
        device="cpu",
        backend={"parallel": {"shard": -1}},
        model_dir=folder / way,
        model=makes[way],
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=2e-2),
        loop=TrainingLoop(max_steps=4),
        checkpoint=Checkpoint(steps=4),
        callbacks=[
            *([Lora(LORA)] if way == "ours" else []),
            HuggingFaceCheckpoint(tokenizer=str(folder / "llama")),
        ],
        seed=1,
    )
    data: Any = rows(tokens)
    model: Any = trainer.model
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    before = model.generate(ids, NUM_NEW, temperature=0.0)[0].tolist()
    ckpt_path = str(folder / "llama") if way == "ours" else None
    trainer.fit(DataLoader(data, batch_size=2), ckpt_path=ckpt_path)
    found: dict[str, Any] = {
        "ids": model.generate(ids, NUM_NEW, temperature=0.0)[0].tolist(),
        "before": before,
        "refused": "",
    }
    if way == "peft_config":
        try:
            model.save_pretrained(folder / "refused")
        except ConfigError as error:
            found["refused"] = str(error)
    return found


def convert(source: Path, target: Path, way: str, llama: Path) -> None:
    """Write the folder from the checkpoint, with the configuration of the run."""
    init: dict[str, Any] = {
        "model": {
            "name": "hf_causal_lm",
            "pretrained_model_name_or_path": str(llama),
            "peft_config": PEFT,
        }
    }
    if way == "ours":
        imported = plan_import(llama, key="ckpt_path")
        init = {
            "model": {"name": "llama", **imported.arguments},
            "callbacks": [{"Lora": {"lora_params": LORA}}],
        }
    params = source.parent / "params.yaml"
    params.write_text(json.dumps({"trainer": {"init": init}}))
    words = ["--to", "hf", "--params", params, "--tokenizer", llama]
    assert main(["checkpoint", "convert", *map(str, [source, target, *words])]) == 0


def served(folder: Path) -> str:
    """Return how the folder continues the prompt."""
    pipeline = transformers.pipeline("text-generation", model=str(folder))
    answer: str = pipeline(PROMPT, max_new_tokens=NUM_NEW, do_sample=False)[0]["generated_text"]
    return answer


# CI: our adapters; those of PEFT are merged in test_export.
@pytest.mark.soak_cases("peft_config")
@pytest.mark.parametrize("way", ["peft_config", "ours"])
def test_a_sharded_run_is_served_with_the_same_text(way: str, tmp_path: Path) -> None:
    make_llama(tmp_path / "llama", make_tokenizer(tmp_path / "tokenizer"))
    first, second = run_ranks(2, fit, tmp_path, way)
    assert first == second
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "llama")
    text = tokenizer.decode(first["ids"], skip_special_tokens=True)
    assert served(tmp_path / way / "hf_4") == text
    convert(tmp_path / way / "checkpoint_4", tmp_path / "converted", way, tmp_path / "llama")
    assert served(tmp_path / "converted") == text
    assert served(tmp_path / "llama") != text
    if way == "peft_config":
        text = tokenizer.decode(first["before"], skip_special_tokens=True)
        assert served(tmp_path / "llama") == text
        assert "sharded" in first["refused"]
        assert "HuggingFaceCheckpoint" in first["refused"]
        assert not (tmp_path / "refused").exists()
