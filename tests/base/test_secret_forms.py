"""Secrets by the form of their value, and values that only look like some."""

import pytest

from modelzoo_trainer.base.secrets import (
    hide_in_command,
    hide_in_text,
    is_secret,
    left_out,
    stands_for_secret,
    without_secrets,
)
from tests.secret_kinds import BODY, IN_TEXTS, KINDS, ORDINARY


def test_more_than_a_hundred_kinds_are_tested():
    assert len(KINDS) + len(IN_TEXTS) > 150
    assert len(set(KINDS.values())) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow_cases(every=4)
def test_a_secret_that_stands_for_itself_is_hidden_wherever_it_is(kind):
    secret = KINDS[kind]
    assert hide_in_text(secret) == "***"
    for text in ("see {} there", "'{}'", '{{"a": "{}"}}', "a={}", "({})", "x: {}\n", "{}."):
        assert secret not in hide_in_text(text.format(secret))
    assert without_secrets({"a": [{"b": secret}]}) == {"a": [{"b": "***"}]}
    assert list(left_out({"a": [secret]})) == [("a[0]", secret)]
    assert secret not in " ".join(hide_in_command(["run.py", "--x", secret, f"--y={secret}"]))


@pytest.mark.parametrize("kind", IN_TEXTS)
def test_a_secret_in_a_text_is_hidden(kind):
    shown = hide_in_text(IN_TEXTS[kind])
    assert "***" in shown
    assert BODY not in shown
    assert shown == hide_in_text(shown)
    assert stands_for_secret(shown)


@pytest.mark.parametrize("text", ORDINARY)
def test_an_ordinary_value_is_shown(text):
    assert hide_in_text(text) == text
    assert hide_in_text(f"see {text} there") == f"see {text} there"
    assert without_secrets({"a": [text]}) == {"a": [text]}


@pytest.mark.parametrize("key", ["PGPASSWORD", "dbpassword", "openaiapikey", "SSHPASS"])
def test_a_word_that_ends_with_a_password_is_one(key):
    assert is_secret(key, "text")


@pytest.mark.parametrize("key", ["show_password", "bypass", "OLDPWD", "passwordless", "keyboard"])
def test_a_word_that_only_begins_or_asks_is_none(key):
    assert not is_secret(key, True)
    assert key == "show_password" or not is_secret(key, "text")


def test_the_value_of_an_option_may_be_the_next_word():
    words = ["run.py", "--api-key", "abc", "--lr", "0.1", "--tokens", "300", "--password", "--fast"]
    assert hide_in_command(words) == [
        *("run.py", "--api-key", "***", "--lr", "0.1", "--tokens", "300", "--password", "--fast")
    ]


@pytest.mark.parametrize(
    "part",
    [
        *("A", "a-", "1a", "M1aB", "s.", "A3-", "/a", "gl", "pa-", "eyJ", "a.b.", "x:1234:", "$6$"),
        *("machine ", "machine a.b login c ", "curl -u ", "AGE-", "SG.", "t1.a", "Q~", "PASSWORD"),
    ],
)
@pytest.mark.slow_cases(every=4)
def test_a_long_text_is_judged_at_once(part):
    text = part * (50_000 // len(part))
    hidden = hide_in_text(text)  # hours instead of a hundredth of a second if its time were squared
    assert len(hidden) <= len(text) + len(hide_in_text(part))
