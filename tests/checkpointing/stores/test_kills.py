"""A run on an object store is killed at its requests, and resumed on this or another machine."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from modelzoo_trainer import checkpointing
from modelzoo_trainer.checkpointing.stores.mirror import open_mirror
from modelzoo_trainer.checkpointing.stores.pulling import pull
from modelzoo_trainer.checkpointing.stores.store import PART_BYTES
from modelzoo_trainer.checkpointing.stores.urls import StoreUrl
from tests.checkpointing.stores.fault_proxy import FaultProxy
from tests.checkpointing.stores.s3_server import BUCKET, S3Server, options_of
from tests.checkpointing.stores.training import Plan, Process

pytestmark = pytest.mark.slow
POINTS: Final = 12
"""Requests at which a run is killed in each test; each once before and once after the server."""
_NUMBERS: Final = itertools.count()


@pytest.fixture
def plan(proxy: FaultProxy, s3: S3Server, tmp_path: Path) -> Plan:
    return Plan("", str(tmp_path / "one"), options_of(proxy.port), s3.environment)


def fresh(plan: Plan, folder: Path) -> Plan:
    """Return the plan on a prefix of its own, with an empty cache."""
    number = next(_NUMBERS)
    return replace(
        plan,
        url=f"s3://{BUCKET}/kills/{os.getpid()}-{number}",
        cache_dir=str(folder / f"machine-{number}"),
    )


def committed(plan: Plan, server: S3Server, folder: Path) -> list[int]:
    """Return the steps of the checkpoints in the store, each of which was loaded and compared."""
    prefix = plan.url.partition(f"{BUCKET}/")[2]
    cache = folder / f"judge-{next(_NUMBERS)}"
    mirror = open_mirror(StoreUrl("s3", BUCKET, prefix), cache_dir=cache, options=server.options)
    pull(mirror, owns=False)
    found = checkpointing.list_checkpoints(mirror.path)
    for checkpoint in found:
        checkpointing.load(checkpoint.path)
    shutil.rmtree(cache)
    return sorted(int(one.path.name.rpartition("_")[2]) for one in found)


def kill_at(
    proxy: FaultProxy,
    plan: Plan,
    result: Path,
    number: int,
    *,
    answered: bool,
    of_kind: str | None = None,
) -> int:
    """Run a plan and kill it at a request, counted among those of a kind; return its exit code."""
    process = Process(plan, result)
    seen = itertools.count()

    def choose(kind: str, target: str) -> str | None:
        if of_kind in (None, kind) and next(seen) == number:
            if answered:
                proxy.answered = process.kill
            else:
                process.kill()
                return "cut request"
        return None

    proxy.choose = choose
    code = process.wait()
    proxy.pass_all()
    return code


# CI: on each machine, before and after the answer.
@pytest.mark.soak_cases("same-True", "other-False")
@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("machine", ["same", "other"])
def test_a_run_killed_at_a_request_resumes_from_its_last_committed_checkpoint(
    machine: str,
    answered: bool,
    plan: Plan,
    proxy: FaultProxy,
    s3: S3Server,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    whole = fresh(plan, tmp_path)
    process = Process(whole, tmp_path / "whole.json")
    assert process.wait() == 0
    expected = process.result
    assert committed(whole, s3, tmp_path) == [7, 8]
    num_requests = len(proxy.requests)
    kills = lost = unequal = in_upload = 0
    for point in range(POINTS):
        run, result = fresh(plan, tmp_path), tmp_path / f"{point}.json"
        number = 12 + point * (num_requests - 12) // POINTS
        if kill_at(proxy, run, result, number, answered=answered) == 0:
            continue  # it had fewer requests
        kills += 1
        steps = committed(run, s3, tmp_path)
        newest = max(steps, default=0)
        in_upload += newest < plan.steps
        again = run if machine == "same" else replace(run, cache_dir=f"{run.cache_dir}-other")
        process = Process(again, result)
        assert process.wait() == 0
        lost += (process.result["begun_at"] or 0) < newest
        unequal += _differ(process.result, expected)
        lost += committed(run, s3, tmp_path)[-1] != plan.steps
    record_property("kills", kills)
    record_property("kills_during_uploads", in_upload)
    record_property("checkpoints_lost", lost)
    record_property("unequal", unequal)
    assert (lost, unequal) == (0, 0)
    assert kills > POINTS // 2


# CI: each request; the last one before and after the answer.
@pytest.mark.soak_cases("start-True", "part-False")
@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("kind", ["start", "part", "complete"])
def test_a_run_killed_within_a_multipart_upload_loses_no_checkpoint(
    kind: str, answered: bool, plan: Plan, proxy: FaultProxy, s3: S3Server, tmp_path: Path
) -> None:
    large = replace(plan, steps=3, num_extra=2 * PART_BYTES // 4)  # three parts
    process = Process(fresh(large, tmp_path), tmp_path / "whole.json")
    assert process.wait() == 0
    requests = [request.kind for request in proxy.requests]
    assert requests.count("part") == 3 * requests.count("start") == 3 * large.steps
    per_save = requests.count(kind) // large.steps
    for number in range(per_save, 2 * per_save):  # of the second checkpoint
        run, result = fresh(large, tmp_path), tmp_path / f"{number}.json"
        code = kill_at(proxy, run, result, number, answered=answered, of_kind=kind)
        assert code == -signal.SIGKILL
        assert committed(run, s3, tmp_path) == [1]
        again = Process(replace(run, cache_dir=f"{run.cache_dir}-other"), result)
        assert again.wait() == 0
        assert again.result["begun_at"] == 1
        assert not _differ(again.result, process.result)
        assert committed(run, s3, tmp_path) == [2, 3]


def _differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return any(one[name] != other[name] for name in ("weights", "optimizer", "step"))


def test_a_second_run_on_a_prefix_ends_before_its_first_step(
    plan: Plan, s3: S3Server, tmp_path: Path
) -> None:
    first = fresh(plan, tmp_path)
    with first.trainer():
        second = replace(first, cache_dir=str(tmp_path / "second"))
        process = Process(second, tmp_path / "second.json")
        assert process.wait() == 2
    assert f"is in use by process {os.getpid()} on " in process.result["error"]
    assert committed(first, s3, tmp_path) == []
