"""Formats of weights that are registered by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modelzoo_trainer import Trainer, checkpointing
from modelzoo_trainer.checkpointing import weight_readers
from modelzoo_trainer.checkpointing.weight_readers import read_weights_for

ROOT = Path(__file__).resolve().parents[2]
asked: list[Path] = []


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    known = dict(weight_readers._readers)
    asked.clear()
    yield
    weight_readers._readers.clear()
    weight_readers._readers.update(known)


class Net(nn.Linear):
    def forward(self, batch: Tensor) -> dict[str, Tensor]:
        return {"loss": super().forward(batch).mean()}


def read_text(model: nn.Module, path: Path) -> dict[str, Tensor] | None:
    asked.append(path)
    if path.suffix != ".txt":
        return None
    values = [float(word) for word in path.read_text().split()]
    return {name: torch.full_like(value, values[0]) for name, value in model.state_dict().items()}


def read_sevens(model: nn.Module, path: Path) -> dict[str, Tensor] | None:
    return {name: torch.full_like(value, 7) for name, value in model.state_dict().items()}


def made(folder: Path, text: str = "3") -> Path:
    (folder / "w.txt").write_text(text)
    return folder / "w.txt"


@pytest.mark.parametrize("reader", [read_text, f"{__name__}:read_text"], ids=["function", "place"])
def test_a_trainer_loads_a_registered_format(tmp_path: Path, reader: object) -> None:
    checkpointing.register_weights_reader("text", reader)  # type: ignore[arg-type]  # both
    trainer = Trainer(model=Net(2, 1), device="cpu", model_dir=tmp_path)
    trainer.validate([torch.ones(1, 2)], ckpt_path=made(tmp_path))
    assert trainer.model.weight.tolist() == [[3, 3]]


def test_the_last_reader_is_asked_first_and_one_of_the_same_name_is_replaced(
    tmp_path: Path,
) -> None:
    model = nn.Linear(1, 1)
    checkpointing.register_weights_reader("text", read_text)
    checkpointing.register_weights_reader("sevens", read_sevens)
    found = read_weights_for(model, made(tmp_path))
    assert found is not None
    assert found["weight"].tolist() == [[7]]
    checkpointing.register_weights_reader("sevens", lambda model, path: None)
    found = read_weights_for(model, made(tmp_path))
    assert found is not None
    assert found["weight"].tolist() == [[3]]


def test_what_no_reader_knows_is_read_as_a_file_of_weights(tmp_path: Path) -> None:
    checkpointing.register_weights_reader("text", read_text)
    file = tmp_path / "w.safetensors"
    checkpointing.write_weights({"weight": torch.ones(2)}, file)
    found = read_weights_for(nn.Linear(1, 1), file)
    assert found is not None
    assert found["weight"].tolist() == [1, 1]
    assert asked == [file]


def test_no_reader_is_asked_about_a_checkpoint_or_what_does_not_exist(tmp_path: Path) -> None:
    checkpointing.register_weights_reader("text", read_text)
    checkpointing.save(tmp_path / "checkpoint_1", {"model": {}}, step=1)
    assert read_weights_for(nn.Linear(1, 1), tmp_path / "checkpoint_1") is None
    assert read_weights_for(nn.Linear(1, 1), tmp_path / "none.txt") is None
    assert asked == []


PROGRAM = """
import sys
from modelzoo_trainer import Checkpoint
from modelzoo_trainer.core import checkpoint
print([name for name in sys.modules if name.startswith("modelzoo_trainer.zoo.conversion")])
"""


@pytest.mark.slow
def test_checkpoint_imports_no_reader() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert done.stdout == "[]\n"
