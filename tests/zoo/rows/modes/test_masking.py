"""Rows of which some tokens are hidden."""

from __future__ import annotations

import numpy as np
import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.modes.masking import MaskedMode
from modelzoo_trainer.zoo.rows.tokenizers import make_tokenizer
from tests.zoo.rows.toys import (
    BOS,
    EOS,
    MASK,
    PAD,
    documents_of,
    encoded,
    named,
    settings_of,
    text,
    word_tokenizer,
)


def mode(tokenizer, dataset="", processing=""):
    dataset = f"training_objective: mlm, {dataset}"
    return MaskedMode(settings_of("pretraining", processing, dataset), tokenizer)


def restored(rows, index=0):
    """Return the tokens of a row with the labels put back."""
    ids, labels = rows.arrays["data"][index, 0].copy(), rows.arrays["labels"][index, 0]
    ids[labels != -100] = labels[labels != -100]
    return ids.tolist()


def test_the_labels_are_the_tokens_that_were_hidden(words_with_bos):
    made = mode(words_with_bos, "mlm_fraction: 0.5")
    rows, _ = encoded(made, documents_of(text(*range(20, 30))), 14)
    assert restored(rows) == [BOS, *range(20, 30), EOS, PAD, PAD]
    assert named(made, rows)["attention_mask"] == [1] * 12 + [0] * 2
    assert rows.arrays["labels"].shape == (1, 1, 14)
    hidden = rows.arrays["labels"][0, 0] != -100
    assert hidden.sum() == 5  # of 10 that may be hidden
    assert not hidden[[0, 11, 12, 13]].any()
    assert rows.lengths.tolist() == [12]


def test_gathered_labels_have_positions_and_weights(words):
    plain = mode(words, "mlm_fraction: 0.25")
    gathered = mode(words, "mlm_fraction: 0.25, mlm_with_gather: true")
    documents = documents_of(text(*range(20, 30)))
    expected, _ = encoded(plain, documents, 16)
    rows, _ = encoded(gathered, documents, 16)
    np.testing.assert_array_equal(rows.arrays["data"], expected.arrays["data"])
    labels = expected.arrays["labels"][0, 0]
    [first, second] = np.flatnonzero(labels != -100)
    assert rows.arrays["labels"].tolist() == [
        [[labels[first], labels[second], -100, -100], [first, second, 0, 0], [1, 1, 0, 0]]
    ]


def test_most_hidden_tokens_are_masked_some_replaced_some_kept(words):
    made = mode(words, "mlm_fraction: 1.0, ignore_index: -1")
    rows, _ = encoded(made, documents_of(*[text(*range(20, 120))] * 40), 100)
    ids, labels = rows.arrays["data"][:, 0], rows.arrays["labels"][:, 0]
    masked, kept = (ids == MASK).mean(), (ids == labels).mean()
    assert masked == pytest.approx(0.8, abs=0.02)
    assert kept == pytest.approx(0.1, abs=0.02)
    assert set(ids[(ids != MASK) & (ids != labels)]).isdisjoint({PAD, BOS, EOS})


def test_excluded_tokens_are_never_hidden(words):
    made = mode(words, "mlm_fraction: 1.0, excluded_tokens: [w20, w22]")
    rows, _ = encoded(made, documents_of(text(20, 21, 22, 23)), 4)
    assert (rows.arrays["labels"][0, 0] != -100).tolist() == [False, True, False, True]


def test_masks_depend_on_the_document_and_the_seed_alone(words):
    documents = documents_of(*[text(*range(20, 60))] * 3)
    together, _ = encoded(mode(words), documents, 40)
    alone, _ = encoded(mode(words), documents[1:2], 40)
    np.testing.assert_array_equal(together.arrays["data"][1], alone.arrays["data"][0])
    assert (together.arrays["data"][0] != together.arrays["data"][1]).any()
    other, _ = encoded(mode(words, processing="seed: 1"), documents, 40)
    assert (together.arrays["data"] != other.arrays["data"]).any()


def test_a_long_document_is_truncated_inside_its_frame(words_with_bos):
    made = mode(words_with_bos, "mlm_fraction: 0.0")
    rows, stats = encoded(made, documents_of(text(*range(20, 40))), 6)
    assert named(made, rows)["input_ids"] == [BOS, 20, 21, 22, 23, EOS]
    assert stats.documents_truncated == 1


def test_vsl_packs_documents_that_see_only_themselves(words):
    made = mode(words, "use_vsl: true, mlm_fraction: 0.5, mlm_with_gather: true")
    rows, stats = encoded(made, documents_of(text(20, 21, 22, 23), text(30, 31, 32)), 8)
    row, labels = named(made, rows), rows.arrays["labels"][0]
    assert row["attention_mask"] == [1] * 7 + [0]
    assert row["attention_span"] == [3, 2, 1, 0, 2, 1, 0, 0]
    assert row["position_ids"] == [0, 1, 2, 3, 0, 1, 2, 0]
    assert labels.shape == (3, 4)
    assert labels[2].tolist() == [1, 1, 1, 0]  # two of four, one of three
    whole = [20, 21, 22, 23, 30, 31, 32]
    assert labels[0, :3].tolist() == [whole[place] for place in labels[1, :3]]
    assert stats.sequences == 2


def test_empty_and_short_documents_are_counted(words):
    made = mode(words, processing="min_sequence_len: 3")
    _, stats = encoded(made, documents_of("", text(20, 21)), 8)
    assert list(stats.skipped) == ["empty", "too short"]


def test_missing_tokens_are_refused(words, tmp_path):
    with pytest.raises(ConfigError, match="excluded_tokens: 'x' is not a token"):
        mode(words, "excluded_tokens: [x]")
    names = {"eos_token": "<eos>"}
    plain = make_tokenizer(huggingface_tokenizer=word_tokenizer(tmp_path, names))
    with pytest.raises(ConfigError, match="mask_token is missing"):
        mode(plain)
