"""Options, and the state that every test finds."""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from tests.compat.corpus_here import CORPUS


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the files of tests/golden anew"
    )
    parser.addoption(
        "--part", help="K/N: of N parts of the tests, by their names, run part K (from 0)"
    )


def pytest_configure() -> None:
    # Torch asks the name server at each connection; one that is slow would cost seconds.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # also for the processes that tests start


@pytest.hookimpl(tryfirst=True)  # before pytest looks for what was asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "corpus" in item.keywords and not CORPUS.is_dir():
            item.add_marker(pytest.mark.skip(reason="MODELZOO_CORPUS does not name a folder"))
    whole = not any("::" in arg for arg in config.args)
    for name in ("slow", "soak"):
        _mark_cases(items, name, whole=whole)
    _thin_out(items)
    if config.option.part is not None:
        number, count = map(int, config.option.part.split("/"))
        others = [item for item in items if crc32(item.nodeid.encode()) % count != number]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if crc32(item.nodeid.encode()) % count == number]


def _mark_cases(items: list[pytest.Item], name: str, *, whole: bool) -> None:
    """Mark the cases that `slow_cases` or `soak_cases` describes.

    Args:
        items: Tests.
        name: "slow" or "soak".
        whole: Whether all cases of their functions are there.

    Raises:
        pytest.UsageError: A pattern matches no case, or no case is left for CI.
    """
    unmatched: dict[tuple[str, str], bool] = {}
    left: dict[str, int] = {}
    for item in items:
        patterns = [arg for mark in item.iter_markers(f"{name}_cases") for arg in mark.args]
        if not patterns:
            continue
        function = item.nodeid.partition("[")[0]
        matching = {one for one in patterns if fnmatchcase(_case(item), one.removeprefix("!"))}
        if matching and not any(one.startswith("!") for one in matching):
            item.add_marker(name)
        for one in patterns:
            unmatched[function, one] = unmatched.get((function, one), True) and one not in matching
        left[function] = left.get(function, 0) + ("soak" not in item.keywords)
    stale = [key for key, is_stale in unmatched.items() if is_stale]
    if stale and whole:
        raise pytest.UsageError(f"{name}_cases matches no case of {stale}")
    empty = [function for function, num in left.items() if not num]
    if empty and whole:
        raise pytest.UsageError(f"{name}_cases leaves no case for CI of {empty}")


def _thin_out(items: list[pytest.Item]) -> None:
    """Mark as slow the cases that `slow_cases(every=n)` leaves out: all but one of each n.

    Its place is another one in each n cases, so that each value of an inner parameter has its turn.
    """
    counts: Counter[str] = Counter()
    for item in items:
        steps = [mark.kwargs["every"] for mark in item.iter_markers("slow_cases") if mark.kwargs]
        if not steps or "slow" in item.keywords or "soak" in item.keywords:
            continue
        function = item.nodeid.partition("[")[0]
        block, place = divmod(counts[function], steps[0])
        counts[function] += 1
        if place != -block % steps[0]:
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    gc.disable()  # collecting keeps all that it makes
    result = yield
    gc.enable()
    gc.freeze()
    return result


def _case(item: pytest.Item) -> str:
    """Return the part of a test's name that stands in brackets."""
    return item.name.partition("[")[2].removesuffix("]")


def pytest_sessionstart() -> None:
    from tests.xla_here import HAS_XLA

    if HAS_XLA:
        import torch_xla

        torch_xla.device()  # autograd knows of no device that comes after its first gradient


@pytest.fixture(autouse=True, scope="module")
def _collect_what_is_new() -> Iterator[None]:
    """Have later collections leave out what is there: libraries, once a test has imported them."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _seeded_module() -> None:
    _seed()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Begin each test with the same numbers, whatever ran before it, and in each run."""
    _seed()


def _seed() -> None:
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        _seed_torch(sys.modules["torch"])


def _seed_torch(torch: Any) -> None:
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # the call above would write down its stack for each kind of device that is not there
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch = sys.modules.get("torch")  # not imported for the tests that need none
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """A function that compares a text with a file of tests/golden, or writes it."""

    def compare(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture
def stuck_pipe() -> Iterator[int]:
    """The end for writing of a pipe that is full, and that nobody reads."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    yield writer
    os.close(reader)
    os.close(writer)


@pytest.fixture
def trainer_of(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A function that builds a trainer (`doubles.make_trainer`), closed after the test."""
    from tests.doubles import make_trainer

    made: list[Any] = []

    def make(*callbacks: Any, **settings: Any) -> Any:
        made.append(
            make_trainer(settings.pop("model_dir", tmp_path / "run"), *callbacks, **settings)
        )
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.fixture
def memory() -> Iterator[Path]:
    """Return a folder in memory."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        yield Path(name)
