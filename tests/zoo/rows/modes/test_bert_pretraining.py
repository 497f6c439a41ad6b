"""Rows of pieces of documents."""

from __future__ import annotations

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.modes.bert_pretraining import BertPretrainingMode
from tests.zoo.rows.toys import (
    BOS,
    EOS,
    PAD,
    documents_of,
    encoded,
    named,
    settings_of,
    text,
)


def mode(tokenizer, processing=""):
    dataset = "training_objective: bert_pretraining"
    return BertPretrainingMode(settings_of("pretraining", processing, dataset), tokenizer)


def test_each_piece_of_a_document_has_its_frame(words_with_bos):
    made = mode(words_with_bos)
    rows, _ = encoded(made, documents_of(text(*range(20, 26))), 6)
    assert named(made, rows, 0) == {
        "input_ids": [BOS, 20, 21, 22, 23, EOS],
        "attention_mask": [1] * 6,
        "token_type_ids": [0] * 6,
    }
    assert named(made, rows, 1)["input_ids"] == [BOS, 24, 25, EOS, PAD, PAD]
    assert named(made, rows, 1)["attention_mask"] == [1, 1, 1, 1, 0, 0]
    assert rows.lengths.tolist() == [6, 4]


def test_empty_and_short_documents_are_counted(words):
    _, stats = encoded(mode(words, "min_sequence_len: 3"), documents_of("", text(20, 21)), 6)
    assert list(stats.skipped) == ["empty", "too short"]


def test_a_row_without_room_is_refused(words_with_bos):
    with pytest.raises(ConfigError, match="max_seq_length: 2 has no room"):
        encoded(mode(words_with_bos), documents_of("w20"), 2)
