"""What is shipped, as a file names it: refused before anything is built, or built as it says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelzoo_trainer.base.annotations import expected
from modelzoo_trainer.config.arguments import schema_of
from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.overrides import apply_overrides, parse_override
from modelzoo_trainer.config.positions import Problems
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.registry import MODELS, model_class
from tests.zoo.models.dino_cases import settings
from tests.zoo.models.llava_cases import LLAVA, SIMPLE

FILE = """\
trainer:
  init:
    model: {name: fc_mnist, hidden_sizes: [4]}
    optimizer: {AdamW: {weight_decay: 0.1}}
    %s
  fit:
    train_dataloader: {data_processor: DigitsProcessor, batch_size: 2}
"""
MODEL = "model: {name: fc_mnist, hidden_sizes: [4]}"
OPTIMIZER = "optimizer: {AdamW: {weight_decay: 0.1}}"
LINEAR = "{LinearLR: {initial_learning_rate: 0, end_learning_rate: 1, total_iters: 3}}"


@pytest.fixture(scope="module")
def shipped():
    return shipped_names()


def plan(names, **changes):
    text = FILE % changes.pop("more", "")
    for key, value in changes.items():
        text = text.replace({"model": MODEL, "optimizer": OPTIMIZER}[key], f"{key}: {value}")
    return check_config(read_text(text, "params.yaml"), names)[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "{name: fc_mnist}"},
            "3:5: trainer.init.model: the hidden layers are not specified: depth is None",
        ),
        (
            {"optimizer": "{SGD: {lr: -1}}"},
            "4:27: trainer.init.optimizer.SGD.lr: expected a finite number >= 0 or null, got -1.",
        ),
        (
            {
                "more": "schedulers: [SequentialLR: {schedulers: [ConstantLR: "
                f"{{learning_rate: 1}}, {LINEAR}]}}]"
            },
            "5:46: trainer.init.schedulers[0].SequentialLR.schedulers[0]: ConstantLR has no total",
        ),
        (
            {"more": "precision: {max_gradient_norm: 1, max_gradient_value: 1}"},
            "5:5: trainer.init.precision: set either max_gradient_norm or max_gradient_value",
        ),
        (
            {"more": "checkpoint: {steps: -1}"},
            "5:25: trainer.init.checkpoint.steps: expected an integer >= 0 or null, got -1",
        ),
        (
            {"more": "device: gpuu"},
            "5:13: trainer.init.device: 'gpuu' is not a backend. Did you mean 'gpu'?",
        ),
        (
            {"more": "backend: {compil: true}"},
            "5:15: trainer.init.backend.compil: no such option of cpu. Did you mean 'compile'?",
        ),
        (
            {"more": "callbacks: [KeepNCheckpoint: {}]"},
            "5:17: trainer.init.callbacks[0].KeepNCheckpoint: 'KeepNCheckpoint' is not a callback.",
        ),
    ],
)
def test_what_a_shipped_class_refuses_is_found_with_its_place(shipped, changes, message):
    with pytest.raises(ConfigError) as caught:
        plan(shipped, **changes)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"params.yaml:{message}")


def test_a_trial_of_a_model_draws_no_random_number(shipped):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    plan(shipped)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_shipped_optimizer_groups_the_parameters_of_the_model(shipped):
    made = plan(shipped).init["optimizer"].build(nn.Linear(2, 2))
    assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.0]


def test_an_optimizer_of_torchs_gets_the_same_groups_and_names(shipped):
    text = "{torch.optim.AdamW: {learning_rate: 0.5, weight_decay: 0.1}}"
    made = plan(shipped, optimizer=text).init["optimizer"].build(nn.Linear(2, 2))
    assert type(made) is torch.optim.AdamW
    assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.0]
    assert [group["lr"] for group in made.param_groups] == [0.5, 0.5]


def test_an_argument_of_an_optimizer_of_torchs_is_checked(shipped):
    with pytest.raises(ConfigError) as caught:
        plan(shipped, optimizer="{torch.optim.AdamW: {lr: x, fooreach: 1}}")
    assert str(caught.value).splitlines() == [
        "params.yaml:4:41: trainer.init.optimizer.torch.optim.AdamW.lr: "
        "expected a number, got 'x'.",
        "params.yaml:4:44: trainer.init.optimizer.torch.optim.AdamW.fooreach: no such argument of "
        "AdamW. Did you mean 'foreach'?",
    ]


def test_a_scheduler_of_torchs_is_built_over_the_optimizer(shipped):
    schedule = "schedulers: [torch.optim.lr_scheduler.StepLR: {step_size: 3}]"
    (component,) = plan(shipped, more=schedule).init["schedulers"]
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    assert component.build(optimizer).optimizer is optimizer


def test_members_of_a_shipped_scheduler_are_built(shipped):
    schedule = f"schedulers: [SequentialLR: {{schedulers: [{LINEAR}, {LINEAR}]}}]"
    (component,) = plan(shipped, more=schedule).init["schedulers"]
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    made = component.build(optimizer)
    assert made.milestones == [3]
    assert [member.optimizer for member in made.members] == [None, None]


def test_the_defaults_are_there_and_null_removes_one(shipped):
    found = plan(shipped, more="callbacks: [ComputeNorm: null]").defaults
    kinds = [type(callback).__name__ for callback in found["callbacks"]]
    assert "CheckLoss" in kinds
    assert "ComputeNorm" not in kinds
    assert "ProgressLogger" in [type(logger).__name__ for logger in found["loggers"]]


@pytest.mark.parametrize("kind", ["models", "processors", "callbacks", "loggers"])
def test_everything_a_shipped_class_takes_can_be_written_in_a_file(shipped, kind):
    table = getattr(shipped, kind)
    parameters = {
        f"{name}.{parameter.name}": expected(parameter.annotation)
        for name in table.names
        for parameter in schema_of(table.load(name)).parameters.values()
    }
    assert parameters
    assert [name for name, fits in parameters.items() if "cannot write" in fits] == []


# Those of Hugging Face need its libraries: tests/zoo/hugging_face.
@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("hf_")])
def test_the_arguments_of_a_shipped_model_are_checked_without_building_it(name, monkeypatch):
    def built(self, *args, **kwargs):
        raise AssertionError("a module was built")

    monkeypatch.setattr(nn.Module, "__init__", built)
    required = {
        "bert": {"max_position_embeddings": 8},
        "bert/classifier": {
            "max_position_embeddings": 8,
            "num_labels": 2,
            "problem_type": "regression",
            "task_dropout": 0.1,
        },
        "bert/extractive_summarization": {"max_position_embeddings": 8},
        "bert/token_classifier": {
            "max_position_embeddings": 8,
            "num_classes": 2,
            "encoder_output_dropout_rate": 0.1,
        },
        "esm2": {"max_position_embeddings": 8},
        "dino": settings(),
        "generic_image_encoders": settings(),
        "dpr": {"encoder": {"max_position_embeddings": 8}},
        "dpo": {"policy_model": {"name": "gpt2"}},
        "fc_mnist": {"hidden_sizes": [3]},
        "llava": LLAVA,
        "multimodal_simple": SIMPLE,
    }
    model_class(name).check_arguments(**required.get(name, {}))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{name: gpt2, hidden_size: 10, num_heads: 3}", "3:25: trainer.init.model: hidden_size (1"),
        ("{name: llama, mup_base_hidden_size: 1}", "3:26: trainer.init.model: mup_base_hidden_siz"),
        ("{name: gpt2, initializer: {nmae: normal}}", "3:39: trainer.init.model: initializer.nma"),
        ("{name: gpt2, initializer: {name: normal, std: a}}", "3:53: trainer.init.model: initi"),
        (
            "{name: mixtral, moe: {top-k: 1}}",
            "3:34: trainer.init.model: moe.top-k: no such setting",
        ),
        ("{name: gpt2, initializer: {name: nrmal}}", "3:39: trainer.init.model: initializer"),
    ],
)
def test_settings_of_a_model_that_do_not_fit_together_are_refused(shipped, model, message):
    with pytest.raises(ConfigError) as caught:
        plan(shipped, model=model)
    assert str(caught.value).startswith(f"params.yaml:{message}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("DigitsProcessor, batch_size: 0", ".batch_size: expected an integer > 0"),
        ("DigitsProcessor, batch_size: 1, val_fraction: 1", ".val_fraction: expected a number in"),
        (
            "SyntheticProcessor, batch_size: 1, vocab_size: 1",
            ".vocab_size: expected an integer >=",
        ),
        (
            "TextFileProcessor, batch_size: 1, data_dir: stdlib, max_sequence_length: 0",
            ".max_sequence_length: expected an integer > 0 or null, got 0.",
        ),
        (
            "TextFileProcessor, batch_size: 1, data_dir: nowhere, max_sequence_length: 3",
            ": data_dir 'nowhere' does not exist.",
        ),
        (
            "TextFileProcessor, batch_size: 1, data_dir: stdlib, max_sequence_length: 3, "
            "tokenizer_file_path: none.json",
            ": tokenizer_file_path 'none.json' does not exist.",
        ),
    ],
)
def test_data_that_cannot_be_had_is_refused_before_a_run(shipped, arguments, message):
    text = (FILE % "").replace("DigitsProcessor, batch_size: 2", arguments)
    with pytest.raises(ConfigError) as caught:
        check_config(read_text(text, "params.yaml"), shipped)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("params.yaml:7:")
    assert f": trainer.fit.train_dataloader{message}" in line


def test_a_mere_check_does_not_ask_for_data_on_this_machine(shipped):
    arguments = "TextFileProcessor, batch_size: 1, data_dir: nowhere, max_sequence_length: 3"
    text = (FILE % "").replace("DigitsProcessor, batch_size: 2", arguments)
    (found,) = check_config(
        read_text(text, "params.yaml"), shipped, problems=Problems(for_a_run=False)
    )
    (note,) = found.notes
    assert "valid, but cannot run here: data_dir 'nowhere' does not exist." in str(note)


def test_a_fault_in_an_anchor_s_value_is_found_once_and_nothing_is_tried_with_it(shipped):
    text = (FILE % "").replace("{data_processor", "&data {data_processor").replace("2}", "a}")
    with pytest.raises(ConfigError) as caught:
        check_config(read_text(f"{text}    val_dataloader: *data\n", "f.yaml"), shipped)
    (line,) = str(caught.value).splitlines()
    assert "batch_size: expected an integer > 0 or null, got 'a'." in line


def test_a_misspelt_key_of_a_parameter_filter_is_named(shipped):
    with pytest.raises(ConfigError) as caught:
        plan(shipped, optimizer="{AdamW: {params: [{prams: '*', tag: x}]}}")
    assert str(caught.value) == (
        "params.yaml:4:35: trainer.init.optimizer.AdamW.params[0].prams: no such key. Did you mean "
        "'params'?"
    )


@pytest.mark.parametrize(
    ("schedulers", "params", "message"),
    [
        (f"{LINEAR}, {LINEAR}", "[]", "5:19: trainer.init.schedulers[1]: schedulers: 2 of them"),
        (
            "{LinearLR: {initial_learning_rate: 0, end_learning_rate: 1, total_iters: 3, "
            "param_group_tags: b}}",
            "[{params: '*', tag: a}]",
            "5:18: trainer.init.schedulers[0]: LinearLR.param_group_tags: no parameters have one "
            "of",
        ),
    ],
)
def test_schedules_that_do_not_fit_together_are_refused(shipped, schedulers, params, message):
    optimizer = f"{{AdamW: {{params: {params}}}}}"
    with pytest.raises(ConfigError) as caught:
        plan(shipped, optimizer=optimizer, more=f"schedulers: [{schedulers}]")
    (line,) = str(caught.value).splitlines()
    assert message[5:] in line
    assert line.startswith("params.yaml:5:")


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        (
            ["init.loop.num_steps=3", "init.loop.num_epochs=2"],
            "trainer.init.loop: set either num_steps",
        ),
        (
            ["init.optimizer.SGD.lr=1"],
            "trainer.init.optimizer: got 2 optimizers ('AdamW', 'SGD')",
        ),
        (
            ["init.model.hidden_sizes=null"],
            "trainer.init.model: the hidden layers are not specified",
        ),
        (["fit=null"], "trainer.fit: missing"),
    ],
)
def test_what_an_option_has_made_wrong_is_reported_at_the_option(shipped, changes, path):
    text = FILE % "loop: {max_steps: 3}"
    root = apply_overrides(read_text(text, "params.yaml"), [*map(parse_override, changes)])
    with pytest.raises(ConfigError) as caught:
        check_config(root, shipped)
    assert str(caught.value).startswith(f"--set {changes[0]}: {path}")
