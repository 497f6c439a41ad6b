"""A run that resumes with another number of processes takes what is left of the pass, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from tests.distributed.data_runs import (
    DividedBackend,
    Numbers,
    Part,
    PartWithState,
    Seen,
    Watcher,
    flat,
    number_loader,
    together,
    train,
)
from tests.distributed.ranks import run_ranks
from tests.doubles import Recorder, Scale

NUM = 23
pytestmark = pytest.mark.slow


def plain(rank: int, count: int) -> DataLoader[Any]:
    return number_loader(rank, count, NUM, 2, shuffle=True)


def dropping(rank: int, count: int) -> DataLoader[Any]:
    return number_loader(rank, count, NUM, 2, shuffle=True, drop_last=True)


def unbatched(rank: int, count: int) -> DataLoader[Any]:
    return number_loader(rank, count, NUM, None, shuffle=True)


def for_all(rank: int, count: int) -> DataLoader[Any]:
    return number_loader(rank, count, NUM, 12, shuffle=True, is_global=True)


def as_a_list(rank: int, count: int) -> list[torch.Tensor]:
    return [torch.full((1,), float(number)) for number in range(NUM)]


def same_together(rank: int, count: int) -> DataLoader[Any]:
    return number_loader(rank, count, NUM, 12 // count, shuffle=True)


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of the data that a checkpoint of all processes has."""
    states: dict[str, Any] = {}
    for result in reversed(results):
        states |= result["state"]
    return states


