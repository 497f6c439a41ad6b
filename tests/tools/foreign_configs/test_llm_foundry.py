"""Files of llm-foundry: values, lengths, schedules, and what is listed."""

import math
import re
from pathlib import Path

import pytest
import torch

from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_text, to_yaml
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import SCHEDULERS, AdamW, Lion
from modelzoo_trainer.tools.foreign_configs.findings import FindingKind
from modelzoo_trainer.tools.foreign_configs.llm_foundry.keys import COMMON
from modelzoo_trainer.tools.foreign_configs.llm_foundry.model_keys import MODEL

SMALL = """\
max_seq_len: 32
model: {name: hf_causal_lm, pretrained_model_name_or_path: ./tiny}
tokenizer: {name: ./tiny}
train_loader:
  name: finetuning
  dataset: {hf_name: ./data, split: train, shuffle: true}
optimizer: {name: decoupled_adamw, lr: 1.0e-3}
scheduler: {name: cosine_with_warmup, t_warmup: 10ba, alpha_f: 0.1}
max_duration: 100ba
eval_interval: 1ep
global_train_batch_size: 16
device_eval_batch_size: 4
"""
LOADER = {
    "data_processor": "SyntheticProcessor",
    "kind": "tokens",
    "num_samples": 64,
    "batch_size": 4,
    "max_sequence_length": 16,
}


@pytest.fixture(scope="module")
def names():
    return shipped_names(())


def changed(text, **values):
    """Return a file with other values of keys at its top level."""
    for key, value in values.items():
        text = re.sub(rf"^{key}:.*\n", "", text, flags=re.MULTILINE) + f"{key}: {value}\n"
    return text


def values_of(schedulers, steps):
    """Return the learning rates of the one schedule of a converted file."""
    ((name, arguments),) = schedulers[0].items()
    schedule = SCHEDULERS[name](None, **_with_members(arguments))
    return [schedule.value(step) for step in range(steps)]


def _with_members(arguments):
    if "schedulers" not in arguments:
        return arguments
    members = []
    for member in arguments["schedulers"]:
        ((name, own),) = member.items()
        members.append(SCHEDULERS[name](None, **own))
    return {"schedulers": members}


def composer(name, step, lr, warmup, total, alpha_f):
    """Return the learning rate of Composer's schedule, as its documentation defines it."""
    if step < warmup:
        return lr * step / warmup
    done = min(1.0, (step - warmup) / (total - warmup))
    if name == "cosine_with_warmup":
        return lr * (alpha_f + (1 - alpha_f) * 0.5 * (1 + math.cos(math.pi * done)))
    if name == "linear_decay_with_warmup":
        return lr * (1 + (alpha_f - 1) * done)
    return lr


@pytest.mark.parametrize(
    "name", ["cosine_with_warmup", "linear_decay_with_warmup", "constant_with_warmup"]
)
def test_a_schedule_has_the_values_of_composer_at_every_step(convert, name):
    alpha = "" if name.startswith("constant") else ", alpha_f: 0.1"
    trainer, _ = convert(changed(SMALL, scheduler=f"{{name: {name}, t_warmup: 0.1dur{alpha}}}"))
    expected = [composer(name, step, 1e-3, 10, 100, 0.1) for step in range(101)]
    assert values_of(trainer["init"]["schedulers"], 101) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "kind", "update"),
    [
        (
            *("decoupled_adamw, eps: 0.1", AdamW),
            lambda m, v, t: m / (1 - 0.9**t) / ((v / (1 - 0.95**t)) ** 0.5 + 0.1),
        ),
        ("decoupled_lionw", Lion, None),
    ],
)
def test_weight_decay_is_that_of_the_decoupled_optimizers(convert, name, kind, update):
    section = f"{{name: {name}, lr: 1.0e-3, betas: [0.9, 0.95], weight_decay: 1.0e-2}}"
    trainer, findings = convert(changed(SMALL, optimizer=section))
    ((_, arguments),) = trainer["init"]["optimizer"].items()
    param = torch.nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = kind([param], **arguments)
    value, average, square = 2.0, 0.0, 0.0
    for step, lr in enumerate((1e-3, 5e-4, 1e-4), 1):
        gradient = 0.5 * step
        optimizer.param_groups[0]["lr"] = lr
        param.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        value *= 1 - lr / 1e-3 * 1e-2  # what Composer does: lr / initial lr, times weight decay
        if update is None:
            value -= lr * math.copysign(1, 0.9 * average + 0.1 * gradient)
            average = 0.95 * average + 0.05 * gradient
        else:
            average = 0.9 * average + 0.1 * gradient
            square = 0.95 * square + 0.05 * gradient**2
            value -= lr * update(average, square, step)
    assert param.item() == pytest.approx(value, abs=1e-8)
    assert "optimizer.weight_decay" in [one.path for one in findings.of(FindingKind.DIFFERENT)]


