"""Units are given by the input alone, and cover every entry once."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.preprocessing import readers
from modelzoo_trainer.zoo.rows.preprocessing.inputs import find_inputs
from modelzoo_trainer.zoo.rows.preprocessing.readers import entries, units
from modelzoo_trainer.zoo.rows.sections import Setup
from tests.zoo.rows.preprocessing.runs import write_lines

TEXTS = [f"text {number} " + "x" * (number % 7) for number in range(40)]
CONTENT = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


@pytest.fixture(autouse=True)
def _small_units(monkeypatch):
    monkeypatch.setattr(readers, "UNIT_BYTES", 100)
    monkeypatch.setattr(readers, "TEXT_BYTES", 400)
    monkeypatch.setattr(readers, "DATASET_ROWS", 7)


def read(folder: Path, key="text", data=None, **options):
    setup = Setup(mode="pretraining", data={"source": str(folder), **(data or {})})
    inputs = find_inputs(setup)
    return [
        [one for part in unit.parts for one in entries(part, key, **options)]
        for unit in units(inputs, None)
    ]


def texts_of(found):
    return [one.entry["text"] for unit in found for one in unit]


def zst(content: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(content)


def tar(content: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        info = tarfile.TarInfo("a.jsonl.zst")
        compressed = zst(content)
        info.size = len(compressed)
        archive.addfile(info, io.BytesIO(compressed))
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.jsonl", bytes),
        ("a.jsonl.gz", gzip.compress),
        ("a.json.gz", gzip.compress),
        ("a.jsonl.zst", zst),
        ("a.jsonl.zst.tar", tar),
    ],
)
def test_lines_are_the_same_units_however_they_are_compressed(tmp_path, name, pack) -> None:
    (tmp_path / name).write_bytes(pack(CONTENT))
    found = read(tmp_path)
    assert texts_of(found) == TEXTS
    assert len(found) > 5
    (tmp_path / name).unlink()
    (tmp_path / "a.jsonl").write_bytes(CONTENT)
    assert [[one.number for one in unit] for unit in read(tmp_path)] == [
        [one.number for one in unit] for unit in found
    ]


@pytest.mark.parametrize("size", range(1, 60, 7))
def test_every_line_is_in_one_unit(tmp_path, monkeypatch, size) -> None:
    monkeypatch.setattr(readers, "UNIT_BYTES", size)
    (tmp_path / "a.jsonl").write_bytes(b"\n" + CONTENT.rstrip(b"\n") + b"\n\n  \n")
    assert texts_of(read(tmp_path)) == TEXTS


def test_a_line_without_an_end_is_read(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_bytes(CONTENT.rstrip(b"\n"))
    assert texts_of(read(tmp_path)) == TEXTS


def test_small_files_share_a_unit_and_are_in_order_of_their_names(tmp_path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt"):
        (tmp_path / name).write_text(name, encoding="utf-8")
    (tmp_path / "empty.txt").touch()
    assert [[one.entry for one in unit] for unit in read(tmp_path)] == [
        [{"text": "a.txt"}, {"text": "b.txt"}, {"text": "sub/c.txt"}]
    ]


def test_a_long_text_is_cut_at_ends_of_lines(tmp_path) -> None:
    lines = [f"line {number} of a long text\n" for number in range(40)]
    (tmp_path / "a.txt").write_text("".join(lines), encoding="utf-8")
    found = texts_of(read(tmp_path))
    assert "".join(found) == "".join(lines)
    assert len(found) == 3
    assert all(text.endswith("\n") for text in found)


def test_sequences_of_a_fasta_file_are_read_without_headers(tmp_path) -> None:
    records = [(f">protein {number}", "MKV" * number) for number in range(1, 30)]
    text = "".join(f"{header}\n{one[:5]}\n{one[5:]}\n" for header, one in records)
    (tmp_path / "a.fasta").write_text(text, encoding="utf-8")
    found = read(tmp_path)
    assert texts_of(found) == [one for _, one in records]
    assert len(found) > 3


@pytest.mark.slow
def test_rows_of_parquet_are_read_by_group(tmp_path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": TEXTS, "n": range(len(TEXTS))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=15)
    found = read(tmp_path)
    assert texts_of(found) == TEXTS
    assert [unit[0].number for unit in found] == [0, 15, 30]


@pytest.mark.slow
def test_a_dataset_of_hugging_face_is_read_by_rows(tmp_path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "saved"))
    found = read(tmp_path / "saved", data={"type": "huggingface", "split": "train"})
    assert texts_of(found) == TEXTS
    assert [unit[0].number for unit in found] == [0, 7, 14, 21, 28, 35]
    folder = tmp_path / "lines"
    folder.mkdir()
    write_lines(folder / "a.jsonl", TEXTS)
    data = {"type": "huggingface", "split": "train", "format": "jsonl", "cache_dir": str(tmp_path)}
    assert texts_of(read(folder, data=data)) == TEXTS


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_an_invalid_line_is_named_with_its_file(tmp_path, pack) -> None:
    lines = CONTENT.splitlines(keepends=True)
    lines[23] = b'{"text": \n'
    name = "a.jsonl" if pack is bytes else "a.jsonl.gz"
    (tmp_path / name).write_bytes(pack(b"".join(lines)))
    with pytest.raises(ConfigError, match=rf"{name}:24: .*UNSAFE_skip_jsonl_decoding_errors"):
        read(tmp_path)
    found = [one.entry for unit in read(tmp_path, skips_invalid=True) for one in unit]
    assert [entry is None for entry in found] == [number == 23 for number in range(40)]


@pytest.mark.parametrize(("line", "kind"), [("[1]", "list"), ("null", "NoneType")])
def test_a_line_that_is_not_an_object_is_named(tmp_path, line, kind) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"a\.jsonl:2: .*{kind}"):
        read(tmp_path, skips_invalid=True)


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text("[" * 200_000, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"a\.jsonl:1: "):
        read(tmp_path)


@pytest.mark.parametrize("change", [lambda packed: packed[:-5], lambda packed: b"x" + packed])
def test_a_damaged_or_truncated_zst_file_is_named(tmp_path, change) -> None:
    (tmp_path / "a.jsonl.zst").write_bytes(change(zst(CONTENT)))
    with pytest.raises(ConfigError, match=r"a\.jsonl\.zst.*cannot be read"):
        read(tmp_path)


def test_several_frames_of_a_zst_file_are_read(tmp_path) -> None:
    half = CONTENT.index(b"\n", len(CONTENT) // 2) + 1
    (tmp_path / "a.jsonl.zst").write_bytes(zst(CONTENT[:half]) + zst(b"") + zst(CONTENT[half:]))
    assert texts_of(read(tmp_path)) == TEXTS


def test_linked_folders_are_read_and_loops_end(tmp_path) -> None:
    for name, texts in (("in", TEXTS[:3]), ("other", TEXTS[3:5])):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "a.jsonl", texts)
    (tmp_path / "in" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "other" / "back").symlink_to(tmp_path / "in")
    assert texts_of(read(tmp_path / "in")) == TEXTS[:5]


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch) -> None:
    (tmp_path / "closed").mkdir()
    write_lines(tmp_path / "a.jsonl", TEXTS)
    scan = os.scandir

    def refusing(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(ConfigError, match=r"closed.*Permission denied"):
        read(tmp_path)


def test_other_unreadable_files_are_named(tmp_path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xffcd")
    with pytest.raises(ConfigError, match=r"a\.txt.*byte 2"):
        read(tmp_path)
    with pytest.raises(ConfigError, match=r"text file .*one key"):
        read(tmp_path, key=None)
    (tmp_path / "a.txt").unlink()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(CONTENT)[:-40])
    with pytest.raises(ConfigError, match=r"b\.jsonl\.gz.*cannot be read"):
        read(tmp_path)
    (tmp_path / "b.jsonl.gz").unlink()
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"c\.parquet.*Parquet"):
        read(tmp_path)


def test_sources_without_files_are_refused(tmp_path) -> None:
    (tmp_path / "notes.md").touch()
    with pytest.raises(ConfigError, match=r"\.jsonl"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        read(tmp_path / "none")
    with pytest.raises(ConfigError, match="'huggingface'"):
        read(tmp_path, data={"type": "hugging"})
    with pytest.raises(ConfigError, match=r"data\.split"):
        read(tmp_path, data={"type": "huggingface"})
    with pytest.raises(ConfigError, match=r"data\.spilt"):
        read(tmp_path, data={"spilt": "train"})
    with pytest.raises(ConfigError, match=r"data\.source"):
        find_inputs(Setup(mode="pretraining"))


def test_files_may_be_listed(tmp_path) -> None:
    write_lines(tmp_path / "b.jsonl", TEXTS[:3])
    write_lines(tmp_path / "a.jsonl", TEXTS[3:5])
    listed = tmp_path / "list"
    listed.write_text(f"{tmp_path}/b.jsonl\n\n{tmp_path}/a.jsonl\n", encoding="utf-8")
    setup = Setup(mode="pretraining", metadata_files=str(listed))
    names = [Path(one.name).name for one in find_inputs(setup).files]
    assert names == ["b.jsonl", "a.jsonl"]
    listed.write_text(f"{tmp_path}/b.jsonl\n{tmp_path}/b.jsonl\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="twice"):
        find_inputs(setup)
    listed.write_text("notes.md\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"notes\.md"):
        find_inputs(setup)
