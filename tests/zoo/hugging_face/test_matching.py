"""Weights of a folder that are not those of the model: other settings, tensors that are unused."""

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import Module

from modelzoo_trainer import Trainer, TrainingLoop
from modelzoo_trainer.callbacks import Lora
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm
from modelzoo_trainer.zoo.models.hugging_face.model import HfModel
from tests.zoo.hugging_face.hf_cases import config_of, language_batch

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_folder")]

LLAMA = config_of("llama")
BERT: dict[str, Any] = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1}
BERT |= {"num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 100}


def start(model: Module, ckpt_path: Path) -> Any:
    """Return the model of a run that starts from a folder, before its first step."""
    trainer = Trainer(
        device="cpu",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loop=TrainingLoop(max_steps=1),
        progress="none",
    )
    batch = language_batch()
    trainer.fit([{key: one.long() for key, one in batch.items()}], ckpt_path=str(ckpt_path))
    return trainer.model


# ---- settings


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_theta": 5.0}, r"rope_parameters\.rope_theta \(10000\.0 there, 5\.0 here\)"),
        (
            {"num_attention_heads": 2, "head_dim": 16, "num_key_value_heads": 1},
            r"num_attention_heads \(4 there, 2 here\)",
        ),
        ({"rms_norm_eps": 0.5}, r"rms_norm_eps \(1e-06 there, 0\.5 here\)"),
        ({"hidden_act": "gelu"}, r"hidden_act \('silu' there, 'gelu' here\)"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"model_type": "mistral"}, "architecture 'llama', .* 'mistral'"),
    ],
)
@pytest.mark.parametrize("file", ["", "model.safetensors"])
def test_other_settings_than_those_of_the_folder_are_refused(
    changes: dict[str, Any], named: str, file: str, folder: Path
) -> None:
    model = HfCausalLm(config=LLAMA | changes)
    with pytest.raises(ConfigError, match=rf"ckpt_path: .*config\.json.*{named}"):
        start(model, folder / file)


def test_a_model_in_python_with_other_settings_is_refused(folder: Path) -> None:
    config = transformers.LlamaConfig(**(LLAMA | {"rms_norm_eps": 0.5}))
    with pytest.raises(ConfigError, match="rms_norm_eps"):
        start(transformers.LlamaForCausalLM(config), folder)


def test_settings_without_effect_on_the_outputs_may_differ(folder: Path) -> None:
    changes = {"attention_dropout": 0.1, "max_position_embeddings": 128, "bos_token_id": 7}
    stored = load_file(folder / "model.safetensors")
    found = start(HfCausalLm(config=LLAMA | changes, dtype="float32"), folder).model.state_dict()
    assert all(torch.equal(found[name], one) for name, one in stored.items())


def test_overrides_are_on_purpose(folder: Path, caplog: Any) -> None:
    changes = {"rms_norm_eps": 0.5, "rope_theta": 5.0}
    model = HfCausalLm(pretrained_model_name_or_path=str(folder), config_overrides=changes)
    with caplog.at_level(logging.INFO, "modelzoo_trainer.checkpoint"):
        start(model, folder)
    assert "rms_norm_eps (1e-06 there, 0.5 here), rope_parameters.rope_theta" in caplog.text
    other = HfCausalLm(config=LLAMA | {"hidden_act": "gelu"}, config_overrides=changes)
    with pytest.raises(ConfigError, match=r"something else: hidden_act \([^,]*, 'gelu' here\)\."):
        start(other, folder)


# ---- tensors


def test_weights_that_a_folder_has_once_are_shared_again(tmp_path: Path) -> None:
    config = transformers.GPT2Config(
        vocab_size=100,
        n_embd=32,
        n_layer=1,
        n_head=2,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    source = transformers.GPT2LMHeadModel(config)
    source.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    found = start(transformers.GPT2LMHeadModel(config), tmp_path)
    assert found.lm_head.weight is found.transformer.wte.weight
    for name, value in source.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


@pytest.fixture
def with_others(folder: Path, tmp_path: Path) -> Path:
    """A folder with tensors of other models, and frequencies as older versions wrote them."""
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    stored["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)
    stored["score.weight"] = torch.ones(3)
    (tmp_path / "others").mkdir()
    (tmp_path / "others/config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(stored, tmp_path / "others/model.safetensors", metadata={"format": "pt"})
    return tmp_path / "others"


_UNUSED = r"2 tensors in '.*others' are not loaded.*: model\.layers\.0\.self_attn\.q_proj\.bias, sc"


def test_tensors_that_are_not_loaded_are_named(with_others: Path) -> None:
    with pytest.warns(UserWarning, match=_UNUSED):
        HfCausalLm(pretrained_model_name_or_path=str(with_others))


def test_tensors_that_are_not_loaded_into_parts_are_named(with_others: Path) -> None:
    model = HfCausalLm(pretrained_model_name_or_path=str(with_others), init_device="meta")
    with pytest.warns(UserWarning, match=_UNUSED):
        Trainer(device="cpu", model=model)


def test_frequencies_and_masks_of_older_versions_are_no_tensors_of_others(
    folder: Path, with_others: Path
) -> None:
    weights = with_others / "model.safetensors"
    stored = load_file(weights)
    del stored["score.weight"], stored["model.layers.0.self_attn.q_proj.bias"]
    save_file(stored, weights, metadata={"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HfCausalLm(pretrained_model_name_or_path=str(with_others))
    stored = load_file(folder / "model.safetensors")
    found = start(HfCausalLm(config=LLAMA), with_others).model.state_dict()
    assert all(torch.equal(found[name], one) for name, one in stored.items())


def test_the_head_of_another_task_is_named(tmp_path: Path) -> None:
    HfModel(auto_class="AutoModelForMaskedLM", config=BERT).save_pretrained(tmp_path)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        HfModel(
            auto_class="AutoModelForTokenClassification",
            pretrained_model_name_or_path=str(tmp_path),
        )
    texts = [str(one.message) for one in found]
    assert any("lack 2 tensors" in one and "classifier.bias" in one for one in texts)
    assert any("are not loaded" in one and "cls.predictions" in one for one in texts)


# ---- adapters beside a new head

TASK = "AutoModelForSequenceClassification"


@pytest.mark.parametrize("init_device", ["cpu", "meta"])
def test_a_new_head_is_trained_with_its_task_type_or_named(
    init_device: Any, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="needs peft")
    HfModel(auto_class="AutoModelForPreTraining", config=BERT).save_pretrained(tmp_path)
    adapters: dict[str, Any] = {"r": 2, "target_modules": ["query"]}

    def make(peft_config: dict[str, Any] | None, *callbacks: Any) -> tuple[set[str], str]:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model = HfModel(
                auto_class=TASK,
                pretrained_model_name_or_path=str(tmp_path),
                init_device=init_device,
                peft_config=peft_config,
            )
            Trainer(device="cpu", model=model, callbacks=callbacks)
        trained = {name for name, one in model.named_parameters() if one.requires_grad}
        return trained, " ".join(str(one.message) for one in found)

    for trained, texts in (make(adapters), make(None, Lora(adapters))):
        assert all(".lora_" in name for name in trained)
        assert "set modules_to_save: [classifier] in peft_config" in texts
    assert "are not trained" not in make(None)[1]
    for given in ({"task_type": "SEQ_CLS"}, {"modules_to_save": ["classifier"]}):
        trained, texts = make(adapters | given)
        assert "model.classifier.modules_to_save.default.weight" in trained
        assert "are not trained" not in texts
