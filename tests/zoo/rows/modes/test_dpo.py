"""Rows of a chosen and a rejected answer."""

from __future__ import annotations

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.modes.dpo import DpoMode
from tests.zoo.rows.toys import PAD, documents_of, encoded, named, settings_of, text

START, END, _, USER, ASSISTANT = range(8, 13)
SPACED = "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"


def mode(tokenizer, dataset="", template=SPACED):
    return DpoMode(settings_of("dpo", "", f"chat_template: '{template}', {dataset}"), tokenizer)


def document(prompt, chosen, rejected):
    return documents_of([("prompt", prompt), ("chosen", chosen), ("rejected", rejected)])


def test_a_row_has_both_answers_after_the_same_prompt(words):
    made = mode(words)
    rows, stats = encoded(made, document("w20", text(30, 31), "w40"), 10)
    assert named(made, rows) == {
        "chosen_input_ids": [START, USER, 20, END, START, ASSISTANT, 30, 31, END, PAD],
        "chosen_attention_mask": [0, 0, 0, 0, 0, 1, 1, 1, 0, 0],
        "chosen_labels": [PAD, PAD, PAD, PAD, PAD, 30, 31, END, PAD, PAD],
        "rejected_input_ids": [START, USER, 20, END, START, ASSISTANT, 40, END, PAD, PAD],
        "rejected_attention_mask": [0, 0, 0, 0, 0, 1, 1, 0, 0, 0],
        "rejected_labels": [PAD, PAD, PAD, PAD, PAD, 40, END, PAD, PAD, PAD],
    }
    assert rows.lengths.tolist() == [17]
    assert stats.documents_truncated == 0


def test_a_prompt_can_be_a_chat(words):
    turns = [("system", "w25"), ("user", "w20"), ("assistant", "w26"), ("user", "w21")]
    made = mode(words)
    content = documents_of([*turns, ("chosen", "w30"), ("rejected", "w40")])
    rows, _ = encoded(made, content, 21)
    row = named(made, rows)
    prompt = [START, 10, 25, END, START, USER, 20, END, START, ASSISTANT, 26, END]
    whole = [*prompt, START, USER, 21, END, START, ASSISTANT, 30, END, PAD]
    assert row["chosen_input_ids"] == whole
    assert row["chosen_attention_mask"] == [0] * 17 + [1, 1, 0, 0]
    assert row["rejected_labels"] == [PAD] * 17 + [40, END, PAD, PAD]


def test_a_long_prompt_keeps_its_end_in_both_rows(words):
    made = mode(
        words, "max_prompt_length: 3", "{{ messages[0].content }} {{ messages[1].content }}"
    )
    rows, stats = encoded(made, document(text(20, 21, 22, 23), text(30, 31, 32), "w40"), 6)
    row = named(made, rows)
    assert row["chosen_input_ids"] == [21, 22, 23, 30, 31, 32]
    assert row["chosen_labels"] == [PAD, PAD, 30, 31, 32, PAD]
    assert row["chosen_attention_mask"] == [0, 0, 1, 1, 1, 0]
    assert row["rejected_input_ids"] == [21, 22, 23, 40, PAD, PAD]
    assert row["rejected_attention_mask"] == [0, 0, 1, 0, 0, 0]
    assert (stats.documents_truncated, stats.answers_cut) == (1, 0)


def test_an_answer_that_is_still_too_long_loses_its_end(words):
    made = mode(
        words, "max_prompt_length: 3", "{{ messages[0].content }} {{ messages[1].content }}"
    )
    rows, stats = encoded(made, document(text(20, 21), text(*range(30, 39)), "w40"), 6)
    row = named(made, rows)
    assert row["chosen_input_ids"] == [20, 21, 30, 31, 32, 33]
    assert row["chosen_labels"] == [PAD, 30, 31, 32, 33, PAD]
    assert (stats.documents_truncated, stats.answers_cut) == (1, 1)


def test_documents_without_a_row_are_counted_by_reason(words):
    made = mode(words, "max_prompt_length: 512")
    rows, stats = encoded(made, document(text(*range(20, 30)), "w30", "w31"), 8)
    assert len(rows.lengths) == 0
    assert list(stats.skipped) == ["too long"]
    _, stats = encoded(made, document("w20", " ", "w31"), 8)
    assert list(stats.skipped) == ["empty"]
    _, stats = encoded(
        mode(words, template="{{ messages[0].role }}"), document("w20", "w30", "w31"), 8
    )
    assert list(stats.skipped) == ["the chat template omits or changes a message"]


def test_other_turns_are_refused_with_the_document(words):
    with pytest.raises(ConfigError, match=r"row 0: .*prompt, chosen, rejected; got prompt"):
        encoded(mode(words), documents_of([("prompt", "w20")]), 8)
