"""A nursery for all tests of a session, and the counts that `benchmarks/reliability.py` reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.reliability.forkserver import Nursery
from tests.reliability.runs import Run, Runs


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if sys.platform.startswith("linux"):
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs Linux: /proc and pidfd_open"))


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    made = Nursery(tmp_path_factory.mktemp("nursery") / "output.txt")
    yield made
    made.close()


@pytest.fixture(scope="session")
def unbroken_runs() -> dict[str, Run]:
    return {}


@pytest.fixture
def runs(nursery: Nursery, tmp_path: Path, unbroken_runs: dict[str, Run]) -> Runs:
    return Runs(nursery, tmp_path, unbroken_runs)


@pytest.fixture
def count(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """A function that notes what was counted, for the table of results."""

    def note(**counts: int) -> None:
        for name, number in counts.items():
            record_property(name, number)

    return note
