"""Rows of contexts and completions that are token ids already."""

from __future__ import annotations

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.modes.nlg import NlgMode
from tests.zoo.rows.toys import documents_of, encoded, named, settings_of


def document(context, completion):
    return documents_of([("context", context), ("completion", completion)])


def mode(tokenizer, processing=""):
    return NlgMode(settings_of("nlg", processing), tokenizer)


def test_the_completion_is_predicted(words):
    rows, _ = encoded(mode(words), document([20, 21, 22], [30, 31]), 6)
    assert named(mode(words), rows) == {
        "input_ids": [20, 21, 22, 30, 0, 0],
        "attention_mask": [0, 0, 1, 1, 0, 0],
        "labels": [21, 22, 30, 31, 0, 0],
    }


@pytest.mark.parametrize(
    ("context", "completion", "reason"),
    [
        ([20, 21, 22], [30, 31, 32], None),
        ([20, 21, 22], [30, 31, 32, 33], "too long"),
        ([], [30], "empty"),
        ([20], [], "empty"),
        ([20], [30], "too short"),
    ],
)
def test_documents_without_a_row_are_counted_by_reason(words, context, completion, reason):
    made = mode(words, "min_sequence_len: 3")
    rows, stats = encoded(made, document(context, completion), 5)
    assert list(stats.skipped) == ([reason] if reason else [])
    assert len(rows.lengths) == (0 if reason else 1)


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ("w20", "context is text; nlg needs"),
        ([200], "context has token 200, but the tokenizer has 200 tokens"),
    ],
)
def test_what_are_no_ids_of_the_tokenizer_is_refused(words, context, message):
    with pytest.raises(ConfigError, match=rf"a\.jsonl, row 0: {message}"):
        encoded(mode(words), document(context, [30]), 8)
    with pytest.raises(ConfigError, match="nlg needs the turns context and completion"):
        encoded(mode(words), documents_of([("prompt", [20])]), 8)
