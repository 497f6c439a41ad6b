"""Two local copies of one prefix: the main process has one, a process of another host the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer import checkpointing
from modelzoo_trainer.checkpointing.file_writing import write_file
from modelzoo_trainer.checkpointing.stores.apart import (
    attempt_for,
    bring,
    folder_for_upload,
    lies_apart,
    remove_leftovers,
    upload,
)
from modelzoo_trainer.checkpointing.stores.mirror import Mirror, attempt_of, open_mirror
from modelzoo_trainer.checkpointing.stores.pulling import pull
from modelzoo_trainer.checkpointing.stores.pushing import Pusher
from modelzoo_trainer.checkpointing.stores.urls import StoreUrl
from modelzoo_trainer.checkpointing.transaction import CheckpointTransaction
from modelzoo_trainer.errors import CheckpointError, DamagedObject, StoreError

pytest.importorskip("obstore")

NAME = "checkpoint_5"
OWN, THEIRS = "shard-00000.safetensors", "shard-00001.safetensors"


@pytest.fixture
def copies(tmp_path: Path) -> tuple[Mirror, Mirror]:
    """Return the copies of the main process and of the other host."""
    url = StoreUrl("memory", tmp_path.name, "run")
    main, other = (open_mirror(url, cache_dir=tmp_path / name) for name in ("main", "other"))
    main.is_split = other.is_split = other.is_apart = True
    return main, other


def save(main: Mirror, other: Mirror, *, is_sent: bool = True, content: bytes = b"their") -> str:
    """Save a checkpoint of two files as both processes do; return the attempt."""
    path, theirs = main.path / NAME, other.path / NAME
    attempt = attempt_for(path)
    with folder_for_upload(theirs) as folder:
        record = write_file(folder / THEIRS, [content])
        if is_sent:
            upload(theirs, attempt, folder, {THEIRS: record})
    with CheckpointTransaction(path) as transaction:
        transaction.attempt = attempt
        transaction.write(OWN, [b"own"])
        transaction.records[THEIRS] = record
        transaction.elsewhere = {THEIRS}
        transaction.commit(step=5)
    return attempt


def push(mirror: Mirror) -> Pusher:
    pusher = Pusher(mirror, lambda: None)
    pusher.push()
    return pusher


def names_in(mirror: Mirror) -> set[str]:
    return {one.name for one in mirror.store.list("")}


def test_it_is_complete_in_the_store_and_on_any_host(copies: Any, tmp_path: Path) -> None:
    main, other = copies
    attempt = save(main, other)
    assert names_in(main) == {f"{NAME}/{attempt}/{THEIRS}"}
    push(main)
    assert names_in(main) == {
        f"{NAME}/{attempt}/{OWN}",
        f"{NAME}/{attempt}/{THEIRS}",
        f"{NAME}/manifest.json",
    }
    bring(other, NAME, attempt)
    third = open_mirror(main.url, cache_dir=tmp_path / "third")
    pull(third, owns=True)
    for mirror in (main, other, third):
        path = mirror.path / NAME
        assert checkpointing.verify(path) == []
        assert (path / OWN).read_bytes() + (path / THEIRS).read_bytes() == b"owntheir"
        assert not list(mirror.folder.glob("share-*"))


def test_without_the_files_of_the_other_host_there_is_no_manifest(copies: Any) -> None:
    main, other = copies
    save(main, other, is_sent=False)
    pusher = push(main)
    assert "another host" in pusher.refused[NAME]
    assert f"{NAME}/manifest.json" not in names_in(main)
    assert "another host" in (pusher.push_one(NAME) or "")


def test_a_file_of_another_size_does_not_count(copies: Any) -> None:
    main, other = copies
    attempt = save(main, other)
    main.store.put(f"{NAME}/{attempt}/{THEIRS}", b"shorter"[:2])
    assert NAME in push(main).refused


@pytest.mark.parametrize("is_sent", [True, False])
def test_the_next_run_of_the_main_process_completes_it_if_the_rest_is_there(
    copies: Any, is_sent: bool
) -> None:
    main, other = copies
    save(main, other, is_sent=is_sent)
    pull(main, owns=False)  # by a command in the meantime
    pull(main, owns=True)
    assert (main.path / NAME).exists() is is_sent
    push(main)
    assert (f"{NAME}/manifest.json" in names_in(main)) is is_sent


def test_half_deleted_one_does_not_come_back(copies: Any, tmp_path: Path) -> None:
    main, other = copies
    save(main, other)
    push(main)
    third = open_mirror(main.url, cache_dir=tmp_path / "third")
    pull(third, owns=True)  # its manifest only
    main.store.delete([f"{NAME}/manifest.json"])  # the files are deleted after it
    pull(third, owns=False)
    assert not (third.path / NAME).exists()


def test_an_old_checkpoint_of_that_name_is_replaced_on_the_other_host(copies: Any) -> None:
    main, other = copies
    checkpointing.save(other.path / NAME, {"old": 1}, step=5)
    attempt = save(main, other)
    push(main)
    bring(other, NAME, attempt)
    assert checkpointing.verify(other.path / NAME) == []
    assert (other.path / NAME / THEIRS).read_bytes() == b"their"
    (aside,) = other.folder.glob(f"set_aside/*/{NAME}")
    assert checkpointing.load(aside)["old"] == 1


def test_what_was_brought_is_replaced_without_a_copy(copies: Any) -> None:
    main, other = copies
    bring_all = [save(main, other)]
    pusher = push(main)
    bring(other, NAME, bring_all[0])
    checkpointing.delete(main.path / NAME)
    pusher.push_deletions()
    assert names_in(main) == set()
    attempt = save(main, other, content=b"new")
    push(main)
    bring(other, NAME, attempt)
    assert checkpointing.verify(other.path / NAME) == []
    assert (other.path / NAME / THEIRS).read_bytes() == b"new"
    assert not list(other.folder.glob("set_aside/*"))


def test_another_checkpoint_in_the_store_is_not_taken_for_it(copies: Any) -> None:
    main, other = copies
    save(main, other)
    push(main)
    with pytest.raises(CheckpointError, match="is not the checkpoint that the main process has"):
        bring(other, NAME, "0123456789abcdef")
    with pytest.raises(StoreError, match="checkpoint_6"):
        bring(other, "checkpoint_6", "0123456789abcdef")


def test_damaged_files_are_not_uploaded(copies: Any) -> None:
    _, other = copies
    path = other.path / NAME
    with folder_for_upload(path) as folder:
        record = write_file(folder / THEIRS, [b"right"])
        (folder / THEIRS).write_bytes(b"wrong")
        with pytest.raises(DamagedObject):
            upload(path, attempt_for(path), folder, {THEIRS: record})
    assert names_in(other) == set()


def test_only_checkpoints_of_several_hosts_have_an_attempt(copies: Any, tmp_path: Path) -> None:
    main, other = copies
    assert attempt_for(main.path / NAME) != attempt_for(main.path / NAME)
    assert attempt_for(main.path / f".tmp-{NAME}") == ""
    assert attempt_for(tmp_path / NAME) == ""
    assert (lies_apart(main.path / NAME), lies_apart(other.path / NAME)) == (False, True)
    main.is_split = False
    assert attempt_for(main.path / NAME) == ""
    checkpointing.save(main.path / "plain", {}, step=1)
    text = (main.path / "plain/manifest.json").read_bytes()
    assert b"attempt" not in text
    assert attempt_of(text) != attempt_of(text + b" ")


def test_leftovers_of_dead_processes_are_removed(copies: Any) -> None:
    _, other = copies
    dead, alive = other.folder / "share-4194304-aa", other.folder / "share-1-bb"
    dead.mkdir()
    alive.mkdir()
    remove_leftovers(other)
    assert (dead.exists(), alive.exists()) == (False, True)
