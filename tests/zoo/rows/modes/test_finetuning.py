"""Rows of prompts with completions, and of chats."""

from __future__ import annotations

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.interface import Document
from modelzoo_trainer.zoo.rows.modes.finetuning import FinetuningMode
from modelzoo_trainer.zoo.rows.tokenizers import make_tokenizer
from tests.zoo.rows.toys import (
    BOS,
    EOS,
    PAD,
    SEP,
    documents_of,
    encoded,
    named,
    settings_of,
    text,
    word_tokenizer,
)

START, END, SYSTEM, USER, ASSISTANT = range(8, 13)
SPACED = "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
PAIR = [("prompt", text(20, 21)), ("completion", text(30, 31))]


def mode(tokenizer, processing="", dataset=""):
    return FinetuningMode(settings_of("finetuning", processing, dataset), tokenizer)


def only_row(made, content, length=8):
    rows, stats = encoded(made, documents_of(content), length)
    assert stats.skipped == {}
    assert len(rows.lengths) == 1
    return named(made, rows)


def test_only_the_completion_and_its_end_count(words):
    assert only_row(mode(words), PAIR) == {
        "input_ids": [20, 21, SEP, 30, 31, PAD, PAD, PAD],
        "attention_mask": [0, 0, 1, 1, 1, 0, 0, 0],
        "labels": [21, SEP, 30, 31, EOS, PAD, PAD, PAD],
    }


def test_a_tokenizer_that_adds_bos_and_eos_has_each_once(words_with_bos):
    row = only_row(mode(words_with_bos), PAIR)
    assert row["input_ids"] == [BOS, 20, 21, SEP, 30, 31, PAD, PAD]
    assert row["labels"] == [20, 21, SEP, 30, 31, EOS, PAD, PAD]
    assert row["attention_mask"] == [0, 0, 0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(("given", "between"), [("<mid>", [6]), ("''", [])])
def test_the_separator_can_be_set(words, given, between):
    content = [("prompt", "w20 "), ("completion", "w30")]
    row = only_row(mode(words, dataset=f"sep_token: {given}"), content)
    assert row["input_ids"][: 2 + len(between)] == [20, *between, 30]


def test_several_prompts_each_keep_their_completion(words):
    content = [
        ("prompt", "w20"),
        ("completion", "w30"),
        ("prompt", "w21"),
        ("completion", "w31"),
    ]
    assert only_row(mode(words), content) == {
        "input_ids": [20, SEP, 30, EOS, 21, SEP, 31, PAD],
        "attention_mask": [0, 1, 1, 0, 0, 1, 1, 0],
        "labels": [SEP, 30, EOS, 21, SEP, 31, EOS, PAD],
    }


def chat(made, *pairs, length=16):
    row = only_row(made, list(pairs), length)
    size = row["labels"].index(PAD)
    return [row[name][:size] for name in ("input_ids", "attention_mask", "labels")]


def test_a_chat_is_in_the_template_and_answers_count_with_their_end(words):
    made = mode(words, "end_of_turn_token: ' <|im_end|>'", f"chat_template: '{SPACED}'")
    ids, mask, labels = chat(made, ("user", "w20"), ("assistant", text(30, 31)))
    assert ids == [START, USER, 20, END, START, ASSISTANT, 30, 31]
    assert mask == [0, 0, 0, 0, 0, 1, 1, 1]
    assert labels == [USER, 20, END, START, ASSISTANT, 30, 31, END]


def test_a_chat_that_the_template_refuses_is_skipped_and_counted(words):
    made = mode(words, dataset="chat_template: \"{{ raise_exception('no system role') }}\"")
    rows, stats = encoded(made, documents_of([("user", "w20"), ("assistant", "w30")]), 8)
    assert len(rows.lengths) == 0
    reason = "the chat template refuses the messages (no system role)"
    assert {one: count for one, (count, _) in stats.skipped.items()} == {reason: 1}


def test_every_answer_of_a_chat_counts(words):
    made = mode(words, dataset=f"chat_template: '{SPACED}'")
    turns = [("system", "w25"), ("user", "w20"), ("assistant", "w30"), ("user", "w21")]
    ids, mask, labels = chat(made, *turns, ("assistant", "w31"), length=20)
    counted = [label for label, weight in zip(labels, mask, strict=True) if weight]
    assert counted == [30, END, 31, END]
    assert ids[:4] == [START, SYSTEM, 25, END]


def test_without_a_known_end_one_token_after_each_turn_joins_it(letters):
    made = mode(letters)  # ChatML, whose <|im_end|> is a token
    ids, mask, labels = chat(made, ("user", "ab"), ("assistant", "cd"), length=80)
    counted = [label for label, weight in zip(labels, mask, strict=True) if weight]
    assert letters.decode(counted) == "cd<|im_end|>"
    assert letters.decode([*ids, labels[-1]]) == (
        "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\ncd<|im_end|>\n"
    )


def test_weights_of_the_settings_and_of_the_hook_replace_the_default(words):
    made = mode(words, "semantic_loss_weight: {prompt: {text: 1}, completion: {text: 0}}")
    row = only_row(made, PAIR)
    assert row["attention_mask"] == [1, 0, 0, 0, 0, 0, 0, 0]
    turn = {"type": "completion", "content": [{"a": "w30"}, {"b": " w31"}]}
    turn["semantic_loss_weight"] = [0, 1]
    prompt = {"type": "prompt", "content": [{"text": "w20"}]}
    rows, _ = encoded(mode(words), [Document("a", 0, [prompt, turn])], 8)
    assert named(mode(words), rows)["attention_mask"] == [0, 0, 1, 1, 0, 0, 0, 0]


def test_a_dropped_region_is_not_in_the_row(words):
    made = mode(words, "semantic_drop_mask: {prompt: {text: true}}")
    assert only_row(made, PAIR)["input_ids"][:3] == [30, 31, PAD]


def test_a_token_across_the_edge_of_a_region_counts(words):
    content = [("prompt", "w2"), ("completion", "0 w30")]
    row = only_row(mode(words, dataset="sep_token: ''"), content)
    assert row["input_ids"][:2] == [20, 30]
    assert row["attention_mask"][:2] == [1, 1]


def skipped(made, *contents, length=8):
    rows, stats = encoded(made, documents_of(*contents), length)
    assert len(rows.lengths) == 0
    return {reason: count for reason, (count, _) in stats.skipped.items()}


def test_documents_without_a_row_are_counted_by_reason(words):
    empty = [("prompt", "w20"), ("completion", " ")]
    assert skipped(mode(words), empty) == {"empty": 1}
    assert skipped(mode(words, "min_sequence_len: 7"), PAIR) == {"too short": 1}
    assert skipped(mode(words), [("prompt", text(*range(20, 40))), PAIR[1]]) == {"too long": 1}
    uncounted = mode(words, "semantic_loss_weight: {completion: {text: 0}}")
    assert skipped(uncounted, PAIR) == {"no token counts in the loss": 1}


def test_a_sequence_has_at_most_as_many_tokens_as_a_row(words):
    fits = [("prompt", text(20, 21)), ("completion", text(30, 31, 32, 33))]
    assert only_row(mode(words), fits)["labels"] == [21, SEP, 30, 31, 32, 33, EOS, PAD]
    longer = [("prompt", text(20, 21)), ("completion", text(30, 31, 32, 33, 34))]
    assert skipped(mode(words), longer) == {"too long": 1}


@pytest.mark.parametrize(
    ("truncation", "inputs", "last", "answers_cut"),
    [
        ("max_turn_length: 2", [22, 23, SEP, 30, 31], EOS, 0),
        ("max_turn_length: 2, prompt_truncation_mode: keep_start", [20, 21, SEP, 30, 31], EOS, 0),
        ("", [20, 21, 22, 23, SEP], 30, 1),
    ],
)
def test_long_prompts_are_cut_to_a_length_then_answers_from_their_end(
    words, truncation, inputs, last, answers_cut
):
    content = [("prompt", text(20, 21, 22, 23)), ("completion", text(30, 31))]
    made = mode(words, dataset=f"truncate_to_msl: {{{truncation}}}")
    rows, stats = encoded(made, documents_of(content), 6)
    row = named(made, rows)
    assert row["input_ids"] == [*inputs, PAD]
    assert row["labels"] == [*inputs[1:], last, PAD]
    assert (stats.documents_truncated, stats.answers_cut) == (1, answers_cut)


def test_the_longest_prompt_is_cut_first(words):
    content = [
        ("prompt", text(20, 21)),
        ("completion", "w30"),
        ("prompt", text(22, 23, 24, 25)),
        ("completion", "w31"),
    ]
    made = mode(words, dataset="truncate_to_msl: {max_turn_length: 1}")
    row = only_row(made, content, 11)
    assert row["input_ids"] == [20, 21, SEP, 30, EOS, 23, 24, 25, SEP, 31, PAD]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "prompt_truncate_mode: keep_end",
            r"truncate_to_msl\.prompt_truncate_mode: .*prompt_truncation_mode",
        ),
        ("prompt_truncation_mode: keep", "'keep' is not one of keep_start, keep_end"),
        ("max_turn_length: 0", "an integer > 0 is expected, got 0"),
    ],
)
def test_an_invalid_truncation_is_refused(words, given, message):
    with pytest.raises(ConfigError, match=message):
        mode(words, dataset=f"truncate_to_msl: {{{given}}}")


