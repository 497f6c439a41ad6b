"""Constrained arguments are refused alike from a file and from Python."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction as Rational
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from modelzoo_trainer import callbacks, core, loggers
from modelzoo_trainer.base.constraints import Milestones, PositiveInt, Steps, checked
from modelzoo_trainer.config.arguments import check_arguments, schema_of
from modelzoo_trainer.config.loader import read_text, to_yaml
from modelzoo_trainer.config.positions import Place, Problems
from modelzoo_trainer.core import TrainingLoop
from modelzoo_trainer.core.autorestart import AutoRestart
from modelzoo_trainer.core.reproducibility import Reproducibility
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import OPTIMIZERS, SCHEDULERS, sparsity
from modelzoo_trainer.zoo.data.digits import DigitsProcessor
from modelzoo_trainer.zoo.data.synthetic import SyntheticProcessor
from modelzoo_trainer.zoo.models.decoder_names import Gpt2
from modelzoo_trainer.zoo.models.fc_mnist import FcMnist

MODEL = nn.Linear(2, 2)
LINE = {"initial_learning_rate": 1.0, "end_learning_rate": 0.0, "total_iters": 5}
WD_LINE = {"initial_val": 1.0, "end_val": 0.0, "total_iters": 5}
STEPS = {"initial_learning_rate": 1.0, "gamma": 0.5, "milestones": [1, 2]}
CYCLE = {"base_lr": 0.1, "max_lr": 1.0}
MLP = {"hidden_sizes": [2]}
SMALL = {"vocab_size": 2, "hidden_size": 8, "num_heads": 1, "num_hidden_layers": 1}
SMALL |= {"filter_size": 2, "max_position_embeddings": 2}
SET = {"sparsity": 0.5, "update": {"freq": 1}}
NO_KIND = ("per_example_grad_norms", ["Linear", "Linaer"], "Did you mean 'Linear'?")

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
    (SCHEDULERS["LinearLR"], LINE, "total_iters", 0, "an integer > 0"),
    (SCHEDULERS["LinearLR"], LINE, "end_learning_rate", [1], "a finite number >= 0"),
    (SCHEDULERS["LinearWD"], WD_LINE, "total_iters", -1, "an integer > 0"),
    (SCHEDULERS["LinearWD"], WD_LINE, "end_val", "x", "a finite number >= 0"),
    (SCHEDULERS["MultiStepLR"], STEPS, "milestones", [2, 1], "increasing steps > 0"),
    (SCHEDULERS["MultiStepLR"], STEPS, "milestones", [], "increasing steps > 0"),
    (SCHEDULERS["MultiStepLR"], STEPS, "milestones", [1, "x"], "an integer > 0"),
    (TrainingLoop, {}, "max_steps", "x", "an integer > 0 or null"),
    (TrainingLoop, {}, "max_steps", 0, "an integer > 0 or null"),
    (TrainingLoop, {}, "num_epochs", 1.5, "an integer > 0 or null"),
    (TrainingLoop, {}, "grad_accum_steps", None, "an integer > 0"),
    (TrainingLoop, {}, "eval_steps", True, "an integer > 0 or null"),
    (callbacks.CheckLoss, {}, "policy", "skp", "Did you mean 'skip'?"),
    (callbacks.CheckLoss, {}, "spike_threshold", math.inf, "finite"),
    (callbacks.EarlyStopping, {"metric": "loss"}, "patience", 0, "an integer > 0"),
    (callbacks.EarlyStopping, {"metric": "loss"}, "mode", "low", "'min', 'max' or null"),
    (callbacks.EmailNotification, {"mailto": "a@x.org"}, "port", 70_000, "[1, 65535]"),
    (callbacks.KeepNCheckpoints, {}, "n", -1, "an integer > 0 or null"),
    (callbacks.ModelEma, {}, "decay", 1.0, "[0, 1)"),
    (callbacks.ModelEma, {}, "dtype", "float8", "'bfloat16' or null"),
    (callbacks.RunHistory, {}, "max_values", 10**10, "[1, 1000000000]"),
    (callbacks.SaveBest, {"metric": "loss"}, "k", "2", "an integer > 0"),
    (callbacks.SpikeDetection, {}, "warmup", -1, "an integer >= 0"),
    (callbacks.SpikeDetection, {}, "atol", -1.0, "a finite number >= 0 or null"),
    (loggers.ProgressLogger, {}, "interval_s", -1, "a number >= 0 or null"),
    (SCHEDULERS["CyclicLR"], CYCLE, "mode", "up", "'triangular', 'triangular2' or 'exp_range'"),
    (
        TrainingLoop,
        {},
        "eval_frequency",
        -1,
        "an integer >= 0, a fraction of the run in [0, 1]",
    ),
    (TrainingLoop, {}, "eval_frequency", 1.5, "a fraction of the run in [0, 1] or null"),
    (TrainingLoop, {}, "eval_frequency", True, "an integer >= 0"),
    (TrainingLoop, {}, "max_time", "1:60:00", "'1-11:30:00' (days, hours, minutes, seconds)"),
    (TrainingLoop, {}, "max_time", math.inf, "a number of seconds > 0 or null"),
    (core.Checkpoint, {}, "steps", -1, "an integer >= 0 or null"),
    (core.Checkpoint, {}, "minutes", math.inf, "a finite number > 0 or null"),
    (core.Checkpoint, {}, "epochs", 0, "an integer > 0 or null"),
    (core.Checkpoint, {}, "save_final_checkpoint", 1, "true or false"),
    (core.Logging, {}, "log_steps", True, "an integer >= 0"),
    (core.Logging, {}, "log_level", "LOUD", "one of DEBUG, INFO, WARNING, ERROR, CRITICAL"),
    (core.MixedPrecision, {}, "fp16_type", "float8", "'bfloat16', 'float16' or 'cbfloat16'"),
    (core.MixedPrecision, {}, "precision_opt_level", 3, "0, 1, 2 or null"),
    (core.MixedPrecision, {}, "loss_scaling_factor", "dynamc", "Did you mean 'dynamic'?"),
    (core.MixedPrecision, {}, "steps_per_increase", 0, "an integer > 0"),
    (core.MixedPrecision, {}, "max_gradient_norm", 0.0, "a number > 0 or null"),
    (AutoRestart, {}, "max_num_restarts", -1, "an integer >= 0 or null"),
    (AutoRestart, {}, "hang_timeout", math.nan, "a number of seconds > 0 or null"),
    (Reproducibility, {}, "seed", 2**32, "an integer in [0, 4294967296) or null"),
    (FcMnist, MLP, "hidden_sizes", [2, 0], "an integer > 0"),
    (FcMnist, MLP, "hidden_sizes", [], "that is not empty"),
    (FcMnist, MLP, "dropout", 1.0, "a number in [0, 1)"),
    (FcMnist, MLP, "activation_fn", "rely", "Did you mean 'relu'?"),
    (Gpt2, SMALL, "vocab_size", 0, "an integer > 0"),
    (Gpt2, SMALL, "num_hidden_layers", 1.5, "an integer in [1, 1000000000]"),
    (Gpt2, SMALL, "norm_type", "rmsnrm", "Did you mean 'rmsnorm'?"),
    (Gpt2, SMALL, "attention_dropout_rate", -0.1, "a number in [0, 1) or null"),
    (Gpt2, SMALL, "pos_scaling_factor", 0.5, "a number >= 1"),
    (DigitsProcessor, {"batch_size": 2}, "val_fraction", 1.0, "a number in (0, 1)"),
    (DigitsProcessor, {"batch_size": 2}, "split", "validate", "'train' or 'val'"),
    (SyntheticProcessor, {"batch_size": 2}, "vocab_size", 1, "an integer >= 2"),
    (SyntheticProcessor, {"batch_size": 2}, "shuffle_seed", 2**63, "an integer in [0, 9223"),
    (SyntheticProcessor, {"batch_size": 2}, "num_workers", -1, "an integer >= 0"),
    (sparsity.Static, {"sparsity": 0.5}, "sparsity", 1.0, "a number in [0, 1)"),
    (sparsity.Static, {"sparsity": 0.5}, "init_method", "top", "Did you mean 'topk'?"),
    (sparsity.Static, {"sparsity": 0.5}, "param_filter", [""], "a glob, a list of globs or null"),
    (sparsity.GMP, {"sparsity": 0.5}, "sparsity", 1.5, "a number in [0, 1), a mapping with type"),
    (sparsity.SET, SET, "update", 3, "a mapping with freq or steps"),
    (sparsity.RigL, SET, "balance_in_groups", 0, "an integer > 0 or null"),
    (sparsity.UpdateEvery, {"freq": 1}, "stop", -1, "an integer >= 0 or null"),
    (sparsity.UpdateAt, {"steps": [1]}, "steps", [1, True], "an integer >= 0"),
    (sparsity.Cubic, {"final": 0.9, "steps": 5}, "final", math.inf, "a finite number"),
    (sparsity.Cycling, {"values": [1]}, "values", [0, "a"], "a finite number"),
    (callbacks.ComputeNormGNS, {"per_example_grad_norms": "Linear"}, *NO_KIND),
    (callbacks.CountParams, {}, "order_by", "shapes", "Did you mean 'shape'?"),
    (callbacks.EmailNotification, {"mailto": "a@x.org"}, "subject", "a\nb", "one line of text"),
    (callbacks.HFCacheDir, {"cache_dir": "x"}, "cache_dir", "", "the name of a folder"),
    (callbacks.ModelEma, {}, "name_scope", "ema/", "a prefix such as 'ema'"),
    (callbacks.MoveModulesToDevice, {}, "modules", [""], "such as 'teacher' or null"),
    (callbacks.OpProfiler, {}, "start_step", 0, "-1 or an integer > 0"),
    (callbacks.SaveBest, {"metric": "loss"}, "metric", "", "the name of a metric"),
    (callbacks.SaveBest, {"metric": "loss"}, "checkpoint_name", "best", "with {step}, once"),
    (callbacks.SaveCheckpointState, {"k": 1}, "checkpoint_name", "{x}", "and {ckpt_name}, once"),
    (callbacks.WSDCheckpoint, {}, "folder", "../x", "a path within model_dir"),
    (callbacks.SpikeDetection, {}, "exclude_batches_path", 3, "a path or null"),
    (loggers.MLflowLogger, {}, "experiment_name", "", "a string that is not empty"),
    (loggers.WandbLogger, {}, "resume", "yes", "'never', 'allow', 'auto' or 'must'"),
    (loggers.WandbLogger, {}, "tags", "one", "a list of words or null"),
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


def test_an_integer_of_numpy_s_is_a_size_and_a_seed():
    assert FcMnist(hidden_sizes=[np.int64(3)], num_classes=np.int32(2)).layers[-1].out_features == 2
    with pytest.raises(ConfigError, match=r"num_classes: .* > 0, got np.int64\(0\)"):
        FcMnist(hidden_sizes=[3], num_classes=np.int64(0))
    with pytest.raises(ConfigError, match=r"num_classes: expected an integer > 0, got .*2\.0"):
        FcMnist(hidden_sizes=[3], num_classes=np.float64(2))


def test_integers_of_arrays_are_sizes_of_data_too():
    sizes = {"num_samples": np.int64(8), "vocab_size": np.int64(10)}
    data = SyntheticProcessor(kind="tokens", batch_size=4, **sizes)
    assert len(data.create_dataloader()) == 2
    with pytest.raises(ConfigError, match=r"vocab_size: expected an integer >= 2, got .*1"):
        SyntheticProcessor(kind="tokens", batch_size=4, vocab_size=np.int64(1))


@pytest.mark.parametrize(
    "value", [np.array("dynamic"), torch.tensor(1j), np.complex64(1), np.datetime64("2026-01-01")]
)
def test_an_array_of_what_is_no_number_is_refused(value):
    with pytest.raises(ConfigError, match=r"^autorestart\.hang_timeout: expected .*, got "):
        AutoRestart(hang_timeout=value)


@pytest.mark.parametrize("value", [np.array([3]), torch.tensor([3])])
def test_an_array_of_one_number_is_no_seed(value):
    with pytest.raises(ConfigError, match=r"^trainer\.seed: expected .*, got .*\[3\]"):
        core.Reproducibility(value)


@pytest.mark.parametrize("value", [8, np.float32(8), torch.tensor(8.0)])
def test_a_loss_scale_of_an_array_is_a_constant_one(value):
    precision = core.MixedPrecision(fp16_type="float16", loss_scaling_factor=value)
    assert precision.loss_scaling_factor == 8.0
    assert precision._scaler_options()["init_scale"] == 8.0


@pytest.mark.parametrize("value", [np.bool_(True), torch.tensor(True), Decimal(1), Rational(1, 2)])
def test_what_only_looks_like_a_number_is_refused(value):
    with pytest.raises(ConfigError, match=r"^autorestart\.hang_timeout: expected .*, got "):
        AutoRestart(hang_timeout=value)
    with pytest.raises(ConfigError, match=r"^loop\.eval_frequency: expected .*, got "):
        TrainingLoop(max_steps=1, eval_frequency=value)


@pytest.mark.parametrize("value", [np.float32(0.5), torch.tensor(0.5)])
def test_a_fraction_of_an_array_is_a_fraction_of_the_run(value):
    assert repr(TrainingLoop(max_steps=4, eval_frequency=value).eval_frequency) == "0.5"
    assert repr(TrainingLoop(max_steps=4, eval_frequency=2 * value).eval_frequency) == "1.0"
    assert repr(TrainingLoop(max_steps=4, eval_frequency=4 * value).eval_frequency) == "2"


def test_text_of_numpys_and_mappings_are_text_and_mappings():
    assert callbacks.EarlyStopping(np.str_("loss")).metric == "loss"
    sparsity.GMP(MappingProxyType({"type": "linear", "init": 0.0, "slope": 0.1}))


@pytest.mark.parametrize("value", [0, 1.0, True, np.int64(3), "1", None, object()])
def test_a_whole_number_is_an_int(value):
    with pytest.raises(ConfigError, match=r"^owner\.num: expected an integer > 0, got "):
        Taking(value)
