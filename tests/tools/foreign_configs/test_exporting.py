"""Folders of Hugging Face that files of llm-foundry and torchtune write."""

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.foreign_configs.findings import FindingKind
from tests.tools.foreign_configs.test_llm_foundry import SMALL as LLM_FOUNDRY
from tests.tools.foreign_configs.test_llm_foundry import changed
from tests.tools.foreign_configs.test_torchtune import SMALL as TORCHTUNE

LORA = "{_component_: torchtune.models.llama3_2.lora_llama3_2_1b, lora_attn_modules: [q_proj]}"
SAVER = (
    "{_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: ./tiny,"
    " output_dir: %s}"
)


def exported(trainer):
    """Return the arguments of the callback; None if there is none."""
    found = [one for one in trainer["init"].get("callbacks", []) if "HuggingFaceCheckpoint" in one]
    return found[0]["HuggingFaceCheckpoint"] or {} if found else None


def llm_foundry(convert, settings, **more):
    options = {key: more.pop(key) for key in ("steps_per_epoch",) if key in more}
    callbacks = f"{{hf_checkpointer: {{save_folder: './a/{{run_name}}/hf', {settings}}}}}"
    text = changed(LLM_FOUNDRY, callbacks=callbacks, run_name="mine", **more)
    return convert(text, **options)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("save_interval: 1dur", {"dtype": "float32"}),
        ("save_interval: 100ba", {"dtype": "float32"}),
        ("save_interval: 25ba, precision: bfloat16", {"dtype": "bfloat16", "steps": 25}),
        ("save_interval: 320sp", {"dtype": "float32", "steps": 20}),
        ("save_interval: 2", {"dtype": "float32", "steps": 100}),
    ],
)
def test_intervals_and_dtypes_of_llm_foundry(convert, settings, expected):
    trainer, findings = llm_foundry(convert, settings, steps_per_epoch=50)
    assert exported(trainer) == {"folder": "../a/mine/hf/huggingface/ba{step}", **expected}
    assert not [one for one in findings.of(FindingKind.DIFFERENT) if "hf_checkpointer" in one.path]


def test_an_interval_in_epochs_needs_their_steps(convert):
    trainer, findings = llm_foundry(convert, "save_interval: 1ep")
    assert "steps" not in exported(trainer)
    (missing,) = findings.of(FindingKind.MISSING)
    assert missing.path == "callbacks.hf_checkpointer.save_interval"
    assert "--steps-per-epoch" in missing.why


def test_the_names_of_folders_have_the_step(convert):
    name = "huggingface_folder_name: '{run_name}-{batch}'"
    trainer, _ = llm_foundry(convert, f"save_interval: 1dur, {name}")
    assert exported(trainer)["folder"].endswith("/mine-{step}")
    name = "huggingface_folder_name: 'ep{epoch}-ba{batch}'"
    trainer, findings = llm_foundry(convert, f"save_interval: 1dur, {name}")
    assert exported(trainer)["folder"].endswith("/ba{step}")
    paths = [one.path for one in findings.of(FindingKind.DIFFERENT)]
    assert "callbacks.hf_checkpointer.huggingface_folder_name" in paths


def test_a_bucket_is_not_written_to(convert):
    callbacks = "{hf_checkpointer: {save_folder: 's3://a/b', save_interval: 1dur}}"
    trainer, findings = convert(changed(LLM_FOUNDRY, callbacks=callbacks))
    assert exported(trainer)["folder"] == "huggingface/ba{step}"
    paths = [one.path for one in findings.of(FindingKind.DIFFERENT)]
    assert "callbacks.hf_checkpointer.save_folder" in paths