def test_roles_of_another_mode_are_refused_with_the_document(words):
    with pytest.raises(
        ConfigError, match=r"a\.jsonl, row 0: .*prompt and completion.*\['chosen'\]"
    ):
        encoded(mode(words), documents_of([("chosen", "w20")]), 8)
    ids = Document("a.jsonl", 0, [{"type": "prompt", "content": [{"text": [1]}]}])
    with pytest.raises(ConfigError, match=r"holds token ids.*nlg"):
        encoded(mode(words), [ids], 8)


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    tokenizer = make_tokenizer(huggingface_tokenizer=word_tokenizer(tmp_path, {}))
    with pytest.raises(ConfigError, match=r"Set processing\.eos_id"):
        mode(tokenizer)


@pytest.mark.parametrize(
    ("processing", "message"),
    [
        ("semantic_loss_weight: {prompt: {text: 2}}", r"loss_weight\.prompt\.text: .*got 2"),
        ("semantic_drop_mask: {text: 3}", r"drop_mask\.text: .*got 3"),
        ("semantic_attention_mask: {text: 0}", "semantic_attention_mask has no effect"),
    ],
)
def test_invalid_rules_for_regions_are_refused(words, processing, message):
    with pytest.raises(ConfigError, match=message):
        mode(words, processing)


def test_vsl_packs_short_documents_and_masks_their_prompts(words):
    made = mode(words, dataset="use_vsl: true")
    other = [("prompt", "w22"), ("completion", "w32")]
    rows, stats = encoded(made, documents_of(PAIR, other), 8)
    assert named(made, rows) == {
        "input_ids": [20, 21, SEP, 30, 31, 22, SEP, 32],
        "attention_mask": [0, 0, 1, 1, 1, 0, 1, 1],
        "labels": [21, SEP, 30, 31, EOS, SEP, 32, EOS],
        "attention_span": [4, 3, 2, 1, 0, 2, 1, 0],
        "position_ids": [0, 1, 2, 3, 4, 0, 1, 2],
    }
    assert stats.sequences == 2
