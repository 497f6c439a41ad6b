"""Folders for tests of models of `transformers`."""

from pathlib import Path

import pytest
import torch

from tests.zoo.hugging_face.hf_cases import config_of


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # of runs without model_dir


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm

    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    HfCausalLm(config=config_of("llama")).save_pretrained(path)
    return path
