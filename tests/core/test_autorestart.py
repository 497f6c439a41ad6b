"""What a trainer knows of restarts, and the watchdog of a program without a supervisor."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from modelzoo_trainer import AutoRestart, Callback, Checkpoint, ConfigError, TrainingLoop
from modelzoo_trainer.callback import hook_names
from modelzoo_trainer.checkpointing import load
from tests.doubles import make_trainer, tiny_batches

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"max_num_restarts": -1},
            "autorestart.max_num_restarts: .* an integer >= 0 .*, got -1",
        ),
        (
            {"max_num_restarts": True},
            "autorestart.max_num_restarts: expected an integer .*, got true",
        ),
        (
            {"max_num_restarts": 1.5},
            "autorestart.max_num_restarts: expected an integer .*, got 1.5",
        ),
        ({"min_num_csx": 0}, "autorestart.min_num_csx: expected an integer > 0, got 0"),
        ({"hang_timeout": 0}, "autorestart.hang_timeout: .* a number of seconds > 0 .*, got 0"),
        ({"hang_timeout": "1"}, "autorestart.hang_timeout: .* a number of seconds > 0 .*, got '1'"),
        (
            {"startup_timeout": float("inf")},
            "autorestart.startup_timeout: .* seconds > 0 .* got inf",
        ),
        (
            {"startup_timeout": float("nan")},
            "autorestart.startup_timeout: .* seconds > 0 .* got nan",
        ),
    ],
)
def test_a_number_out_of_range_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        AutoRestart(**arguments)


@pytest.mark.parametrize(("num", "enabled"), [(None, False), (0, False), (1, True), (5, True)])
def test_it_is_on_if_there_are_restarts(num, enabled):
    assert AutoRestart(num).enabled is enabled
    assert AutoRestart(max_num_restarts=num, min_num_csx=2).enabled is enabled


def test_switched_off_it_listens_to_nothing_but_checkpoints():
    assert set(hook_names(AutoRestart())) == {"preprocess_checkpoint", "on_after_save_checkpoint"}
    assert list(hook_names(AutoRestart(1))) == list(hook_names(AutoRestart(hang_timeout=1)))


class Keeper(Callback):
    """Has state that only a restart needs, and notes who is called when."""

    def __init__(self) -> None:
        self.calls = []

    def on_save_checkpoint(self, trainer, state_dict):
        self.calls.append("save")

    def on_save_trainer_state(self, trainer, state_dict):
        state_dict["keeper"] = trainer.global_step
        self.calls.append("save state")

    def on_after_save_trainer_state(self, trainer, trainer_state_file):
        assert trainer_state_file.is_dir()
        self.calls.append(f"saved state {trainer_state_file.name}")

    def on_load_trainer_state(self, trainer, state_dict):
        self.calls.append(f"load state {state_dict}")

    def preprocess_checkpoint(self, trainer, state_dict):
        self.calls.append(f"preprocess {'__trainer_state__' in state_dict}")


def trainer_with(folder, keeper, autorestart=None):
    return make_trainer(
        folder,
        keeper,
        loop=TrainingLoop(max_steps=2, eval_frequency=None),
        checkpoint=Checkpoint(steps=2),
        autorestart=autorestart,
    )


def test_enabled_its_hooks_are_called_around_a_checkpoint(tmp_path):
    keeper = Keeper()
    with trainer_with(tmp_path, keeper, AutoRestart(1)) as trainer:
        trainer.fit(tiny_batches(2))
    assert keeper.calls == ["save", "save state", "saved state checkpoint_2"]
    assert load(tmp_path / "checkpoint_2")["__trainer_state__"] == {"keeper": 2}


def test_the_state_is_loaded_first_and_by_whoever_there_is(tmp_path):
    with trainer_with(tmp_path, Keeper(), AutoRestart(1)) as trainer:
        trainer.fit(tiny_batches(2))
    keeper = Keeper()
    with trainer_with(tmp_path, keeper) as trainer:
        trainer.fit(tiny_batches(2))
    assert keeper.calls == ["load state {'keeper': 2}", "preprocess False"]


def test_switched_off_nothing_of_it_is_saved(tmp_path):
    keeper = Keeper()
    with trainer_with(tmp_path, keeper) as trainer:
        trainer.fit(tiny_batches(2))
    assert keeper.calls == ["save"]
    assert "__trainer_state__" not in load(tmp_path / "checkpoint_2")


def test_a_callback_needs_neither_hook(tmp_path):
    with trainer_with(tmp_path, Callback(), AutoRestart(1)) as trainer:
        trainer.fit(tiny_batches(2))
    assert load(tmp_path / "checkpoint_2")["__trainer_state__"] == {}


class Look(Callback):
    """Asks for the position of the run as the watchdog does."""

    def __init__(self) -> None:
        self.seen = []

    def look(self, trainer, where):
        position = trainer.autorestart.position()
        self.seen.append((where, trainer.global_step, position.is_steady))
        return position

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.look(trainer, "train")

    def on_validate_batch_start(self, trainer, model, batch, batch_idx):
        self.look(trainer, "validate")

    def on_save_checkpoint(self, trainer, state_dict):
        self.look(trainer, "save")

    def on_after_save_checkpoint(self, trainer, ckpt_path):
        self.look(trainer, "saved")

    def on_validate_end(self, trainer, model, loop):
        self.look(trainer, "validated")


def steady(seen, where):
    return [(step, is_steady) for place, step, is_steady in seen if place == where]


def test_only_between_batches_that_should_not_take_long_a_run_is_watched_closely(tmp_path):
    look = Look()
    trainer = make_trainer(
        tmp_path,
        look,
        loop=TrainingLoop(max_steps=6, eval_frequency=6),
        checkpoint=Checkpoint(steps=4),
        autorestart=AutoRestart(1),
    )
    with trainer:
        trainer.fit(tiny_batches(6), tiny_batches(4))
    batches = [(0, False), (1, True), (2, True), (3, True), (4, True), (5, False)]
    assert steady(look.seen, "train") == batches  # compiling at first; the end of the pass at last
    assert steady(look.seen, "save") == [(4, False), (6, False)]
    assert steady(look.seen, "saved") == [(4, True), (6, False)]
    assert [one for _, one in steady(look.seen, "validate")] == [False, True, True, False]
    assert steady(look.seen, "validated") == [(6, False)]
    assert trainer.autorestart.position().is_steady is False


def test_a_new_stage_is_given_time_to_start_again(tmp_path):
    look = Look()
    trainer = make_trainer(
        tmp_path,
        look,
        loop=TrainingLoop(max_steps=6, eval_frequency=3),
        autorestart=AutoRestart(1),
    )
    with trainer:
        trainer.fit(tiny_batches(8), tiny_batches(1))
    assert [one for _, one in steady(look.seen, "train")] == [False, True, True] * 2


def test_every_batch_is_progress(tmp_path):
    class Collect(Look):
        def look(self, trainer, where):
            position = trainer.autorestart.position()
            self.seen.append((position.mark, position.count))

    collect = Collect()
    trainer = make_trainer(
        tmp_path,
        collect,
        loop=TrainingLoop(max_steps=4, eval_frequency=2),
        checkpoint=Checkpoint(steps=2),
        autorestart=AutoRestart(1),
    )
    with trainer:
        trainer.fit(tiny_batches(4), tiny_batches(3))
    pairs = zip(collect.seen, collect.seen[1:], strict=False)
    still = [one for one, following in pairs if one == following]
    assert len(collect.seen) == 4 + 2 * 3 + 2 * 2 + 2
    assert len(still) == 2  # from the last batch of a validation to its end


PROGRAM = """\
import sys, time
from dataclasses import replace
sys.path.insert(0, {root!r})
from tests.doubles import make_trainer, tiny_batches
from modelzoo_trainer import AutoRestart, Callback, TrainingLoop

class Hang(Callback):
    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.global_step == 4:
            self.sleep_here()

    def sleep_here(self):
        trainer.autorestart.is_there = True
        time.sleep(600)

class Patient(AutoRestart):
    is_there = False  # before that a late step is no hang, however short the limit

    def position(self):
        found = super().position()
        return replace(found, is_steady=found.is_steady and self.is_there)

trainer = make_trainer({folder!r}, Hang(), loop=TrainingLoop(max_steps=8, eval_frequency=None),
                       autorestart=Patient(hang_timeout=0.4))
trainer.fit(tiny_batches(8))
"""


@pytest.mark.slow
def test_a_program_that_asks_for_it_does_not_hang_forever(tmp_path):
    program = PROGRAM.format(root=str(ROOT), folder=str(tmp_path / "run"))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 1
    stacks = tmp_path / "run/logs/latest/stacks.txt"
    # Looks come each 0.1 s, or later on a busy machine.
    assert re.search(
        rf"no progress for [01] s\. Stacks: in {re.escape(str(stacks.parents[1]))}", done.stderr
    )
    assert "in sleep_here" in stacks.read_text()
