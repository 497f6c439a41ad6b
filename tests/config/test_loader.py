"""YAML text to values with positions."""

import math

import pytest

from modelzoo_trainer.config.loader import read_file, read_text, read_value
from modelzoo_trainer.config.positions import Mapping, to_plain
from modelzoo_trainer.errors import ConfigError
from tests.config.attempts import patience


def load(text):
    return to_plain(read_text(text, "params.yaml"))


def complaints(text):
    with pytest.raises(ConfigError) as caught:
        read_text(text, "params.yaml")
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1E5", 1e5),
        ("5.", 5.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("10", 10),
        ("+3", 3),
        ("0123", 123),
        ("0o17", 15),
        ("0x1F", 31),
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("no", "no"),
        ("12:30:45", "12:30:45"),
        ("1_000", "1_000"),
        ("2001-01-01", "2001-01-01"),
        ("=", "="),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("null", None),
        ("", None),
        ("'1'", "1"),
        ('"null"', "null"),
        ("!!str 3", "3"),
        ("!!float 3", 3.0),
        ("|\n  two\n  lines\n", "two\nlines\n"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    loaded = load(f"key: {text}")["key"]
    assert loaded == value
    assert type(loaded) is type(value)


def test_nan_is_a_float():
    assert math.isnan(load("key: .nan")["key"])


def test_a_repeated_key_is_refused_with_both_lines():
    assert complaints("a: 1\nb:\n  c: 1\n  c: 2\n") == [
        "params.yaml:4:3: duplicate key 'c'; first in line 3."
    ]


def test_all_problems_are_reported_together_sorted_by_line():
    assert complaints("a: 1\nb: !foo 3\nc: 1e999\na: 2\n") == [
        "params.yaml:2:4: tag '!foo' is not supported. Known: !!null, !!bool, !!int, !!float, "
        "!!str, !!seq, !!map.",
        "params.yaml:3:4: 1e999 is too large for a float; write .inf for infinity.",
        "params.yaml:4:1: duplicate key 'a'; first in line 1.",
    ]


def test_merge_keys_fill_in_what_a_mapping_does_not_give_itself():
    text = "base: &b {p: 1, q: 2}\none: {<<: *b, q: 3}\ntwo: {<<: [{p: 0, r: 4}, *b]}\n"
    loaded = load(text)
    assert loaded["one"] == {"p": 1, "q": 3}
    assert loaded["two"] == {"p": 0, "q": 2, "r": 4}


def test_a_merged_value_keeps_the_place_where_it_was_written():
    node = read_text("base: &b\n  p: 1\none:\n  <<: *b\n", "params.yaml")
    assert isinstance(node, Mapping)
    merged = node.get("one")
    assert isinstance(merged, Mapping)
    assert str(merged.entries["p"].key_at) == "params.yaml:2:3"


def test_a_merge_of_something_else_is_refused():
    assert complaints("a:\n  <<: 3\n") == [
        "params.yaml:2:7: '<<' takes a mapping or a list of mappings."
    ]


def test_aliases_give_values_that_are_not_shared():
    loaded = load("a: &a [1]\nb: *a\n")
    loaded["a"].append(2)
    assert loaded["b"] == [1]


def test_an_alias_bomb_is_refused_at_once():
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    lines += [
        f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ]
    with patience():
        found = complaints("\n".join(lines))
    assert found[0] == (
        "params.yaml:5:4: contains more than 100000 values after expanding its aliases."
    )


def test_an_alias_bomb_of_merge_keys_is_refused():
    lines = ["a: &a {" + ", ".join(f"k{i}: [1, 2, 3]" for i in range(200)) + "}"]
    lines += ["b:"] + [f"  - {{<<: *a, own: {i}}}" for i in range(200)]
    assert complaints("\n".join(lines))[0].endswith("after expanding its aliases.")


def test_an_alias_to_what_contains_it_is_refused():
    assert complaints("a: &a\n  - *a\n") == [
        "params.yaml:1:4: an alias refers to a value that contains it."
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "params.yaml: the file is empty."),
        ("# nothing\n", "params.yaml: the file is empty."),
        (
            "a: 1\n---\nb: 2\n",
            "params.yaml:2:1: expected a single document in the stream, but found another "
            "document.",
        ),
        ("a: *b\n", "params.yaml:1:4: found undefined alias 'b'"),
        ("a: 1\n b: 2\n", "params.yaml:2:3: unexpected ':'. Check the indentation"),
        ("a:\n\tb: 1\n", "params.yaml:2:1: tab character; indent YAML with spaces."),
        ("a: 1\nb: [1,\nc: 2\nd: 3\n", "'[' in line 2 is not closed: expected ',' or ']'"),
        ("a: {b: 1\n", "'{' in line 1 is not closed: expected ',' or '}', but got the end."),
        ("a: 'b\n", "a quote in line 1 is not closed."),
        ("a: @b\n", "params.yaml:1:4: a value cannot begin with '@'; write it in quotes."),
        ("a: *b\n", "found undefined alias 'b'; write a text that begins with '*' in quotes."),
        ("a: [1]]\n", "unexpected ']'. Check the indentation, brackets and quotes."),
        ("a:\n  - b\n c: 1\n", "params.yaml:3:2: unexpected indentation. Check"),
        ("a: 1\nb: \x01\n", "params.yaml:2:4: character U+0001 is not allowed in YAML."),
        ('a: "\\ud800"\n', "params.yaml:1:4: the text contains half of a surrogate pair."),
        ('a: "x\\0"\n', "params.yaml:1:4: the text contains a null character."),
        (
            "? [1, 2]\n: 3\n",
            "params.yaml:1:3: a key must be a single value, not a list or mapping.",
        ),
        ("a: !!int on\n", "params.yaml:1:4: 'on' is not of type int."),
        (
            f"a: {'9' * 400}\n",
            "params.yaml:1:4: a number of 400 digits is too long; the maximum is 300.",
        ),
        ("[" * 60 + "]" * 60, "params.yaml:1:52: nested more than 50 levels deep."),
    ],
)
def test_text_that_is_no_configuration_is_refused_with_its_place(text, message):
    (found,) = complaints(text)
    assert found.startswith("params.yaml:")
    assert message in found


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['true']",
        "a: !!python/name:os.system",
        "!!set {a}",
        "!!map [1]",
        "!!timestamp 2001-01-01",
    ],
)
def test_tags_build_no_objects(text):
    assert "is not supported. Known: !!null" in complaints(text)[0]


def test_a_file_that_is_not_there_is_refused(tmp_path):
    path = tmp_path / "missing.yaml"
    with pytest.raises(ConfigError, match=r"missing.yaml: cannot be read: no such file or dir"):
        read_file(path)


def test_a_python_file_is_refused_as_such(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("model: Net = Net()\nx = {a: b}\n")
    with pytest.raises(ConfigError, match=r"train.py: is a Python file, .* YAML") as raised:
        read_file(path)
    assert "\n" not in str(raised.value)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_bytes(b"a: \xff\n")
    with pytest.raises(ConfigError, match=r"params.yaml: is not UTF-8 text \(byte 3\)."):
        read_file(path)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    path = tmp_path / "params.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert to_plain(read_file(path)) == {"a": 1}


def test_a_value_of_the_command_line_has_the_option_as_its_place():
    with pytest.raises(ConfigError) as caught:
        read_value("[1, !foo 2]", "--set a=[1, !foo 2]")
    assert str(caught.value).startswith("--set a=[1, !foo 2]: tag '!foo' is not supported.")
