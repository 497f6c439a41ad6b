"""The Trainer is a sequence of hook calls, and each attribute has one writer."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

MOST_LINES = 50_000  # of the engine: what grows, grows in the zoo


@pytest.fixture(scope="module")
def structure(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("structure", root / "docs" / "structure.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_direct_call_to_a_core_callback_has_a_reason(structure: ModuleType) -> None:
    assert set(structure.direct_calls()) == structure.CALLS.keys() | structure.SETTINGS.keys()


def test_the_sequence_makes_few_direct_calls(structure: ModuleType) -> None:
    calls = [call for call in structure.direct_calls() if call in structure.CALLS]
    assert len(calls) <= 20


def test_the_trainer_fires_more_hooks_than_it_makes_calls(structure: ModuleType) -> None:
    assert len(structure.hooks_fired()) > 2 * len(structure.CALLS)


def test_each_attribute_of_the_trainer_has_one_writer(structure: ModuleType) -> None:
    plain = {(name, file) for name, file in structure.written() if "." not in name}
    assert plain == set(structure.WRITERS.items())


def test_nobody_sets_what_belongs_to_a_core_callback(structure: ModuleType) -> None:
    found = {
        (name, file)
        for name, file in structure.written()
        if name.partition(".")[0] in structure.CORE and "." in name
    }
    assert found == set()


def test_all_tables_are_printed(structure: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    structure.main()
    printed = capsys.readouterr().out
    assert "schedule.stages" in printed
    assert re.search(r"^ +\d+ zoo +\d+ files +\d{4,} lines$", printed, re.MULTILINE)


def test_every_file_is_counted_once(structure: ModuleType, root: Path) -> None:
    package = [*(root / "modelzoo_trainer").rglob("*.py"), *(root / "backends").rglob("*.py")]
    assert sum(map(len, structure.sizes().values())) == len(package)


def test_the_engine_stays_small(structure: ModuleType) -> None:
    found = structure.sizes()
    assert sum(sum(found[name]) for name in structure.ENGINE) <= MOST_LINES


def test_the_engine_lies_below_the_zoo(structure: ModuleType) -> None:
    order = [name for floor in structure.floors() for name in floor]
    above = order[: order.index("zoo") + 1]
    assert above == ["__main__", "cli", "tools", "config", "zoo"]
    assert set(order) - set(above) == {*structure.ENGINE, "_moved"}
