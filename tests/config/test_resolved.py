"""Plain values to YAML that reads back the same."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from modelzoo_trainer.config.loader import read_text, to_yaml
from modelzoo_trainer.config.positions import to_plain

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=12)
LOOKALIKES = st.from_regex(r"[-+.0-9eoxEnyOf:~_]{0,6}", fullmatch=True)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS | LOOKALIKES
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=10,
)


def reread(value):
    return to_plain(read_text(to_yaml(value), "resolved.yaml"))


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(VALUES)
def test_every_value_reads_back_as_it_was(value):
    assert reread(value) == value


@pytest.mark.parametrize("text", ["1e-4", "0o17", "on", "no", "0123", "12:30:45", "null", "", "<<"])
def test_text_that_looks_like_something_else_stays_text(text):
    assert reread({"key": text}) == {"key": text}
    assert yaml.safe_load(to_yaml({"key": text})) == {"key": text}


@pytest.mark.parametrize("number", [1e-5, 1e22, 0.1, 3.0, 10**20, -7])
def test_numbers_read_back_with_their_type(number):
    found = reread({"key": number})["key"]
    assert (found, type(found)) == (number, type(number))


def test_keys_keep_their_order_and_nothing_is_an_alias():
    shared = {"b": 1, "a": 2}
    assert to_yaml({"x": shared, "c": shared}) == "x:\n  b: 1\n  a: 2\nc:\n  b: 1\n  a: 2\n"
