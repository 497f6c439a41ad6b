"""Mirrors of a store: what is saved on one machine is complete on another, or not there at all."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from modelzoo_trainer import checkpointing
from modelzoo_trainer.checkpointing import disk
from modelzoo_trainer.checkpointing.distributed import load_into, save_sharded
from modelzoo_trainer.checkpointing.manifest import read_manifest
from modelzoo_trainer.checkpointing.stores.cache import bound
from modelzoo_trainer.checkpointing.stores.mirror import Mirror, mirror_of, open_mirror
from modelzoo_trainer.checkpointing.stores.pulling import fetch, pull
from modelzoo_trainer.checkpointing.stores.pushing import Pusher
from modelzoo_trainer.checkpointing.stores.urls import StoreUrl
from modelzoo_trainer.errors import CheckpointError, ConfigError, NoCheckpoint, StoreError
from modelzoo_trainer.tools.checkpoints.overview import tensor_table
from modelzoo_trainer.zoo.conversion.lazy_checkpoint import open_model

pytest.importorskip("obstore")

_NUMBERS: Final = itertools.count()  # of buckets, which are kept in memory
STATE = {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "global_step": 4}
Machine = Callable[[str], Mirror]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return the mirror of one and the same URL on a machine of a name."""
    url = StoreUrl("memory", f"mirror-{next(_NUMBERS)}", "runs/a")
    return lambda name: open_mirror(url, cache_dir=tmp_path / name)


def push(mirror: Mirror) -> Pusher:
    pusher = Pusher(mirror, lambda: None)
    pusher.push()
    return pusher


def save(mirror: Mirror, step: int, **more: object) -> Path:
    path = mirror.path / f"checkpoint_{step}"
    checkpointing.save(path, {**STATE, "global_step": step, **more}, step=step)
    return path


