"""What goes wrong with the store of a run: expired credentials, deleted objects, outages."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from modelzoo_trainer import Callback, Trainer
from modelzoo_trainer.checkpointing.stores.store import Store, open_store
from modelzoo_trainer.errors import CheckpointError
from tests.checkpointing.stores.fault_proxy import FaultProxy
from tests.checkpointing.stores.s3_server import BUCKET, SECRET, S3Server, options_of
from tests.checkpointing.stores.training import Plan

pytestmark = pytest.mark.slow
_NUMBERS: Final = itertools.count()


class At(Callback):
    """Does something after a step.

    Args:
        acts: By step.
    """

    def __init__(self, acts: dict[int, Callable[[], object]]) -> None:
        self.acts = acts

    def on_train_batch_end(
        self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (act := self.acts.pop(trainer.global_step, None)) is not None:
            act()


@pytest.fixture
def plan(proxy: FaultProxy, s3: S3Server, tmp_path: Path) -> Plan:
    url = f"s3://{BUCKET}/mishaps/{os.getpid()}-{next(_NUMBERS)}"
    options = options_of(proxy.port) | {"request_seconds": 2, "retry_seconds": 1}
    return Plan(url, str(tmp_path / "one"), options, s3.environment, keep=10)


@pytest.fixture
def store(plan: Plan, s3: S3Server) -> Store:
    """The prefix of the plan, without the proxy."""
    return open_store(plan.url, s3.options)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cache = tmp_path_factory.mktemp("whole")
    return Plan("memory://mishaps/whole", str(cache), {}, {}).train()


def stored(store: Store) -> list[int]:
    names = [one.name for one in store.list() if one.name.endswith("/manifest.json")]
    return sorted(int(name.split("/")[0].rpartition("_")[2]) for name in names)


def wait_until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("fault", ["expired", "503", "cut request"])
def test_training_continues_while_the_store_refuses(
    fault: str,
    plan: Plan,
    proxy: FaultProxy,
    store: Store,
    expected: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse() -> None:
        wait_until(lambda: 1 in stored(store))
        proxy.choose = lambda kind, target: fault

    def note() -> None:
        wait_until(lambda: "UPLOADS FAIL" in caplog.text)
        seen.extend(stored(store))

    seen: list[int] = []
    with caplog.at_level(logging.INFO):
        result = plan.train(At({2: refuse, 6: note, 7: proxy.pass_all}))
    assert result == expected
    assert 5 not in seen
    assert stored(store) == list(range(1, 9))
    assert "Training continues" in caplog.text
    assert "work again" in caplog.text
    assert SECRET not in caplog.text
    if fault == "expired":
        assert "the credentials have expired" in caplog.text


def test_a_run_that_ended_with_expired_credentials_is_uploaded_by_the_next(
    plan: Plan, proxy: FaultProxy, store: Store
) -> None:
    def refuse() -> None:
        wait_until(lambda: 1 in stored(store))
        proxy.choose = lambda kind, target: "expired"

    with pytest.raises(CheckpointError, match="expired") as caught:
        replace(plan, wait_s=1).train(At({2: refuse}))
    assert "checkpoint upload" in str(caught.value)
    proxy.pass_all()
    assert plan.train()["begun_at"] == 8
    assert stored(store) == list(range(1, 9))


@pytest.mark.parametrize(
    ("deleted", "begun_at"),
    [
        ("checkpoint_8/manifest.json", 7),
        ("checkpoint_8/", 7),
        ("checkpoint_8/[data]", 7),
        ("[manifests]", None),
        (".lock", 8),
        ("metrics.jsonl", 8),
        ("", None),
    ],
)
def test_a_half_deleted_prefix_resumes_from_what_is_complete(
    deleted: str, begun_at: int | None, plan: Plan, store: Store, expected: dict[str, Any]
) -> None:
    plan.train()
    names = [one.name for one in store.list()]
    if deleted == "[manifests]":
        gone = [name for name in names if name.endswith("/manifest.json")]
    elif deleted == "checkpoint_8/[data]":
        is_data = ("checkpoint_8/", ".safetensors")
        gone = [n for n in names if n.startswith(is_data[0]) and n.endswith(is_data[1])]
    else:
        gone = [name for name in names if name.startswith(deleted)]
    assert gone
    store.delete(gone)
    elsewhere = replace(plan, cache_dir=f"{plan.cache_dir}-other")
    result = elsewhere.train()
    assert (result["begun_at"], result["step"]) == (begun_at, 8)
    assert result["weights"] == expected["weights"]
    assert 8 in stored(store)


def test_a_clock_that_is_off_changes_nothing(
    plan: Plan, store: Store, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 10**7)
    assert plan.train() == expected
    monkeypatch.setattr(time, "time", lambda: now() + 10**7)
    elsewhere = replace(plan, cache_dir=f"{plan.cache_dir}-other")
    assert elsewhere.train()["begun_at"] == 8
    assert stored(store) == list(range(1, 9))
