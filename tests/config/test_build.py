"""A file to plans, plans to trainers, with small classes in the place of the shipped ones."""

from pathlib import Path

import pytest

from modelzoo_trainer.config.loader import read_text, to_yaml
from modelzoo_trainer.config.plan import _dataloader
from modelzoo_trainer.config.positions import to_plain
from modelzoo_trainer.errors import ConfigError

FILE = """\
trainer:
  init:
    device: CPU
    model_dir: ./runs/x
    seed: 1
    model:
      name: tiny_net
      hidden_size: 4
    optimizer:
      adamw:
        betas: [0.9, 0.95]
    schedulers:
      - SequentialLR:
          schedulers:
            - LinearLR:
                initial_learning_rate: 0
                end_learning_rate: 1e-3
                total_iters: 5
    precision:
      loss_scaling_factor: dynamic
    loop:
      max_steps: 10
      eval_frequency: 5
    checkpoint:
      steps: 5
    logging:
      log_steps: 1
    callbacks:
      - RateProfiler: null
      - EarlyStopping:
          monitor: loss
    loggers:
      - ProgressLogger:
          summary_dir: ./logs
  fit:
    train_dataloader:
      data_processor: Digits
      batch_size: 2
    val_dataloader:
      data_processor: digits
      batch_size: 3
      split: val
    ckpt_path: null
  validate:
    val_dataloader:
      data_processor: Digits
      batch_size: 4
  validate_all:
    val_dataloaders:
      - data_processor: Digits
        batch_size: 5
      - data_processor: Digits
        batch_size: 6
    ckpt_paths: [a, b]
"""
SMALLEST = "trainer: {init: {model: {name: tiny_net, hidden_size: 1}}, validate_all: {}}"


def built(check, mode="train_and_eval", text=FILE):
    (plan,) = check(text, mode)
    return plan.build().kwargs


def ran(check, mode, text=FILE):
    (plan,) = check(text, mode)
    trainer = plan.build()
    plan.run(trainer)
    return trainer.ran


def test_plain_settings_reach_the_trainer(check):
    arguments = built(check)
    assert arguments["device"] == "cpu"
    assert arguments["model_dir"] == Path("runs/x")
    assert arguments["seed"] == 1


def test_the_trainer_knows_that_it_is_of_a_file(check):
    (plan,) = check(FILE, "train")
    assert plan.build().is_from_file


def test_the_model_is_built_when_the_trainer_asks_for_it(check):
    assert built(check)["model"]().kwargs == {
        "hidden_size": 4,
        "dropout": 0.0,
        "activation": "relu",
    }


def test_the_optimizer_is_built_over_what_the_trainer_gives(check):
    made = built(check)["optimizer"]("the model")
    assert made.args == ("the model",)
    assert made.kwargs["betas"] == (0.9, 0.95)


def test_members_of_a_scheduler_are_components(check):
    (factory,) = built(check)["schedulers"]
    made = factory("the optimizer")
    (member,) = made.kwargs["schedulers"]
    assert (made.args, member.args) == (("the optimizer",), (None,))
    assert member.kwargs["ends"] == (0.0, 1e-3, 5)


def test_sections_with_a_fixed_class_are_built(check):
    arguments = built(check)
    assert arguments["precision"].kwargs["scale"] == "dynamic"
    assert arguments["loop"].kwargs == {"max_steps": 10, "eval_frequency": 5}
    assert arguments["checkpoint"].kwargs["steps"] == 5
    assert arguments["logging"].kwargs["log_steps"] == 1


def test_defaults_come_after_the_named_and_null_removes_one(check):
    kinds = [type(callback).__name__ for callback in built(check)["callbacks"]]
    assert kinds == ["EarlyStopping", "CheckLoss"]


def test_a_named_logger_takes_the_place_of_the_default(check):
    (logger,) = built(check)["loggers"]
    assert logger.kwargs == {"summary_dir": Path("logs")}


def test_a_file_alone_says_whether_there_is_a_check_of_the_loss(check):
    text = FILE.replace("CheckLoss", "EarlyStopping")
    assert built(check)["check_loss"] is False
    assert built(check, text=text)["check_loss"] is False


def test_what_is_not_in_the_file_is_left_to_the_trainer(check):
    arguments = built(check, "eval_all", SMALLEST)
    assert sorted(arguments) == ["callbacks", "check_loss", "loggers", "model"]


@pytest.mark.parametrize("mode", ["eval", "eval_all"])
def test_optimizer_and_schedulers_are_left_out_without_training(check, mode):
    arguments = built(check, mode)
    assert "optimizer" not in arguments
    assert "schedulers" not in arguments


