"""Rows of documents of which some are rearranged."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.modes.fill_in_the_middle import FillInTheMiddleMode
from tests.zoo.rows.toys import (
    BOS,
    EOS,
    MIDDLE,
    PAD,
    PREFIX,
    SUFFIX,
    documents_of,
    encoded,
    named,
    settings_of,
    text,
)

TOKENS = "fim_prefix_tok: <pre>, fim_middle_tok: <mid>, fim_suffix_tok: <suf>"


def mode(tokenizer, fim=1.0, spm=0.0, processing=""):
    dataset = f"training_objective: fim, fim_rate: {fim}, spm_rate: {spm}, {TOKENS}"
    return FillInTheMiddleMode(settings_of("pretraining", processing, dataset), tokenizer)


def whole(rows, index=0):
    """Return the tokens of a row without padding."""
    ids, mask, labels = rows.arrays["data"][index]
    assert (ids[1:][mask[1:] == 1] == labels[:-1][mask[1:] == 1]).all()
    size = int(mask.sum())
    return [*ids[:size].tolist(), int(labels[size - 1])]


def parts_of(ids, tokenizer, *, is_spm):
    """Return prefix, middle and suffix of a rearranged document as text."""
    assert ids[0] == PREFIX
    assert ids[-1] == EOS
    suffix, middle = ids.index(SUFFIX), ids.index(MIDDLE)
    if is_spm:  # pre suf SUFFIX mid PREFIX MIDDLE: the border of the last two is not marked
        assert suffix == 1
        return tokenizer.decode(ids[middle + 1 : -1]), tokenizer.decode(ids[2:middle])
    return [
        tokenizer.decode(part)
        for part in (ids[1:suffix], ids[middle + 1 : -1], ids[suffix + 1 : middle])
    ]


def test_psm_is_prefix_suffix_middle(letters):
    rows, _ = encoded(mode(letters), documents_of("Hello world"), 40)
    prefix, middle, suffix = parts_of(whole(rows), letters, is_spm=False)
    assert prefix + middle + suffix == "Hello world"
    assert named(mode(letters), rows)["input_ids"][-1] == PAD


def test_spm_is_suffix_prefix_middle(letters):
    rows, _ = encoded(mode(letters, spm=1.0), documents_of("Hello world"), 40)
    start, suffix = parts_of(whole(rows), letters, is_spm=True)
    assert start + suffix == "Hello world"


def test_a_document_that_is_not_rearranged_stays_with_its_end(words_with_bos):
    made = mode(words_with_bos, fim=0.0)
    rows, _ = encoded(made, documents_of(text(20, 21), text(30, 31, 32)), 6)
    assert whole(rows, 0) == [BOS, 20, 21, EOS, BOS, 30, 31]
    assert whole(rows, 1) == [31, 32, EOS]


def test_bos_stays_first(words_with_bos):
    rows, _ = encoded(mode(words_with_bos), documents_of(text(20, 21, 22, 23)), 20)
    assert whole(rows)[:2] == [BOS, PREFIX]


@pytest.mark.parametrize("spm", [0.0, 1.0])
def test_a_full_row_is_shortened_by_the_added_tokens(words, spm):
    numbers = list(range(20, 60))
    rows, _ = encoded(mode(words, spm=spm), documents_of(text(*numbers)), 20)
    first = whole(rows)
    assert len(first) == 21
    assert (first[0], first[-1]) == (PREFIX, EOS)
    content = [token for token in first if token >= 19]  # 19: a word that was cut
    assert len(content) == 17  # 21 less three tokens and the end
    assert set(content) < set(range(19, 41))


def test_the_end_of_the_suffix_goes_first(words):
    made = mode(words)
    piece = made._piece([20, 21, 22, 23], random.Random(0))
    piece.parts = [[20, 21], [23], [22]]
    for left in ([[20, 21], [], [22]], [[21], [], [22]], [[], [], [22]], [[], [], []]):
        assert piece.shorten()
        assert piece.parts == left
    assert not piece.shorten()


def test_rates_hold_over_many_documents(letters):
    made, draw = mode(letters, fim=0.5, spm=0.25), random.Random(0)
    [ids] = letters.encode_batch(["abcdefgh"])
    pieces = [made._piece(ids, draw) for _ in range(1000)]
    moved = [piece for piece in pieces if piece.parts]
    spm = [piece for piece in moved if piece.frame[0] == [PREFIX, SUFFIX]]
    assert len(moved) == pytest.approx(500, abs=50)
    assert len(spm) == pytest.approx(len(moved) / 4, abs=40)


def test_rows_depend_on_the_unit_and_the_seed_alone(letters):
    documents = documents_of(*["abcdefgh"] * 20)
    first, _ = encoded(mode(letters, 0.5, 0.5), documents, 30)
    again, _ = encoded(mode(letters, 0.5, 0.5), documents, 30)
    np.testing.assert_array_equal(first.arrays["data"], again.arrays["data"])
    other, _ = encoded(mode(letters, 0.5, 0.5, "seed: 1"), documents, 30)
    assert (first.arrays["data"] != other.arrays["data"]).any()


def test_a_character_cut_by_the_edge_of_a_row_is_not_replaced(letters):
    rows, _ = encoded(mode(letters), documents_of("\u00e9" * 30), 15)
    used = set(letters.encode_batch(["\u00e9"])[0]) | {PREFIX, MIDDLE, SUFFIX, EOS, PAD}
    assert set(rows.arrays["data"][:, 0].ravel().tolist()) <= used


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.lists(st.text("abc", min_size=1, max_size=30), min_size=1, max_size=6), st.integers(0, 9))
def test_rows_are_full_and_have_no_tokens_from_elsewhere(letters, texts, seed):
    made = mode(letters, 0.5, 0.5, f"seed: {seed}")
    rows, _ = encoded(made, documents_of(*texts), 12)
    size = sum(len(one) + 1 for one in texts)
    data = rows.arrays["data"]
    assert len(data) == -(-(size - 1) // 12)
    assert (data[:-1, 1] == 1).all()
    for row in range(len(data)):
        content = letters.decode([token for token in whole(rows, row) if token >= 8])
        assert set(content) <= set("abc")


def test_empty_documents_are_counted(letters):
    rows, stats = encoded(mode(letters), documents_of(" "), 12)
    assert len(rows.lengths) == 0
    assert list(stats.skipped) == ["empty"]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (TOKENS, r"needs dataset\.fim_rate and dataset\.spm_rate"),
        ("fim_rate: 0.5, spm_rate: 0.5", r"dataset\.fim_prefix_tok is missing"),
        (
            f"fim_rate: 0.5, spm_rate: 0.5, {TOKENS.replace('<mid>', '<no>')}",
            "fim_middle_tok: '<no>' is not a token",
        ),
    ],
)
def test_missing_settings_are_refused(words, dataset, message):
    settings = settings_of("pretraining", "", f"training_objective: fim, {dataset}")
    with pytest.raises(ConfigError, match=message):
        FillInTheMiddleMode(settings, words)
