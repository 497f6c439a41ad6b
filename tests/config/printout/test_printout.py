"""What `--check` prints of a plan: the sections, values, secrets, what is not shipped."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from modelzoo_trainer import Callback, Logger
from modelzoo_trainer.config.arguments import Schema
from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.components import Component
from modelzoo_trainer.config.loader import read_file, read_text
from modelzoo_trainer.config.names import NameTable
from modelzoo_trainer.config.positions import FilePosition, Problems
from modelzoo_trainer.config.printout import hook_order, report
from modelzoo_trainer.config.printout.components import (
    WIDTH,
    defaults_of,
    mapping_lines,
    plain,
    show,
)
from modelzoo_trainer.config.shipped import shipped_names

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
OF_USER = "mypkg.parts"


class UserMade:
    """Refuses to be made: a report must not."""

    __module__ = OF_USER

    def __init__(self, **arguments: Any) -> None:
        raise AssertionError("a report makes nothing")


class Net(UserMade):
    __module__ = OF_USER

    def __init__(
        self,
        sizes: list[int],
        rope: dict[str, Any] | None = None,
        activation: Literal["relu", "gelu"] = "relu",
        bias: bool = True,
    ) -> None: ...


class Optimizer(UserMade):
    __module__ = OF_USER

    def __init__(self, params: Any, lr: float = 0.001, betas: tuple[float, float] = (0.9, 0.999)):
        raise AssertionError("a report makes nothing")


class Digits(UserMade):
    __module__ = OF_USER

    def __init__(self, batch_size: int, split: str = "train", shuffle: bool = False) -> None:
        raise AssertionError("a report makes nothing")


class Own(UserMade):
    __module__ = OF_USER


class Uploads(Callback):
    __module__ = OF_USER

    def __init__(
        self,
        url: str = "https://example.org",
        hub_token: str | None = None,
        folder: Path = Path("out"),
        options: dict[str, Any] | None = None,
    ) -> None:
        raise AssertionError("a report makes nothing")

    def run_validation(self, trainer: Any, loop_idx: int | None, is_last: bool) -> None: ...


class Board(Logger):
    __module__ = OF_USER

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None: ...


@pytest.fixture(scope="module")
def names():
    shipped = shipped_names()
    callbacks = dataclasses.replace(
        NameTable.of("callback", {"Uploads": Uploads}),
        published=lambda kind, name: Schema("Harness", is_open=True) if name == "Harness" else None,
    )
    return dataclasses.replace(
        shipped,
        models=NameTable.of("model", {"net": Net}),
        optimizers=NameTable.of("optimizer", {"SGD": Optimizer}),
        processors=NameTable.of("data processor", {"Digits": Digits, "Own": Own}),
        callbacks=callbacks,
        loggers=NameTable.of("logger", {"Board": Board}),
        default_callbacks=tuple,
        default_loggers=lambda: [Board()],
    )


@pytest.fixture
def plans(names):
    """Return a function from a file's text to plans; what cannot run here is noted."""

    def check(text: str, mode: str | None = "train_and_eval") -> Any:
        return check_config(read_text(text, "p.yaml"), names, mode, Problems(for_a_run=False))

    return check


@pytest.fixture
def shown(plans):
    """Return a function from a file's text to the report of its first trainer."""

    def show(text: str, mode: str | None = "train_and_eval") -> str:
        return report(plans(text, mode)[0])

    return show


