"""A dotted path leads only to what fits its place, and nothing else is called."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback
from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.errors import ConfigError

FILE = """\
trainer:
  init:
    device: cpu
    model: {fc_mnist: {hidden_sizes: [4]}}
    optimizer: {SGD: {}}
    schedulers: [ConstantLR: {learning_rate: 1.0}]
    callbacks: [CheckLoss: {}]
    loggers: [ProgressLogger: {}]
  fit:
    train_dataloader: {data_processor: DigitsProcessor, batch_size: 2}
"""
PLACES = {
    "model": "fc_mnist: {hidden_sizes: [4]}",
    "optimizer": "SGD: {}",
    "scheduler": "ConstantLR: {learning_rate: 1.0}",
    "callback": "CheckLoss: {}",
    "logger": "ProgressLogger: {}",
    "processor": "data_processor: DigitsProcessor, batch_size: 2",
}


class Net(nn.Module):
    """A model of the user's."""


class Steps:
    """A scheduler with nothing of torch's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        """Change nothing."""


class Mine(Callback):
    """A callback of the user's."""


class Duck:
    """A callback that is no subclass."""

    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
        """Called before training."""


class Loader:
    """Batches without a processor."""

    def __iter__(self):
        return iter(())


class Processor:
    """Makes a dataloader."""

    def create_dataloader(self):
        return Loader()


def annotated() -> nn.Module | None:
    return Net()


def either() -> Net | nn.Linear:
    return Net()


def plain():
    return Net()


def of_nothing() -> None:
    raise AssertionError("it was called")


def batches() -> Iterator[int]:
    return iter(())


def make_optimizer(model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters())


def make_steps(optimizer):
    return Steps(optimizer)


run = subprocess.run
partial_sgd = functools.partial(torch.optim.SGD, lr=0.1)
bound = functools.partial(plain)
wrapped = functools.lru_cache(annotated)
disguised = functools.partial(subprocess.run, ["true"])


@pytest.fixture(scope="module")
def names():
    return shipped_names()


@pytest.fixture
def my_parts(monkeypatch):
    """Make this file a module of the user's."""
    monkeypatch.setitem(sys.modules, "my_parts", sys.modules[__name__])


def naming(text, place, path):
    """Return a file that names a path at a place."""
    given = f"data_processor: {path}" if place == "processor" else f"{path}: {{}}"
    assert PLACES[place] in text
    return text.replace(PLACES[place], given)


@pytest.fixture
def plan(names, my_parts):
    """Return a function from a place, and what a file names there, to a plan."""

    def check(place, path):
        return check_config(read_text(naming(FILE, place, path), "f.yaml"), names)[0]

    return check


@pytest.mark.parametrize(
    "path",
    [
        *("os.system", "subprocess.run", "subprocess.Popen", "builtins.eval", "builtins.exec"),
        *("shutil.rmtree", "os._exit", "sys.exit", "pathlib.Path", "runpy.run_path", "os.remove"),
        *("socketserver.BaseRequestHandler", "pdb.Pdb", "my_parts.run", "my_parts.disguised"),
        *("my_parts.of_nothing", "torch.save", "torch.set_num_threads"),
    ],
)
@pytest.mark.usefixtures("my_parts")
def test_what_does_not_fit_is_refused_at_every_place_before_it_is_called(names, path):
    text = FILE
    for place in PLACES:
        text = naming(text, place, path)
    with pytest.raises(ConfigError) as caught:
        check_config(read_text(text, "f.yaml"), names)
    lines = str(caught.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        *("f.yaml:4:13", "f.yaml:5:17", "f.yaml:6:18", "f.yaml:7:17", "f.yaml:8:15"),
        "f.yaml:10:40",
    ]


@pytest.mark.parametrize(
    ("place", "path"),
    [
        *(
            ("model", f"my_parts.{name}")
            for name in ("Net", "annotated", "either", "plain", "bound")
        ),
        ("model", "my_parts.wrapped"),
        ("model", "torch.nn.Identity"),
        *(("optimizer", path) for path in ("my_parts.make_optimizer", "torch.optim.AdamW")),
        *(("scheduler", f"my_parts.{name}") for name in ("Steps", "make_steps")),
        *(
            (kind, f"my_parts.{name}")
            for kind in ("callback", "logger")
            for name in ("Mine", "Duck")
        ),
        *(
            ("processor", f"my_parts.{name}")
            for name in ("Loader", "Processor", "batches", "plain")
        ),
    ],
)
def test_what_fits_its_place_is_taken(plan, place, path):
    assert plan(place, path)


@pytest.mark.parametrize(
    ("place", "path"),
    [
        *((place, "my_parts.Duck") for place in ("model", "optimizer", "scheduler", "processor")),
        *((place, "my_parts.Net") for place in ("callback", "logger", "optimizer", "scheduler")),
        *((place, "my_parts.plain") for place in ("callback", "logger")),
        ("model", "my_parts.make_optimizer"),
        ("optimizer", "my_parts.annotated"),
    ],
)
def test_what_fits_another_place_is_refused(plan, place, path):
    with pytest.raises(ConfigError, match=r"f\.yaml:\d+:\d+: trainer\."):
        plan(place, path)


def test_a_function_that_returns_something_else_is_refused_with_its_annotation(plan):
    with pytest.raises(ConfigError, match=r"annotated .* Module or None, .* not an optimizer: "):
        plan("optimizer", "my_parts.annotated")


@pytest.mark.usefixtures("my_parts")
def test_a_partial_of_a_class_is_refused_with_what_to_write(plan):
    with pytest.raises(ConfigError, match=r"a functools\.partial of SGD .* Name the class"):
        plan("optimizer", "my_parts.partial_sgd")


@pytest.mark.usefixtures("my_parts")
def test_what_is_inside_a_class_is_refused_by_its_name(plan):
    with pytest.raises(
        ConfigError, match=r"'my_parts\.Processor' is not a module\. .*package\.module\.Name"
    ):
        plan("processor", "my_parts.Processor.create_dataloader")


@pytest.mark.parametrize("path", ["os._exit", "builtins.exit", "time.sleep", "os.close"])
@pytest.mark.parametrize(
    "given",
    [
        "LambdaLR: {initial_learning_rate: 1, lr_lambda: %s}",
        "torch.optim.lr_scheduler.LambdaLR: {lr_lambda: %s}",
    ],
)
def test_a_factor_is_no_function_of_the_standard_library(names, given, path):
    given = given.replace("%s", path)
    text = FILE.replace(PLACES["scheduler"], given)
    with pytest.raises(ConfigError, match=r"lr_lambda: .* Python's standard library"):
        check_config(read_text(text, "f.yaml"), names)[0].init["schedulers"][0].build(
            torch.optim.SGD(nn.Linear(1, 1).parameters())
        )
