"""Folders of Hugging Face of trained models: the same numbers in transformers and peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import HuggingFaceCheckpoint, Lora
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm
from modelzoo_trainer.zoo.models.hugging_face.model import HfModel
from modelzoo_trainer.zoo.models.registry import model_class
from tests.zoo.hugging_face.hf_cases import GPT_SIZES, config_of, language_batch

transformers = pytest.importorskip("transformers", reason="needs transformers")
peft = pytest.importorskip("peft", reason="needs peft")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def fit(folder: Path, model: Any, *callbacks: Any, **options: Any) -> Any:
    """Train for two steps with large steps; return the model in eval mode."""
    torch.manual_seed(0)
    trainer = Trainer(
        device="cpu",
        model=model,
        optimizer=lambda one: torch.optim.SGD(
            [param for param in one.parameters() if param.requires_grad], lr=1.0
        ),
        loop=TrainingLoop(max_steps=2),
        checkpoint=Checkpoint(steps=2),
        model_dir=folder,
        seed=1,
        progress="none",
        callbacks=[*callbacks, HuggingFaceCheckpoint(**options)],
        call_model="kwargs" if isinstance(model, peft.PeftModel) else None,
    )
    batch = {key: value.long() for key, value in language_batch().items()}
    trainer.fit([batch] * 2)
    return trainer.model.eval()


IDS = language_batch()["input_ids"].long()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        if hasattr(model, "last_logits"):
            return model.logits(IDS)  # type: ignore[no-any-return]
        return model(input_ids=IDS).logits  # type: ignore[no-any-return]


def loaded(folder: Path) -> Any:
    made, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    return made.eval()


def save_base(folder: Path, model_type: str = "llama") -> Path:
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(**config_of(model_type))
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config.max_length = 33
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "llama", "mixtral"])
def test_a_folder_has_the_names_of_the_library(model_type: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", model_type)
    given: dict[str, Any] = {"pretrained_model_name_or_path": str(base)}
    model = fit(tmp_path, lambda: HfCausalLm(**given), shard_size="20KB")
    folder = tmp_path / "hf_2"
    torch.testing.assert_close(logits(loaded(folder)), logits(model), rtol=0, atol=1e-6)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == load_file(base / "model.safetensors").keys()
    assert json.loads((folder / "generation_config.json").read_text())["max_length"] == 33
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("options", [{"init_device": "meta"}, {"pretrained": False}], ids=str)
def test_generation_settings_of_a_folder_whose_weights_are_not_loaded_by_transformers(
    options: dict[str, Any], tmp_path: Path
) -> None:
    base = save_base(tmp_path / "base")
    given: dict[str, Any] = {"pretrained_model_name_or_path": str(base), **options}
    fit(tmp_path, lambda: HfCausalLm(**given))
    assert json.loads((tmp_path / "hf_2/generation_config.json").read_text())["max_length"] == 33


@pytest.mark.parametrize("kind", ["plain", "injected", "PeftModel"])
def test_models_of_the_library_without_a_wrapper(kind: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(save_base(tmp_path / "base"))
    if kind == "injected":
        peft.inject_adapter_in_model(peft.LoraConfig(**LORA), model)
    elif kind == "PeftModel":
        model = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    trained = fit(tmp_path, model)
    torch.testing.assert_close(
        logits(loaded(tmp_path / "hf_2")), logits(trained), rtol=0, atol=1e-6
    )
    assert (logits(loaded(tmp_path / "base")) - logits(trained)).abs().max() > 1e-3


def test_an_image_model_without_embeddings(tmp_path: Path) -> None:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3}
    auto_class = "AutoModelForImageClassification"
    trainer = Trainer(
        device="cpu",
        model=lambda: HfModel(auto_class=auto_class, config={"model_type": "resnet", **sizes}),
        optimizer=lambda one: torch.optim.SGD(one.parameters(), lr=0.1),
        loop=TrainingLoop(max_steps=2),
        model_dir=tmp_path,
        seed=1,
        progress="none",
        callbacks=[HuggingFaceCheckpoint()],
    )
    images = torch.randn(2, 3, 32, 32)
    trainer.fit([{"pixel_values": images, "labels": torch.tensor([0, 2])}] * 2)
    made = getattr(transformers, auto_class).from_pretrained(tmp_path / "hf_2").eval()
    trainer.model.eval()
    with torch.no_grad():
        expected = trainer.model({"pixel_values": images})["logits"]
        torch.testing.assert_close(made(images).logits, expected, rtol=0, atol=1e-6)


WITH_LORA = {
    "Conv1D": ({"model_type": "gpt2", **GPT_SIZES}, {"r": 3, "target_modules": ["c_attn"]}),
    "tied": (
        {"model_type": "gpt2", **GPT_SIZES},
        {"r": 3, "target_modules": ["wte"], "use_rslora": True},
    ),
    "copy": (config_of("llama"), {**LORA, "modules_to_save": ["lm_head", "norm"]}),
    "mixtral": (config_of("mixtral"), LORA),
}


@pytest.mark.parametrize("case", WITH_LORA)
def test_adapters_are_merged(case: str, tmp_path: Path) -> None:
    config, adapters = WITH_LORA[case]
    given: dict[str, Any] = {"config": config, "peft_config": adapters}
    model = fit(tmp_path, lambda: HfCausalLm(**given))
    made = loaded(tmp_path / "hf_2")
    torch.testing.assert_close(logits(made), logits(model), rtol=0, atol=1e-5)
    assert made.config.tie_word_embeddings == (case == "Conv1D")


@pytest.mark.parametrize("kind", ["peft_config", "callback", "injected"])
def test_a_folder_of_adapters(kind: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    given: dict[str, Any] = {"pretrained_model_name_or_path": str(base)}
    callbacks, model = [], None
    if kind == "peft_config":
        given["peft_config"] = LORA | {"modules_to_save": ["lm_head"]}
    elif kind == "callback":
        pairs = [{"r": 4, "alpha": 8, "target_modules": [name]} for name in ("q_proj", "v_proj")]
        callbacks = [Lora([pairs[0], pairs[1] | {"r": 2, "alpha": 3}])]
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        peft.inject_adapter_in_model(peft.LoraConfig(**LORA), model)
    trained = fit(
        tmp_path, model or (lambda: HfCausalLm(**given)), *callbacks, merge_adapters=False
    )
    own = json.loads((tmp_path / "hf_2/adapter_config.json").read_text())
    assert own["base_model_name_or_path"] == str(base)
    again = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "hf_2"
    )
    torch.testing.assert_close(logits(again.eval()), logits(trained), rtol=0, atol=1e-6)
    auto = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "hf_2")
    torch.testing.assert_close(logits(auto.eval()), logits(trained), rtol=0, atol=1e-6)


OURS: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_heads": 4,
    "num_hidden_layers": 2,
    "filter_size": 48,
    "max_position_embeddings": 64,
}


def test_adapters_of_a_decoder_are_merged(tmp_path: Path) -> None:
    settings = OURS | {"share_embedding_weights": True}
    lora = {"r": 3, "alpha": 5}
    model = fit(tmp_path, lambda: model_class("llama")(**settings), Lora(lora))
    made = loaded(tmp_path / "hf_2")
    torch.testing.assert_close(logits(made), logits(model), rtol=0, atol=1e-5)
    assert not made.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("adapters", "options", "message"),
    [
        (LORA | {"use_dora": True}, {}, "DoRA"),
        (
            {"peft_type": "IA3", "target_modules": ["q_proj"], "feedforward_modules": []},
            {},
            "no LoRA",
        ),
        (LORA, {"merge_adapters": False}, "did not start from"),
        (None, {"merge_adapters": False}, "has no adapters"),
        (None, {"family": "llama"}, "family has no effect"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_training(
    adapters: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(
            tmp_path, lambda: HfCausalLm(config=config_of("llama"), peft_config=adapters), **options
        )