FILE = """\
trainer:
  init:
    device: CPU
    model_dir: runs/a
    model: {name: net, sizes: [4, 2], rope: {base: 10, type: null}}
    optimizer: {SGD: {lr: 1}}
    schedulers:
      - LinearLR: {initial_learning_rate: 1, end_learning_rate: 0, total_iters: 8}
    loop: {max_steps: 10, eval_frequency: 4, eval_steps: 2, grad_accum_steps: 3}
    checkpoint: {steps: 20, save_initial_checkpoint: true}
    logging: {log_steps: 1, wsc_log_level: {a: INFO}}
    callbacks:
      - Uploads: {hub_token: abc, options: {api_key: def, retries: 2}}
    sparsity: 0.5
    seed: 1
  fit:
    train_dataloader: {data_processor: Digits, batch_size: 8}
    val_dataloader:
      - {data_processor: Digits, batch_size: 8, split: val}
      - {data_processor: Digits, batch_size: 8, split: test}
"""
REPORT = """\
What runs
  mode:          train_and_eval (fit)
  device:        cpu
  model_dir:     runs/a
  seed:          1
  start:         the newest checkpoint in model_dir if there is one, else new weights
  resuming:      depends on the dataloader, which is not built here; the run warns before its first
                 step if it cannot be exact

Components
  model: Net (of mypkg.parts)
      sizes=[4, 2], rope={base: 10, type: null}
      defaults: activation=relu, bias=true
  optimizer: Optimizer (of mypkg.parts)
      lr=1.0
      defaults: betas=[0.9, 0.999]
  schedulers[0]: LinearLR
      initial_learning_rate=1.0, end_learning_rate=0.0, total_iters=8
      defaults: cycle=false, param_group_tags=null
  sparsity: Static
      sparsity=0.5
      defaults: init_method=random, param_filter=null
  loop: TrainingLoop
      max_steps=10, eval_frequency=4, eval_steps=2, grad_accum_steps=3
      defaults: num_steps=null, num_epochs=null, steps_per_epoch=null, max_time=null
  checkpoint: Checkpoint
      steps=20, save_initial_checkpoint=true
      defaults: autoload_last_checkpoint=true, disable_strict_checkpoint_loading=false,
                checkpoint_root=null, checkpoint_name=checkpoint_{step}, strict_version=true,
                minutes=null, epochs=null, asynchronous=false, memory=null
  logging: Logging
      log_steps=1, wsc_log_level={a: INFO}
      defaults: log_level=INFO, enable_act_frequency=false
  callbacks[0]: Uploads (of mypkg.parts)
      hub_token=***, options={api_key: ***, retries: 2}
      defaults: url=https://example.org, folder=out
  loggers, by default: Board
  fit.train_dataloader: Digits (of mypkg.parts)
      batch_size=8
      defaults: split=train, shuffle=false
  fit.val_dataloader[0]: Digits (of mypkg.parts)
      batch_size=8, split=val
      defaults: shuffle=false
  fit.val_dataloader[1]: Digits (of mypkg.parts)
      batch_size=8, split=test
      defaults: shuffle=false

Length
  steps:         10; each with 3 batches of 8 samples: 24
  validations:   3, at steps 4, 8, 10; 2 batches of 2 dataloaders each
  checkpoints:   2, at steps 0, 10
  log lines:     10, at steps 1, 2, 3, ..., 10
  hint:          checkpoint.steps is 20, but the run has 10 steps, so it gives only one checkpoint,
                 at the end

Schedules
  schedulers[0]: LinearLR sets lr of all parameter groups
      steps         0      1      2      5      8     10
      value         1  0.875   0.75  0.375      0      0
      curve     @%#*=-:.___  0 to 1
      hint: the schedule ends at step 8, before the end of the run at step 10: the value stays at \
0"""


def test_a_report_says_what_runs_of_what_how_long_and_what_to_know(shown):
    assert shown(FILE) == REPORT


