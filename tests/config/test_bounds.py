"""Work and memory grow with the size of a file, whatever it holds: counted, not timed."""

from __future__ import annotations

import difflib
import sys
import tracemalloc
from collections.abc import Callable

import pytest

from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.legacy import convert_legacy, is_legacy
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.positions import Problems
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.errors import ConfigError
from tests.config.attempts import patience

INIT = "trainer:\n  init:\n"
HEAD = INIT + "    model: {name: fc_mnist, depth: 1, hidden_size: 2}\n"


def lines(form: str) -> Callable[[int], str]:
    """Return a function that repeats a line; `%d` in it is the number of the line."""
    return lambda n: "".join(form % i if "%d" in form else form for i in range(n))


def below(head: str, form: str) -> Callable[[int], str]:
    return lambda n: head + lines(form)(n)


def merges(n: int) -> str:
    """Return mappings of which each merges the one before."""
    return "a0: &a0 {x: 1}\n" + "".join(
        f"a{i}: &a{i} {{<<: *a{i - 1}, y{i}: 1}}\n" for i in range(1, n)
    )


def fan(n: int) -> str:
    """Return mappings that all merge a long one."""
    return "a: &a\n" + lines("  k%d: 1\n")(n) + lines("b%d: {<<: *a}\n")(n)


def bomb(n: int) -> str:
    """Return lists of which each holds the one before nine times."""
    return "a0: &a0 [1]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, n)
    )


def bomb_of_mappings(n: int) -> str:
    """Return mappings of which each holds the one before three times."""
    return "a0: &a0 {x: 1}\n" + "".join(
        f"a{i}: &a{i} {{p: *a{i - 1}, q: *a{i - 1}, r: *a{i - 1}}}\n" for i in range(1, n)
    )


# What grows, and how large it is the first time; the second time it is twice that.
CASES: dict[str, tuple[Callable[[int], str], int]] = {
    "lists in lists": (lambda n: "[" * n, 625),
    "mappings in mappings": (lambda n: "{a: " * n, 625),
    "blocks in blocks": (lambda n: "".join(" " * i + "a:\n" for i in range(n)), 62),
    "items in items": (lambda n: "- " * n, 625),
    "keys in keys": (lambda n: "? " * n, 250),
    "aliases to lists": (bomb, 40),
    "aliases to mappings": (bomb_of_mappings, 40),
    "aliases in a list": (lambda n: "a: &a [1, 2]\nb: [" + "*a, " * n + "]\n", 625),
    "anchors": (lines("- &a%d x\n"), 250),
    "a long text": (lambda n: "a: " + "x" * n, 62_000),
    "a long text in quotes": (lambda n: 'a: "' + "x" * n + '"', 62_000),
    "a long text of escapes": (lambda n: 'a: "' + "\\x41" * n + '"', 6250),
    "a long integer": (lambda n: "a: " + "9" * n, 25_000),
    "a long hexadecimal number": (lambda n: "a: 0x" + "f" * n, 25_000),
    "a long fraction": (lambda n: "a: 0." + "1" * n, 25_000),
    "a long exponent": (lambda n: "a: 1e" + "9" * n, 6250),
    "a long key": (lambda n: "? " + "k" * n + "\n: 1\n", 12_000),
    "a long name of a model": (lambda n: "trainer: {init: {model: {name: " + "g" * n, 12_000),
    "a long key in its section": (lambda n: HEAD + "    ? " + "optim" * n + "\n    : 1\n", 2500),
    "a long tag": (lambda n: "!" + "a" * n + " x", 12_000),
    "a long anchor": (lambda n: "&" + "a" * n + " x", 12_000),
    "a long directive": (lambda n: "%" + "A" * n, 12_000),
    "empty lines": (lines("\n"), 12_000),
    "comments": (lines("# c\n"), 2500),
    "spaces": (lines(" "), 62_000),
    "documents": (lines("---\na\n"), 250),
    "keys": (lines("k%d: 1\n"), 375),
    "one key many times": (lines("k: 1\n"), 375),
    "a merge of a list of aliases": (lambda n: f"a: &a {{x: 1}}\nb: {{<<: [{'*a, ' * n}]}}\n", 625),
    "trainers": (below("trainer:\n", "- x: 1\n"), 125),
    "unknown sections": (below(HEAD, "    k%d: 1\n"), 125),
    "unknown arguments": (
        below(INIT + "    model:\n      name: gpt2\n", "      k%d: 1\n"),
        37,
    ),
    "unknown callbacks": (below(HEAD + "    callbacks:\n", "    - CheckLos%d: {}\n"), 62),
    "callbacks": (below(HEAD + "    callbacks:\n", "    - CheckLoss: {}\n"), 125),
    "flags": (below(HEAD + "    callbacks:\n    - GlobalFlags:\n", "        csx.k%d: 1\n"), 62),
    "members of a scheduler": (
        below(
            HEAD + "    schedulers:\n    - SequentialLR:\n        schedulers:\n",
            "        - ConstantLR: {learning_rate: 1.0, total_iters: 1}\n",
        ),
        75,
    ),
    "numbers for a seed": (lambda n: HEAD + "    seed: [" + "1, " * n + "]\n", 375),
    "invalid items of a list": (
        lambda n: INIT + "    model: {name: fc_mnist, hidden_sizes: [" + "x, " * n + "]}\n",
        375,
    ),
    "integers with exponents": (
        lambda n: INIT + "    model: {name: fc_mnist, hidden_sizes: [" + "1e1, " * n + "]}\n",
        375,
    ),
    "unknown keys of the older layout": (below("runconfig:\n", "  k%d: 1\n"), 62),
    "schedulers of the older layout": (
        below(
            "model: {name: fc_mnist}\noptimizer:\n  optimizer_type: SGD\n  learning_rate:\n",
            "  - {scheduler: Linear, steps: 1, initial_learning_rate: 0, end_learning_rate: 1}\n",
        ),
        50,
    ),
}
MERGES = {"merges in a row": (merges, 400), "merges of one": (fan, 400)}


