"""Folders of sharded runs with shared weights that have adapters, and with averaged weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import HuggingFaceCheckpoint, Lora, ModelEma
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.zoo.models.registry import model_class
from tests.distributed.ranks import run_ranks
from tests.zoo.hugging_face.hf_cases import config_of, language_batch
from tests.zoo.hugging_face.test_export import OURS, loaded, logits

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("peft", reason="needs peft")
pytestmark = pytest.mark.slow

IDS = language_batch()["input_ids"].long()
TIED: dict[str, Any] = config_of("llama") | {"tie_word_embeddings": True}
BOTH = {"r": 3, "lora_alpha": 5, "target_modules": ["embed_tokens", "lm_head"]}
HF: dict[str, Any] = {"name": "hf_causal_lm", "config": TIED, "init_device": "meta"}
LORA: list[Any] = [
    {"r": 3, "alpha": 5, "target_modules": [one]} for one in ("token_embeddings", "lm_head")
]
RUNS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "tied": (HF, []),
    "adapters": (HF | {"peft_config": BOTH}, []),
    "decoder": ({"name": "llama", **OURS, "share_embedding_weights": True}, LORA),
}


def fit(rank: int, folder: Path, model: dict[str, Any], lora: list[Any]) -> list[Tensor]:
    """Train for two steps; return the logits before, after, of the averaged weights, and again."""
    arguments = {key: one for key, one in model.items() if key != "name"}
    ema = ModelEma(0.5, validate=False)
    trainer = Trainer(
        device="cpu",
        backend={"parallel": {"shard": -1}},
        model=lambda: model_class(model["name"])(**arguments),
        optimizer=lambda one: torch.optim.AdamW(one.parameters(), lr=0.05),
        loop=TrainingLoop(max_steps=2),
        checkpoint=Checkpoint(steps=2),
        model_dir=folder,
        progress="none",
        seed=1,
        callbacks=[
            *([Lora(lora)] if lora else []),
            ema,
            HuggingFaceCheckpoint(folder="own_{step}"),
            HuggingFaceCheckpoint(folder="average_{step}", averaged=True),
        ],
    )
    own: Any = trainer.model
    found = []

    def compute() -> None:
        own.eval()
        with torch.no_grad():
            found.append(own.logits(IDS))

    compute()
    batch = language_batch(num_rows=8)
    rows: Any = [{key: value[idx] for key, value in batch.items()} for idx in range(8)]
    trainer.fit(DataLoader(rows, batch_size=2))
    compute()
    with ema.swap():
        compute()
    compute()
    return found


def fit_all(rank: int, folder: Path) -> dict[str, list[Tensor]]:
    return {kind: fit(rank, folder / kind, *given) for kind, given in RUNS.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def runs(folder: Path) -> Any:
    """Return the logits of each run."""
    return run_ranks(2, fit_all, folder)[0]


@pytest.mark.parametrize("kind", RUNS)
def test_folders_compute_what_the_model_and_its_average_did(
    kind: str, runs: Any, folder: Path
) -> None:
    before, own, average, again = runs[kind]
    assert again.equal(own)
    assert (own - before).abs().max() > 1e-2
    assert (own - average).abs().max() > 1e-2
    model, lora = RUNS[kind]
    init = {"model": model, "callbacks": [{"Lora": {"lora_params": lora}}] if lora else []}
    params = folder / kind / "params.yaml"
    params.write_text(json.dumps({"trainer": {"init": init}}))
    for name, words in (("own", []), ("average", ["--averaged"])):
        target = folder / kind / f"converted_{name}"
        given = [folder / kind / "checkpoint_2", target, "--to", "hf", "--params", params, *words]
        assert main(["checkpoint", "convert", *map(str, given)]) == 0
        for path in (folder / kind / f"{name}_2", target):
            made = loaded(path)
            expected = own if name == "own" else average
            torch.testing.assert_close(logits(made), expected, rtol=0, atol=1e-5)
            assert made.config.tie_word_embeddings == (kind == "tied")
