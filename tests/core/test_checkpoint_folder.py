"""A folder of checkpoints that is another one than `model_dir`, or has what a run does not load."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer import Callback, Checkpoint, ConfigError, checkpointing
from tests.doubles import tiny_batches

HOLD = """
import sys
from pathlib import Path
from modelzoo_trainer.core.run_lock import FolderLock
FolderLock("checkpoint_root").take(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("held") / "root"


@pytest.fixture(scope="module")
def holder(held: Path) -> Any:
    """Another process that writes checkpoints in the folder `held`."""
    arguments = [sys.executable, "-c", HOLD, str(held)]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def fit(trainer_of: Any, folder: Path, root: Path, num: int = 4, *callbacks: Any) -> Any:
    checkpoint = Checkpoint(steps=2, checkpoint_root=root)
    trainer = trainer_of(*callbacks, model_dir=folder, checkpoint=checkpoint, max_steps=num)
    trainer.fit(tiny_batches(10))
    return trainer


# ---- one run at a time


@pytest.mark.slow
def test_a_folder_that_another_process_writes_to_is_refused(
    trainer_of, tmp_path, held, holder
) -> None:
    message = rf"checkpoint_root '{held}' is in use by process {holder.pid} on .* checkpoint_root"
    with pytest.raises(ConfigError, match=message):
        fit(trainer_of, tmp_path / "run", held)


@pytest.mark.usefixtures("holder")
def test_a_run_that_writes_none_may_read_there(trainer_of, tmp_path, held) -> None:
    trainer = trainer_of(
        model_dir=tmp_path / "run", checkpoint=Checkpoint(checkpoint_root=held), max_steps=1
    )
    trainer.fit(tiny_batches(1))
    assert trainer.global_step == 1


@pytest.mark.slow
def test_the_folder_is_free_after_a_fit(trainer_of, tmp_path, root) -> None:
    fit(trainer_of, tmp_path / "run", root)
    subprocess.run(
        [sys.executable, "-c", HOLD, str(root)], stdin=subprocess.DEVNULL, check=True, timeout=60
    )


def test_two_trainers_do_not_write_there_at_once(trainer_of, tmp_path, root) -> None:
    class Nested(Callback):
        def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
            with pytest.raises(ConfigError, match=r"checkpoint_root '.*' "):
                fit(trainer_of, tmp_path / "inner", root)

    assert fit(trainer_of, tmp_path / "run", root, 2, Nested()).global_step == 2


def test_what_a_crash_left_over_there_is_removed(trainer_of, tmp_path, root) -> None:
    left = root / ".tmp-checkpoint_7-999999999-abcdef01"
    left.mkdir(parents=True)
    (left / "state.json").write_text("{")
    fit(trainer_of, tmp_path / "run", root)
    assert not left.exists()


# ---- whose they are


def test_the_checkpoint_of_another_run_is_told(trainer_of, tmp_path, root, caplog) -> None:
    fit(trainer_of, tmp_path / "one", root)
    fit(trainer_of, tmp_path / "one", root, 6)
    assert "another model_dir" not in caplog.text
    fit(trainer_of, tmp_path / "two", root, 8)
    told = [line for line in caplog.messages if "another model_dir" in line]
    assert len(told) == 1
    assert str(root / "checkpoint_6") in told[0]
    assert str(tmp_path / "one") in told[0]


def test_a_run_that_was_moved_with_its_checkpoints_is_still_their_own(
    trainer_of, tmp_path, caplog
) -> None:
    fit(trainer_of, tmp_path / "a" / "run", tmp_path / "a" / "root").close()
    shutil.move(tmp_path / "a", tmp_path / "b")
    fit(trainer_of, tmp_path / "b" / "run", tmp_path / "b" / "root", 6)
    assert "another model_dir" not in caplog.text


def test_checkpoints_of_model_dir_do_not_say_where_it_is(trainer_of, tmp_path) -> None:
    trainer = fit(trainer_of, tmp_path / "run", tmp_path / "run")
    assert "model_dir" not in checkpointing.load(trainer.model_dir / "checkpoint_4")


# ---- other names


def test_checkpoints_of_other_names_are_told_when_a_run_begins(
    trainer_of, tmp_path, caplog
) -> None:
    folder = tmp_path / "run"
    fit(trainer_of, folder, folder)
    assert "checkpoint_name" not in caplog.text
    checkpoint = Checkpoint(steps=2, checkpoint_name="ck_{step}")
    trainer_of(model_dir=folder, checkpoint=checkpoint, max_steps=2).fit(tiny_batches(10))
    told = [line for line in caplog.messages if "checkpoint_name" in line]
    assert told == [
        f"Starting at step 0: no checkpoint in {folder} matches checkpoint.checkpoint_name "
        f"'ck_{{step}}' (found: 2 with other names, such as checkpoint_4). To resume from one, "
        f"pass its path as ckpt_path."
    ]


# ---- loading that fails


class Refusing(Callback):
    """Cannot take its state back."""

    def state_dict(self):
        return {"n": 1}

    def load_state_dict(self, state):
        raise KeyError("gone")


def test_a_state_that_was_loaded_in_part_is_not_trained_on(trainer_of, tmp_path) -> None:
    folder = tmp_path / "run"
    fit(trainer_of, folder, folder, 4, Refusing())
    trainer = trainer_of(Refusing(), model_dir=folder, max_steps=6)
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            trainer.fit(tiny_batches(10))
        assert "raised in Refusing.load_state_dict" in caught.value.__notes__