def test_a_report_is_told_without_what_is_not_there(shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "trainer: {init: {model: {name: net, sizes: [1]}}, validate: {val_dataloader: %s}}"
    assert shown(text % "{data_processor: Digits, batch_size: 2}", "eval") == (
        "What runs\n"
        "  mode:          eval (validate)\n"
        "  device:        cpu (default)\n"
        "  model_dir:     model_dir (default)\n"
        "  seed:          none (default)\n"
        "  start:         invalid: no checkpoint in model_dir, so ckpt_path is required\n"
        "\n"
        "Components\n"
        "  model: Net (of mypkg.parts)\n"
        "      sizes=[1]\n"
        "      defaults: rope=null, activation=relu, bias=true\n"
        "  loggers, by default: Board\n"
        "  validate.val_dataloader: Digits (of mypkg.parts)\n"
        "      batch_size=2\n"
        "      defaults: split=train, shuffle=false\n"
        "\n"
        "Length\n"
        "  validations:   all batches of one dataloader"
    )


def test_a_file_without_a_run_says_so_and_has_no_length(shown):
    text = shown("trainer: {init: {model: {name: net, sizes: [1]}}}", None)
    assert (
        "  mode:          none; the file has none of fit, validate, validate_all, test, predict\n"
        in text
    )
    assert "start:" not in text
    assert "Length" not in text


@pytest.mark.parametrize(
    ("fit", "start"),
    [
        ("", "the newest checkpoint in /data/runs if there is one, else new weights"),
        ("ckpt_path: null", "new weights (ckpt_path: null)"),
        ("ckpt_path: runs/checkpoint_3", "runs/checkpoint_3 (ckpt_path)"),
    ],
)
def test_a_report_says_what_a_run_starts_from(shown, fit, start):
    text = FILE.replace("{steps: 20,", "{checkpoint_root: /data/runs,") + f"    {fit}\n"
    assert f"  start:         {start}\n" in shown(text)


def test_a_run_that_must_not_load_says_so(shown):
    text = FILE.replace("{steps: 20,", "{autoload_last_checkpoint: false,")
    assert "new weights (autoload_last_checkpoint: false)" in shown(text)


def test_several_checkpoints_are_validated_one_after_the_other(shown):
    text = shown(
        "trainer:\n"
        "  init: {model: {name: net, sizes: [1]}}\n"
        "  validate_all: {val_dataloaders: [{data_processor: Digits, batch_size: 2}],"
        " ckpt_paths: [a, 'b*']}\n",
        "eval_all",
    )
    assert "  start:         [a, b*] (ckpt_paths)\n" in text
    assert "all batches of one dataloader, of each of 2 checkpoints or patterns" in text


def test_each_trainer_of_a_list_has_its_own_report(plans):
    trainer = FILE.replace("trainer:\n", "- trainer:\n", 1).replace("\n", "\n    ")
    both = f"trainer:\n  {trainer}\n  {trainer.replace('runs/a', 'runs/b')}\n"
    first, second = map(report, plans(both))
    assert "model_dir:     runs/a" in first
    assert "model_dir:     runs/b" in second
    assert first.partition("Notes")[0].replace("runs/a", "runs/b") == second.partition("Notes")[0]


def test_a_secret_is_shown_nowhere(shown):
    text = FILE.replace("device: CPU", "device: CPU\n    backend: {}")
    assert "abc" in text
    assert "abc" not in shown(text)
    assert "def" not in shown(text).replace("default", "")


def test_options_of_the_backend_are_told(names):
    anything = dataclasses.replace(names, try_backend=lambda device, options: None)
    text = FILE.replace("device: CPU", "device: CPU\n    backend: {flag: 1, api_key: abc}")
    (plan,) = check_config(read_text(text, "p.yaml"), anything)
    assert "  device:        cpu\n  options:       flag=1, api_key=***\n" in report(plan)


def test_a_trainer_without_a_default_folder_has_none(names):
    other = dataclasses.replace(names, trainer=UserMade)
    text = FILE.replace("    model_dir: runs/a\n", "")
    (plan,) = check_config(read_text(text, "p.yaml"), other)
    assert "model_dir:" not in report(plan)


def test_callbacks_that_validate_are_told_where_no_dataloader_is(shown):
    text = FILE[: FILE.index("    val_dataloader")]
    assert (
        "  validations:   3, at steps 4, 8, 10; no val_dataloader; only callbacks validate: Uploads"
        in shown(text)
    )


def test_a_dataloader_without_a_batch_size_is_told_by_its_batches(shown):
    size = "csx.performance.micro_batch_size"
    flags = f"modelzoo_trainer.callbacks.GlobalFlags: {{{size}: 2}}"
    text = FILE.replace("batch_size: 8}\n    val", "}\n    val").replace("Digits, }", "Own}")
    told = shown(text.replace("- Uploads:", f"- {flags}\n      - Uploads:"))
    assert "  steps:         10; each with 3 batches\n" in told
    assert (
        "  micro-batches: training: at most 2 samples each\n"
        "  micro-batches: validation: at most 2 samples each\n"
    ) in told


class Size(Enum):
    SMALL = "small"


@dataclasses.dataclass
class Pair:
    left: int
    token: str


class Settings(BaseModel):
    size: Size
    inner: Pair


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Size.SMALL, "small"),
        (Pair(1, "abc"), "{left: 1, token: ***}"),
        (
            Settings(size=Size.SMALL, inner=Pair(1, "abc")),
            "{size: small, inner: {left: 1, token: ***}}",
        ),
        ({"a": {1}, 2: (None, 1e-7)}, "{a: [1], 2: [null, 1e-07]}"),
        (Path("a/b"), "a/b"),
        (Size, "Size"),
        (object(), "object"),
    ],
)
def test_a_value_of_any_type_is_told_as_yaml_would_write_it(value, told):
    assert show(plain(value)) == told


