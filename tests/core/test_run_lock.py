"""One run per folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from doubles import make_trainer, tiny_batches

from modelzoo_trainer import Callback, ConfigError
from modelzoo_trainer.core.run_lock import LOCK_NAME

pytest.importorskip("fcntl")

HOLD = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(descriptor, fcntl.LOCK_EX)
os.ftruncate(descriptor, 0)
os.pwrite(descriptor, sys.argv[2].encode(), 0)
print("held", flush=True)
if len(sys.argv) > 3 and os.fork() == 0:  # as a worker that outlives its process
    os.close(1)
sys.stdin.read()
"""
FACTS = '{"pid": 4711, "host": "node7", "since": "2026-01-01 12:00:00"}'


class Holder:
    """Another process that holds the lock of a folder."""

    def __init__(self, folder: Path, text: str = FACTS, *more: str) -> None:
        folder.mkdir(exist_ok=True)
        arguments = [sys.executable, "-c", HOLD, str(folder / LOCK_NAME), text, *more]
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def holder(tmp_path):
    made = Holder(tmp_path / "run")
    yield made
    made.end()


def test_a_folder_that_another_process_holds_is_refused(trainer_of, holder) -> None:
    with pytest.raises(
        ConfigError,
        match=r"in use by process 4711 on node7 since 2026-01-01 12:00:00. Wait until .* another",
    ):
        trainer_of()


def test_what_a_refused_trainer_found_is_left_as_it_was(trainer_of, holder, tmp_path) -> None:
    with pytest.raises(ConfigError):
        trainer_of()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK_NAME]
    assert (tmp_path / "run" / LOCK_NAME).read_text() == FACTS


@pytest.mark.parametrize("text", ["", "nonsense", "[]", '{"pid": 1}'])
def test_a_holder_who_does_not_say_who_it_is_is_refused_too(trainer_of, tmp_path, text) -> None:
    holder = Holder(tmp_path / "run", text)
    with pytest.raises(ConfigError, match="in use by another process"):
        trainer_of()
    holder.end()


def test_a_lock_dies_with_its_process(trainer_of, holder) -> None:
    holder.end()
    trainer_of().fit(tiny_batches(1))


def test_a_child_that_outlives_the_holder_does_not_keep_the_lock(trainer_of, tmp_path) -> None:
    holder = Holder(tmp_path / "run", FACTS, "fork")
    time.sleep(0.05)
    os.kill(holder.process.pid, signal.SIGKILL)
    holder.process.wait()
    trainer_of().fit(tiny_batches(1))
    holder.end()


def test_trainers_of_one_process_share_a_folder_one_after_another(trainer_of) -> None:
    first, second = trainer_of(), trainer_of()
    first.fit(tiny_batches(1))
    first.close()
    second.fit(tiny_batches(1))


def test_the_lock_is_free_when_the_last_trainer_is_closed(trainer_of, tmp_path) -> None:
    first, second = trainer_of(), trainer_of()
    first.close()
    program = f"""
import fcntl, os
descriptor = os.open({str(tmp_path / "run" / LOCK_NAME)!r}, os.O_RDWR)
try:
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("free")
except OSError:
    print("held")
"""

    def state() -> str:
        return subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.strip()

    assert state() == "held"
    second.close()
    assert state() == "free"


def test_two_trainers_of_one_process_do_not_fit_in_one_folder_at_once(trainer_of, tmp_path) -> None:
    class Nested(Callback):
        def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
            inner = make_trainer(tmp_path / "run")
            with pytest.raises(ConfigError, match="being trained in by another trainer"):
                inner.fit(tiny_batches(1))
            inner.close()

    trainer = trainer_of(Nested())
    trainer.fit(tiny_batches(2))
    assert trainer.global_step == 2
    trainer_of().fit(tiny_batches(1))


def test_a_lock_that_is_a_link_is_refused(trainer_of, tmp_path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "run" / LOCK_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be used"):
        trainer_of()
    assert (tmp_path / "elsewhere").read_text() == "precious"