@pytest.fixture(scope="module")
def names():
    return shipped_names()


@pytest.fixture(scope="module")
def load(names):
    """Return a function that loads a text and returns whether it was refused."""

    return lambda text: bool(refusal_of(names, text))


def refusal_of(names, text: str) -> str:
    problems = Problems()
    try:
        root = read_text(text, "f.yaml")
        if is_legacy(root):
            root = convert_legacy(root, problems)
        check_config(root, names, None, problems)
    except ConfigError as error:
        return str(error)
    return ""


def calls_of(function: Callable[[str], object], text: str) -> int:
    """Return how many functions are called, built-in ones included."""
    number = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function(text)
    finally:
        sys.setprofile(None)
    return number


def peak_of(function: Callable[[str], object], text: str) -> int:
    """Return the most bytes in use at once."""
    tracemalloc.start()
    try:
        function(text)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_twice_the_size_is_twice_the_work_at_most(load, case):
    make, size = CASES[case]
    load(make(2))  # what is read once is read now
    with patience():
        once, twice = (calls_of(load, make(factor * size)) for factor in (1, 2))
    assert twice < 2.3 * once + 2000


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_twice_the_size_is_twice_the_memory_at_most(load, case):
    make, size = CASES[case]
    load(make(2))
    once, twice = (peak_of(load, make(factor * size)) for factor in (1, 2))
    assert twice < 2.3 * once + 200_000


@pytest.mark.slow
@pytest.mark.slow_cases("merges of one")
@pytest.mark.parametrize("case", MERGES)
def test_merges_take_no_more_memory_than_the_bound_on_values(load, case):
    make, size = MERGES[case]
    at_bound, beyond = (peak_of(load, make(factor * size)) for factor in (1, 4))
    assert beyond < 4 * 2.3 * at_bound


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "line", "known"),
    [
        (HEAD, "    modle%d: 1\n", "'model'"),
        (INIT + "    model:\n      name: fc_mnist\n", "      depht%d: 1\n", "'depth'"),
        (HEAD + "    callbacks:\n", "    - CheckLos%d: {}\n", "'CheckLoss'"),
        ("runconfig:\n", "  max_stpes%d: 1\n", "'max_steps'"),
    ],
)
def test_only_so_many_problems_have_suggestions(names, monkeypatch, head, line, known):
    asked = []
    real = difflib.get_close_matches
    monkeypatch.setattr(
        "backends.errors.get_close_matches",
        lambda *args, **more: asked.append(0) or real(*args, **more),
    )
    said = refusal_of(names, head + lines(line)(4_000))
    assert said.count(f"Did you mean {known}?") >= 98  # of the 100 that are printed
    assert said.endswith("more")
    assert len(asked) < 2_500


@pytest.mark.parametrize(
    "case", ["aliases to lists", "aliases to mappings", "lists in lists", "keys", "a long integer"]
)
@pytest.mark.slow_cases(every=4)
def test_what_is_too_large_is_refused(load, case):
    make, size = CASES[case]
    assert load(make(4 * size))
