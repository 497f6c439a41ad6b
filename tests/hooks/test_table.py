"""Hook tables: on log steps and off them, and what a fit finds when it starts."""

from __future__ import annotations

from typing import Any

import pytest

from modelzoo_trainer import AutoRestart, Callback, Logging
from modelzoo_trainer.callbacks import ComputeNorm
from modelzoo_trainer.hooks.spec import HOOKS
from modelzoo_trainer.hooks.table import HookTable
from tests.doubles import tiny_batches

TRACED, OUTSIDE = "on_before_optimizer_step", "on_train_batch_end"


class Heard(Callback):
    """Notes which of its hooks are called; two are for log steps."""

    log_step_hooks = frozenset({TRACED, OUTSIDE, "hear"})

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_before_optimizer_step(self, trainer, model, optimizer):
        self.calls.append(TRACED)

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.calls.append(OUTSIDE)

    def on_step_boundary(self, trainer):
        self.calls.append("on_step_boundary")

    def hear(self):
        self.calls.append("hear")


class Always(Callback):
    """Has the same hooks for every step."""

    def __init__(self) -> None:
        self.num = 0

    def on_before_optimizer_step(self, trainer, model, optimizer):
        self.num += 1


def calls_of(table: HookTable, heard: Heard) -> list[str]:
    heard.calls.clear()
    table.on_before_optimizer_step(None, None, None)
    table.on_train_batch_end(None, None, None, None, 0)
    table.on_step_boundary(None)
    table.call(None, "hear")
    return list(heard.calls)


def test_a_table_off_log_steps_leaves_out_the_hooks_for_log_steps_alone() -> None:
    heard, always = Heard(), Always()
    table = HookTable([heard, always])
    quiet, rehearsed = table.off_log_steps(), table.off_log_steps(rehearses=True)
    assert calls_of(quiet, heard) == ["on_step_boundary", "hear"]
    assert calls_of(rehearsed, heard) == [TRACED, "on_step_boundary", "hear"]
    assert calls_of(table, heard) == [TRACED, OUTSIDE, "on_step_boundary", "hear"]
    assert always.num == 3


def test_listeners_of_a_hook_keep_their_order_off_log_steps() -> None:
    order = []

    class Named(Callback):
        def __init__(self, name: str, for_log: bool) -> None:
            self.name = name
            if for_log:
                self.log_step_hooks = frozenset({TRACED})

        def on_before_optimizer_step(self, trainer, model, optimizer):
            order.append(self.name)

    table = HookTable([Named("a", False), Named("b", True), Named("c", False), Named("d", True)])
    table.off_log_steps().on_before_optimizer_step(None, None, None)
    assert order == ["a", "c"]


def listeners_of(table: HookTable) -> dict[str, list[Any]]:
    return {name: [one for one, _ in table._listeners[name]] for name in HOOKS}


class ComparesTables(Callback):
    """Notes at each batch whether the tables are those that rebuilding them makes."""

    def __init__(self) -> None:
        self.found: list[bool] = []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        tables = trainer.callbacks.log_hooks, trainer.callbacks.quiet_hooks
        trainer.callbacks.rebuild()
        again = trainer.callbacks.log_hooks, trainer.callbacks.quiet_hooks
        self.found.append([*map(listeners_of, tables)] == [*map(listeners_of, again)])
        trainer.callbacks.log_hooks, trainer.callbacks.quiet_hooks = tables


@pytest.mark.parametrize(
    "settings",
    [{}, {"grad_accum_steps": 2}, {"sparsity": 0.5}, {"autorestart": AutoRestart(2)}],
    ids=["plain", "accumulation", "sparsity", "restarts"],
)
def test_a_fit_finds_the_tables_of_its_settings(trainer_of, settings) -> None:
    compares = ComparesTables()
    trainer = trainer_of(compares, ComputeNorm(), max_steps=12, **settings)
    trainer.fit(tiny_batches(24))
    assert compares.found == [True] * len(compares.found)
    assert len(compares.found) >= 12


class DecidesInSetup(Heard):
    """Knows only in set-up which of its hooks are for log steps."""

    log_step_hooks = frozenset()

    def setup(self, trainer):
        self.log_step_hooks = frozenset({OUTSIDE})


def test_a_callback_may_decide_in_setup_which_hooks_are_for_log_steps(trainer_of) -> None:
    decides = DecidesInSetup()
    trainer_of(decides, max_steps=4, logging=Logging(log_steps=3)).fit(tiny_batches(4))
    assert decides.calls.count(OUTSIDE) == 2  # steps 3 and 4
    assert decides.calls.count("on_step_boundary") == 4
