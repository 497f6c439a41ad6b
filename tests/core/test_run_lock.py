"""One run per folder."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from modelzoo_trainer import Callback, Checkpoint, ConfigError
from modelzoo_trainer.core import run_lock
from modelzoo_trainer.core.run_lock import LOCK_NAME, FolderLock
from tests.doubles import make_trainer, tiny_batches

fcntl = pytest.importorskip("fcntl")

HOLD = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
os.ftruncate(descriptor, 0)
os.pwrite(descriptor, sys.argv[2].replace("PID", str(os.getpid())).encode(), 0)
if len(sys.argv) > 3 and os.fork() == 0:  # a child that outlives its process with the lock
    os.close(1)
else:
    print("held", flush=True)
sys.stdin.read()
"""
TAKE = """
import os, sys
from pathlib import Path
from modelzoo_trainer.core.run_lock import FolderLock
FolderLock("model_dir").take(Path(sys.argv[1]).parent)
if os.fork() == 0:  # a child that outlives its process
    print("held", flush=True)
sys.stdin.read()
"""
FACTS = '{"pid": 4711, "host": "node7", "since": "2026-01-01 12:00:00"}'
OURS = FACTS.replace("4711", "PID").replace("node7", platform.node())


class Holder:
    """Another process that holds the lock of a folder."""

    def __init__(self, folder: Path, text: str = FACTS, *more: str, program: str = HOLD) -> None:
        folder.mkdir(exist_ok=True)
        arguments = [sys.executable, "-c", program, str(folder / LOCK_NAME), text, *more]
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "held\n"

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        if self.process.stdout.closed:  # a second call
            return
        with self.process as process:  # closes both pipes
            process.kill()
            process.stdin.close()  # its child, if it has one, ends with that
            process.stdout.read()


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


@pytest.mark.slow
def test_a_child_that_was_forked_does_not_keep_the_lock(trainer_of, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run_lock, "ORPHANS_S", 0.0)
    holder = Holder(tmp_path / "run", program=TAKE)
    holder.kill()
    trainer_of().fit(tiny_batches(1))
    holder.end()


def test_children_of_a_dead_holder_are_waited_for(trainer_of, tmp_path, monkeypatch) -> None:
    is_dead = run_lock._holder_is_dead
    asked = []

    def ask(descriptor: int) -> bool:
        holder.process.stdin.close()  # its child, which has been found with the lock, may end
        asked.append(is_dead(descriptor))
        return asked[-1]

    monkeypatch.setattr(run_lock, "_holder_is_dead", ask)
    monkeypatch.setattr(run_lock, "ORPHANS_S", 60.0)
    holder = Holder(tmp_path / "run", OURS, "child")
    holder.kill()
    trainer_of().fit(tiny_batches(1))
    holder.end()
    assert asked
    assert all(asked)


