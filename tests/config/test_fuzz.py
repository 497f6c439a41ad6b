"""Whatever a file holds, it is a plan or a `ConfigError` with places, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelzoo_trainer.config.loader import to_yaml
from modelzoo_trainer.config.modes import MODES
from modelzoo_trainer.config.overrides import parse_override
from modelzoo_trainer.config.shipped import shipped_names
from tests.compat.corpus_here import CONFIGURATIONS
from tests.config.attempts import Attempts
from tests.config.inputs import CHANGES, FILES, LEGACY_FILES, PIECES, spoilt

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
SMALL = """\
trainer:
  init:
    model: {name: fc_mnist, depth: 1, hidden_size: 2}
    optimizer: {AdamW: {weight_decay: 0.1}}
    schedulers: [{ConstantLR: {learning_rate: 0.1}}]
    loop: {max_steps: 1}
  fit:
    train_dataloader: {data_processor: DigitsProcessor, batch_size: 2}
"""
MODE = st.sampled_from([None, *MODES])

Case = Callable[[Attempts, Any], None]


def load(attempts: Attempts, given: tuple[Any, str | None, bool]) -> None:
    content, mode, for_a_run = given
    attempts.load(content, mode=mode, for_a_run=for_a_run)


def load_tree(attempts: Attempts, given: tuple[Any, str | None, bool]) -> None:
    tree, mode, for_a_run = given
    attempts.load(to_yaml(tree), mode=mode, for_a_run=for_a_run)


def change(attempts: Attempts, changes: list[str]) -> None:
    attempts.load(SMALL, changes=changes)


def parse(attempts: Attempts, text: str) -> None:
    found = "\n".join(attempts.call(parse_override, text))
    assert found == "" or found.startswith(f"--set {text}: ")


# Of inputs, how many in the default run, and in the long one; the strategy; what is done.
CASES: dict[str, tuple[int, int, st.SearchStrategy[Any], Case]] = {
    "text": (600, 4000, st.tuples(st.text(max_size=80), MODE, st.booleans()), load),
    "bytes": (300, 1000, st.tuples(st.binary(max_size=60), MODE, st.booleans()), load),
    "pieces of YAML": (
        800,
        5000,
        st.tuples(st.lists(PIECES, max_size=20).map("".join), MODE, st.booleans()),
        load,
    ),
    "trees": (500, 5000, st.tuples(FILES, MODE, st.booleans()), load_tree),
    "trees of the older layout": (
        400,
        3000,
        st.tuples(LEGACY_FILES, MODE, st.booleans()),
        load_tree,
    ),
    "changes": (300, 2500, CHANGES, change),
    "one change": (300, 1500, PIECES.flatmap(lambda one: CHANGES.map(lambda c: one + c[0])), parse),
    "spoilt files": (200, 4000, st.tuples(spoilt(CONFIGS), MODE, st.booleans()), load),
    "spoilt published files": (
        200,
        4000,
        st.tuples(spoilt(sorted(CONFIGURATIONS.rglob("*.yaml"))), MODE, st.booleans()),
        load,
    ),
}
KINDS = [
    pytest.param(kind, marks=pytest.mark.corpus if "published" in kind else ()) for kind in CASES
]


def fuzz(kind: str, num_inputs: int, folder: Path) -> Attempts:
    """Return the outcomes of about `num_inputs` inputs of a kind, the same ones each time."""
    _, _, strategy, act = CASES[kind]
    attempts = Attempts(folder, shipped_names())

    @settings(max_examples=num_inputs, deadline=None, derandomize=True, database=None)
    @given(strategy)
    def each(value: Any) -> None:
        act(attempts, value)

    each()
    return attempts


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_input_is_planned_or_refused(tmp_path, kind):
    attempts = fuzz(kind, CASES[kind][0], tmp_path)
    assert attempts.outcomes.total() >= CASES[kind][0] / 2
    assert attempts.outcomes["refused"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_thousands_of_inputs_are_planned_or_refused(tmp_path, capsys, kind):
    num = CASES[kind][1]
    found = fuzz(kind, num, tmp_path).outcomes
    with capsys.disabled():
        sys.stdout.write(f"{kind}: {found['planned']} planned, {found['refused']} refused\n")
    assert found.total() >= 0.9 * num


def test_there_are_twenty_thousand_of_them():
    assert sum(case[1] for case in CASES.values()) >= 20_000


@pytest.mark.parametrize("key", ['"a\\nb"', '"a\\x1b[2Jb"', '"a\\u2028b"'])
@pytest.mark.parametrize("place", ["%s: 1\ntrainer: {}\n", "trainer: {init: {%s: 1}}\n"])
def test_a_key_with_a_line_break_is_named_in_one_printable_line(tmp_path, place, key):
    lines = Attempts(tmp_path, shipped_names()).load(place % key)
    assert lines[0].startswith("f.yaml:1:")
    assert all(line.startswith("f.yaml:") and line.isprintable() for line in lines)


def test_a_change_that_leads_too_deep_is_refused(tmp_path):
    path = ".".join(["a"] * 1000)
    lines = Attempts(tmp_path, shipped_names()).load(SMALL, changes=[f"{path}=1"])
    assert lines[0].startswith("--set a.a.")
