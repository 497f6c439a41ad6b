"""Rows of CSV files: where they are, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.csv import files as module
from modelzoo_trainer.zoo.data.csv.files import CsvFiles, find_files, row_bounds, whole_file
from modelzoo_trainer.zoo.data.csv.rows import parse_list
from tests.zoo.data.csv.written import write_folder

ODD = ["plain", "a, b", 'say "x"', "two\nlines", "", "\xfc, \xdf", "end\r\n"]


NO_LISTS = [
    "('a', 'b')",
    "('a', 'b']",
    "['a'##'b']",
    "['a', 'b'",
    "{'a', 'b'}",
    "['a';;'b']",
    "['a\nb']",
]


def rows_of(*texts):
    return [{"number": number, "text": text} for number, text in enumerate(texts)]


@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
def test_any_row_is_read_as_it_was_written(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    monkeypatch.setattr(module, "_INDICES", {})
    folder = write_folder(tmp_path, rows_of(*ODD), rows_of("last"))
    files = CsvFiles(find_files([folder]), ("text",))
    order = np.array([7, 3, 0, 6, 4, 1, 5, 2])
    assert [cells for (cells,) in files.read(order)] == [[*ODD, "last"][row] for row in order]
    assert files.place_of(7).endswith("part 1.csv: row 1")


@pytest.mark.parametrize("text", ["h\n1\n2", "h\r\n1\r\n\r\n2\r\n\r\n", "\ufeffh\n1\n\n2\n\n"])
def test_line_ends_and_empty_lines(tmp_path, text):
    (tmp_path / "f.csv").write_text(text, newline="")
    (tmp_path / "meta.dat").write_text("f.csv 2\n\n")
    assert CsvFiles(find_files([str(tmp_path)]), ("h",)).read(np.arange(2)) == [["1"], ["2"]]
    assert len(row_bounds(str(tmp_path / "f.csv"))) == 3


def test_what_does_not_fit_is_refused_with_its_place(tmp_path):
    folder = write_folder(tmp_path / "a", rows_of("x", "y"))
    files = find_files([folder])
    with pytest.raises(ConfigError, match=r"part 0.csv: the header has no column tokens; it has"):
        CsvFiles(files, ("tokens",)).read(np.array([0]))
    (tmp_path / "a" / "meta.dat").write_text("part 0.csv 3\n")
    with pytest.raises(ConfigError, match=r"2 rows after its header, but meta.dat says 3"):
        CsvFiles(find_files([folder]), ("text",)).read(np.array([0]))
    for line, facts in (("part 0.csv", "meta.dat:1"), ("b.csv 3", "b.csv: .*meta.dat:1")):
        (tmp_path / "a" / "meta.dat").write_text(f"{line}\n")
        with pytest.raises(ConfigError, match=facts):
            find_files([folder])
    (tmp_path / "a" / "meta.dat").write_text("part 0.csv 2\n")
    (tmp_path / "a" / "part 0.csv").write_text('number,text\n1,"a\n2,b\n')
    with pytest.raises(ConfigError, match="1 rows after its header"):
        CsvFiles(find_files([folder]), ("text",)).read(np.array([0]))
    (tmp_path / "a" / "part 0.csv").write_text("number,text\n1,a\n2\n")
    with pytest.raises(ConfigError, match=r"part 0\.csv: row 2 has 1 cells, but the header has 2"):
        CsvFiles(find_files([folder]), ("text",)).read(np.array([1]))


def test_how_a_file_is_read_belongs_to_what_is_known_of_it(tmp_path, monkeypatch):
    (tmp_path / "f").write_text('a,b\tc\n"1\t2\n3\t4"\n')
    path = str(tmp_path / "f")
    plain = whole_file(path, delimiter="\t", quotes=False)
    assert plain.num_rows == 2
    quoted = whole_file(path)
    assert quoted.num_rows == 1
    scanned = []
    monkeypatch.setattr(module, "row_bounds", lambda *given, **_: scanned.append(given))
    tabs = CsvFiles([plain], (), delimiter="\t", quotes=False)
    assert tabs.read(np.arange(2)) == [['"1', "2"], ["3", '4"']]
    assert CsvFiles([quoted], (), delimiter=",").common_columns(["a", "c"]) == ["a"]
    assert not scanned  # they were when the rows were counted


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    (tmp_path / "f.csv").write_text("h,h\n1,2\n")
    (tmp_path / "meta.dat").write_text("f.csv 1\n")
    with pytest.raises(ConfigError, match=r"f.csv: the header has the column h twice"):
        CsvFiles(find_files([str(tmp_path)]), ("h",)).read(np.array([0]))


def test_folders_that_lack_something_are_refused(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=r"does not exist|no file meta\.dat"):
            find_files([str(path)])
    write_folder(tmp_path)
    with pytest.raises(ConfigError, match="lists no rows"):
        find_files([str(tmp_path)])


def test_a_change_during_a_run_is_noticed(tmp_path):
    folder = write_folder(tmp_path, rows_of("x", "y"))
    files = CsvFiles(find_files([folder]), ("text",))
    before = files.fingerprint
    files.check_unchanged()
    (tmp_path / "part 0.csv").write_text("number,text\n1,a\n")
    with pytest.raises(ConfigError, match=r"part 0\.csv: the file has been changed"):
        files.check_unchanged()
    assert CsvFiles(find_files([folder]), ("text",)).fingerprint != before
    (tmp_path / "part 0.csv").unlink()
    with pytest.raises(ConfigError, match=r"part 0\.csv: the file cannot be read any more"):
        files.check_unchanged()


def test_a_change_within_an_epoch_is_noticed(tmp_path):
    folder = write_folder(tmp_path, rows_of("x", "y"))
    files = CsvFiles(find_files([folder]), ("text",))
    assert files.read(np.array([0])) == [["x"]]
    (tmp_path / "part 0.csv").write_text("number,text\n1,abc\n2,d\n")
    with pytest.raises(ConfigError, match=r"part 0\.csv: the file has been changed"):
        files.read(np.array([1]))
    (tmp_path / "part 0.csv").unlink()
    with pytest.raises(ConfigError, match=r"part 0\.csv: the file cannot be read any more"):
        files.read(np.array([1]))


@pytest.mark.parametrize(
    "value",
    [
        *([], ["a"], ["a", "'", '"', "b, c"], ["\\", "\n", "'\""], ["', '"], ["", ""]),
        *([1, -2, 3], [0.5, 1], ["\xfc", "##x"]),
    ],
)
def test_lists_are_read_as_python_writes_them(value):
    assert parse_list(repr(value)) == value


@pytest.mark.parametrize(
    "text", ["", "1", "['a', b]", "__import__('os')", "['a' 'b'", "(1, 2)", *NO_LISTS]
)
def test_anything_else_is_no_list(text):
    with pytest.raises(ValueError, match="is not a list"):
        parse_list(text)
