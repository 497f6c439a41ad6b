"""Files of torchtune: values, schedules, adapters, datasets, and what is listed."""

import math
import re
from pathlib import Path

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import SCHEDULERS
from modelzoo_trainer.tools.foreign_configs.findings import FindingKind
from modelzoo_trainer.tools.foreign_configs.torchtune.keys import KEYS

FILES = ("torchtune_full.yaml", "torchtune_lora_dpo.yaml")
SMALL = """\
output_dir: ./out
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: t.model, max_seq_len: 64}
model: {_component_: torchtune.models.llama3_2.llama3_2_1b}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: ./tiny}
dataset: {_component_: torchtune.datasets.text_completion_dataset, source: ./data}
optimizer: {_component_: torch.optim.AdamW, lr: 1.0e-3, weight_decay: 0.0}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
epochs: 2
batch_size: 2
dtype: fp32
"""
COSINE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"


def changed(text, **values):
    """Return a file with other values of keys at its top level."""
    for key, value in values.items():
        text = re.sub(rf"^{key}:.*\n", "", text, flags=re.MULTILINE) + f"{key}: {value}\n"
    return text


def test_the_schedule_has_the_values_of_torchtune_at_every_step(convert):
    section = f"{{_component_: {COSINE}, num_warmup_steps: 10}}"
    trainer, findings = convert(changed(SMALL, lr_scheduler=section), steps_per_epoch=30)
    assert not findings.of(FindingKind.DIFFERENT)
    (schedule,) = trainer["init"]["schedulers"]
    members = [
        SCHEDULERS[name](None, **arguments)
        for member in schedule["SequentialLR"]["schedulers"]
        for name, arguments in member.items()
    ]
    whole = SCHEDULERS["SequentialLR"](None, schedulers=members)
    for step in range(61):
        done = (step - 10) / 50
        expected = step / 10 if step < 10 else 0.5 * (1 + math.cos(math.pi * 0.5 * 2 * done))
        assert whole.value(step) == pytest.approx(1e-3 * expected, abs=1e-12)


def test_a_schedule_needs_the_steps_of_an_epoch(convert):
    section = f"{{_component_: {COSINE}, num_warmup_steps: 10}}"
    trainer, findings = convert(changed(SMALL, lr_scheduler=section))
    assert "schedulers" not in trainer["init"]
    assert "--steps-per-epoch" in findings.of(FindingKind.MISSING)[0].why


def test_weights_have_the_dtype_of_the_file_without_mixed_precision(convert):
    trainer, _ = convert(changed(SMALL, dtype="bf16", clip_grad_norm="1.0"))
    assert trainer["init"]["model"]["dtype"] == "bfloat16"
    assert trainer["init"]["precision"] == {"enabled": False, "max_gradient_norm": 1.0}


def test_adapters_have_the_names_of_transformers(convert):
    model = (
        "{_component_: torchtune.models.llama3_2.qlora_llama3_2_1b, lora_rank: 4, lora_alpha: 8,"
        " lora_attn_modules: [q_proj, output_proj], apply_lora_to_mlp: true, use_dora: true}"
    )
    trainer, findings = convert(changed(SMALL, model=model))
    assert trainer["init"]["model"]["peft_config"] == {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "use_dora": True,
    }
    (absent,) = findings.of(FindingKind.ABSENT)
    assert "not quantized" in absent.why


def test_layers_that_phi3_has_in_one_get_one_adapter(convert):
    model = (
        "{_component_: torchtune.models.phi3.lora_phi3_mini, lora_attn_modules: [q_proj, v_proj]}"
    )
    trainer, findings = convert(changed(SMALL, model=model))
    assert trainer["init"]["model"]["peft_config"]["target_modules"] == ["qkv_proj"]
    assert [one.path for one in findings.of(FindingKind.DIFFERENT)] == ["model.lora_attn_modules"]


@pytest.mark.parametrize(
    ("dataset", "loader"),
    [
        (
            "{_component_: torchtune.datasets.alpaca_cleaned_dataset, packed: true}",
            {
                "task": "instruction",
                "path": "yahma/alpaca-cleaned",
                "prompt_column": "instruction",
                "response_column": "output",
                "chat_template": "tokenizer",
                "packing": True,
            },
        ),
        (
            "{_component_: torchtune.datasets.chat_dataset, source: a/b, conversation_style: "
            "openai, conversation_column: messages, max_seq_len: 32}",
            {
                "task": "chat",
                "path": "a/b",
                "messages_column": "messages",
                "max_sequence_length": 32,
            },
        ),
        (
            "{_component_: torchtune.datasets.text_completion_dataset, source: text, data_files: "
            "a.txt, column: body}",
            {"task": "text", "path": "text", "data_files": "a.txt", "text_column": "body"},
        ),
        (
            "{_component_: torchtune.datasets.preference_dataset, source: a, column_map: "
            "{chosen: good, rejected: bad}}",
            {
                "task": "preference",
                "path": "a",
                "chosen_column": "good",
                "rejected_column": "bad",
            },
        ),
    ],
)
def test_a_dataset_builder_is_a_task_with_columns(convert, dataset, loader):
    trainer, _ = convert(changed(SMALL, dataset=dataset))
    expected = {
        "data_processor": "HuggingFaceDataProcessor",
        "tokenizer": "./tiny",
        "max_sequence_length": 64,
        "batch_size": 2,
        "shuffle": True,
    }
    assert trainer["fit"]["train_dataloader"] == expected | loader


