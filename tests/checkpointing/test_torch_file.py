"""Weights in files of `torch.save`: read safely, or refused with what to do."""

from __future__ import annotations

import json
import logging
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from modelzoo_trainer import CheckpointError
from modelzoo_trainer.callbacks import LoadCheckpointStates
from modelzoo_trainer.checkpointing.torch_file import open_torch_file
from modelzoo_trainer.checkpointing.weights import holds_weights, read_weights
from tests.doubles import TinyModel, differing, make_trainer, tiny_batches, weights_of

STATE = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.arange(3, dtype=torch.bfloat16)}


class Payload:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("ran",))


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def saved(content: Any, name: str = "x.pt", **options: Any) -> Path:
    torch.save(content, name, **options)
    return Path(name)


def equal(found: dict[str, torch.Tensor]) -> bool:
    return list(found) == list(STATE) and all(
        found[name].dtype is value.dtype and torch.equal(found[name], value)
        for name, value in STATE.items()
    )


@pytest.mark.parametrize("name", ["x.pt", "x.pth", "x.bin", "x.ckpt", "X.PT"])
def test_a_state_dict_is_read(name) -> None:
    assert equal(read_weights(saved(STATE, name)))


def test_the_format_from_before_torch_1_6_is_read() -> None:
    assert equal(read_weights(saved(STATE, _use_new_zipfile_serialization=False)))


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict"])
def test_the_weights_in_the_checkpoint_of_another_trainer_are_found(key) -> None:
    content = {"epoch": 3, key: STATE, "optimizer": {"state": {0: {"step": torch.ones(())}}}}
    assert equal(read_weights(saved(content)))


@pytest.mark.parametrize(("num", "said"), [(0, "nothing."), (5, "k4."), (7, "k4 and 2 more.")])
def test_what_is_not_loaded_is_named_or_counted(num, said, caplog) -> None:
    caplog.set_level(logging.INFO)
    others = {f"k{idx}": idx for idx in range(num)}
    assert equal(open_torch_file(saved({"state_dict": STATE, **others})))
    assert caplog.messages[0].endswith(said)


def test_what_was_read_does_not_change_with_the_file() -> None:
    path = saved({"w": torch.ones(100_000)})
    found = read_weights(path)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    path.unlink()
    assert torch.equal(found["w"], torch.ones(100_000))


def test_tensors_that_share_memory_still_do_and_cost_it_once() -> None:
    shared = torch.ones(1).expand(1 << 20)
    found = read_weights(saved({"w": shared, "v": shared[:5]}))
    assert found["w"].data_ptr() == found["v"].data_ptr()
    assert found["w"].untyped_storage().nbytes() == 4


@pytest.mark.parametrize("old", ["2.9.0", "2.9.1+cpu", "2.10.0a0+git1234"])
def test_an_affected_torch_is_refused_before_anything_is_read(monkeypatch, old) -> None:
    path = saved(STATE)
    monkeypatch.setattr(torch, "__version__", TorchVersion(old))
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("it was read"))
    with pytest.raises(CheckpointError, match=r"x\.pt.*CVE-2026-24747.*torch 2\.10\.0.*save_model"):
        read_weights(path)


@pytest.mark.parametrize("new", ["2.10.0", "2.10.0+cpu", "2.11.0a0", "3.0.0"])
def test_a_torch_with_the_fix_is_not(monkeypatch, new) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(new))
    assert equal(read_weights(saved(STATE)))


@pytest.mark.parametrize("variable", ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "unset"])
@pytest.mark.parametrize("zipped", [True, False])
def test_code_is_named_and_never_run(monkeypatch, variable, zipped) -> None:
    monkeypatch.setenv(variable, "1")
    path = saved({"w": torch.ones(1), "x": Payload()}, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"mkdir.*weights_only=True") as found:
        read_weights(path)
    assert not Path("ran").exists()
    assert "weights_only=False" not in str(found.value)  # which torch's own message advises
    Path("bare.bin").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(CheckpointError, match=r"bare\.bin"):
        read_weights(Path("bare.bin"))
    assert not Path("ran").exists()


def test_a_whole_module_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"contains torch\.nn\.modules\.linear\.Linear"):
        read_weights(saved(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([torch.ones(1)], "of type list, not"),
        ({"epoch": 3, "lr": 0.1}, "of type dict with the keys 'epoch', 'lr', not"),
        ({"model": STATE, "state_dict": STATE}, "not the weights of one model"),
        ({"w": torch.ones(1), "n": 3}, "'n' is an object of type int"),
        ({"w": torch.ones(2).to_sparse()}, r"'w' is a tensor of layout torch\.sparse_coo"),
        ({"w": torch.ones(2, device="meta")}, "'w' is a tensor on the meta device"),
        ({3: torch.ones(2)}, "key 3; keys must be strings"),
    ],
)
def test_what_is_no_state_dict_is_refused(content, words) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_weights(saved(content))


def test_a_changed_bit_is_found() -> None:
    path = saved({"w": torch.full((64,), 3.0)})
    content = bytearray(path.read_bytes())
    content[content.index(torch.full((64,), 3.0).numpy().tobytes()) + 7] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"damaged: the CRC-32 of .*data/0"):
        read_weights(path)


@pytest.mark.parametrize("content", [b"", b"abc", b"PK\x03\x04" + bytes(100)])
def test_what_torch_has_not_written_is_refused(content) -> None:
    Path("x.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.pt"):
        read_weights(Path("x.pt"))


def test_every_shortened_file_is_refused() -> None:
    content = saved(STATE).read_bytes()
    for size in range(0, len(content), 37):
        Path("x.pt").write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"x\.pt"):
            read_weights(Path("x.pt"))


def test_a_compressed_archive_is_refused() -> None:
    saved({"w": torch.zeros(1 << 20)})
    with (
        zipfile.ZipFile("x.pt") as plain,
        zipfile.ZipFile("y.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(CheckpointError, match="compressed"):
        open_torch_file(Path("y.pt"))


def test_folders_in_the_older_layout_of_hugging_face_are_read() -> None:
    Path("one").mkdir()
    saved(STATE, "one/pytorch_model.bin")
    assert holds_weights(Path("one"))
    assert equal(read_weights(Path("one")))
    Path("many").mkdir()
    for number, name in enumerate(STATE, 1):
        saved({name: STATE[name]}, f"many/pytorch_model-{number}.bin")
    places = {"w": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}
    Path("many/pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    assert sorted(read_weights(Path("many"))) == ["b", "w"]


def test_a_file_of_another_name_in_a_folder_is_named() -> None:
    Path("one").mkdir()
    saved(STATE, "one/mine.pt")
    with pytest.raises(CheckpointError, match=r"one of its files: mine\.pt"):
        read_weights(Path("one"))


@pytest.mark.parametrize("prefix", ["", "module."])  # as DataParallel has it
@pytest.mark.parametrize("callbacks", [(), (LoadCheckpointStates("model"),)])
def test_a_run_starts_from_such_a_file(tmp_path, callbacks, prefix) -> None:
    torch.manual_seed(7)
    model = TinyModel()
    path = saved({f"{prefix}{name}": value for name, value in model.state_dict().items()})
    with make_trainer(tmp_path / "run", *callbacks) as trainer:
        trainer.validate(tiny_batches(), ckpt_path=path)
        assert differing(weights_of(trainer), model.state_dict()) == []
        assert trainer.global_step == 0
        trainer.fit(tiny_batches(), ckpt_path=path)
        assert differing(weights_of(trainer), model.state_dict()) != []