def test_a_mapping_in_a_long_one_has_lines_of_its_own():
    inner = {f"number_{idx}": idx for idx in range(12)}
    lines = mapping_lines("outer", {"inner": inner, "b": 1}, 2)
    assert lines[:4] == ["  outer:", "    inner:", "      number_0: 0", "      number_1: 1"]
    assert lines[-1] == "    b: 1"


def test_a_class_without_a_signature_has_no_defaults_that_are_known(names):
    component = Component(type, {}, FilePosition("p.yaml", 1, 1), "x")
    assert defaults_of(component) == {}


def test_a_class_that_is_not_shipped_is_told_with_its_arguments(shown, plans):
    text = FILE.replace("- Uploads:", "- Harness: {tasks: a}\n      - Uploads:")
    told = shown(text)
    assert "  callbacks[0]: Harness (not part of this package)\n      tasks=a\n" in told
    assert "  p.yaml:13:9: trainer.init.callbacks[0].Harness: valid, but cannot run here: " in told
    order = hook_order(plans(text)[0])
    assert "  Harness: not part of this package; its hooks are unknown" in order


def test_members_of_a_schedule_stand_below_it(shown):
    member = "{initial_learning_rate: 1, end_learning_rate: 0, total_iters: 8}"
    sequence = f"SequentialLR: {{schedulers: [LinearLR: {member}, LinearLR: {member}]}}"
    told = shown(FILE.replace(f"LinearLR: {member}", sequence))
    assert (
        "  schedulers[0]: SequentialLR\n"
        "      schedulers[0]: LinearLR\n"
        "          initial_learning_rate=1.0, end_learning_rate=0.0, total_iters=8\n"
        "          defaults: cycle=false, param_group_tags=null\n"
        "      schedulers[1]: LinearLR\n"
    ) in told


def test_a_long_mapping_stands_in_lines_of_its_own(shown):
    long = ", ".join(f"number_{idx}: {idx}" for idx in range(12))
    told = shown(FILE.replace("{base: 10, type: null}", f"{{a: {{{long}}}, b: [1, 2]}}"))
    lines = "".join(f"          number_{idx}: {idx}\n" for idx in range(12))
    assert f"      rope:\n        a:\n{lines}        b: [1, 2]\n" in told


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("'1'", '"1"'),
        ("'null'", '"null"'),
        ("'a, b'", '"a, b"'),
        ("''", '""'),
        ('"\\n"', '"\\n"'),
        ("a/b.c", "a/b.c"),
        ("x" * 100, f"{'x' * 50}...{'x' * 27}"),
    ],
)
def test_a_text_is_told_from_a_number_and_has_one_line(shown, given, told):
    text = shown(FILE.replace("{hub_token: abc,", f"{{url: {given},"))
    assert f"      url={told}," in text


def test_a_long_list_is_cut_off(shown):
    numbers = ", ".join(map(str, range(1, 31)))
    told = shown(FILE.replace("[4, 2]", f"[{numbers}]"))
    assert "sizes=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, and 18 more]" in told


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_report_of_a_shipped_file_fits_a_terminal(path, tmp_path, monkeypatch):
    for part in ("train", "val"):  # as preprocessing writes them
        (tmp_path / "rows" / part).mkdir(parents=True)
        (tmp_path / "rows" / part / "data-00000.h5").touch()
    monkeypatch.chdir(tmp_path)
    (plan,) = check_config(read_file(path), shipped_names())
    lines = report(plan).partition("\nNotes\n")[0].splitlines()
    assert [line for line in lines if len(line) > WIDTH or line != line.rstrip()] == []
    assert all(line.isascii() for line in lines)
    assert "Schedules" in lines


def test_validate_all_tells_that_it_takes_every_checkpoint(shown):
    text = "trainer: {init: {model: {name: net, sizes: [1]}}, validate_all: {}}"
    assert "  start:         each checkpoint in model_dir\n" in shown(text, "eval_all")
