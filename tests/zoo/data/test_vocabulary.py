"""Vocabulary files."""

from __future__ import annotations

import pytest

from modelzoo_trainer.config.model_zoo_root import with_advice
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.vocabulary import Vocabulary, missing_vocabulary


@pytest.fixture
def path(tmp_path):
    (tmp_path / "v").write_bytes(b"\xef\xbb\xbf[UNK]\r\na\n\nB\n")
    return str(tmp_path / "v")


def test_a_line_is_an_id_and_a_byte_order_mark_is_left_out(path):
    found = Vocabulary(path, extra_ids=2)
    assert found.ids == {"[UNK]": 0, "a": 1, "B": 3}
    assert found.size == 6
    assert found.ids_of(["a", "", "x", "B"]) == [1, 0, 0, 3]


def test_how_case_counts(path):
    for case, pieces, ids in (
        ("counts", ["A", "B"], [0, 3]),
        ("lower_if_missing", ["A", "B"], [1, 3]),
        ("lower", ["a", "b"], [1, 3]),
    ):
        found = Vocabulary(path, case=case)
        assert found.pieces_of("A B") == pieces
        assert found.ids_of(pieces) == ids


def test_a_token_that_is_there_twice_is_refused(tmp_path):
    (tmp_path / "v").write_text("[UNK]\na\nA\na\n")
    for case in ("counts", "lower_if_missing"):
        with pytest.raises(ConfigError, match="lines 2 and 4 are both 'a'"):
            Vocabulary(str(tmp_path / "v"), case=case)
    assert Vocabulary(str(tmp_path / "v"), case="lower").ids_of(["a"]) == [1]


def test_settings_differ_if_ids_differ(path):
    first = Vocabulary(path).settings
    assert Vocabulary(path).settings == first
    others = [{"oov_token": "a"}, {"case": "lower"}, {"extra_ids": 1}]
    assert first not in [Vocabulary(path, **one).settings for one in others]


def test_a_missing_file_under_the_model_zoo_has_advice():
    path = "$MODELZOO_ROOT/vocab.txt"
    with pytest.raises(ConfigError, match=r"src_vocab_file .*cannot be read") as refused:
        Vocabulary(path, argument="src_vocab_file")
    (found,) = missing_vocabulary(path, "src_vocab_file")
    assert found.startswith("src_vocab_file ")
    for message in (str(refused.value), found):
        assert "environment variable MODELZOO_ROOT" in with_advice(message)
