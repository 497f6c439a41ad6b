"""Constrained arguments are refused alike from a file and from Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from modelzoo_trainer import callbacks, loggers
from modelzoo_trainer.config.arguments import check_arguments, schema_of
from modelzoo_trainer.config.loader import read_text, to_yaml
from modelzoo_trainer.config.positions import Place, Problems
from modelzoo_trainer.constraints import Milestones, PositiveInt, Steps, checked
from modelzoo_trainer.core import TrainingLoop
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import OPTIMIZERS, SCHEDULERS

MODEL = nn.Linear(2, 2)
LINE = {"initial_learning_rate": 1.0, "end_learning_rate": 0.0, "total_iters": 5}
WD_LINE = {"initial_val": 1.0, "end_val": 0.0, "total_iters": 5}
STEPS = {"initial_learning_rate": 1.0, "gamma": 0.5, "milestones": [1, 2]}
CYCLE = {"base_lr": 0.1, "max_lr": 1.0}

# A class, arguments that fit, and what does not: the place, the value, and what would.
CASES: list[tuple[Any, dict[str, Any], str, Any, str]] = [
    (OPTIMIZERS["AdamW"], {}, "lr", -1.0, ">= 0"),
    (OPTIMIZERS["AdamW"], {}, "lr", math.inf, "finite"),
    (OPTIMIZERS["AdamW"], {}, "lr", math.nan, "finite"),
    (OPTIMIZERS["AdamW"], {}, "lr", "x", "a finite number >= 0 or null"),
    (OPTIMIZERS["AdamW"], {}, "lr", True, "number"),
    (OPTIMIZERS["Adam"], {}, "betas", [0.9, 1.0], "[0, 1)"),
    (OPTIMIZERS["Adam"], {}, "betas", [0.9], "a list of 2"),
    (OPTIMIZERS["AdamBase"], {}, "eps", None, ">= 0"),
    (OPTIMIZERS["Rprop"], {}, "etas", [1.5, 2.0], "(0, 1)"),
    (OPTIMIZERS["Adafactor"], {}, "decay_rate", 0.5, "< 0"),
    (OPTIMIZERS["Muon"], {}, "ns_steps", 100, "[1, 100)"),
    (OPTIMIZERS["Muon"], {}, "adjust_lr_fn", "orignal", "Did you mean 'original'?"),
    (SCHEDULERS["LinearLR"], LINE, "total_iters", 0, "a whole number > 0"),
    (SCHEDULERS["LinearLR"], LINE, "end_learning_rate", [1], "a finite number >= 0"),
    (SCHEDULERS["LinearWD"], WD_LINE, "total_iters", -1, "a whole number > 0"),
    (SCHEDULERS["LinearWD"], WD_LINE, "end_val", "x", "a finite number >= 0"),
    (SCHEDULERS["MultiStepLR"], STEPS, "milestones", [2, 1], "increase"),
    (SCHEDULERS["MultiStepLR"], STEPS, "milestones", [], "increase"),
    (SCHEDULERS["MultiStepLR"], STEPS, "milestones", [1, "x"], "a whole number > 0"),
    (TrainingLoop, {}, "max_steps", "x", "a whole number > 0 or null"),
    (TrainingLoop, {}, "max_steps", 0, "a whole number > 0 or null"),
    (TrainingLoop, {}, "num_epochs", 1.5, "a whole number > 0 or null"),
    (TrainingLoop, {}, "grad_accum_steps", None, "a whole number > 0"),
    (TrainingLoop, {}, "eval_steps", True, "a whole number > 0 or null"),
    (callbacks.CheckLoss, {}, "policy", "skp", "Did you mean 'skip'?"),
    (callbacks.CheckLoss, {}, "spike_threshold", math.inf, "finite"),
    (callbacks.EarlyStopping, {"metric": "loss"}, "patience", 0, "a whole number > 0"),
    (callbacks.EarlyStopping, {"metric": "loss"}, "mode", "low", "'min' or 'max'"),
    (callbacks.EmailNotification, {"mailto": "a@x.org"}, "port", 70_000, "[1, 65535]"),
    (callbacks.KeepNCheckpoints, {}, "n", -1, "a whole number > 0 or null"),
    (callbacks.ModelEma, {}, "decay", 1.0, "[0, 1)"),
    (callbacks.ModelEma, {}, "dtype", "float8", "'bfloat16' or null"),
    (callbacks.RunHistory, {}, "max_values", 10**10, "[1, 1000000000]"),
    (callbacks.SaveBest, {"metric": "loss"}, "k", "2", "a whole number > 0"),
    (callbacks.SpikeDetection, {}, "warmup", -1, "a whole number >= 0"),
    (callbacks.SpikeDetection, {}, "atol", -1.0, "a finite number >= 0 or null"),
    (loggers.ProgressLogger, {}, "interval_s", -1, "a number >= 0 or null"),
    (SCHEDULERS["CyclicLR"], CYCLE, "mode", "up", "'triangular', 'triangular2' or 'exp_range'"),
]


def said_of_a_file(target: Any, arguments: dict[str, Any], num_injected: int) -> str:
    problems = Problems()
    place = Place.root(read_text(to_yaml(arguments), "f.yaml"))
    check_arguments(place, schema_of(target, num_injected), problems)
    (line,) = problems.lines()
    return line.split(": ", 1)[1]


@pytest.mark.parametrize(
    ("target", "others", "name", "value", "fits"),
    [pytest.param(*case, id=f"{case[0].__name__}.{case[2]}={case[3]}") for case in CASES],
)
def test_the_message_is_the_same_from_a_file_and_from_python(target, others, name, value, fits):
    is_of_optim = target in {*OPTIMIZERS.values(), *SCHEDULERS.values()}
    injected = [MODEL if target in OPTIMIZERS.values() else None] if is_of_optim else []
    target(*injected, **others)
    arguments = {**others, name: value}
    with pytest.raises(ConfigError) as caught:
        target(*injected, **arguments)
    _, _, of_python = str(caught.value).rpartition(f".{name}")
    of_file = said_of_a_file(target, arguments, len(injected)).removeprefix(name)
    assert of_python == of_file.removesuffix(" Write it without quotes.")
    assert fits in of_python
    assert ", got " in of_python


class Taking:
    @checked("owner")
    def __init__(
        self, num: PositiveInt = 1, *, steps: Steps = 1, at: Milestones = (), free: str = ""
    ) -> None:
        self.given = num, steps, at, free


@pytest.mark.parametrize(
    "arguments",
    [
        {"num": 3},
        {"steps": 2.5},
        {"steps": np.int64(3)},
        {"steps": torch.tensor(3.0)},
        {"at": (1, 2.5)},
        {"free": 3},
    ],
)
def test_what_python_gives_is_taken_as_it_is(arguments):
    made = Taking(**arguments)
    assert any(given is value for given in made.given for value in arguments.values())


@pytest.mark.parametrize("value", [0, 1.0, True, np.int64(3), "1", None, object()])
def test_a_whole_number_is_an_int(value):
    with pytest.raises(ConfigError, match=r"^owner\.num: expected a whole number > 0, got "):
        Taking(value)
