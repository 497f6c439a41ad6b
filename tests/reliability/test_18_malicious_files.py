"""Code instead of data: pickles in any file, names outside the folder, classes by name."""

from __future__ import annotations

import json
import os
import pickle
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from modelzoo_trainer import checkpointing
from modelzoo_trainer.errors import CheckpointError
from tests.doubles import make_trainer, tiny_batches
from tests.reliability.sealing import STATE, seal
from tests.reliability.states import make


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return (Path.touch, (self.canary,))


@pytest.fixture
def canary(tmp_path):
    path = tmp_path / "canary"
    pickle.loads(pickle.dumps(Payload(path)))  # it would work
    path.unlink()
    yield path
    assert not path.exists()


def pickled(canary: Path, kind: str) -> bytes:
    if kind == "pickle":
        return pickle.dumps(Payload(canary))
    path = canary.with_name("saved.pt")
    torch.save({"model": Payload(canary)}, path)
    return path.read_bytes()


def refused(path: Path) -> str:
    """Return why a checkpoint is refused, by whoever reads one."""
    with pytest.raises(CheckpointError) as caught:
        checkpointing.load(path)
    checkpointing.verify(path)
    checkpointing.list_checkpoints(path.parent)
    return str(caught.value)


@pytest.mark.parametrize("is_sealed", [False, True], ids=["as it is", "with digests"])
@pytest.mark.parametrize("kind", ["pickle", "torch.save"])
@pytest.mark.slow_cases(every=4)
def test_a_pickle_in_the_place_of_any_file_is_not_run(
    tmp_path, count, canary, kind, is_sealed
) -> None:
    names = sorted(file.name for file in make(tmp_path / "good", 1)[0].iterdir())
    for number, name in enumerate(names):
        path = make(tmp_path / f"run-{number}", 1)[0]
        (path / name).write_bytes(pickled(canary, kind))
        if is_sealed and name != "manifest.json":
            seal(path)
        assert path.name in refused(path)
    count(trials=len(names), executed=0)


@pytest.mark.parametrize("name", [".metadata", "data.pkl", "model.pt", "optimizer.bin"])
def test_a_pickle_beside_the_files_is_not_run(tmp_path, count, canary, name) -> None:
    path = make(tmp_path / "run", 1)[0]
    (path / name).write_bytes(pickled(canary, "pickle"))
    assert name in refused(path)
    count(trials=1, executed=0)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "pytorch_model.bin"])
def test_a_pickle_that_is_named_as_weights_is_not_run(tmp_path, count, canary, name) -> None:
    path = tmp_path / name
    path.write_bytes(pickled(canary, "torch.save"))
    with pytest.raises(CheckpointError, match=name):
        checkpointing.read_weights(path)
    trainer = make_trainer(tmp_path / "run")
    with pytest.raises(CheckpointError, match=name):
        trainer.fit(tiny_batches(2), ckpt_path=path)
    trainer.close()
    count(trials=2, executed=0)


OUTSIDE = [
    *("../secret.json", "/etc/passwd", "..", ".", "", "a/b.json", "manifest.json"),
    *("..\\secret.json", "x\x00.json", "state.json/../../secret.json", "secret.txt"),
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest_that_names_a_file_elsewhere_is_refused(tmp_path, count, name) -> None:
    path = make(tmp_path / "run", 1)[0]
    data = b'{"is": "secret"}'
    (tmp_path / "run" / "secret.json").write_bytes(data)

    def add(manifest) -> None:
        manifest["files"][name] = dict(manifest["files"][STATE], size_bytes=len(data))

    seal(path, add)
    assert path.name in refused(path)
    count(trials=1)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_link_that_leads_outside_is_refused(tmp_path, count, what) -> None:
    path = make(tmp_path / "run", 1)[0]
    outside = tmp_path / "outside"
    (path if what == "folder" else path / STATE).rename(outside)
    (path if what == "folder" else path / STATE).symlink_to(outside)
    assert "link" in refused(path)
    count(trials=1)


def test_what_is_deleted_is_a_checkpoint_and_nothing_behind_a_link(tmp_path, count) -> None:
    real = make(tmp_path / "real", 1)[0]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "checkpoint_1").symlink_to(real)
    (folder / "precious").mkdir()
    (folder / "precious" / "thesis.txt").touch()
    for path in (folder / "checkpoint_1", folder / "precious", folder / ".." / "real"):
        with pytest.raises(CheckpointError):
            checkpointing.delete(path)
    assert checkpointing.verify(real) == []
    assert (folder / "precious" / "thesis.txt").exists()
    count(trials=3)


CALLS = ["os.system", "canary_module.Boom", "builtins.eval", "torch.load", "pickle.loads", "exec"]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.slow_cases(every=4)
def test_a_name_in_a_state_is_never_imported_or_called(
    tmp_path, count, canary, monkeypatch, name
) -> None:
    source = f"import pathlib\npathlib.Path({str(canary)!r}).touch()\nclass Boom: pass\n"
    (tmp_path / "canary_module.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    command = f"touch {canary}"
    values = [
        {"__type__": name, "items": [command], "args": [command], "value": command},
        {"_target_": name, "_args_": [command], "class_path": name, "__reduce__": [name, command]},
    ]
    for number, value in enumerate(values):
        path = make(tmp_path / f"run-{number}", 1)[0]
        state = json.loads((path / STATE).read_text())
        state["callbacks"] = {name: value}
        (path / STATE).write_text(json.dumps(state))
        seal(path)
        if "__type__" in value:
            refused(path)
        else:
            assert checkpointing.load(path)["callbacks"] == {name: value}  # data, nothing else
    assert "canary_module" not in sys.modules
    count(trials=len(values), executed=0)


def test_a_checkpoint_of_torch_distributed_is_refused_unread(tmp_path, count, canary) -> None:
    path = tmp_path / "run" / "checkpoint_1"
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(pickled(canary, "pickle"))
    with zipfile.ZipFile(path / "__0_0.distcp", "w") as archive:
        archive.writestr("archive/data.pkl", pickled(canary, "pickle"))
    refused(path)
    trainer = make_trainer(tmp_path / "run")
    with pytest.raises(CheckpointError):
        trainer.fit(tiny_batches(2), ckpt_path=path)
    trainer.close()
    count(trials=1, executed=0)


def test_files_are_private_to_whom_the_umask_says(tmp_path, count) -> None:
    before = os.umask(0o027)
    try:
        path = make(tmp_path / "run", 1)[0]
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}
    assert path.stat().st_mode & 0o777 == 0o750
    count(trials=1)