def test_adapters_and_the_tokenizer_of_llm_foundry(convert):
    model = "{name: hf_causal_lm, pretrained_model_name_or_path: ./tiny, peft_config: {r: 4}}"
    trainer, _ = llm_foundry(convert, "save_interval: 1dur", model=model)
    assert exported(trainer)["merge_adapters"] is False
    assert "tokenizer" not in exported(trainer)
    changed_model = f"{model[:-1]}, config_overrides: {{attn_bias: true}}}}"
    trainer, findings = llm_foundry(convert, "save_interval: 1dur", model=changed_model)
    assert "merge_adapters" not in exported(trainer)
    assert [one for one in findings.of(FindingKind.DIFFERENT) if "config_overrides" in one.why]
    trainer, _ = llm_foundry(convert, "save_interval: 1dur", tokenizer="{name: other}")
    assert exported(trainer)["tokenizer"] == "other"


def test_an_mpt_is_exported_if_a_family_has_its_settings(convert):
    plain = "{name: mpt_causal_lm, d_model: 32, n_heads: 4, n_layers: 2, vocab_size: 64"
    trainer, findings = llm_foundry(convert, "save_interval: 1dur", model=f"{plain}}}")
    assert exported(trainer)["dtype"] == "float32"
    paths = [one.path for one in findings.of(FindingKind.DIFFERENT)]
    assert "callbacks.hf_checkpointer.save_folder" in paths
    trainer, findings = llm_foundry(
        convert, "save_interval: 1dur", model=f"{plain}, no_bias: true}}"
    )
    assert exported(trainer) is None
    (absent,) = [one for one in findings.of(FindingKind.ABSENT) if "hf_checkpointer" in one.path]
    assert "No other family fits" in absent.why


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("save_interval: soon", "hf_checkpointer.save_interval: 'soon'"),
        ("overwrite: true", "hf_checkpointer.save_interval: is missing"),
        ("save_interval: 1dur, precision: int8", "hf_checkpointer.precision: 'int8' is unknown"),
    ],
)
def test_an_invalid_value_is_refused(convert, settings, said):
    with pytest.raises(ConfigError) as refused:
        llm_foundry(convert, settings)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"steps": 30}),
        ({"epochs": 1}, {}),
        ({"save_last_epoch_only": True}, {}),
        ({"save_every_n_steps": 7}, {"steps": 7}),
        ({"max_steps_per_epoch": 20}, {"steps": 20}),
        ({"checkpointer": SAVER % "./out/weights"}, {"steps": 30, "folder": "weights/hf_{step}"}),
        ({"checkpointer": SAVER % "./x"}, {"steps": 30, "folder": "../x/hf_{step}"}),
        ({"model": LORA}, {"steps": 30}),
        (
            {"model": LORA, "save_adapter_weights_only": True},
            {"steps": 30, "merge_adapters": False},
        ),
        ({"save_adapter_weights_only": True}, {"steps": 30}),
    ],
)
def test_torchtune_writes_a_folder_after_each_epoch(convert, values, expected):
    values = {"checkpointer": SAVER % "./out", **values}
    trainer, findings = convert(changed(TORCHTUNE, **values), steps_per_epoch=30)
    assert exported(trainer) == expected
    listed = [
        one for one in findings.of(FindingKind.DIFFERENT) if one.path == "checkpointer.output_dir"
    ]
    assert bool(listed) is (values.get("model") == LORA and "merge_adapters" not in expected)


def test_folders_after_each_epoch_need_its_steps(convert):
    trainer, findings = convert(changed(TORCHTUNE, checkpointer=SAVER % "./out"))
    assert exported(trainer) == {}
    (missing,) = findings.of(FindingKind.MISSING)
    assert missing.path == "checkpointer.output_dir"


def test_folders_are_kept_when_checkpoints_are_deleted(convert):
    values = {"checkpointer": SAVER % "./out", "keep_last_n_checkpoints": 2}
    trainer, findings = convert(changed(TORCHTUNE, **values), steps_per_epoch=30)
    assert {"KeepNCheckpoints": {"n": 2}} in trainer["init"]["callbacks"]
    paths = [one.path for one in findings.of(FindingKind.DIFFERENT)]
    assert "keep_last_n_checkpoints" in paths
