"""Documents that are cut so that answers keep their ends."""

from __future__ import annotations

import numpy as np
import pytest

from modelzoo_trainer.zoo.rows.modes.finetuning import FinetuningMode
from modelzoo_trainer.zoo.rows.modes.sequences import NO_TURN
from modelzoo_trainer.zoo.rows.modes.truncation import WholeAnswers
from tests.zoo.rows.toys import EOS, SEP, documents_of, encoded, named, settings_of, text

START, END, SYSTEM, USER, ASSISTANT = range(8, 13)
SPACED = "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
PROMPT = ("prompt", text(20, 21, 22, 23))


def cut(tokenizer, content, length, side="keep_end"):
    """Return the tokens of the only row, those of them that count, and the statistics."""
    settings = settings_of("finetuning", "", f"chat_template: '{SPACED}'")
    made = FinetuningMode(settings, tokenizer, WholeAnswers(side == "keep_end"))
    rows, stats = encoded(made, documents_of(content), length)
    assert stats.skipped == {}
    row, size = named(made, rows), rows.lengths[0]
    ids = [row["input_ids"][0], *row["labels"][:size]]
    assert ids[:-1] == row["input_ids"][:size]
    mask = row["attention_mask"][:size]
    return ids, [label for label, counts in zip(ids[1:], mask, strict=True) if counts], stats


@pytest.mark.parametrize(("side", "prompt"), [("keep_end", [22, 23]), ("keep_start", [20, 21])])
def test_a_prompt_is_cut_so_that_its_answer_stays_whole(words, side, prompt):
    ids, counted, stats = cut(words, [PROMPT, ("completion", text(30, 31))], 6, side)
    assert ids == [*prompt, SEP, 30, 31, EOS]
    assert counted == [30, 31, EOS]
    assert (stats.documents_truncated, stats.answers_cut) == (1, 0)


def test_a_prompt_keeps_one_token_of_its_own(words):
    ids, counted, _ = cut(words, [PROMPT, ("completion", text(30, 31, 32))], 6)
    assert ids == [23, SEP, 30, 31, 32, EOS]
    assert counted == [30, 31, 32, EOS]


def test_an_answer_that_cannot_be_whole_loses_its_end_and_is_reported(words):
    ids, counted, stats = cut(words, [PROMPT, ("completion", text(30, 31, 32, 33, 34))], 6)
    assert ids == [21, 22, 23, SEP, 30, 31]
    assert counted == [30, 31]
    assert (stats.documents_truncated, stats.answers_cut) == (1, 1)


def test_a_row_ends_with_the_last_answer_that_fits(words):
    first = [("system", "w25"), ("user", "w20"), ("assistant", "w30")]
    whole = [START, SYSTEM, 25, END, START, USER, 20, END, START, ASSISTANT, 30, END]
    later = [("user", "w21"), ("assistant", text(*range(40, 60)))]
    for length in (12, 18, 30):
        ids, counted, stats = cut(words, [*first, *later], length)
        assert ids == whole
        assert counted == [30, END]
        assert (stats.documents_truncated, stats.answers_cut) == (1, 0)


def test_the_longest_of_the_first_prompts_is_cut_first(words):
    chat = [("system", text(25, 26, 27)), ("user", text(20, 21, 22, 23, 24)), ("assistant", "w30")]
    ids, counted, _ = cut(words, [*chat, ("user", "w40"), ("assistant", "w41")], 15)
    assert ids == [START, SYSTEM, 26, 27, END, START, USER, 23, 24, END, START, ASSISTANT, 30, END]
    assert counted == [30, END]


def test_a_chat_whose_template_fills_the_row_is_skipped(words):
    settings = settings_of("finetuning", "", f"chat_template: '{SPACED}'")
    made = FinetuningMode(settings, words, WholeAnswers(keeps_end=True))
    chat = [("user", "w20"), ("assistant", text(*range(30, 40)))]
    rows, stats = encoded(made, documents_of(chat), 6)
    assert len(rows.lengths) == 0
    assert list(stats.skipped) == ["too long"]


