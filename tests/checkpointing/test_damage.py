import json
import random
import shutil

import pytest
import torch

from modelzoo_trainer import CheckpointError, checkpointing

STATE = {"model": {"w": torch.arange(64.0)}, "global_step": 3, "x": {"loss": 1.5}}


@pytest.fixture
def path(tmp_path):
    checkpointing.save(tmp_path / "checkpoint_3", STATE, step=3)
    return tmp_path / "checkpoint_3"


def test_it_is_intact_as_it_was_written(path):
    assert checkpointing.verify(path) == []
    assert checkpointing.read_manifest(path).step == 3


@pytest.mark.slow
def test_every_flipped_bit_is_found(path):
    chance = random.Random(0)
    files = sorted(path.iterdir())
    for _ in range(200):
        file = chance.choice(files)
        before = file.read_bytes()
        damaged = bytearray(before)
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        assert checkpointing.verify(path), file
        file.write_bytes(before)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_a_truncated_file_is_named(path, name):
    file = path / name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"'{name}' has .* bytes, expected "):
        checkpointing.load(path)


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_a_missing_file_is_named(path, name):
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=f"'{name}' is missing"):
        checkpointing.load(path)


def test_an_extra_file_is_refused(path):
    (path / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"'optimizer\.safetensors' is not in the manifest"):
        checkpointing.load(path)


def test_a_link_in_place_of_a_file_is_refused(path, tmp_path):
    target = tmp_path / "elsewhere"
    (path / "state.json").rename(target)
    (path / "state.json").symlink_to(target)
    with pytest.raises(CheckpointError, match=r"'state.json' is not a regular file"):
        checkpointing.load(path)


def test_a_directory_without_a_manifest_was_never_committed(path):
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        checkpointing.load(path)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"format_version": 1}', "null"])
def test_a_broken_manifest_is_one_clear_error(path, content):
    (path / "manifest.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"cannot be read|is damaged"):
        checkpointing.load(path)


def test_another_format_version_is_refused(path):
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["format_version"] = 99
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"format version 99; .* 2"):
        checkpointing.load(path)


def test_a_name_that_leads_outside_is_refused(path):
    found = checkpointing.read_manifest(path)
    found.files["../state.json"] = found.files.pop("state.json")
    (path / "manifest.json").write_text(found.to_json())
    with pytest.raises(CheckpointError, match=r"'\.\./state\.json', which cannot be"):
        checkpointing.load(path)


def test_a_checkpoint_is_never_overwritten(path):
    with pytest.raises(CheckpointError, match="never overwritten"):
        checkpointing.save(path, {}, step=4)
    assert checkpointing.load(path)["global_step"] == 3


def test_a_renamed_checkpoint_is_refused_by_its_right_name(path):
    renamed = path.rename(path.with_name("checkpoint_4"))
    with pytest.raises(CheckpointError, match=r"was renamed.*'checkpoint_3'"):
        checkpointing.load(renamed)
    assert checkpointing.verify(renamed)
    assert checkpointing.list_checkpoints(renamed.parent) == []
    assert checkpointing.load(renamed.rename(path))["global_step"] == 3


def test_a_copy_in_another_folder_is_fine(path, tmp_path):
    shutil.copytree(path, tmp_path / "elsewhere" / path.name)
    assert checkpointing.load(tmp_path / "elsewhere" / path.name)["global_step"] == 3


@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_a_file_of_another_checkpoint_is_refused(path, tmp_path, name):
    other = {"model": {"w": torch.arange(64.0) + 1}, "global_step": 4, "x": {"loss": 2.5}}
    checkpointing.save(tmp_path / "checkpoint_4", other, step=4)
    shutil.copy(tmp_path / "checkpoint_4" / name, path / name)
    with pytest.raises(CheckpointError, match=rf"{name}' cannot be read: the file is damaged"):
        checkpointing.load(path)
    assert len(checkpointing.verify(path)) == 1


def test_the_manifest_of_another_checkpoint_is_refused(path, tmp_path):
    checkpointing.save(tmp_path / "checkpoint_4", STATE | {"global_step": 4}, step=4)
    shutil.copy(tmp_path / "checkpoint_4/manifest.json", path / "manifest.json")
    with pytest.raises(CheckpointError, match="saved as 'checkpoint_4'"):
        checkpointing.load(path)


def test_every_zeroed_block_is_found(tmp_path):
    path = tmp_path / "c"
    checkpointing.save(path, {"model": {"w": torch.rand(20_000)}}, step=1)
    file = path / "model.safetensors"
    before = file.read_bytes()
    for begin in range(0, len(before), 4096):
        end = min(begin + 4096, len(before))
        file.write_bytes(before[:begin] + bytes(end - begin) + before[end:])
        with pytest.raises(CheckpointError, match=r"model\.safetensors' cannot be read"):
            checkpointing.load(path)


def test_every_length_but_the_right_one_is_found(path):
    for name in ("manifest.json", "model.safetensors", "state.json"):
        before = (path / name).read_bytes()
        for length in [*range(0, len(before), 7), len(before) - 1]:
            (path / name).write_bytes(before[:length])
            assert checkpointing.verify(path)
        (path / name).write_bytes(before + b"\0")
        assert checkpointing.verify(path)
        (path / name).write_bytes(before)
    assert checkpointing.verify(path) == []


def test_all_that_is_wrong_is_told_at_once(path):
    (path / "notes.txt").write_text("x")
    (path / "state.json").unlink()
    damaged = bytearray((path / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (path / "model.safetensors").write_bytes(damaged)
    problems = checkpointing.verify(path)
    assert problems[:2] == ["'state.json' is missing", "'notes.txt' is not in the manifest"]
    assert "model.safetensors' cannot be read: the file is damaged" in problems[2]
    assert len(problems) == 3


def test_large_files_are_checked_from_end_to_end(tmp_path):
    path = tmp_path / "c"
    tensors = {str(size): torch.rand(size) for size in (3, 1 << 20, 1, (1 << 21) + 1, 5_000_000)}
    checkpointing.save(path, {"model": tensors}, step=1)
    found = checkpointing.load(path)["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    file = path / "model.safetensors"
    for place in (9, 1 << 22, (1 << 23) + 1, file.stat().st_size - 1):
        with file.open("r+b") as opened:
            opened.seek(place)
            byte = opened.read(1)[0]
            opened.seek(place)
            opened.write(bytes([byte ^ 4]))
        assert "damaged" in checkpointing.verify(path)[0]
        with pytest.raises(CheckpointError, match="cannot be read"):
            checkpointing.load(path)
        with file.open("r+b") as opened:
            opened.seek(place)
            opened.write(bytes([byte]))
    assert checkpointing.verify(path) == []


def test_many_small_tensors_come_back(tmp_path):
    tensors = {f"{idx}": torch.full((idx % 5,), float(idx)) for idx in range(2000)}
    checkpointing.save(tmp_path / "c", {"model": tensors}, step=1)
    found = checkpointing.load(tmp_path / "c")["model"]
    assert list(found) == list(tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