def test_train_and_eval_fits_with_validation(check):
    method, call = ran(check, "train_and_eval")
    assert method == "fit"
    assert call["train_dataloader"]() == ["train"] * 2
    assert call["val_dataloader"]() == ["val"] * 3
    assert call["ckpt_path"] is None


def test_train_fits_without_validation(check):
    method, call = ran(check, "train")
    assert method == "fit"
    assert "val_dataloader" not in call
    assert built(check, "train")["loop"].kwargs["eval_frequency"] is None


def test_eval_validates(check):
    method, call = ran(check, "eval")
    assert (method, list(call)) == ("validate", ["val_dataloader"])
    assert len(call["val_dataloader"]()) == 4


def test_eval_all_validates_every_dataloader_and_checkpoint(check):
    method, call = ran(check, "eval_all")
    assert method == "validate_all"
    assert [len(loader()) for loader in call["val_dataloaders"]] == [5, 6]
    assert call["ckpt_paths"] == ["a", "b"]


def test_a_list_of_trainers_is_a_plan_for_each(check):
    one = "{trainer: {init: {model: {name: tiny_net, hidden_size: %d}}, validate_all: }}"
    plans = check(f"trainer: [{one % 1}, {one % 2}]", "eval_all")
    assert [plan.build().kwargs["model"]().kwargs["hidden_size"] for plan in plans] == [1, 2]


def test_the_resolved_configuration_is_an_input(check):
    (plan,) = check(FILE)
    text = to_yaml(plan.resolved)
    (again,) = check(text)
    assert again.resolved == plan.resolved == to_plain(read_text(FILE, "params.yaml"))


@pytest.mark.parametrize("written", ["GPU", "gpu", "Gpu"])
def test_a_backend_type_is_a_device_in_any_case_and_the_rest_are_options(check, written):
    text = SMALLEST.replace("model:", f"backend: {{backend_type: {written}, flag: 1}}, model:", 1)
    arguments = built(check, "eval_all", text)
    assert arguments["device"] == "gpu"
    assert arguments["backend"] == {"flag": 1}


def test_a_model_of_the_users_is_named_by_its_path(check):
    text = SMALLEST.replace("{name: tiny_net, hidden_size: 1}", "{fractions.Fraction: {}}")
    assert built(check, "eval_all", text)["model"]() == 0


def test_a_refusal_by_a_constructor_has_its_place(check):
    (plan,) = check(FILE)
    component = plan.init["loop"]
    component.arguments.update(num_steps=1, num_epochs=1)
    with pytest.raises(ConfigError) as caught:
        component.build()
    assert str(caught.value) == (
        "params.yaml:21:5: trainer.init.loop: num_steps and num_epochs are both given."
    )


def test_a_refusal_by_a_section_is_found_before_anything_is_built(complaints):
    assert complaints(FILE.replace("max_steps: 10", "max_steps: 0")) == [
        "params.yaml:22:7: trainer.init.loop.max_steps is 0; it must be > 0."
    ]


@pytest.mark.slow
def test_of_more_than_100_problems_the_first_100_and_the_number_of_others_are_reported(complaints):
    unknown = "".join(f"\n    odd_{number}: 1" for number in range(5_000))
    found = complaints(FILE.replace("  init:\n", f"  init:{unknown}\n", 1))
    assert len(found) == 101
    assert "trainer.init.odd_0: " in found[0]
    assert "trainer.init.odd_99: " in found[99]
    assert found[100] == "... and 4,900 more"


def test_100_problems_are_all_reported(complaints):
    unknown = "".join(f"\n    odd_{number}: 1" for number in range(100))
    found = complaints(FILE.replace("  init:\n", f"  init:{unknown}\n", 1))
    assert len(found) == 100
    assert "trainer.init.odd_99: " in found[99]


def test_an_exception_of_the_users_gets_its_place_as_a_note(check):
    text = SMALLEST.replace("{name: tiny_net, hidden_size: 1}", "{builtins.range: {}}")
    (plan,) = check(text, "eval_all")
    with pytest.raises(TypeError) as caught:
        plan.init["model"].build()
    assert caught.value.__notes__ == [
        "raised by trainer.init.model.builtins.range (params.yaml:1:26)"
    ]


class OwnProcessor:
    """Fails when it is made, or when it makes a dataloader."""

    def __init__(self, error: str, early: bool = False) -> None:
        self.error = {"key": KeyError("column"), "config": ConfigError("error: not a word")}[error]
        if early:
            raise self.error

    def create_dataloader(self) -> None:
        raise self.error