def test_prompts_that_count_by_default_are_listed(convert):
    text = changed(SMALL, dataset="{_component_: torchtune.datasets.alpaca_dataset}")
    _, findings = convert(text)
    listed = {one.path for one in findings.of(FindingKind.DIFFERENT)}
    assert {"dataset.train_on_input", "dataset._component_"} <= listed


def test_pairs_train_a_policy_with_beta(convert_named):
    trainer, findings = convert_named("torchtune_lora_dpo.yaml")
    model = trainer["init"]["model"]
    assert model["name"] == "dpo"
    assert model["dpo"] == {"beta": 0.05, "loss_type": "sigmoid", "disable_dropout": False}
    assert (model["policy_model"]["name"], model["policy_model"]["dtype"]) == (
        "hf_causal_lm",
        "bfloat16",
    )
    assert model["policy_model"]["peft_config"]["target_modules"][:3] == [
        "q_proj",
        "v_proj",
        "o_proj",
    ]
    assert trainer["fit"]["train_dataloader"]["task"] == "preference"
    assert not findings.of(FindingKind.ABSENT)


def test_a_full_fine_tuning_keeps_its_values(convert_named):
    trainer, _ = convert_named("torchtune_full.yaml")
    init = trainer["init"]
    assert init["backend"] == {
        "parallel": {"replicate": 2, "shard": 4},
        "sharding": {"reshard_after_forward": False},
        "activation_checkpointing": "selective",
        "compile": True,
        "deterministic": True,
    }
    assert init["loop"] == {
        "num_epochs": 3,
        "steps_per_epoch": 100,
        "grad_accum_steps": 8,
        "eval_frequency": 50,
        "eval_steps": 20,
    }
    assert init["checkpoint"] == {
        "autoload_last_checkpoint": False,
        "steps": 25,
        "asynchronous": True,
    }
    assert {"OpProfiler": {"start_step": 9, "end_step": 10}} in init["callbacks"]
    assert init["optimizer"]["AdamW"] == {
        "lr": 2e-5,
        "betas": [0.9, 0.95],
        "eps": 1e-7,
        "eps_after_correction": True,  # as in torch
        "weight_decay": 0.05,
    }
    assert init["seed"] == 5


def test_every_known_key_is_converted_or_listed(convert_named):
    found, unknown = set(), []
    for name in FILES:
        _, findings = convert_named(name)
        unknown += findings.of(FindingKind.UNKNOWN)
        text = (Path(__file__).parent / name).read_text()
        found |= set(re.findall(r"([A-Za-z_]\w*):", text))
    assert not unknown
    known = {key.rpartition(".")[2] for key in KEYS if not key.endswith("*")}
    assert sorted(known - found) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"loss": "{_component_: a.PPOLoss}"}, "loss._component_: 'PPOLoss' has no counterpart"),
        ({"dataset": "{_component_: a.b}"}, "dataset._component_: 'b' has no counterpart"),
        ({"dtype": "int8"}, "dtype: 'int8' is unknown"),
        ({"checkpointer": "{_component_: a.B}"}, "checkpointer.checkpoint_dir: is missing"),
        ({"epochs": "many"}, "epochs: expected an integer"),
        ({"epochs": ""}, "epochs: is missing"),
        (
            {"model": "{_component_: a.lora_b, lora_attn_modules: [w1]}"},
            "model.lora_attn_modules: 'w1' is unknown",
        ),
    ],
)
def test_an_invalid_value_is_refused_with_its_key(convert, values, said):
    with pytest.raises(ConfigError) as refused:
        convert(changed(SMALL, **values))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("{lr: 1.0e-3}", "optimizer._component_: missing"),
        ("{_component_: torch.optim.AdamW, betas: 3}", "optimizer.betas: expected a list of two"),
    ],
)
def test_an_optimizer_without_a_class_or_with_other_betas_is_refused(convert, optimizer, message):
    with pytest.raises(ConfigError, match=message):
        convert(changed(SMALL, optimizer=optimizer))


def test_validation_that_torchtune_would_not_run_is_listed(convert):
    data = "{_component_: torchtune.datasets.text_completion_dataset, source: ./data}"
    _, findings = convert(changed(SMALL, dataset_val=data))
    listed = [one for one in findings.of(FindingKind.DIFFERENT) if one.path == "dataset_val"]
    assert "run_val_every_n_steps" in listed[0].why
    _, findings = convert(changed(SMALL, dataset_val=data, run_val_every_n_steps=5))
    assert not [one for one in findings.of(FindingKind.DIFFERENT) if one.path == "dataset_val"]
