"""The order of hooks that a report tells, against the hook tables of trainers that are built."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from modelzoo_trainer import Callback, Logger
from modelzoo_trainer.callback import hook_names, register_global_callback
from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_file, read_text
from modelzoo_trainer.config.names import NameTable
from modelzoo_trainer.config.printout import hook_order
from modelzoo_trainer.config.printout.components import WIDTH
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.hooks.spec import HOOKS

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
DATA = "{data_processor: SyntheticProcessor, num_features: 3, batch_size: 4}"
FILE = f"""\
trainer:
  init:
    model: {{name: fc_mnist, hidden_sizes: [4], input_size: 3}}
    optimizer: {{SGD: {{lr: 0.1}}}}
    SECTIONS
    callbacks: [CALLBACKS]
    loggers: [ProgressLogger: null, JsonlLogger: null]
  fit:
    train_dataloader: {DATA}
"""
SIZE = "csx.performance.micro_batch_size"


class Watches(Callback):
    """Has a hook for log steps, and one that it inherits."""

    log_step_hooks = frozenset({"on_train_batch_end"})

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx): ...


class WatchesMore(Watches):
    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop): ...


class Plain:
    """No `Callback`, which is enough."""

    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop): ...


class Keeps(Logger):
    def log_metrics(self, metrics, step): ...

    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop): ...


def watching():
    """Return a callback; what its hooks are is not known before."""
    return Watches()


@pytest.fixture(scope="module")
def names():
    shipped = shipped_names()
    own = {cls.__name__: cls for cls in (Watches, WatchesMore, Plain, Keeps, watching)}
    own |= {name: shipped.callbacks.load(name) for name in shipped.callbacks.names}
    return dataclasses.replace(shipped, callbacks=NameTable.of("callback", own))


@pytest.fixture
def plan(names):
    """Return a function from callbacks and sections to a plan."""

    def make(callbacks="", sections=""):
        text = FILE.replace("CALLBACKS", callbacks).replace("SECTIONS", sections)
        return check_config(read_text(text, "params.yaml"), names)[0]

    return make


def order_of(text):
    """Return what a report tells: hook -> [(group, class)]."""
    found = {}
    group = ""
    for line in text.splitlines()[1:]:
        hook = re.fullmatch(r"  (\w+)", line)
        if hook:
            listeners = found.setdefault(hook[1], [])
            continue
        first = re.match(r"    (\w+): ", line)
        group = first[1] if first else group
        listeners += [(group, name) for name in re.findall(r"(\w+)(?: \(log\))?(?:,|$)", line)]
    return found


def order_in(trainer):
    """Return the order in which a trainer calls: hook -> [(group, class)]."""
    core = len(trainer.callbacks) - len([*trainer.callbacks.user, *trainer.loggers])
    found = {}
    for number, callback in enumerate(trainer.hooks.callbacks):
        group = "core" if number < core else "global"
        group = "user" if callback in trainer.callbacks.user else group
        group = "loggers" if callback in trainer.loggers else group
        for name in hook_names(callback):
            found.setdefault(name, []).append((group, type(callback).__name__))
    return {name: found[name] for name in HOOKS if name in found}


def test_the_order_that_is_told_is_that_of_the_trainer_of_the_digits(tmp_path):
    (plan,) = check_config(read_file(CONFIGS / "digits_mlp.yaml"), shipped_names())
    plan.init["model_dir"] = tmp_path / "run"
    told = hook_order(plan)
    with plan.build() as trainer:
        assert order_of(told) == order_in(trainer)
    assert max(map(len, told.splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("callbacks", "sections"),
    [
        ("", ""),
        ("", "checkpoint: {steps: 3}"),
        ("", "loop: {grad_accum_steps: 2}"),
        ("", "sparsity: {algorithm: set, sparsity: 0.5, update: {freq: 2}}"),
        ("", "precision: {enabled: true, fp16_type: bfloat16}"),
        (f"ScopedTrainFlags: {{{SIZE}: 2}}", ""),
        (f"ScopedValidateFlags: {{{SIZE}: 2}}", ""),
        (f"GlobalFlags: {{{SIZE}: 2}}", "logging: {log_steps: 5}"),
        ("Keeps: {}, WatchesMore: {}, Watches: {}, Plain: {}, CheckLoss: null", ""),
        ("Watches: {}, Watches: {}", ""),
    ],
)
def test_the_order_that_is_told_is_that_of_a_trainer(plan, tmp_path, callbacks, sections):
    made = plan(callbacks, f"model_dir: {tmp_path / 'run'}\n    {sections}")
    told = order_of(hook_order(made))
    with made.build() as trainer:
        assert told == order_in(trainer)


def test_a_global_callback_comes_last(plan, tmp_path):
    made = plan("Keeps: {}", f"model_dir: {tmp_path / 'run'}")
    handle = register_global_callback(WatchesMore())
    told = order_of(hook_order(made))
    with made.build() as trainer:
        assert told == order_in(trainer)
    handle.remove()
    assert told["on_fit_start"][-2:] == [("loggers", "Keeps"), ("global", "WatchesMore")]


def test_hooks_for_log_steps_alone_are_marked(plan):
    told = hook_order(plan("WatchesMore: {}"))
    assert re.search(r"\n  on_train_batch_end\n.*\n    user:    WatchesMore \(log\)", told)
    assert re.search(r"\n  on_fit_start\n.*\n    user:    WatchesMore\n", told)


def test_hooks_are_told_in_the_order_of_their_declaration(plan):
    told = list(order_of(hook_order(plan())))
    assert told == [name for name in HOOKS if name in told]
    assert len(told) > 10


def test_of_a_function_nothing_is_known(plan):
    told = hook_order(plan("watching: {}"))
    assert told.endswith("\n  watching: a function; the hooks of its result are unknown")