def test_children_of_a_dead_holder_are_not_waited_for_forever(
    trainer_of, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(run_lock, "ORPHANS_S", 0.2)
    holder = Holder(tmp_path / "run", OURS, "child")
    holder.kill()
    with pytest.raises(ConfigError, match=f"in use by process {holder.process.pid} on"):
        trainer_of()
    holder.end()


def test_a_holder_that_lives_is_not_waited_for(trainer_of, tmp_path, monkeypatch) -> None:
    def sleep(seconds: float) -> None:
        pytest.fail("it is waited for")

    clock = SimpleNamespace(monotonic=time.monotonic, strftime=time.strftime, sleep=sleep)
    monkeypatch.setattr(run_lock, "time", clock)
    holder = Holder(tmp_path / "run", OURS)
    with pytest.raises(ConfigError, match="in use by process"):
        trainer_of()
    holder.end()


def is_free(folder: Path) -> bool:
    """Return whether whoever opens the lock anew would get it."""
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def test_a_copy_of_the_folder_does_not_free_it(trainer_of, tmp_path) -> None:
    trainer = trainer_of()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert not is_free(tmp_path / "run")
    trainer.close()
    assert is_free(tmp_path / "run")


def test_a_file_that_must_be_writable_to_be_locked_is(tmp_path, monkeypatch) -> None:
    lock_file = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:  # as on NFS
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        lock_file(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock = FolderLock("model_dir")
    lock.take(tmp_path)
    assert lock.is_held
    assert not is_free(tmp_path)
    lock.release()
    assert is_free(tmp_path)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_does_not_free_the_folder(tmp_path) -> None:
    lock = FolderLock("model_dir")
    lock.take(tmp_path)
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not is_free(tmp_path)
    lock.release()
    assert is_free(tmp_path)


def test_trainers_of_one_process_share_a_folder_one_after_another(trainer_of) -> None:
    first, second = trainer_of(), trainer_of()
    first.fit(tiny_batches(1))
    first.close()
    second.fit(tiny_batches(1))


def test_the_lock_is_free_when_the_last_trainer_is_closed(trainer_of, tmp_path) -> None:
    first, second = trainer_of(), trainer_of()
    first.close()
    assert not is_free(tmp_path / "run")
    second.close()
    assert is_free(tmp_path / "run")


def test_two_trainers_of_one_process_do_not_fit_in_one_folder_at_once(trainer_of, tmp_path) -> None:
    class Nested(Callback):
        def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
            inner = make_trainer(tmp_path / "run")
            with pytest.raises(ConfigError, match=r"model_dir .*another trainer"):
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


# ---- a lock that is lost during a run


class Between(Callback):
    """Does something after the first step."""

    def __init__(self, do) -> None:
        self.do = do

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if batch_idx == 0:
            self.do()


def saving(trainer_of, folder: Path, do) -> None:
    trainer = trainer_of(Between(do), model_dir=folder, checkpoint=Checkpoint(steps=2))
    trainer.fit(tiny_batches(4))
    trainer.close()


def test_a_lock_file_that_is_removed_during_a_run_is_locked_again(
    trainer_of, tmp_path, caplog
) -> None:
    run = tmp_path / "run"
    is_locked = []

    def remove() -> None:
        (run / LOCK_NAME).unlink()

    class Look(Callback):
        def on_after_save_checkpoint(self, trainer, ckpt_path):
            is_locked.append(not is_free(run))

    trainer = trainer_of(Between(remove), Look(), model_dir=run, checkpoint=Checkpoint(steps=2))
    trainer.fit(tiny_batches(4))
    assert is_locked == [True, True]
    assert caplog.text.count("was removed or replaced during the run") == 1
    trainer.close()
    assert is_free(run)


def test_a_folder_that_is_removed_during_a_run_is_made_and_locked_again(
    trainer_of, tmp_path, caplog
) -> None:
    saving(trainer_of, tmp_path / "run", lambda: shutil.rmtree(tmp_path / "run"))
    assert "the folder is locked again" in caplog.text
    assert (tmp_path / "run" / "checkpoint_4").is_dir()


@pytest.mark.parametrize("removed", [LOCK_NAME, "."])
def test_a_run_whose_folder_another_has_taken_writes_no_more_checkpoints(
    trainer_of, tmp_path, removed
) -> None:
    run = tmp_path / "run"
    holders = []

    def take_over() -> None:
        (run / removed).unlink() if removed == LOCK_NAME else shutil.rmtree(run)
        holders.append(Holder(run))

    with pytest.raises(
        ConfigError, match=r"lock file .* during this run, and .* in use by process 4711 on node7"
    ):
        saving(trainer_of, run, take_over)
    holders[0].end()
    assert not list(run.glob("checkpoint_*"))
    assert (run / LOCK_NAME).read_text() == FACTS


def test_a_second_fit_notices_that_another_run_has_taken_the_folder(trainer_of, tmp_path) -> None:
    trainer = trainer_of()
    trainer.fit(tiny_batches(1))
    (tmp_path / "run" / LOCK_NAME).unlink()
    holder = Holder(tmp_path / "run")
    with pytest.raises(ConfigError, match="in use by process 4711"):
        trainer.fit(tiny_batches(1))
    holder.end()


def test_a_checkpoint_root_that_another_run_has_taken_is_noticed(trainer_of, tmp_path) -> None:
    root = tmp_path / "root"
    holders = []

    def take_over() -> None:
        (root / LOCK_NAME).unlink()
        holders.append(Holder(root))

    checkpoint = Checkpoint(steps=2, checkpoint_root=root)
    trainer = trainer_of(Between(take_over), model_dir=tmp_path / "run", checkpoint=checkpoint)
    with pytest.raises(ConfigError, match=r"checkpoint_root .* in use by process 4711"):
        trainer.fit(tiny_batches(4))
    holders[0].end()


def test_a_disk_that_refuses_the_new_lock_does_not_end_the_run(
    trainer_of, tmp_path, monkeypatch, caplog
) -> None:
    def refuse(path, access) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    def remove() -> None:
        (tmp_path / "run" / LOCK_NAME).unlink()
        monkeypatch.setattr(run_lock, "_open", refuse)

    saving(trainer_of, tmp_path / "run", remove)
    assert "cannot be renewed ([Errno 30]" in caplog.text
    assert (tmp_path / "run" / "checkpoint_4").is_dir()


def test_trainers_of_one_process_still_share_a_lock_that_was_taken_again(
    trainer_of, tmp_path
) -> None:
    first, second = trainer_of(), trainer_of()
    (tmp_path / "run" / LOCK_NAME).unlink()
    first.fit(tiny_batches(1))
    first.close()
    assert not is_free(tmp_path / "run")
    second.close()
    assert is_free(tmp_path / "run")


class Retarget(Callback):
    """Point a link at another folder after the second step."""

    def __init__(self, link, target):
        self.link, self.target = link, target

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.global_step == 2:
            self.link.unlink()
            self.link.symlink_to(self.target)


@pytest.mark.parametrize("setting", ["model_dir", "checkpoint_root"])
def test_a_link_that_is_changed_during_a_run_is_noticed(tmp_path, caplog, setting):
    first, second, link = (tmp_path / name for name in ("first", "second", "link"))
    first.mkdir()
    second.mkdir()
    link.symlink_to(first)
    root = link if setting == "checkpoint_root" else None
    trainer = make_trainer(
        tmp_path / "run" if root else link,
        Retarget(link, second),
        checkpoint=Checkpoint(steps=1, checkpoint_root=root),
    )
    with trainer:
        trainer.fit(tiny_batches(4))
        told = [one for one in caplog.messages if "leads to another folder than when" in one]
        assert len(told) == 1
        assert setting in told[0]
        assert str(second) in told[0]
        if setting == "model_dir":  # both are locked
            for folder in (first, second):
                with pytest.raises(BlockingIOError), (folder / LOCK_NAME).open() as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for folder in (first, second):
        with (folder / LOCK_NAME).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_link_to_the_folder_of_another_run_ends_the_run(tmp_path):
    first, second, link = (tmp_path / name for name in ("first", "second", "link"))
    first.mkdir()
    second.mkdir()
    link.symlink_to(first)
    trainer = make_trainer(link, Retarget(link, second), checkpoint=Checkpoint(steps=1))
    holder = Holder(second)
    with (
        trainer,
        pytest.raises(ConfigError, match=r"leads to another folder.*in use by process 4711"),
    ):
        trainer.fit(tiny_batches(4))
    holder.end()
    assert not list(second.glob("checkpoint_*"))


def test_a_relative_checkpoint_root_is_the_same_folder_after_a_chdir(tmp_path, monkeypatch):
    class Leave(Callback):
        def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
            os.chdir(tmp_path / "other")

    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    checkpoint = Checkpoint(steps=2, checkpoint_root="saved")
    with make_trainer("run", Leave(), checkpoint=checkpoint) as trainer:
        trainer.fit(tiny_batches(4))
    assert (tmp_path / "saved/checkpoint_4").is_dir()
    assert not list((tmp_path / "other").iterdir())
