"""What data processors say of their samples without data, beside batches of real data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.published_data import write_data
from benchmarks.published_scaling import scaled
from modelzoo_trainer.config.build import load_plans
from modelzoo_trainer.config.loader import to_yaml
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.core.parts.model_length import lengths_of
from modelzoo_trainer.loading.dataset_info import check_model
from tests.compat.corpus_here import CORPUS
from tests.tools.planning.test_without_data import described

pytestmark = [pytest.mark.corpus, pytest.mark.slow]

FILES = (
    "nlp/gpt3/configs/muP/params_gpt3_40M.yaml",
    "nlp/gemma2/configs/params_gemma2_9b_msl8k_swa_4k_sink_512.yaml",
    "nlp/bert/configs/bert_base_MSL512.yaml",
    "nlp/bert/classifier/configs/bert_base_classifier_mnli.yaml",
    "nlp/bert/extractive_summarization/configs/bert_base_summarization.yaml",
    "nlp/bert/token_classifier/configs/bert_base_ner_bc5cdr_chem.yaml",
    "nlp/dpo/configs/params_zephyr_7b_dpo.yaml",
    "nlp/t5/configs/t5_3B.yaml",
    "multimodal/llava/configs/params_llava_v1p5_pretrain_7b_phase1_MSL2K.yaml",
    "vision/dino/configs/params_dinov2_large_224_bs2048.yaml",
    "vision/dit/configs/params_dit_small_patchsize_2x2.yaml",
    "vision/vision_transformer/configs/params_vit_base_patch_16_imagenet_1k.yaml",
)


@pytest.mark.filterwarnings("ignore:pooler_nonlinearity .* has no effect")  # as published
@pytest.mark.parametrize("name", FILES)
def test_samples_are_described_as_they_are_loaded(name: str, tmp_path: Path) -> None:
    [path] = CORPUS.rglob(name)
    load = {"device": "cpu"}
    [given] = load_plans(path, shipped_names, mode=None, options=load, for_a_run=False)
    trainer, loaders = scaled(given.resolved["trainer"], tmp_path / "data")
    for loader in loaders:
        write_data(loader)
    file = tmp_path / "params.yaml"
    file.write_text(to_yaml({"trainer": trainer}))
    [plan] = load_plans(file, shipped_names, mode="train", options=load)
    component, model = plan.call["train_dataloader"], plan.init["model"].build()

    with lengths_of(model):
        loader: Any = component.build().create_dataloader()
    check_model(loader, model)
    found = component.target.unopened(**component.arguments).sample_features(model)

    assert described(next(iter(loader))) == found