def files_in(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def test_checkpoint_of_another_machine_is_listed_then_downloaded(machine: Machine) -> None:
    one, other = machine("one"), machine("other")
    path = save(one, 4)
    push(one)
    pull(other, owns=True)
    [found] = checkpointing.list_checkpoints(other.path)
    assert found.step == 4
    assert files_in(found.path) == {"manifest.json"}
    state = checkpointing.load(found.path)
    assert torch.equal(state["model"]["w"], STATE["model"]["w"])
    assert files_in(found.path) == files_in(path)
    assert checkpointing.verify(found.path) == []


def test_manifest_is_created_last(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = machine("one"), machine("other")
    save(one, 4)
    put = type(one.store).put

    def fail(store: object, name: str, *args: object, **options: object) -> None:
        if "tensors" in name or name.endswith(".safetensors"):
            raise StoreError("the store is down", is_temporary=True)
        put(store, name, *args, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(type(one.store), "put", fail)
        with pytest.raises(StoreError, match="down"):
            push(one)
    pull(other, owns=True)
    assert checkpointing.list_checkpoints(other.path) == []
    push(one)
    pull(other, owns=True)
    assert [info.step for info in checkpointing.list_checkpoints(other.path)] == [4]


def test_newest_checkpoint_is_uploaded_first(machine: Machine) -> None:
    one = machine("one")
    for step in (1, 2, 3):
        save(one, step)
    pusher = Pusher(one, lambda: None)
    assert pusher.pending().checkpoints == ["checkpoint_3", "checkpoint_2", "checkpoint_1"]
    pusher.push()
    assert not pusher.pending()


def test_deletion_is_repeated_in_the_store(machine: Machine) -> None:
    one, other = machine("one"), machine("other")
    path = save(one, 4)
    save(one, 5)
    push(one)
    pull(other, owns=True)
    checkpointing.delete(path)
    push(one)
    assert not [each.name for each in one.store.list("checkpoint_4")]
    pull(other, owns=True)
    assert [info.step for info in checkpointing.list_checkpoints(other.path)] == [5]


def test_deleted_name_is_used_again(machine: Machine) -> None:
    one, other = machine("one"), machine("other")
    push(one)
    save(one, 4)
    push(one)
    checkpointing.delete(one.path / "checkpoint_4")
    save(one, 4, seed=7)
    push(one)
    pull(other, owns=True)
    assert checkpointing.load(other.path / "checkpoint_4")["seed"] == 7


def test_replacement_waits_for_nothing_else(machine: Machine) -> None:
    """The only checkpoint of its kind is deleted and saved again, as after a rollback."""
    one, other = machine("one"), machine("other")
    save(one, 4)
    push(one)
    checkpointing.delete(one.path / "checkpoint_4")
    save(one, 4, seed=7)
    assert push(one).refused == {}
    assert checkpointing.load(fetch(other, "checkpoint_4"))["seed"] == 7
    assert len({each.name.split("/")[1] for each in one.store.list("checkpoint_4")}) == 2


def test_store_keeps_an_old_checkpoint_until_it_has_a_newer_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints are written and deleted faster than the store takes them."""
    one, other = machine("one"), machine("other")
    pusher = Pusher(one, lambda: None)
    put, num = type(one.store).put, 4

    def slowly(store: object, name: str, *args: object, **options: object) -> None:
        nonlocal num
        if name.startswith(f"checkpoint_{num}/") and name.endswith("state.json") and num < 8:
            checkpointing.delete(one.path / f"checkpoint_{num}")
            num += 1
            save(one, num)
        put(store, name, *args, **options)  # type: ignore[arg-type]

    save(one, 4)
    created = []
    create = type(one.store).create

    def note(store: object, name: str, data: bytes) -> bool:
        created.append(name)
        return create(store, name, data)  # type: ignore[arg-type]

    monkeypatch.setattr(type(one.store), "put", slowly)
    monkeypatch.setattr(type(one.store), "create", note)
    pusher.push()
    assert created == [f"checkpoint_{step}/manifest.json" for step in range(4, 9)]
    pull(other, owns=True)
    [found] = checkpointing.list_checkpoints(other.path)
    assert checkpointing.load(found.path)["global_step"] == found.step == 8


def test_deletion_in_the_store_by_hand_is_not_undone(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    one = machine("one")
    for step in (4, 5, 6):
        save(one, step)
    push(one)
    for step in (5, 6):
        one.store.delete(each.name for each in one.store.list(f"checkpoint_{step}"))
    pull(one, owns=True)
    assert not Pusher(one, lambda: None).pending()
    assert [info.step for info in checkpointing.list_checkpoints(one.path)] == [4]
    assert "was deleted from the store" in caplog.text


def test_damaged_local_copy_is_not_uploaded(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    one = machine("one")
    save(one, 4)
    push(one)
    path = save(one, 5)
    file = next(path.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    checkpointing.delete(one.path / "checkpoint_4")
    pusher = push(one)
    assert list(pusher.refused) == ["checkpoint_5"]
    assert "checksum" in caplog.text
    assert one.store.read("checkpoint_4/manifest.json")  # there is no newer one


def test_old_leftovers_of_uploads_are_removed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machine("one")
    save(one, 4)
    push(one)
    one.store.put(f"checkpoint_3/{'a' * 16}/state.json", b"1")
    Pusher(one, lambda: None).sweep()
    assert one.store.list("checkpoint_3")
    monkeypatch.setattr("modelzoo_trainer.checkpointing.stores.pushing._OLD_S", -1.0)
    Pusher(one, lambda: None).sweep()
    assert not one.store.list("checkpoint_3")
    assert len(one.store.list("checkpoint_4")) == 3


def test_checkpoint_that_a_listing_lacked_is_not_a_leftover(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = machine("one")
    save(one, 4)
    push(one)
    monkeypatch.setattr("modelzoo_trainer.checkpointing.stores.pushing._OLD_S", -1.0)
    forgetful = Pusher(one, lambda: None)
    forgetful.record.checkpoints.clear()
    forgetful.sweep()
    assert len(one.store.list("checkpoint_4")) == 3


def test_metrics_of_the_store_win(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    one, other = machine("one"), machine("other")
    (one.path / "metrics.jsonl").write_text("1\n")
    push(one)
    with (one.path / "metrics.jsonl").open("a") as file:
        file.write("2 of a run that was killed\n")
    pull(other, owns=True)
    with (other.path / "metrics.jsonl").open("a") as file:
        file.write("2\n")
    push(other)
    pull(one, owns=True)
    assert (one.path / "metrics.jsonl").read_text() == "1\n2\n"
    [aside] = one.folder.glob("set_aside/*/metrics.jsonl")
    assert "killed" in aside.read_text()
    assert str(aside) in caplog.text


def test_damage_in_the_store_is_noticed(machine: Machine) -> None:
    one, other = machine("one"), machine("other")
    save(one, 4)
    push(one)
    [name] = [x.name for x in one.store.list("") if x.name.endswith(".safetensors")]
    content = bytearray(one.store.read(name)[0])
    content[-1] ^= 1
    one.store.put(name, bytes(content))
    pull(other, owns=True)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpointing.load(other.path / "checkpoint_4")
    assert checkpointing.verify(other.path / "checkpoint_4")
    assert files_in(other.path / "checkpoint_4") <= {"manifest.json", "state.json"}


def test_missing_file_in_the_store_is_noticed(machine: Machine) -> None:
    one, other = machine("one"), machine("other")
    save(one, 4)
    push(one)
    one.store.delete(x.name for x in one.store.list("") if x.name.endswith("state.json"))
    pull(other, owns=True)
    with pytest.raises(CheckpointError, match="not complete"):
        checkpointing.load(other.path / "checkpoint_4")


def test_local_copies_are_bounded_and_downloaded_again(machine: Machine) -> None:
    one = machine("one")
    paths = [save(one, step) for step in (1, 2, 3)]
    pusher = Pusher(one, lambda: None)
    bound(one, pusher.record, 0)
    assert all(len(files_in(path)) > 1 for path in paths)  # none is in the store yet
    pusher.push()
    bound(one, pusher.record, 0)
    assert [len(files_in(path)) > 1 for path in paths] == [False, False, True]
    assert checkpointing.load(paths[0])["global_step"] == 1
    assert not pusher.pending()


def test_two_newest_copies_stay_by_default(machine: Machine) -> None:
    one = machine("one")
    paths = [save(one, step) for step in (1, 2, 3)]
    pusher = push(one)
    bound(one, pusher.record, None)
    assert [len(files_in(path)) > 1 for path in paths] == [False, True, True]


READERS = {
    "load": lambda path: checkpointing.load(path)["model"]["w"],
    "load_into": lambda path: load_into(path, {})["model"]["w"],
    "open_model": lambda path: open_model(path).read("w"),
    "tensor_table": lambda path: torch.zeros(tensor_table(path, read_manifest(path))[0].shape),
    "verify": lambda path: torch.zeros((2, 3)) if not checkpointing.verify(path) else None,
}


@pytest.mark.parametrize("save_as", [checkpointing.save, save_sharded])
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.slow_cases(every=4)
def test_a_copy_that_is_removed_before_it_is_opened_is_downloaded_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, read: Any, save_as: Any
) -> None:
    """The uploads of a run bound its local copy while it, or another program, reads."""
    one = machine("one")
    for step in (1, 2):
        save_as(one.path / f"checkpoint_{step}", STATE, step=step)
    pusher = push(one)
    path = one.path / "checkpoint_1"
    expected = read(path)
    removed = set()

    def before(function: Any) -> Any:
        def call(file: Path) -> Any:
            is_first = file.parent == path and file.name != "manifest.json"
            if is_first and (function, file) not in removed:
                removed.add((function, file))
                bound(one, pusher.record, 0)
            return function(file)

        return call

    monkeypatch.setattr(disk, "open_old", before(disk.open_old))
    for name in ("is_file", "lstat"):
        monkeypatch.setattr(Path, name, before(getattr(Path, name)))
    assert torch.equal(read(path), expected)
    assert removed


def test_metrics_and_logs_follow(machine: Machine) -> None:
    one, other = machine("one"), machine("other")
    (one.path / "logs/1").mkdir(parents=True)
    (one.path / "metrics.jsonl").write_text("1\n")
    (one.path / "logs/1/run.log").write_text("begin\n")
    (one.path / ".hidden").write_text("no")
    pusher = push(one)
    with (one.path / "metrics.jsonl").open("a") as file:
        file.write("2\n")
    assert pusher.pending().files == ["metrics.jsonl"]
    pusher.push()
    pull(other, owns=True)
    assert (other.path / "metrics.jsonl").read_text() == "1\n2\n"
    assert (other.path / "logs/1/run.log").read_text() == "begin\n"
    assert not (other.path / ".hidden").exists()
    assert not Pusher(other, lambda: None).pending()


def test_unsent_checkpoints_survive_a_restart(machine: Machine) -> None:
    one = machine("one")
    save(one, 4)
    push(one)
    save(one, 5)  # killed before the upload
    pull(one, owns=True)
    assert Pusher(one, lambda: None).pending().checkpoints == ["checkpoint_5"]


def test_unsent_checkpoints_are_set_aside_if_another_machine_went_on(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = machine("one"), machine("other")
    save(one, 4)
    push(one)
    save(one, 6)
    pull(other, owns=True)
    save(other, 5)
    push(other)
    pull(one, owns=True)
    assert [info.step for info in checkpointing.list_checkpoints(one.path)] == [4, 5]
    [aside] = one.folder.glob("set_aside/*/checkpoint_6")
    assert checkpointing.load(aside)["global_step"] == 6
    assert str(aside) in caplog.text


def test_conflicting_name_keeps_both(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    one, other = machine("one"), machine("other")
    save(one, 4)
    save(other, 4, seed=1)
    push(one)
    pusher = push(other)
    assert pusher.refused == {"checkpoint_4": "the store has another checkpoint of this name"}
    assert "checkpoint_4" in caplog.text
    pull(other, owns=True)
    assert "seed" not in checkpointing.load(other.path / "checkpoint_4")
    assert list(other.folder.glob("set_aside/*/checkpoint_4"))


def test_upload_is_repeated_without_harm(machine: Machine) -> None:
    one = machine("one")
    save(one, 4)
    push(one)
    (one.folder / "record.json").unlink()
    assert push(one).refused == {}


def test_lost_bucket_is_filled_again(machine: Machine) -> None:
    one = machine("one")
    save(one, 4)
    push(one)
    one.store.delete(each.name for each in one.store.list(""))
    pull(one, owns=True)
    push(one)
    assert one.store.read("checkpoint_4/manifest.json")


def test_one_checkpoint_is_fetched_without_the_rest(machine: Machine) -> None:
    one, other = machine("one"), machine("other")
    save(one, 4)
    save(one, 5)
    (one.path / "hf_4").mkdir()
    (one.path / "hf_4/config.json").write_text("{}")
    push(one)
    path = fetch(other, "checkpoint_4")
    assert checkpointing.load(path)["global_step"] == 4
    assert not (other.path / "checkpoint_5").exists()
    assert (fetch(other, "hf_4") / "config.json").read_text() == "{}"
    with pytest.raises(NoCheckpoint, match=r"runs/a/checkpoint_6 does not exist"):
        fetch(other, "checkpoint_6")


def test_names_outside_of_the_mirror_are_ignored(machine: Machine) -> None:
    one, other = machine("one"), machine("other")
    one.store.put("..data/x", b"1")
    one.store.put(".lock", b"1")
    pull(other, owns=True)
    assert files_in(other.path) == {".store"}


def test_paths_know_their_mirror(machine: Machine, tmp_path: Path) -> None:
    one = machine("one")
    found = mirror_of(one.path / "extra/checkpoint_5")
    assert found is one
    assert one.name_of(one.path / "extra/checkpoint_5") == "extra/checkpoint_5"
    assert one.name_of(one.path / ".store/x") is None
    assert mirror_of(tmp_path / "checkpoint_5") is None


def test_a_binding_to_a_plain_folder_is_refused_with_the_reason(tmp_path: Path) -> None:
    hidden = tmp_path / "run/.store"
    hidden.mkdir(parents=True)
    (hidden / "binding.json").write_text('{"url": "file:///elsewhere", "options": {}}')
    with pytest.raises(ConfigError, match=r"'file:///elsewhere' is a folder, not an object store"):
        mirror_of(tmp_path / "run")