@pytest.mark.parametrize("early", ["true", "false"])
def test_an_exception_of_a_users_data_processor_gets_class_and_place(check, early) -> None:
    name = f"{OwnProcessor.__module__}.OwnProcessor"
    text = SMALLEST.replace(
        "validate_all: {}",
        f"fit: {{train_dataloader: {{data_processor: {name}, error: key, early: {early}}}}}",
    ).replace(
        "size: 1}", "size: 1}, optimizer: {adamw: {betas: [0.9, 0.95]}}, loop: {num_steps: 1}"
    )
    (plan,) = check(text, "train")
    with pytest.raises(KeyError, match="column") as caught:
        _dataloader(plan.call["train_dataloader"])()
    [note] = caught.value.__notes__
    assert "trainer.fit.train_dataloader (params.yaml:" in note
    assert name + ("" if early == "true" else ".create_dataloader") in note


MODEL = "model: {name: tiny_net, hidden_size: 1}"


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (
            "modle: 1, " + MODEL,
            "trainer.init.modle: no such key in trainer.init. Did you mean 'mod",
        ),
        ("seed: 1", "trainer.init.model: missing; trainer.init requires it."),
        ("model: null", "trainer.init.model: missing; trainer.init requires it."),
        ("model: tiny_net", "trainer.init.model: a model is written as {ClassName: {arguments}}; "),
        ("model: {hidden_size: 1, dropout: 0}", "trainer.init.model.name: missing; add `na"),
        ("model: {name: tiny}", "trainer.init.model.name: 'tiny' is not a model. Did you mean 'ti"),
        ("model: {name: 3}", "trainer.init.model.name: expected a string, got 3."),
        (
            "model: {name: tiny_net}",
            "trainer.init.model.hidden_size: missing; TinyNet requires it (an",
        ),
        (MODEL + ", device: GPUU", "trainer.init.device: 'GPUU' is not a backend. Did you mean 'c"),
        (MODEL + ", device: 3", "trainer.init.device: expected a string, got 3."),
        (
            MODEL + ", backend: GPU",
            "trainer.init.backend: expected a mapping of options, got 'GPU'.",
        ),
        (
            MODEL + ", device: cpu, backend: {backend_type: GPU}",
            "trainer.init.device: 'cpu' and backend.backend_type 'GPU' are both given",
        ),
        (MODEL + ", backend: {flg: 1}", "trainer.init.backend.flg: no such option of cpu. Did you"),
        (
            MODEL + ", seed: one",
            "trainer.init.seed: expected an integer in [0, 4294967296) or null, got 'one'.",
        ),
        (
            MODEL + ", optimizer: AdamW",
            "trainer.init.optimizer: an optimizer is written as {ClassName: {arguments}}; write "
            "{AdamW: {}}.",
        ),
        (
            MODEL + ", optimizer: AdmW",
            "trainer.init.optimizer: 'AdmW' is not an optimizer. Did you mean 'AdamW'? ",
        ),
        (
            MODEL + ", optimizer: torch.optim.AdmW",
            "trainer.init.optimizer: torch.optim has no 'AdmW'. Did you mean 'AdamW'? ",
        ),
        (
            MODEL + ", optimizer: {}",
            "trainer.init.optimizer: an optimizer is written as {ClassName: {arguments}}, with "
            "exactly one key; got no key",
        ),
        (
            MODEL + ", optimizer: {AdamW: , lr: 1}",
            "trainer.init.optimizer: an optimizer is written as {ClassName: {arguments}}, with "
            "exactly "
            "one key; got 'AdamW', 'lr'. Indent the arguments below the name.",
        ),
        (
            MODEL + ", optimizer: {AdamW: {lr: 1}, SGD: {lr: 1}}",
            "trainer.init.optimizer: got 2 optimizers ('AdamW', 'SGD')",
        ),
        (
            MODEL + ", optimizer: {AdamV: {}}",
            "trainer.init.optimizer.AdamV: 'AdamV' is not an opti",
        ),
        (
            MODEL + ", schedulers: {LinearLR: {}}",
            "trainer.init.schedulers: expected a list of schedulers, got a mapping.",
        ),
        (
            MODEL + ", schedulers: [SequentialLR: {schedulers: [{Linear: {}}]}]",
            "trainer.init.schedulers[0].SequentialLR.schedulers[0].Linear: 'Linear' is not a sch",
        ),
        (
            MODEL + ", precision: {enabeld: 1}",
            "trainer.init.precision.enabeld: no such argument of",
        ),
        (
            MODEL + ", precision: 16",
            "trainer.init.precision: expected a mapping of arguments of MixedPrecision, got 16.",
        ),
        (
            MODEL + ", logging: {}",
            "trainer.init.logging.log_steps: missing; Logging requires it (an i",
        ),
        (MODEL + ", loop: {num_steps: 1, num_epochs: 1}", "trainer.init.loop: num_steps and num_e"),
        (MODEL + ", sparsity: 1.5", "trainer.init.sparsity: expected a number in [0, 1), got 1.5."),
        (
            MODEL + ", sparsity: {sparsity: 0, algoritm: 1}",
            "trainer.init.sparsity.algoritm: no such",
        ),
        (
            MODEL + ", callbacks: {CheckLoss: {}}",
            "trainer.init.callbacks: expected a list of callbacks, got a mapping.",
        ),
        (MODEL + ", callbacks: [CheckLoss]", "trainer.init.callbacks[0]: a callback is written as"),
        (MODEL + ", callbacks: [EarlyStopping: ]", "trainer.init.callbacks[0].EarlyStopping: null"),
        (MODEL + ", loggers: [CheckLoss: {}]", "trainer.init.loggers[0].CheckLoss: 'CheckLoss' is"),
    ],
)
def test_a_fault_in_init_is_reported_with_place_and_advice(complaints, init, message):
    found = complaints(f"trainer:\n  init: {{{init}}}\n  validate_all:\n", "eval_all")
    assert len(found) == 1
    assert found[0].startswith("params.yaml:2:")
    assert found[0].split(": ", 1)[1].startswith(message)


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("[1]", "eval", "params.yaml:1:1: expected a mapping with trainer, got [1]."),
        ("a: 1", "eval", "params.yaml:1:1: a: no such key in the file. Known: trainer."),
        ("trainer:", "eval", "params.yaml:1:1: trainer: missing; the file requires it."),
        ("trainer: []", "eval", "params.yaml:1:10: trainer: the list is empty; expected"),
        (
            "trainer: 3",
            "eval",
            "params.yaml:1:10: trainer: expected a mapping with init, fit, validate, "
            "validate_all, test, predict, got 3.",
        ),
        ("trainer: [{init: }]", "eval", "params.yaml:1:12: trainer[0].init: no such key in traine"),
        (
            "trainer: {fit: }",
            "eval",
            "params.yaml:1:1: trainer.init: missing; trainer requires it.",
        ),
        (SMALLEST, "eval", "params.yaml:1:1: trainer.validate: missing; the command 'validate'"),
        (
            SMALLEST,
            "train",
            "params.yaml:1:11: trainer.init.optimizer: missing; the command 'fit' requires",
        ),
    ],
)
def test_a_fault_in_the_shape_of_the_file_is_reported(complaints, text, mode, message):
    assert complaints(text, mode)[0].startswith(message)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ("fit: {}", "trainer.fit.train_dataloader: missing; trainer.fit requires it."),
        (
            "fit: {train_dataloader: 3}",
            "trainer.fit.train_dataloader: expected a mapping with data_processor "
            "and its arguments, got 3.",
        ),
        ("fit: {train_dataloader: {batch_size: 1}}", "trainer.fit.train_dataloader.data_processor"),
        ("validate: {val_dataloader: {data_processor: Digit, batch_size: 1}}", "trainer.validate."),
        ("validate: {val_dataloaders: []}", "trainer.validate.val_dataloaders: no such key in tra"),
        (
            "validate: 3",
            "trainer.validate: expected a mapping with val_dataloader, ckpt_path, got 3.",
        ),
    ],
)
def test_sections_that_the_mode_does_not_use_are_checked_as_well(complaints, sections, message):
    text = f"trainer:\n  init: {{{MODEL}}}\n  validate_all:\n  {sections}\n"
    found = complaints(text, "eval_all")
    assert found[0].split(": ", 1)[1].startswith(message)
    assert found[0].startswith("params.yaml:4:")


def test_all_faults_of_a_file_are_reported_together_sorted_by_line(complaints):
    text = FILE.replace("seed: 1", "sed: 1").replace("log_steps: 1", "log_steps: x")
    text = text.replace("      batch_size: 4", "      batch_seize: 4")
    assert [line.split(":")[1] for line in complaints(text)] == ["5", "27", "45", "47"]


def test_an_alias_that_leads_to_a_fault_twice_is_reported_once(complaints):
    text = (
        "trainer:\n  init: {model: {name: tiny_net, hidden_size: 1}}\n"
        "  validate: {val_dataloader: &val {data_processor: Digits, batch_size: x}}\n"
        "  validate_all: {val_dataloaders: *val}\n"
    )
    assert complaints(text, "eval") == [
        "params.yaml:3:72: trainer.validate.val_dataloader.batch_size: expected an integer, "
        "got 'x'."
    ]
