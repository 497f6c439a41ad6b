"""Splits, formats and changes of the files that `HuggingFaceDataProcessor` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data import processor_class
from tests.zoo.rows.toys import byte_tokenizer

pytestmark = pytest.mark.slow
datasets = pytest.importorskip("datasets", reason="needs datasets")


@pytest.fixture(scope="module")
def bytes_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return byte_tokenizer(tmp_path_factory.mktemp("sources") / "bytes")


def make(path: Path, tokenizer: str, **arguments: Any) -> Any:
    return processor_class("HuggingFaceDataProcessor")(
        **{
            "path": str(path),
            "tokenizer": tokenizer,
            "max_sequence_length": 32,
            "batch_size": 1,
            "cache_dir": str(path.parent / "cache"),
            "shuffle": False,
            "drop_last": False,
            **arguments,
        }
    )


def texts_of(processor: Any) -> list[str]:
    """Return the text of each row up to its end token."""
    rows = [row for batch in processor.create_dataloader() for row in batch["input_ids"].tolist()]
    decode = processor.tokenizer.decode
    return [decode(row).replace("<pad>", "").replace("<eos>", "") for row in rows]


def save(folder: Path, **splits: list[str]) -> Path:
    made = {name: datasets.Dataset.from_dict({"text": rows}) for name, rows in splits.items()}
    (made["unnamed"] if "unnamed" in made else datasets.DatasetDict(made)).save_to_disk(str(folder))
    return folder


@pytest.mark.parametrize("streaming", [False, True])
def test_splits_of_saved_folders_can_be_sliced(
    tmp_path: Path, bytes_folder: str, streaming: bool
) -> None:
    one = save(tmp_path / "one", unnamed=["aa", "bb", "cc"])
    two = save(tmp_path / "two", train=["aa", "bb"], test=["cc", "dd"])

    def found(path: Path, split: str) -> list[str]:
        return texts_of(make(path, bytes_folder, split=split, streaming=streaming))

    assert found(one, "train") == ["aa", "bb", "cc"]
    assert found(one, "train[:1]") == ["aa"]
    assert found(one, "train[1:]") == ["bb", "cc"]
    assert found(two, "test[50%:]") == ["dd"]
    assert found(two, "train[1:]+test") == ["bb", "cc", "dd"]


@pytest.mark.parametrize("split", ["validation", "train[1", "train[9:]"])
def test_a_saved_folder_refuses_splits_that_it_lacks(
    tmp_path: Path, bytes_folder: str, split: str
) -> None:
    folder = save(tmp_path / "one", unnamed=["aa", "bb", "cc"])

    with pytest.raises(ConfigError, match=r"split.*train"):
        make(folder, bytes_folder, split=split)


@pytest.mark.parametrize("name", ["data.jsonl", "saved"])
def test_other_content_of_the_same_size_makes_other_rows(
    tmp_path: Path, bytes_folder: str, name: str
) -> None:
    found = []
    for text in ("ab", "cd"):
        if name == "saved":
            save(tmp_path / name, train=[text])
        else:
            (tmp_path / name).write_text(f'{{"text": "{text}"}}\n')
        found += texts_of(make(tmp_path / name, bytes_folder))

    assert found == ["ab", "cd"]


def test_a_folder_with_files_of_several_formats_is_warned_of(
    tmp_path: Path, bytes_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed/a.jsonl").write_text('{"text": "ab"}\n')
    assert texts_of(make(tmp_path / "mixed", bytes_folder)) == ["ab"]
    assert "several formats" not in caplog.text

    (tmp_path / "mixed/b.csv").write_text("text\ncd\n")
    make(tmp_path / "mixed", bytes_folder)

    assert "files of several formats (.csv, .jsonl)" in caplog.text