@pytest.mark.parametrize(
    ("length", "loop"),
    [
        ("100ba", {"max_steps": 100}),
        ("3ep", {"num_epochs": 3}),
        ("3", {"num_epochs": 3}),
        ("1000sp", {"max_steps": 63}),
        ("90sec", {"max_time": 90.0, "num_epochs": 10**9}),
    ],
)
def test_lengths_have_units(convert, length, loop):
    text = changed(SMALL, max_duration=length, scheduler="{name: constant_with_warmup}")
    assert convert(text)[0]["init"]["loop"] == loop


def test_tokens_are_steps_where_every_sample_has_the_same_number(convert_named):
    trainer, _ = convert_named("llm_foundry_pretrain.yaml")
    assert trainer["init"]["loop"] == {"max_steps": 1000, "eval_frequency": 0.25}


def test_what_depends_on_the_length_of_an_epoch_needs_it(convert):
    text = changed(SMALL, max_duration="2ep")
    trainer, findings = convert(text)
    assert "schedulers" not in trainer["init"]
    (missing,) = findings.of(FindingKind.MISSING)
    assert missing.path == "scheduler.t_max"
    assert "--steps-per-epoch" in missing.why
    assert not [
        one for one in findings.of(FindingKind.NO_EFFECT) if one.path.startswith("scheduler")
    ]
    trainer, findings = convert(text, steps_per_epoch=50)
    assert not findings.of(FindingKind.MISSING)
    members = trainer["init"]["schedulers"][0]["SequentialLR"]["schedulers"]
    assert [one["total_iters"] for member in members for one in member.values()] == [10, 90]


def test_a_run_that_ends_in_its_warmup_has_a_warmup_alone(convert):
    text = changed(SMALL, scheduler="{name: cosine_with_warmup, t_warmup: 200ba}")
    trainer, _ = convert(text)
    rise = {"initial_learning_rate": 0.0, "end_learning_rate": 1e-3, "total_iters": 200}
    assert trainer["init"]["schedulers"] == [{"LinearLR": rise}]


@pytest.mark.parametrize(
    ("strategy", "parallel", "sharding"),
    [
        ("FULL_SHARD", {"shard": -1}, {"param_dtype": "bfloat16", "reduce_dtype": "float32"}),
        ("NO_SHARD", {"replicate": -1}, None),
        (
            "HYBRID_SHARD",
            {"replicate": -1, "shard": 8},
            {"param_dtype": "bfloat16", "reduce_dtype": "float32"},
        ),
    ],
)
def test_a_sharding_strategy_is_a_mesh(convert, strategy, parallel, sharding):
    trainer, _ = convert(changed(SMALL, fsdp_config=f"{{sharding_strategy: {strategy}}}"))
    assert trainer["init"]["backend"]["parallel"] == parallel
    assert trainer["init"]["backend"].get("sharding") == sharding


def test_batch_sizes_are_global_for_training_and_per_process_for_validation(convert):
    loader = "{name: finetuning, dataset: {hf_name: ./data, split: test}}"
    text = changed(SMALL, device_train_microbatch_size=2, eval_loader=loader)
    trainer, _ = convert(text)
    assert trainer["fit"]["train_dataloader"]["global_batch_size"] == 16
    assert trainer["fit"]["val_dataloader"]["batch_size"] == 4
    flags = {"csx.performance.micro_batch_size": 2}
    assert {"ScopedTrainFlags": flags} in trainer["init"]["callbacks"]
    assert trainer["init"]["loop"]["eval_frequency"] == "epoch"


def test_every_known_key_is_converted_or_listed(convert_named):
    found, unknown = set(), []
    for name in ("llm_foundry_finetune.yaml", "llm_foundry_pretrain.yaml"):
        _, findings = convert_named(name, steps_per_epoch=100)
        unknown += findings.of(FindingKind.UNKNOWN)
        assert not findings.of(FindingKind.MISSING)
        found |= _keys_in(name)
    assert not unknown
    known = {key.rpartition(".")[2] for key in {**COMMON, **MODEL} if not key.endswith("*")}
    assert sorted(known - found) == []


