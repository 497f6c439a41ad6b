"""Every request of saving, uploading, resuming elsewhere and deleting fails once, in each way."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import torch

from modelzoo_trainer import checkpointing
from modelzoo_trainer.checkpointing.stores.mirror import Mirror, open_mirror
from modelzoo_trainer.checkpointing.stores.pulling import pull
from modelzoo_trainer.checkpointing.stores.pushing import Pusher
from modelzoo_trainer.checkpointing.stores.urls import StoreUrl
from modelzoo_trainer.errors import CheckpointError, StoreError
from tests.checkpointing.stores.fault_proxy import FAULTS, FaultProxy
from tests.checkpointing.stores.s3_server import BUCKET, options_of

pytestmark = pytest.mark.slow

_LIMITS: Final = {"request_seconds": 1, "retry_seconds": 30}
_NUMBERS: Final = itertools.count()
_STATES: Final = [
    {"model": {"w": torch.arange(1000.0) + step}, "global_step": step} for step in range(3)
]


class FailOne:
    """Lets the request of one number fail, and counts all."""

    def __init__(self, number: int | None, fault: str) -> None:
        self.number, self.fault, self.count = number, fault, 0

    def __call__(self, kind: str, target: str) -> str | None:
        self.count += 1
        return self.fault if self.count - 1 == self.number else None


def cycle(proxy: FaultProxy, folder: Path, limits: dict[str, float]) -> None:
    """Save on one machine, resume on another one, go on there and delete the oldest."""
    url = StoreUrl("s3", BUCKET, f"cycles/{os.getpid()}-{next(_NUMBERS)}")

    def on(machine: str) -> Mirror:
        return open_mirror(url, cache_dir=folder / machine, options=options_of(proxy.port) | limits)

    one, other, third = on("one"), on("other"), on("third")
    save(one, 0)
    save(one, 1)
    push(one)
    again(lambda: pull(other, owns=True))
    check(other, [0, 1])
    save(other, 2)
    checkpointing.delete(other.path / "checkpoint_0")
    push(other)
    again(lambda: pull(third, owns=True))
    check(third, [1, 2])
    left = {entry.name.split("/")[0] for entry in third.store.list("")}
    assert left == {"checkpoint_1", "checkpoint_2"}


def save(mirror: Mirror, step: int) -> None:
    checkpointing.save(mirror.path / f"checkpoint_{step}", _STATES[step], step=step)


def push(mirror: Mirror) -> None:
    """Upload as the thread of a run does: again after an error."""
    pusher = Pusher(mirror, lambda: None)
    again(pusher.push)
    assert not pusher.pending()
    assert not pusher.refused


def again(act: Callable[[], object]) -> None:
    try:
        act()
    except StoreError:
        act()


def check(mirror: Mirror, steps: list[int]) -> None:
    found = checkpointing.list_checkpoints(mirror.path)
    assert [info.step for info in found] == steps
    for info in found:
        try:
            state = checkpointing.load(info.path)
        except (CheckpointError, StoreError):  # noticed, so not silent; and not for ever
            state = checkpointing.load(info.path)
        assert torch.equal(state["model"]["w"], _STATES[info.step]["model"]["w"])


# CI: a refusal, an answer that is lost or wrong, a request that hangs or comes twice; each single
# one in test_faults.
@pytest.mark.soak_cases(
    "503", "cut request", "truncated answer", "corrupted request", "corrupted signature"
)
@pytest.mark.parametrize("fault", FAULTS)
def test_no_checkpoint_is_lost_or_damaged(
    fault: str,
    proxy: FaultProxy,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    counting = FailOne(None, fault)
    proxy.choose = counting
    cycle(proxy, tmp_path / "none", _LIMITS | {"request_seconds": 30})
    for number in range(counting.count):
        proxy.choose = failing = FailOne(number, fault)
        cycle(proxy, tmp_path / str(number), _LIMITS)
        assert failing.count > number
    record_property("requests_failed", counting.count)
    assert counting.count > 25
