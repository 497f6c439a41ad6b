"""Files of a run that are not regular files are refused, without waiting for their other end."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer import Checkpoint, ConfigError
from modelzoo_trainer.base.regular_files import (
    open_regular,
    outside_target,
    read_bytes,
    read_text,
    require_inside,
    require_regular,
)
from modelzoo_trainer.callbacks import SpikeDetection
from modelzoo_trainer.loggers import CSVLogger, JsonlLogger
from modelzoo_trainer.loggers.file_logger import cut_back
from modelzoo_trainer.loggers.service_logger import ReachedStep
from tests.doubles import tiny_batches

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")


@pytest.fixture(autouse=True)
def _impatient() -> Iterator[None]:
    """Fail a test that waits for the other end of a pipe."""

    def give_up(*_: object) -> None:
        raise AssertionError("it was waited for")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_pipes_sockets_and_devices_are_distinguished_from_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for name in ("file", "missing", "."):
            require_regular(tmp_path / name)
        require_regular(Path("/dev/null"), allow_device=True)
        with pytest.raises(ConfigError, match=r"pipe' is a named pipe; .* Remove it"):
            require_regular(tmp_path / "pipe", allow_device=True)
        with pytest.raises(ConfigError, match="socket' is a socket"):
            require_regular(tmp_path / "socket")
        with pytest.raises(ConfigError, match="/dev/null' is a device"):
            require_regular(Path("/dev/null"))


def laid(path: Path, kind: str) -> Path:
    """Lay something that is not a regular file."""
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "loop":
            path.symlink_to(path)
        case "socket":
            os.mknod(path, stat.S_IFSOCK | 0o600)
    return path


KINDS = ("pipe", "device", "folder", "loop", "socket")


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    for read in (open_regular, read_bytes, read_text):
        path = laid(tmp_path / read.__name__, kind)
        with pytest.raises(OSError, match=read.__name__):
            read(path)


def test_a_file_is_read_up_to_a_size_and_inside_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "other").write_text("text")
    (tmp_path / "run" / "own").write_text("words")
    (tmp_path / "run" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "run" / "near").symlink_to("own")
    assert read_text(tmp_path / "run" / "link") == "text"
    assert read_text(tmp_path / "run" / "near", most=5, inside=tmp_path / "run") == "words"
    if Path("/proc/self/status").exists():  # whose size is 0
        assert b"Name:" in read_bytes(Path("/proc/self/status"))
    with pytest.raises(OSError, match="too large"):
        read_bytes(tmp_path / "other", most=3)
    with pytest.raises(OSError, match="link out of its folder"):
        read_bytes(tmp_path / "run" / "link", inside=tmp_path / "run")


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_in_the_shared_memory_of_other_runs_is_not_waited_for(
    kind: str, trainer_of: Any, tmp_path: Path
) -> None:
    home = tmp_path / "memory" / f"modelzoo_trainer-{os.getuid()}"
    (home / "of-another-run").mkdir(parents=True)
    home.chmod(0o700)
    laid(home / "of-another-run" / "run.json", kind)
    memory = {"steps": 1, "path": str(home.parent)}
    trainer = trainer_of(checkpoint=Checkpoint(steps=2, memory=memory))
    trainer.fit(tiny_batches(2))
    assert trainer.global_step == 2


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (".lock", {}),
        ("metrics.jsonl", {"loggers": [JsonlLogger()]}),
        ("metrics.csv", {"loggers": [CSVLogger()]}),
        ("skip_batches.json", {"callbacks": [SpikeDetection()]}),
    ],
)
def test_a_pipe_in_the_place_of_a_runs_file_is_refused_and_not_waited_for(
    trainer_of, tmp_path, name, parts
) -> None:
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / name)
    with pytest.raises(ConfigError, match=f"{name}' is a named pipe"):
        trainer_of(*parts.pop("callbacks", ()), **parts).fit(tiny_batches(1))


def test_a_device_is_refused_in_a_runs_folder_and_taken_where_it_is_named(
    trainer_of, tmp_path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/null")
    with pytest.raises(ConfigError, match=r"metrics.jsonl' is a device"):
        trainer_of(loggers=[JsonlLogger()])
    trainer_of(loggers=[JsonlLogger(path=Path("/dev/null"))]).fit(tiny_batches(1))


def test_a_pipe_in_the_place_of_a_number_of_a_service_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".wandb-a.step")
    with pytest.raises(ConfigError, match=r"wandb-a.step' is a named pipe"):
        ReachedStep(tmp_path / ".wandb-a.step")


def test_a_pipe_in_the_place_of_a_file_that_is_being_written_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1, "time": 1.0}\n{"step": 2, "time": 1.0}\n')
    os.mkfifo(tmp_path / ".m.jsonl.new")
    cut_back(path, 1)
    assert path.read_text() == '{"step": 1, "time": 1.0}\n'
    assert os.listdir(tmp_path) == ["m.jsonl"]


def test_a_link_is_followed_within_its_folder_and_not_out_of_it(tmp_path: Path) -> None:
    model, other = tmp_path / "model", tmp_path / "model_2"
    (model / "part").mkdir(parents=True)
    other.mkdir()
    for path in (model / "part" / "a", other / "a"):
        path.write_text("{}")
    for name, target in (("in", "part/a"), ("up", "part/../part/a"), ("gone", "nowhere")):
        (model / name).symlink_to(target)
        assert outside_target(model / name, model) is None
    for name, target in (("out", "../model_2/a"), ("whole", other / "a"), ("lost", "/nowhere")):
        (model / name).symlink_to(target)
        with pytest.raises(ConfigError, match=rf"model/{name}' is a symbolic link to '/.*outside"):
            require_inside(model / name, model)
    (model / "chain").symlink_to("out")
    (model / "folder").symlink_to(other)
    assert outside_target(model / "chain", model) == (other / "a").resolve()
    assert outside_target(model / "folder" / "a", model) == (other / "a").resolve()
    (tmp_path / "link").symlink_to(model)  # the folder itself may be given by a link
    assert outside_target(tmp_path / "link" / "in", tmp_path / "link") is None


def test_blobs_of_the_same_repository_are_inside_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    for name in ("models--a--b", "models--a--c", "anything"):
        (tmp_path / name / "blobs").mkdir(parents=True)
        (tmp_path / name / "blobs" / "0123").write_text("{}")
        (tmp_path / name / "snapshots" / "main").mkdir(parents=True)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "main"
    (snapshot / "config.json").symlink_to("../../blobs/0123")
    require_inside(snapshot / "config.json", snapshot)
    (snapshot / "vocab.txt").symlink_to("../../../models--a--c/blobs/0123")
    (snapshot / "merges.txt").symlink_to("../../refs")
    plain = tmp_path / "anything" / "snapshots" / "main"  # no repository of the Hub
    (plain / "config.json").symlink_to("../../blobs/0123")
    for path in (snapshot / "vocab.txt", snapshot / "merges.txt", plain / "config.json"):
        with pytest.raises(ConfigError, match="outside of its folder"):
            require_inside(path, path.parent)