def _keys_in(name):
    text = (Path(__file__).parent / name).read_text()
    return set(re.findall(r"([A-Za-z_]\w*):", text))


def test_the_converted_mpt_is_a_valid_model(convert_named, names):
    trainer, _ = convert_named("llm_foundry_pretrain.yaml", steps_per_epoch=100)
    trainer["fit"] = {"train_dataloader": LOADER}
    trainer.pop("validate")
    text = to_yaml({"trainer": trainer})
    (plan,) = check_config(read_text(text, "ours.yaml"), names)
    assert plan is not None


def test_a_finetune_keeps_its_values(convert_named):
    trainer, _ = convert_named("llm_foundry_finetune.yaml", steps_per_epoch=100)
    init = trainer["init"]
    assert init["model"]["peft_config"] == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 64,
        "lora_alpha": 128,
        "lora_dropout": 0.05,
        "target_modules": ["q_proj", "k_proj"],
    }
    assert init["seed"] == 17
    assert init["precision"] == {"fp16_type": "bfloat16", "max_gradient_value": 1.0}
    assert init["backend"]["parallel"] == {"replicate": 2, "shard": 4}
    assert init["backend"]["activation_checkpointing"] == "full"
    assert init["checkpoint"] == {"checkpoint_root": "./llama-sft/checkpoints", "steps": 500}
    assert {"KeepNCheckpoints": {"n": 2}} in init["callbacks"]
    assert {"OpProfiler": {"start_step": 5, "end_step": 8}} in init["callbacks"]
    stop = {"metric": "validate_1/loss", "mode": "min", "patience": 3, "min_delta": 0.01}
    assert {"EarlyStopping": stop} in init["callbacks"]
    assert [one["path"] for one in trainer["fit"]["val_dataloader"]] == [
        "mosaicml/dolly_hhrlhf",
        "json",
    ]


def test_an_unknown_key_is_listed_with_a_suggestion(convert):
    _, findings = convert(changed(SMALL, eval_intervall="1ep"))
    (unknown,) = findings.of(FindingKind.UNKNOWN)
    assert (unknown.path, unknown.value) == ("eval_intervall", "1ep")
    assert "'eval_interval'" in unknown.why


def test_a_secret_is_not_shown(convert):
    _, findings = convert(changed(SMALL, callbacks="{mine: {api_key: hf_abcdefghij0123456789}}"))
    assert "abcdef" not in "\n".join(findings.lines())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_duration": "3 weeks"}, "max_duration: '3 weeks' is not a length of time"),
        ({"model": "{name: hf_t5}"}, "model.name: 'hf_t5' has no counterpart"),
        ({"precision": "int4"}, "precision: 'int4' is unknown"),
        ({"optimizer": "{name: decoupled_adamw, lr: 1, betas: 3}"}, "optimizer.betas: expected"),
        ({"seed": "yes"}, "seed: expected an integer, got 'yes'"),
        ({"optimizer": "3"}, "optimizer: expected a mapping"),
        ({"scheduler": "{name: cosine_with_warmup, t_warmup: soon}"}, "scheduler.t_warmup"),
    ],
)
def test_an_invalid_value_is_refused_with_its_key(convert, values, said):
    with pytest.raises(ConfigError) as refused:
        convert(changed(SMALL, **values))
    assert said in str(refused.value)


def test_a_file_without_a_section_that_it_needs_is_refused(convert):
    with pytest.raises(ConfigError, match="optimizer: is missing"):
        convert(changed(SMALL, optimizer=""))


def test_a_gated_layer_has_the_gelu_of_the_file(convert):
    text = Path(__file__).with_name("llm_foundry_pretrain.yaml").read_text()
    (old,) = re.findall(r"^  ffn_config:.*\n(?:    .*\n)*", text, flags=re.MULTILINE)
    for approximate, name in (("tanh", "geglu_new"), ("none", "geglu")):
        act = f"{{name: gelu, approximate: {approximate}}}"
        new = f"  ffn_config: {{ffn_type: mptglu, ffn_act_fn: {act}}}\n"
        trainer, findings = convert(text.replace(old, new), steps_per_epoch=100)
        assert trainer["init"]["model"]["nonlinearity"] == name
        assert not [one for one in findings.of(FindingKind.DIFFERENT) if "approximate" in one.path]