BLOCKS = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }} <|im_end|> {% endgeneration %}{% else %}{{ m.content }} "
    "<|im_end|> {% endif %}{% endfor %}"
)
CHAT = [
    ("system", text(25, 26, 27)),
    ("user", text(20, 21, 22, 23, 24)),
    ("assistant", text(30, 31, 32, 33)),
    ("user", text(40, 41, 42, 43)),
    ("assistant", text(50, 51, 52, 53)),
]


@pytest.mark.parametrize("template", [SPACED, BLOCKS], ids=["spaced", "blocks"])
@pytest.mark.parametrize("side", ["keep_start", "keep_end"])
def test_a_prompt_that_is_cut_keeps_what_ends_it(words, side, template):
    settings = settings_of("finetuning", "", f'chat_template: "{template}"')
    made = FinetuningMode(settings, words, WholeAnswers(side == "keep_end"))
    rows, _ = encoded(made, documents_of(CHAT), 17)
    row, size = named(made, rows), rows.lengths[0]
    system, user = ([25, 26], [20, 21]) if side == "keep_start" else ([26, 27], [23, 24])
    assert [*row["input_ids"][:1], *row["labels"][:size]][:-1] == row["input_ids"][:size]
    expected = [START, SYSTEM, *system, END, START, USER, *user, END]
    assert row["input_ids"][:size] == [*expected, START, ASSISTANT, 30, 31, 32, 33]
    assert row["labels"][size - 1] == END


@pytest.mark.parametrize("template", [SPACED, BLOCKS], ids=["spaced", "blocks"])
@pytest.mark.parametrize("side", ["keep_start", "keep_end"])
@pytest.mark.parametrize("length", [21, 24, 28, 33])
def test_of_several_turns_only_content_is_cut(words, side, template, length):
    cuts = f"{{max_turn_length: 1, prompt_truncation_mode: {side}}}"
    dataset = f'chat_template: "{template}", truncate_to_msl: {cuts}'
    made = FinetuningMode(settings_of("finetuning", "", dataset), words)
    rows, _ = encoded(made, documents_of(CHAT), length)
    row, size = named(made, rows), rows.lengths[0]
    ids, mask = row["input_ids"][:size] + row["labels"][size - 1 : size], row["attention_mask"]
    starts = [place for place, token in enumerate(ids) if token == START]
    turns = [ids[a:b] for a, b in zip(starts, [*starts[1:], len(ids)], strict=True)]
    assert [turn[:2] for turn in turns] == [
        [START, role] for role in (SYSTEM, USER, ASSISTANT, USER, ASSISTANT)
    ]
    assert all(turn[-1] == END for turn in turns[:-1])
    learned = [label for label, counts in zip(ids[1:], mask, strict=False) if counts]
    whole = [END] * sum({30, 31, 32, 33} <= set(turn) for turn in turns[:-1])
    whole += [END] * (turns[-1][-1] == END)
    assert [token for token in learned if token == END] == whole


def test_what_ends_an_answer_that_is_cut_is_not_learned(words):
    pairs = [("prompt", "w20"), ("completion", text(30, 31, 32, 33, 34))]
    pairs += [("prompt", "w21"), ("completion", "w40")]
    dataset = "truncate_to_msl: {max_turn_length: 1}"
    made = FinetuningMode(settings_of("finetuning", "", dataset), words)
    rows, stats = encoded(made, documents_of(pairs), 9)
    row, size = named(made, rows), rows.lengths[0]
    assert row["input_ids"][:size] == [20, SEP, 30, 31, EOS, 21, SEP, 40]
    assert row["attention_mask"][:size] == [0, 1, 1, 0, 0, 0, 1, 1]
    assert stats.answers_cut == 1


@pytest.mark.parametrize("length", range(4, 15))
def test_prompts_that_keep_their_ends_are_cut_as_in_earlier_releases(length):
    owners = np.array([NO_TURN, 0, 0, NO_TURN, 1, 1, 1, 1, 1, NO_TURN, 2, 2, 2, 2, 2])
    is_end = np.zeros(len(owners), bool)
    is_end[[8, -1]] = True
    known, plain = (
        WholeAnswers(True).kept(owners, ends, [False, False, True], length)
        for ends in (is_end, np.zeros_like(is_end))
    )
    np.testing.assert_array_equal(known, plain)