def by_run(results: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    return [list(parts) for parts in zip(*results, strict=True)]


def seen_by_all(parts: list[dict[str, Any]]) -> list[float]:
    seen: list[list[Seen]] = [part["seen"] for part in parts]
    wrapped = [
        [(idx, value if isinstance(value, list) else [value], *rest) for idx, value, *rest in one]
        for one in seen
    ]
    return flat(together(wrapped))  # type: ignore[arg-type]


def resumed(make: Any, before: int, folder: Path, num_batches: int) -> list[tuple[int, Any, Any]]:
    """Return what runs see that stop within the first pass, and what those that resume them.

    Args:
        make: Returns the loader.
        before: The number of processes that began.
        folder: For the runs.
        num_batches: How many batches of a pass they have.
    """
    stops = [{"max_steps": steps} for steps in sorted({1, num_batches // 2, num_batches - 1})]
    first = by_run(run_ranks(before, train, folder / "first", make, stops))
    found = []
    for after in (1, 2, 3, 4):
        runs = [{"state": merged(parts), "num_epochs": 1, "max_steps": None} for parts in first]
        second = by_run(run_ranks(after, train, folder / str(after), make, runs))
        found += [(after, one, other) for one, other in zip(first, second, strict=True)]
    return found


# CI: each kind of data, from two processes or three.
@pytest.mark.soak_cases("plain-1", "plain-3")
@pytest.mark.parametrize(
    ("make", "before"),
    [(plain, 1), (plain, 2), (plain, 3), (as_a_list, 2), (for_all, 2), (unbatched, 3)],
)
def test_each_sample_is_seen_once(tmp_path: Path, make: Any, before: int) -> None:
    draws = {plain: 12, as_a_list: NUM, unbatched: NUM}.get(make, 2 * before)  # for_all: 2 batches
    [whole] = by_run(run_ranks(1, train, tmp_path / "whole", make, [{"num_epochs": 1}]))
    for _, first, second in resumed(make, before, tmp_path, -(-draws // before)):
        assert seen_by_all(first) + seen_by_all(second) == seen_by_all(whole)
        assert {part["epoch"] for part in second} == {1}


def test_with_drop_last_no_sample_is_seen_twice(tmp_path: Path) -> None:
    [whole] = by_run(run_ranks(1, train, tmp_path / "whole", dropping, [{"num_epochs": 1}]))
    order = seen_by_all(whole)
    for after, first, second in resumed(dropping, 2, tmp_path, 4):
        seen = seen_by_all(first) + seen_by_all(second)
        assert seen == order[: len(seen)]
        assert len(order) - len(seen) < 2 * after
        assert {part["epoch"] for part in second} == {1}


def test_a_run_may_resume_again_and_again(tmp_path: Path) -> None:
    [whole] = by_run(run_ranks(1, train, tmp_path / "whole", plain, [{"num_epochs": 1}]))
    seen, state = [], None
    for number, (count, steps) in enumerate([(1, 1), (2, 2), (2, 1), (3, 1), (4, None)]):
        run: dict[str, Any] = {"state": state, "max_steps": steps}
        run |= {"num_epochs": 1} if steps is None else {}
        [parts] = by_run(run_ranks(count, train, tmp_path / str(number), plain, [run]))
        seen += seen_by_all(parts)
        state = merged(parts)
    assert seen == seen_by_all(whole)


def test_a_checkpoint_is_resumed_by_more_processes(tmp_path: Path) -> None:
    [whole] = by_run(run_ranks(1, train, tmp_path / "whole", plain, [{"num_epochs": 2}]))
    [first] = by_run(
        run_ranks(2, train, tmp_path / "first", plain, [{"max_steps": 2, "saves": True}])
    )
    run = {"path": first[0]["path"], "num_epochs": 2, "max_steps": None}
    [second] = by_run(run_ranks(3, train, tmp_path / "second", plain, [run]))
    assert seen_by_all(first) + seen_by_all(second) == seen_by_all(whole)
    assert first[0]["state"]["offset"] == 4
    assert [part["seen"][0][0] for part in second] == [1] * 3


def test_a_run_of_one_process_from_before_offsets_is_resumed(tmp_path: Path) -> None:
    [[first]] = by_run(run_ranks(1, train, tmp_path / "first", plain, [{"max_steps": 3}]))
    names = ("epoch", "batch_idx", "num_batches")
    run = {"state": {name: first["state"][name] for name in names}, "num_epochs": 1}
    [second] = by_run(run_ranks(2, train, tmp_path / "second", plain, [run]))
    [whole] = by_run(run_ranks(1, train, tmp_path / "whole", plain, [{"num_epochs": 1}]))
    assert seen_by_all([first]) + seen_by_all(second) == seen_by_all(whole)


def test_the_same_batch_of_all_processes_is_no_change_of_the_data(tmp_path: Path) -> None:
    [whole] = by_run(run_ranks(1, train, tmp_path / "whole", same_together, [{"num_epochs": 1}]))
    [first] = by_run(run_ranks(2, train, tmp_path / "first", same_together, [{"max_steps": 1}]))
    for count in (1, 3, 4):
        run = {"state": merged(first), "num_epochs": 1}
        [second] = by_run(run_ranks(count, train, tmp_path / str(count), same_together, [run]))
        assert seen_by_all(first) + seen_by_all(second) == seen_by_all(whole)
        assert [part["warnings"] for part in second] == [[]] * count


def test_another_global_batch_size_is_warned_of(tmp_path: Path) -> None:
    [first] = by_run(run_ranks(2, train, tmp_path / "first", plain, [{"max_steps": 1}]))
    run = {"state": merged(first), "num_epochs": 1}
    [[second]] = by_run(run_ranks(1, train, tmp_path / "second", plain, [run]))
    [warned] = second["warnings"]
    assert "batches of 2, 12 batches per epoch" in warned
    assert "batches of 4, 6 batches per epoch" in warned


def test_skipped_batches_are_forgotten_with_their_numbers(tmp_path: Path) -> None:
    [first] = by_run(run_ranks(2, train, tmp_path / "first", same_together, [{"max_steps": 1}]))
    state = merged(first) | {"passed_over": [[0, 1]]}
    runs = [{"state": state, "max_steps": 1}]
    [same] = by_run(run_ranks(2, train, tmp_path / "same", same_together, runs))
    assert [(part["epoch"], part["seen"][0][0]) for part in same] == [(1, 0)] * 2
    [other] = by_run(run_ranks(1, train, tmp_path / "other", same_together, runs))
    assert other[0]["seen"][0][0] == 1
    [warned] = other[0]["warnings"]
    facts = ("2 data shards", "this run has 1", "the 1 batches")
    assert [fact for fact in facts if fact not in warned] == []


BEFORE = {"epoch": 0, "num_batches": 4, "num_shards": 2, "per_batch": 2, "draw_size": 2}


def test_a_pass_of_which_too_little_is_left_is_over(trainer_of: Any) -> None:
    watcher, recorder = Watcher(), Recorder()
    trainer = trainer_of(
        watcher, recorder, model=Scale, device=None, backend=DividedBackend(0, 4), max_steps=1
    )
    state = BEFORE | {"batch_idx": 4, "offset": 8}
    trainer.data.on_load_checkpoint(trainer, {"dataloader": state})
    trainer.fit(dropping(0, 4), ckpt_path=None)
    assert trainer.data.epoch == 1
    assert watcher.seen[0][0] == 0
    assert recorder.count("on_train_epoch_end") == 1


def test_a_step_that_was_cut_off_begins_anew_with_other_processes(trainer_of: Any) -> None:
    watcher = Watcher()
    trainer = trainer_of(
        watcher, model=Scale, device=None, backend=DividedBackend(0, 4), max_steps=1
    )
    state = BEFORE | {"batch_idx": 4, "offset": 8, "parts": 1}
    state["window"] = BEFORE | {"batch_idx": 2, "offset": 4}
    trainer.data.on_load_checkpoint(trainer, {"dataloader": state, "global_step": 0})
    trainer.fit(plain(0, 4), ckpt_path=None)
    assert [idx for idx, *_ in watcher.seen] == [1]


# ---- loaders that each process has of its own


def with_state(rank: int, count: int) -> PartWithState:
    return PartWithState(*(100 * rank + number for number in range((5, 3, 4)[rank])))


def without_state(rank: int, count: int) -> Part:
    return Part(*(100 * rank + number for number in range((5, 3, 4)[rank])))


# CI: those with a state; without one: test_resume_data.
@pytest.mark.soak_cases("without_state")
@pytest.mark.parametrize("make", [with_state, without_state])
def test_loaders_of_their_own_go_on_where_each_was(tmp_path: Path, make: Any) -> None:
    [whole] = by_run(run_ranks(3, train, tmp_path / "whole", make, [{"num_epochs": 2}]))
    stops = [{"max_steps": steps} for steps in range(1, 10)]
    first = by_run(run_ranks(3, train, tmp_path / "first", make, stops))
    runs = [
        {"state": merged(parts), "max_steps": 10 - stop["max_steps"]}
        for stop, parts in zip(stops, first, strict=True)
    ]
    second = by_run(run_ranks(3, train, tmp_path / "second", make, runs))
    for one, other in zip(first, second, strict=True):
        for rank in range(3):
            assert one[rank]["seen"] + other[rank]["seen"] == whole[rank]["seen"]
    assert [seen[2] for seen in whole[1]["seen"]] == [False, False, False, True, True] * 2


def test_a_state_of_the_loaders_own_serves_as_many_processes_alone(tmp_path: Path) -> None:
    [first] = by_run(run_ranks(2, train, tmp_path / "first", with_state, [{"max_steps": 2}]))
    assert first[0]["state"]["loader_0"]["state"] == {"position": 2}
    run = {"state": merged(first), "num_epochs": 1}
    [second] = by_run(run_ranks(3, train, tmp_path / "second", with_state, [run]))
    assert [part["seen"][0][1] for part in second] == [[1.0], [101.0], [201.0]]
    assert all(
        "state of train_dataloader for 2 data shards" in part["warnings"][0] for part in second
    )


def divided(rank: int, count: int) -> DataLoader[Any]:
    data = Numbers(12)
    sampler: Any = DistributedSampler(data, count, rank, shuffle=False)
    return DataLoader(data, 2, sampler=sampler)


def test_what_the_user_has_divided_is_warned_of_once(tmp_path: Path) -> None:
    [parts] = by_run(run_ranks(2, train, tmp_path, divided, [{"num_epochs": 2}]))
    for part in parts:
        [said] = part["warnings"]
        assert said.startswith("train_dataloader has a sampler that shards the data")
        assert part["num_exchanged"] == 0


def test_what_the_user_has_divided_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    [first] = by_run(run_ranks(3, train, tmp_path / "first", divided, [{"max_steps": 1}]))
    run = {"state": merged(first), "num_epochs": 1}
    [second] = by_run(run_ranks(2, train, tmp_path / "second", divided, [run]))
    for rank, part in enumerate(second):  # after the 3 batches that there were, 1 for each of two
        found = [(idx, batch) for idx, batch, *_ in part["seen"]]
        assert found == [(1, [4.0 + rank, 6.0 + rank]), (2, [8.0 + rank, 10.0 + rank])]


# ---- parts of batches, and validation


# CI: three processes.
@pytest.mark.soak_cases("2")
@pytest.mark.parametrize("count", [2, 3])
def test_parts_of_batches_are_as_many_everywhere(tmp_path: Path, count: int) -> None:
    run = {"num_epochs": 1, "micro_batch_size": 1, "val": True}
    [parts] = by_run(run_ranks(count, train, tmp_path, plain, [run]))
    assert all(part["parts"] == parts[0]["parts"] for part in parts)
    assert sorted(seen_by_all(parts)) == list(range(NUM))
    assert {part["num_exchanged"] for part in parts} == {0}


# CI: a loader, and one for all processes.
@pytest.mark.soak_cases("as_a_list", "without_state")
@pytest.mark.parametrize("make", [plain, as_a_list, without_state, for_all])
def test_a_validation_divides_its_data(tmp_path: Path, make: Any) -> None:
    runs = [{"num_epochs": 1, "val": True}, {"num_epochs": 1, "val": True, "eval_steps": 2}]
    whole, cut = by_run(run_ranks(3, train, tmp_path, make, runs))
    validated = [together([part["validated"] for part in run]) for run in (whole, cut)]
    assert sorted(flat(validated[0])) == sorted(seen_by_all(whole))
    assert validated[1] == validated[0][:2]


def test_steps_per_epoch_counts_batches_of_all(tmp_path: Path) -> None:
    run = {"num_epochs": 2, "steps_per_epoch": 2}
    [parts] = by_run(run_ranks(2, train, tmp_path, plain, [run]))
    assert [idx for idx, *_ in parts[0]["seen"]] == [0, 1, 0, 1]
    [first] = by_run(
        run_ranks(2, train, tmp_path / "first", plain, [{"max_steps": 1, "steps_per_epoch": 2}])
    )
    run = {"state": merged(first), "max_steps": 2, "steps_per_epoch": 2}
    [[second]] = by_run(run_ranks(1, train, tmp_path / "second", plain, [run]))
    assert [idx for idx, *_ in second["seen"]] == [0, 1]
