"""Architectures that are Python code of a repository."""

import json
import sys
from pathlib import Path

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm
from tests.zoo.hugging_face.hf_cases import config_of, language_batch

pytest.importorskip("transformers", reason="needs transformers")
pytestmark = pytest.mark.slow

CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

class MineConfig(PreTrainedConfig):
    model_type = "mine"
    vocab_size: int = 100

class Mine(PreTrainedModel):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, 8)
        self.head = torch.nn.Linear(8, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, **others):
        return CausalLMOutput(logits=self.head(self.embed(input_ids)))
"""
CLASSES = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"}


def test_remote_code_runs_only_where_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "mine.py").write_text(CODE)
    (folder / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": CLASSES}))
    place = {"pretrained_model_name_or_path": str(folder), "pretrained": False}
    with pytest.raises(ConfigError, match=r"'mine' .*Python code .*trust_remote_code: true"):
        HfCausalLm(**place)
    with pytest.warns(UserWarning, match="runs Python code of its repository"):
        model = HfCausalLm(**place, trust_remote_code=True)
    assert model(language_batch())["logits"].shape == (4, 8, 100)


def test_trust_that_is_not_needed_is_reported(tmp_path: Path) -> None:
    HfCausalLm(config=config_of("llama")).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="trust_remote_code .*no effect"):
        HfCausalLm(pretrained_model_name_or_path=str(tmp_path), trust_remote_code=True)
