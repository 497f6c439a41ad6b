"""Every kind of data loader, killed and resumed: equal bits, or a warning before the first step."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.forkserver import Nursery
from tests.reliability.loader_kinds import EXACT, EXPECTED, KINDS, WARNED, library_of
from tests.reliability.loader_program import INEXACT, UNBROKEN

FAST = [
    "augmented-0",
    "augmented-2",
    "sampler_torch_generator-0",
    "sampler_draws_while_iterated-0-limited",
    "sampler_without_seed-0",
    "data_generator-0",
    "grows_cache-0",
    "data_state_dict-0",
    "stream_shuffle_buffer-0",
    "stream_state_dict-2",
    "iterable_generator",
]
# Of those with the same result as without workers, and of those that are limited, CI runs these.
WITH_WORKERS = [
    "augmented-persistent",
    "sampler_torch_generator-2-limited",
    "sampler_draws_while_iterated-persistent-limited",
    "batch_sampler-2",
    "data_counter-persistent",
    "data_state_dict-2-limited",
    "stream_augmented-2-limited",
    "stream_sharded-persistent-limited",
    "stream_state_dict-persistent-limited",
    "sharded_stream-2-limited",
    "torchdata_stream_state_dict-2-limited",
    "datasets_stream_shuffled-2-limited",
    "iterable_state_dict-limited",
    "subclass-2",
]
ALIKE = {
    *("in_order", "tensors", "getitems", "own_collate"),  # augmented: a data set of samples
    *("replacement", "weighted", "subset", "drop_last", "unbatched"),  # loader_generator: of torch
    *("sampler_numpy_generator", "sampler_random_state", "sampler_python_generator"),
    *("batch_sampler_of_torch", "unbatched_sampler", "data_opens_lazily", "data_cache"),
    *("grows_list", "grows_long_list", "grows_objects", "grows_tensor"),  # grows_cache
    *("grows_batch_sampler", "grows_iterable", "grows_counting_stream"),
    *("stream_drop_last", "stream_of_batches", "stream_even_state_dict"),
    *("stream_even_iterator_state_dict", "torchdata_plain", "datasets_map", "subclass_stream"),
}
TIMEOUT_S = 900


@dataclass(slots=True)
class Attempt:
    """What one process wrote.

    Args:
        code: How it ended.
        warnings: Of the package, that exactness is not guaranteed.
        is_early: Whether there was one before its first step.
        steps: Those that it began.
        batches: The loss and a digest of the weights, by number of the forward.
        result: Digests at the end.
        error: What it raised.
    """

    code: int | None = None
    error: str | None = None
    warnings: list[str] = field(default_factory=list)
    is_early: bool = False
    steps: list[int] = field(default_factory=list)
    batches: dict[int, str] = field(default_factory=dict)
    result: str | None = None


@dataclass(frozen=True, slots=True)
class Chain:
    """The attempts of a run."""

    attempts: list[Attempt]

    @property
    def errors(self) -> list[str]:
        """What was raised, and how processes ended that should have ended otherwise."""
        *killed, last = [attempt.code for attempt in self.attempts]
        raised = [attempt.error for attempt in self.attempts if attempt.error]
        codes = [code for code in killed if code != -signal.SIGKILL] + [last] * (last != 0)
        return [*raised, *(f"ended with {code}" for code in codes)]

    @property
    def warnings(self) -> list[str]:
        return [text for attempt in self.attempts for text in attempt.warnings]

    @property
    def is_warned_of(self) -> bool:
        """Whether each attempt that trained was warned of before its first step."""
        return all(attempt.is_early for attempt in self.attempts if attempt.steps)

    def differing(self, unbroken: Chain) -> list[int]:
        """Return the batches that are not those of the unbroken run, or that are missing."""
        expected = unbroken.attempts[0].batches
        given = [item for attempt in self.attempts for item in attempt.batches.items()]
        wrong = {number for number, said in given if expected.get(number) != said}
        return sorted(wrong | (expected.keys() - dict(given).keys()))

    def is_equal(self, unbroken: Chain) -> bool:
        results = self.attempts[-1].result, unbroken.attempts[0].result
        return not self.differing(unbroken) and results[0] == results[1]


def read_attempt(path: Path) -> Attempt:
    attempt = Attempt()
    for line in path.read_text(encoding="ascii").splitlines():
        word, _, rest = line.partition(" ")
        match word:
            case "warning" if INEXACT in rest:
                attempt.warnings.append(rest)
                attempt.is_early = attempt.is_early or not attempt.steps
            case "step":
                attempt.steps.append(int(rest))
            case "batch":
                number, _, said = rest.partition(" ")
                attempt.batches[int(number)] = said
            case "result":
                attempt.result = rest
            case "error":
                attempt.error = rest
            case "ended":
                attempt.code = int(rest)
    return attempt


def read_chain(place: Path) -> Chain:
    num = len(list(place.glob("*.txt")))
    return Chain([read_attempt(place / f"{number}.txt") for number in range(num)])


def sample() -> set[str]:
    """Return the kinds that CI runs: each loader, and each result that is expected, once.

    Where the state is in the same place, one loader stands for all: those of `ALIKE` are left out.
    """
    first: dict[tuple[str, str], str] = {}
    for kind in KINDS:
        name = kind.partition("-")[0]
        if name not in ALIKE:
            first.setdefault((name, EXPECTED[kind]), kind)
    return {*first.values(), *FAST, *WITH_WORKERS}


def marks_of(kind: str) -> Any:
    if kind in FAST:
        return ()
    return pytest.mark.slow if kind in sample() else [pytest.mark.slow, pytest.mark.soak]


def check(nursery: Nursery, place: Path, count, kind: str, numbers: list[int]) -> None:
    library = library_of(kind)
    if library is not None and find_spec(library) is None:  # its import would start threads here
        pytest.skip(f"needs {library}")
    ended = nursery.run("loader_program:chains", kind, str(place), numbers, timeout_s=TIMEOUT_S)
    assert (ended.code, ended.orphans) == (0, 0), nursery.said()[-3000:]
    unbroken = read_chain(place / UNBROKEN)
    assert unbroken.errors == [], f"{kind}, unbroken"
    found = {number: read_chain(place / str(number)) for number in numbers}
    errors = {number: chain.errors for number, chain in found.items() if chain.errors}
    assert errors == {}, f"{kind}: errors, by chain"
    runs = [unbroken, *found.values()]
    wrong = {
        number: chain.differing(unbroken) or "the result"
        for number, chain in found.items()
        if not chain.is_equal(unbroken)
    }
    is_warned_of = all(run.is_warned_of for run in runs)
    attempts = [attempt for chain in found.values() for attempt in chain.attempts]
    count(
        kinds=int(len(numbers) == 1),  # each is counted once
        chains=len(found),
        kills=sum(attempt.code == -signal.SIGKILL for attempt in attempts),
        batches_compared=sum(len(attempt.batches) for attempt in attempts),
        chains_warned_of=len(found) if is_warned_of else 0,
        unequal=0 if is_warned_of else len(wrong),
    )
    expected = EXPECTED[kind]
    if expected == EXACT:
        assert wrong == {}, f"{kind}: batches that differ, by chain"
        assert [text for run in runs for text in run.warnings] == []
    elif expected == WARNED:
        assert is_warned_of, f"{kind}: no warning before the first step; {len(wrong)} chains differ"
    else:
        assert is_warned_of or wrong == {}, f"{kind}: batches that differ, by chain; no warning"


@pytest.mark.slow_cases(
    "*-2", "iterable_generator", "stream_shuffle_buffer-0", "sampler_*", every=4
)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=marks_of(kind)) for kind in KINDS])
def test_a_killed_run_ends_equal_or_warned_of(nursery, tmp_path, count, kind) -> None:
    check(nursery, tmp_path, count, kind, [2])


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_killed_anywhere_ends_equal_or_warned_of(
    nursery, tmp_path, count, kind
) -> None:
    check(nursery, tmp_path, count, kind, [0, 1, 3, 4])


def test_the_fast_selection_has_kinds_that_are_there() -> None:
    assert set(FAST) | set(WITH_WORKERS) <= KINDS.keys()
    assert {kind.partition("-")[0] for kind in KINDS} >= ALIKE
