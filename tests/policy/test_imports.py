"""Importing does nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Imports the modules named on the command line and prints what is different from before.
WATCH = """
import importlib, json, logging, os, random, signal, sys, threading, warnings
import numpy, torch, torch._dynamo  # the compiler of torch sets environment variables

def state():
    return {
        "environment": dict(os.environ),
        "handlers": [str(handler) for handler in logging.getLogger().handlers],
        "level": logging.getLogger().level,
        "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "random": [
            str(random.getstate()),
            str(numpy.random.get_state()),
            str(torch.get_rng_state().sum()),
        ],
        "torch": [
            torch.get_num_threads(),
            str(torch.get_default_dtype()),
            str(torch.get_default_device()),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
            torch.get_float32_matmul_precision(),
            torch.cuda.is_initialized(),
            torch.distributed.is_initialized(),
        ],
        "excepthook": str(sys.excepthook),
        "files": os.listdir("."),
        "path": sys.path[:],
    }

before = state()
for name in sys.argv[1:]:
    importlib.import_module(name)
after = state()
optional = {"tensorboard", "torch_tpu", "torch_xla", "wandb"}
print(
    json.dumps(
        {
            "changed": sorted(key for key in before if before[key] != after[key]),
            "optional": sorted(optional & {name.split(".")[0] for name in sys.modules}),
        }
    )
)
"""


def run_python(code: str, *arguments: str, root: Path, folder: Path) -> str:
    """Return what the code prints; it must end well and print nothing to stderr."""
    done = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", code, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("name", ["modelzoo_trainer", "modelzoo_trainer.cli.command"])
def test_the_command_line_answers_without_torch(name: str, root: Path, tmp_path: Path) -> None:
    code = "import importlib, sys; importlib.import_module(sys.argv[1]); print(sorted(sys.modules))"
    loaded = run_python(code, name, root=root, folder=tmp_path)
    assert f"'{name}'" in loaded
    assert "'torch'" not in loaded
    assert "'pydantic'" not in loaded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "brings", "brings_not"),
    [
        ("from modelzoo_trainer import Trainer", "trainer", ["torch._dynamo", "pydantic"]),
        (
            "from modelzoo_trainer.callbacks import HuggingFaceCheckpoint",
            "zoo.callbacks.hugging_face_checkpoint",
            ["torch.distributed.tensor"],
        ),
        ("import modelzoo_trainer.zoo.models.dpo", "zoo.models.head_loss", ["torch._dynamo"]),
    ],
    ids=["the trainer", "a callback for kinds of models", "language models"],
)
def test_what_takes_longer_to_import_than_the_trainer_is_not_brought(
    root: Path, tmp_path: Path, statement: str, brings: str, brings_not: list[str]
) -> None:
    code = f"{statement}; import sys; print(sorted(sys.modules))"
    loaded = run_python(code, root=root, folder=tmp_path)
    assert f"'modelzoo_trainer.{brings}'" in loaded
    assert [name for name in brings_not if f"'{name}'" in loaded] == []


def test_asking_whether_there_are_other_processes_imports_no_torch(
    root: Path, tmp_path: Path
) -> None:
    code = """
import sys
from backends.coordination import launch
launch.read_launch()
print(sorted(sys.modules))
"""
    loaded = run_python(code, root=root, folder=tmp_path)
    assert "'backends.coordination.launch'" in loaded
    assert "'torch'" not in loaded


@pytest.mark.slow
def test_importing_backends_imports_no_library_of_a_device(root: Path, tmp_path: Path) -> None:
    code = "import backends, sys; backends.make_backend('cpu'); print(sorted(sys.modules))"
    loaded = run_python(code, root=root, folder=tmp_path)
    assert "'torch'" in loaded
    assert "'torch_xla'" not in loaded
    assert "'torch_tpu'" not in loaded
    assert "'modelzoo_trainer'" not in loaded


@pytest.mark.slow
def test_importing_every_module_changes_nothing(
    root: Path, tmp_path: Path, sources: list[Any]
) -> None:
    names = [source.module for source in sources if not source.name.endswith("__main__.py")]
    printed = run_python(WATCH, *names, root=root, folder=tmp_path)
    assert json.loads(printed) == {"changed": [], "optional": []}


MAKE_A_TRAINER = """
import sys
from modelzoo_trainer import Trainer
from torch import nn
Trainer(device="cpu", model_dir="run", model=nn.Linear(2, 2))
above = ("callbacks.", "loggers.", "zoo", "config", "tools", "cli")
names = [name.removeprefix("modelzoo_trainer.") for name in sys.modules]
print(*(name for name in names if name.startswith(above)))
"""


@pytest.mark.slow
def test_a_trainer_imports_the_callbacks_that_it_uses(root: Path, tmp_path: Path) -> None:
    loaded = run_python(MAKE_A_TRAINER, root=root, folder=tmp_path).split()
    used = {"callbacks.check_loss", "callbacks.step_guard", "loggers.progress"}
    assert used <= set(loaded)
    assert {name for name in loaded if not name.startswith("loggers.console")} == used
