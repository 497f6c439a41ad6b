"""Each request of a run on an object store fails once: its save, and its resume elsewhere."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import pytest

from modelzoo_trainer import Checkpoint, ObjectStore, Trainer, TrainingLoop, checkpointing
from modelzoo_trainer.callbacks import KeepNCheckpoints
from modelzoo_trainer.checkpointing.stores.mirror import open_mirror
from modelzoo_trainer.checkpointing.stores.pulling import pull
from modelzoo_trainer.checkpointing.stores.urls import StoreUrl
from modelzoo_trainer.loggers import JsonlLogger
from tests.checkpointing.stores.fault_proxy import FAULTS, FaultProxy
from tests.checkpointing.stores.s3_server import BUCKET, S3Server, options_of
from tests.doubles import TinyModel, differing, sgd, tiny_batches, weights_of

pytestmark = pytest.mark.slow
STEPS: Final = (4, 6)  # at the end of the first process and of the second
KEPT: Final = {"checkpoint_4", "checkpoint_6"}
LIMITS: Final = {"request_seconds": 2, "retry_seconds": 20}
_NUMBERS: Final = itertools.count()
_VARYING: Final = re.compile(r"[0-9a-f]{16}|\d+")


class Run:
    """A run of two processes on two machines, on a prefix of its own.

    Args:
        proxy: In front of the server.
        folder: For the machines.
    """

    def __init__(self, proxy: FaultProxy, folder: Path) -> None:
        self.proxy = proxy
        self.folder = folder / f"run-{next(_NUMBERS)}"
        self.prefix = f"runs/{os.getpid()}-{next(_NUMBERS)}"
        self.url = f"s3://{BUCKET}/{self.prefix}"

    def trainer(self, machine: str, num_steps: int, *, model_dir: Any = None) -> Trainer:
        return Trainer(
            model=lambda: TinyModel(dropout=0.5),
            optimizer=sgd,
            loop=TrainingLoop(max_steps=num_steps),
            checkpoint=Checkpoint(steps=2),
            callbacks=[KeepNCheckpoints(2)],
            loggers=[JsonlLogger()],
            seed=1,
            progress="none",
            model_dir=self.url if model_dir is None else model_dir,
            object_store=ObjectStore(
                cache_dir=self.folder / machine,
                lease_seconds=12,
                wait_seconds=60,
                options=options_of(self.proxy.port) | LIMITS,
            ),
        )

    def train(self) -> tuple[dict[str, Any], int]:
        """Train on one machine, then on another; return the weights and the step resumed from."""
        with self.trainer("one", STEPS[0]) as first:
            first.fit(tiny_batches(20))
        with self.trainer("other", STEPS[1]) as second:
            second.fit(tiny_batches(20))
            return weights_of(second), second.checkpoint.begun_with[1]

    def stored(self, server: S3Server) -> set[str]:
        """Return the checkpoints in the store, each of which was loaded and compared."""
        mirror = open_mirror(
            StoreUrl("s3", BUCKET, self.prefix),
            cache_dir=self.folder / "judge",
            options=server.options,
        )
        pull(mirror, owns=False)
        found = checkpointing.list_checkpoints(mirror.path)
        for checkpoint in found:
            checkpointing.load(checkpoint.path)
        return {checkpoint.path.name for checkpoint in found}

    def kinds(self) -> list[tuple[str, str]]:
        """Return what kinds of requests there were, of which kinds of objects."""
        return [(one.kind, self.name_of(one.target)) for one in self.proxy.requests]

    def name_of(self, target: str) -> str:
        path, _, query = target.partition("?")
        name = unquote(path).partition(f"{self.prefix}/")[2]
        if "prefix=" in query:
            name = unquote(query.partition("prefix=")[2]).partition(f"{self.prefix}/")[2]
        return _VARYING.sub("N", name)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The weights of a run in a folder."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = Trainer(
        model=lambda: TinyModel(dropout=0.5),
        optimizer=sgd,
        loop=TrainingLoop(max_steps=STEPS[-1]),
        seed=1,
        progress="none",
        model_dir=folder,
    )
    with trainer:
        trainer.fit(tiny_batches(20))
        return weights_of(trainer)


def ends(kinds: Iterable[tuple[str, str]]) -> list[tuple[tuple[str, str], int]]:
    """Return each kind with the number of its first and its last request."""
    all_kinds = list(kinds)
    numbers = {kind: {0, all_kinds.count(kind) - 1} for kind in all_kinds}
    return [(kind, number) for kind in sorted(numbers) for number in sorted(numbers[kind])]


# CI: a refusal, an answer that is lost or wrong, a request that hangs or comes twice; each single
# one in test_faults.
@pytest.mark.soak_cases(
    "503", "cut request", "truncated answer", "corrupted request", "corrupted signature"
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_whose_requests_fail_once_loses_and_damages_nothing(
    fault: str,
    proxy: FaultProxy,
    s3: S3Server,
    expected: dict[str, Any],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    whole = Run(proxy, tmp_path)
    whole.train()
    lost = damaged = num = 0
    for kind, number in ends(whole.kinds()):
        run = Run(proxy, tmp_path)
        seen = itertools.count()

        def choose(found: str, target: str, run=run, kind=kind, number=number, seen=seen) -> Any:  # type: ignore[no-untyped-def]
            is_one = (found, run.name_of(target)) == kind and next(seen) == number
            return fault if is_one else None

        proxy.requests.clear()
        proxy.choose = choose
        weights, begun_at = run.train()
        proxy.pass_all()
        num += len(proxy.faults)
        lost += begun_at != STEPS[0]
        lost += len(KEPT - run.stored(s3))
        damaged += differing(weights, expected) != []
        shutil.rmtree(run.folder)
    record_property("requests_failed", num)
    record_property("checkpoints_lost", lost)
    record_property("undetected", damaged)
    assert (lost, damaged) == (0, 0)
    assert num > 20
