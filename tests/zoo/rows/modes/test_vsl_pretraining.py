"""Rows of whole documents that are blind to each other."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from modelzoo_trainer.zoo.rows.modes.vsl_pretraining import VslPretrainingMode
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
    return VslPretrainingMode(settings_of("pretraining", processing, "use_vsl: true"), tokenizer)


def test_documents_share_a_row_without_seeing_each_other(words):
    made = mode(words)
    rows, stats = encoded(made, documents_of(text(20, 21, 22, 23), text(30, 31, 32)), 8)
    assert named(made, rows) == {
        "input_ids": [20, 21, 22, 23, 30, 31, 32, PAD],
        "attention_mask": [1, 1, 1, 1, 1, 1, 1, 0],
        "labels": [21, 22, 23, EOS, 31, 32, EOS, PAD],
        "attention_span": [3, 2, 1, 0, 2, 1, 0, 0],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 0],
    }
    assert (stats.sequences, stats.skipped) == (2, {})


def test_a_long_document_is_cut_without_losing_a_token(words_with_bos):
    made = mode(words_with_bos)
    rows, stats = encoded(made, documents_of(text(*range(20, 30))), 8)
    first, second = named(made, rows, 0), named(made, rows, 1)
    assert first["input_ids"] == [BOS, *range(20, 27)]
    assert first["labels"] == [*range(20, 28)]
    assert second["input_ids"] == [27, 28, 29, PAD, PAD, PAD, PAD, PAD]
    assert second["labels"] == [28, 29, EOS, PAD, PAD, PAD, PAD, PAD]
    assert stats.sequences == 2


def test_weights_of_regions_are_kept(words):
    made = mode(words, "semantic_loss_weight: {text: 0}")
    rows, _ = encoded(made, documents_of(text(20, 21)), 4)
    assert named(made, rows)["attention_mask"] == [0, 0, 0, 0]


def test_empty_and_short_documents_are_counted(words):
    rows, stats = encoded(mode(words, "min_sequence_len: 4"), documents_of(" ", text(20, 21)), 8)
    assert len(rows.lengths) == 0
    assert {reason: count for reason, (count, _) in stats.skipped.items()} == {
        "empty": 1,
        "too short": 1,
    }


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.lists(st.integers(1, 30), max_size=8))
def test_every_token_is_predicted_once_and_no_document_crosses(words, sizes):
    texts = [
        text(*(20 + (7 * number + k) % 180 for k in range(size)))
        for number, size in enumerate(sizes)
    ]
    made = mode(words)
    rows, _ = encoded(made, documents_of(*texts), 8)
    data = rows.arrays["data"]
    assert int(data[:, 1].sum()) == sum(sizes)  # of n tokens and EOS, all but the first
    assert int((data[:, 2] == EOS).sum()) == len(sizes)
    assert not (data[:, 0] == EOS).any()
    assert int(rows.lengths.sum()) == sum(sizes)
