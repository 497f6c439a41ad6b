"""The order, names and ratios of settings that differ."""

import pytest

from modelzoo_trainer.tools.report.settings import (
    compared,
    short_paths,
    under_common_names,
    without_overridden,
)


def differing(first, second):
    return [(row.name, row.cells) for row in compared([first, second]).differing]


def test_the_largest_ratio_comes_first_and_seeds_last():
    first = {"a.seed": "1", "a.name": "x", "a.small": "100", "a.large": "570", "a.zero": "0.1"}
    second = {"a.seed": "9999", "a.name": "y", "a.small": "101", "a.large": "57", "a.zero": "0"}
    assert differing(first, second) == [
        ("a.zero", ("0.1", "0")),
        ("a.large", ("570", "57 <small>(&times; 0.1)</small>")),
        ("a.small", ("100", "101 <small>(&times; 1.01)</small>")),
        ("a.name", ("x", "y")),
        ("a.seed", ("1", "9999")),
    ]


def test_a_pair_that_differs_is_shown_whatever_other_runs_record():
    runs = [{"a.n": "16", "a.only": "1"}, {"a.n": "8", "a.only": "1"}, {}]
    found = compared(runs)
    assert [(row.name, row.cells) for row in found.differing] == [
        ("a.n", ("16", "8 <small>(&times; 0.5)</small>", None))
    ]
    assert [(row.name, row.cells) for row in found.partial] == [("a.only", ("1", "1", None))]


def test_what_is_not_recorded_changes_no_order():
    first, second = {"a.big": "1", "a.small": "10"}, {"a.big": "100", "a.small": "11"}
    found = compared([{}, first, second])
    assert [row.name for row in found.differing] == ["a.big", "a.small"]
    assert found.differing[0].cells == (None, "1", "100")


@pytest.mark.parametrize(
    ("key", "is_kept"),
    [
        ("optimizer.SGD.lr", False),
        ("trainer.init.optimizer.SGD.lr", False),
        ("trainer.init.optimizer.torch.optim.SGD.lr", False),
        ("trainer.init.optimizer.SGD.learning_rate", False),
        ("trainer.init.optimizer.SGD.momentum", True),
        ("optimizer.Adam.lr", True),
        ("schedulers[0].LinearLR.lr", True),
    ],
)
def test_what_a_schedule_replaces_is_left_out(key, is_kept):
    kept = without_overridden({key: "1", "seed": "2"}, ["optimizer.SGD.lr"])
    assert kept == ({key: "1", "seed": "2"} if is_kept else {"seed": "2"})
    assert without_overridden({key: "1"}, []) == {key: "1"}


FILE = {"trainer.init.loop.max_steps": "5", "trainer.init.model.width": "8"}
PYTHON = {"loop.TrainingLoop.max_steps": "5"}


def test_settings_from_a_file_have_the_names_of_python_beside_a_run_from_python():
    found = under_common_names([FILE, PYTHON, {}], [PYTHON, PYTHON, {}])
    assert found == [{"trainer.init.model.width": "8", **PYTHON}, PYTHON, {}]


@pytest.mark.parametrize(
    ("found", "resolved"),
    [
        ([FILE, FILE], [PYTHON, PYTHON]),
        ([FILE, {}], [PYTHON, {}]),  # a foreign run
        ([FILE, PYTHON], [{}, PYTHON]),  # a run of an earlier version
    ],
)
def test_settings_are_unchanged_without_a_run_of_each_kind(found, resolved):
    assert under_common_names(found, resolved) == found


@pytest.mark.parametrize(
    ("first", "second", "ratio"),
    [
        ("0.01", "10.0", "1000"),
        ("1", "1234567", "1230000"),
        ("3", "1", "0.333"),
        ("1e9", "1", "1e-09"),
    ],
)
def test_a_ratio_has_no_exponent_unless_it_is_extreme(first, second, ratio):
    ((_, cells),) = differing({"n": first}, {"n": second})
    assert cells[1] == f"{second} <small>(&times; {ratio})</small>"


def test_large_numbers_with_spaces_have_a_ratio():
    assert differing({"n": "100\u2009000"}, {"n": "200\u2009000"})[0][1][1].endswith("2)</small>")


def test_the_folder_of_a_run_is_in_no_table_of_several():
    runs = [{"t.model_dir": name, "t.same": "1"} for name in "ab"]
    found = compared(runs)
    assert found.differing == []
    assert [row.path for row in found.same] == ["t.same"]
    assert [row.path for row in compared(runs[:1]).same] == ["t.model_dir", "t.same"]


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        (["t.s[0].Seq.s[1].Cosine.n"], ["Cosine.n"]),
        (["t.a.Linear.n", "t.b.Linear.n"], ["a.Linear.n", "b.Linear.n"]),
        (["t.s[0].Linear.n", "t.s[1].Linear.n"], ["t.s[0].Linear.n", "t.s[1].Linear.n"]),
        (["lr"], ["lr"]),
    ],
)
def test_names_are_short_but_different(keys, names):
    assert list(short_paths(keys).values()) == names
