"""What the manifest itself says, and what is made of a damaged one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from modelzoo_trainer import CheckpointError, checkpointing


@pytest.fixture
def path(tmp_path):
    checkpointing.save(tmp_path / "c", {"model": {"w": torch.ones(3)}}, step=12)
    return tmp_path / "c"


@pytest.mark.slow
def test_every_bit_of_the_manifest_counts(path):
    file = path / "manifest.json"
    before = file.read_bytes()
    unseen = []
    for bit in range(8 * len(before)):
        damaged = bytearray(before)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        if not checkpointing.verify(path):
            unseen.append(bit)
    assert len(before) > 200
    assert unseen == []


def test_a_changed_step_is_damage(path):
    file = path / "manifest.json"
    file.write_text(file.read_text().replace('"step": 12', '"step": 13'))
    with pytest.raises(CheckpointError, match=r"manifest.json' is damaged"):
        checkpointing.load(path)


def test_fields_of_later_versions_are_no_damage(path):
    raw = json.loads((path / "manifest.json").read_text())
    raw.pop("xxh3_128")
    sealed = checkpointing.manifest._sealed(raw | {"note": [1, None, "x"]})
    (path / "manifest.json").write_text(sealed)
    assert checkpointing.verify(path) == []
    assert checkpointing.read_manifest(path).step == 12


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"format_version": 1, "step": Infinity, "versions": {}, "files": {}}',
        '{"format_version": 1, "files": {"state.json": 3}}',
        '{"format_version": 1, "files": []}',
        '"text"',
        "7" * 5000,
        "\ufeff{}",
        "\x00\xff",
        '{"format_version": true}',
        '{"format_version": [1]}',
        '{"format_version": 2, "step": 1, "name": "c", "versions": {}, "files": {}, "facts": {}}',
    ],
    ids=lambda content: content[:8],
)
def test_whatever_a_manifest_holds_the_error_is_one_kind(path, content):
    (path / "manifest.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"manifest\.json|has format version"):
        checkpointing.load(path)
    assert checkpointing.list_checkpoints(path.parent) == []


@pytest.mark.parametrize("name", ["/etc/passwd", "..", "a/b.json", "", ".x.json", "a\nb.json"])
def test_no_name_in_a_manifest_leads_outside(path, name):
    found = checkpointing.read_manifest(path)
    found.files[name] = found.files["state.json"]
    (path / "manifest.json").write_text(found.to_json())
    with pytest.raises(CheckpointError, match="cannot be a file of a checkpoint"):
        checkpointing.load(path)


def test_a_link_in_place_of_the_manifest_is_refused(path, tmp_path):
    (path / "manifest.json").rename(tmp_path / "elsewhere")
    (path / "manifest.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"manifest\.json' is a symbolic link"):
        checkpointing.load(path)


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(path):
    (path / "state.json").unlink()
    os.mkfifo(path / "state.json")
    with pytest.raises(CheckpointError, match=r"'state\.json' is not a regular file"):
        checkpointing.load(path)


def test_a_disk_that_refuses_to_read_is_one_clear_error(path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(CheckpointError, match=r"manifest\.json' cannot be read: .*Permission"):
        checkpointing.load(path)


def test_a_folder_that_cannot_be_listed_is_an_error_and_no_empty_folder(tmp_path, monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match=r"cannot be listed: Permission denied"):
        checkpointing.list_checkpoints(tmp_path)


def test_a_folder_with_other_things_lists_its_checkpoints(path, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / ".tmp-c-12345678").mkdir()
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "\u00b2").mkdir()  # a digit that is no decimal
    checkpointing.save(tmp_path / "c_\u00b2_3", {}, step=13)
    names = [info.path.name for info in checkpointing.list_checkpoints(tmp_path)]
    assert names == ["c", "c_\u00b2_3"]


SEALED = {
    "format_version": 2,
    "name": "c",
    "step": 12,
    "versions": {},
    "files": {},
    "facts": {},
}
RECORD = {"size_bytes": 3, "xxh3_128": "0" * 32}


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"step": True},
        {"step": 1.0},
        {"step": None},
        {"name": None},
        {"name": ["c"]},
        {"facts": []},
        {"versions": []},
        {"files": {"state.json": {}}},
        {"files": {"state.json": []}},
        {"files": {"state.json": RECORD | {"size_bytes": -1}}},
        {"files": {"state.json": RECORD | {"size_bytes": 1.5}}},
        {"files": {"state.json": RECORD | {"xxh3_128": "0"}}},
        {"files": {"state.json": RECORD | {"xxh3_128": 7}}},
        {"files": {"manifest.json": RECORD}},
    ],
    ids=str,
)
def test_a_malformed_manifest_with_the_right_digest_is_one_clear_error(path, change):
    sealed = checkpointing.manifest._sealed(SEALED | change)
    (path / "manifest.json").write_text(sealed)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        checkpointing.load(path)


def test_a_flipped_bit_is_named_without_the_content(path):
    content = bytearray((path / "manifest.json").read_bytes())
    content[5] ^= 0x80
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"UnicodeDecodeError: .* position 5") as caught:
        checkpointing.load(path)
    assert len(str(caught.value)) < 300 + len(str(path))


def test_what_is_missing_does_not_exist(tmp_path):
    with pytest.raises(CheckpointError, match="nothing' does not exist"):
        checkpointing.load(tmp_path / "nothing")


def test_a_huge_manifest_is_not_read(path):
    with (path / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=r"manifest\.json' cannot be read: .*larger than"):
        checkpointing.load(path)


def test_a_link_to_a_checkpoint_is_refused_by_its_target(path, tmp_path):
    (tmp_path / "latest").symlink_to("c")
    with pytest.raises(CheckpointError, match="latest' is a symbolic link to 'c'"):
        checkpointing.load(tmp_path / "latest")


def test_a_checkpoint_is_found_by_a_relative_path(path, tmp_path, monkeypatch):
    monkeypatch.chdir(path)
    assert checkpointing.read_manifest(Path()).name == "c"
    assert checkpointing.verify(Path("../c")) == []


def test_the_manifest_says_who_wrote_it_and_what_else_is_known(tmp_path):
    facts = {"run": "a", "metrics": {"loss": float("nan"), "accuracy": 0.5}, "seeds": (1, 2)}
    checkpointing.save(tmp_path / "c", {}, step=3, facts=facts)
    found = checkpointing.read_manifest(tmp_path / "c")
    assert (found.format_version, found.name, found.step) == (2, "c", 3)
    assert found.versions.keys() == {"python", "torch", "numpy"}
    assert found.facts == {
        "run": "a",
        "metrics": {"loss": "nan", "accuracy": 0.5},
        "seeds": [1, 2],
    }


def test_a_folder_of_an_adapter_is_named(tmp_path):
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(CheckpointError, match=r"has an adapter of peft.*merge_and_unload"):
        checkpointing.read_manifest(tmp_path)
