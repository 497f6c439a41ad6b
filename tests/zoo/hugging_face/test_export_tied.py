"""Adapters on weights that the embedding and the output layer share, exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo_trainer.callbacks import Lora
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm
from modelzoo_trainer.zoo.models.hugging_face.model import HfModel
from modelzoo_trainer.zoo.models.registry import model_class
from tests.zoo.hugging_face.hf_cases import config_of
from tests.zoo.hugging_face.test_export import OURS, fit, loaded, logits

transformers = pytest.importorskip("transformers", reason="needs transformers")
peft = pytest.importorskip("peft", reason="needs peft")
pytestmark = pytest.mark.slow

TARGETS = {
    "embedding": ["embed_tokens"],
    "output": ["lm_head"],
    "both": ["embed_tokens", "lm_head"],
    "neither": ["q_proj"],
}
OUR_NAMES = {"embed_tokens": "token_embeddings", "lm_head": "lm_head", "q_proj": "q_proj"}


def same_logits(folder: Path, trained: Any, *, is_tied: bool) -> None:
    made = loaded(folder)
    torch.testing.assert_close(logits(made), logits(trained), rtol=0, atol=1e-5)
    assert made.config.tie_word_embeddings is is_tied
    assert (made.lm_head.weight is made.get_input_embeddings().weight) is is_tied


@pytest.mark.parametrize("case", TARGETS)
@pytest.mark.parametrize("how", ["peft_config", "callback", "on meta", "same adapters"])
def test_of_transformers(case: str, how: str, tmp_path: Path) -> None:
    config = config_of("llama") | {"tie_word_embeddings": True}
    given: dict[str, Any] = {"config": config}
    targets, callbacks = TARGETS[case], []
    if how == "callback":
        callbacks = [Lora([{"r": 3, "alpha": 5, "target_modules": [one]} for one in targets])]
    else:
        given["peft_config"] = {"r": 3, "lora_alpha": 5, "target_modules": targets}
    if how == "on meta":
        given["init_device"] = "meta"
    if how == "same adapters":
        given["peft_config"]["ensure_weight_tying"] = case != "neither"
    trained = fit(tmp_path, lambda: HfCausalLm(**given), *callbacks)
    same_logits(tmp_path / "hf_2", trained, is_tied=case == "neither")
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    trained.save_pretrained(tmp_path / "saved")
    assert all(value.equal(before[name]) for name, value in trained.state_dict().items())
    assert trained.config.tie_word_embeddings
    same_logits(tmp_path / "saved", trained, is_tied=case == "neither")


@pytest.mark.parametrize("case", TARGETS)
def test_of_a_decoder(case: str, tmp_path: Path) -> None:
    settings = OURS | {"share_embedding_weights": True}
    params = [{"r": 3, "alpha": 5, "target_modules": [OUR_NAMES[one]]} for one in TARGETS[case]]
    trained = fit(tmp_path, lambda: model_class("llama")(**settings), Lora(params))
    same_logits(tmp_path / "hf_2", trained, is_tied=case == "neither")


T5 = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4, "vocab_size": 100}


def test_more_than_two_shared_layers_are_refused(tmp_path: Path) -> None:
    config = {"model_type": "t5", **T5, "decoder_start_token_id": 0}
    given: dict[str, Any] = {
        "auto_class": "AutoModelForSeq2SeqLM",
        "config": config,
        "peft_config": {"r": 3, "target_modules": ["lm_head"]},
    }
    with pytest.raises(ConfigError, match=r"shared.*share their weights.*different adapters"):
        fit(tmp_path, lambda: HfModel(**given))
    with pytest.raises(ConfigError, match=r"shared.*share their weights.*different adapters"):
        HfModel(**given).save_pretrained(tmp_path / "saved")
