"""Folders of data, and their lists of files."""

from __future__ import annotations

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.csv.files import find_files
from modelzoo_trainer.zoo.data.csv.processor import folders_of, lacks_of
from modelzoo_trainer.zoo.data.folders import read_meta
from modelzoo_trainer.zoo.data.seq2seq.processors import (
    T5DynamicDataProcessor,
    TransformerDynamicDataProcessor,
)


@pytest.fixture
def pieces(tmp_path):
    """Return the arguments of a seq2seq processor over files `a` and `b`."""
    for name in ("a", "b"):
        (tmp_path / name).write_text("w w w\n")
    (tmp_path / "v").write_text("<pad>\n<s>\n</s>\n<unk>\nw\n")
    sizes = {"src_max_sequence_length": 8, "tgt_max_sequence_length": 8, "extra_ids": 4}
    vocabulary = str(tmp_path / "v")
    return {"src_vocab_file": vocabulary, "batch_size": 1, "drop_last": False, **sizes}


def test_a_folder_that_is_named_twice_is_refused(tmp_path, pieces):
    twice = [str(tmp_path), f"{tmp_path}/../{tmp_path.name}"]
    for read in (folders_of, lacks_of):
        with pytest.raises(ConfigError, match=r"data_dir: .* are the same folder"):
            read(twice)
    for create in (T5DynamicDataProcessor, T5DynamicDataProcessor.check_arguments):
        with pytest.raises(ConfigError, match=r"src_data_dir: .* are the same folder"):
            create(src_data_dir=twice, **pieces)


@pytest.mark.parametrize("given", ["\0", ["a", ""], [], {"a": 1}, 3])
def test_what_names_no_folder_is_refused(given):
    with pytest.raises(ConfigError, match=r"data_dir: expected a folder or a list of folders"):
        folders_of(given)


def test_a_file_that_is_listed_twice_is_refused(tmp_path, pieces):
    (tmp_path / "meta.dat").write_text("a 1\nb 1\n./a 1\n")
    twice = r"meta\.dat:3: .*meta\.dat:1 lists"
    with pytest.raises(ConfigError, match=twice):
        find_files([str(tmp_path)])
    with pytest.raises(ConfigError, match=twice):
        T5DynamicDataProcessor(src_data_dir=str(tmp_path), **pieces)


def test_only_equal_pairs_are_listed_twice(tmp_path, pieces):
    (tmp_path / "meta.dat").write_text("a b 1\na a 1\n")  # a text may have two translations
    found = TransformerDynamicDataProcessor(src_data_dir=str(tmp_path), **pieces)
    assert len(found.dataset) == 2
    (tmp_path / "meta.dat").write_text("a b 1\na a 1\na b 1\n")
    with pytest.raises(ConfigError, match=r"meta\.dat:3: .*meta\.dat:1 lists"):
        TransformerDynamicDataProcessor(src_data_dir=str(tmp_path), **pieces)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        *(("a.csv\t12", ("a.csv",)), (" a b.csv  12 ", ("a b.csv",))),
        ("a\tb \t 12", ("a", "b")),
    ],
)
def test_blanks_and_tabs_separate_the_words_of_a_list(tmp_path, line, names):
    (tmp_path / "meta.dat").write_text(f"\n{line}\n")
    (found,) = read_meta(str(tmp_path), len(names), "data_dir")
    assert found[:2] == (names, 12)
    assert found.place.endswith("meta.dat:2")
