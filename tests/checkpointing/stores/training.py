"""A run on an object store in a process of its own, which tests kill."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from modelzoo_trainer import Callback, Checkpoint, ObjectStore, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import KeepNCheckpoints
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loggers import JsonlLogger
from tests.doubles import TinyModel, sgd, tiny_batches
from tests.reliability.digests import digest

_PAUSE_S: Final = 0.02


class Biased(TinyModel):
    """That model with many further weights, whose mean is added to each output."""

    def __init__(self, num_extra: int) -> None:
        super().__init__(dropout=0.5)
        self.bias = nn.Parameter(torch.arange(num_extra) / num_extra)

    def forward(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        _, targets = batch
        _, logits = super().forward(batch)
        logits = logits + self.bias.mean()
        return ((logits - targets) ** 2).mean(), logits


class Pause(Callback):
    """Gives uploads time to run beside the training."""

    def on_train_batch_end(
        self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        time.sleep(_PAUSE_S)


@dataclass(frozen=True)
class Plan:
    """What is trained.

    Args:
        url: `model_dir`.
        cache_dir: The folder of the machine.
        options: Of the store.
        environment: Credentials.
        steps: Of the whole run.
        keep: Number of checkpoints.
        wait_s: How long the end waits for uploads without progress.
        num_extra: Number of further weights, to make files of several parts.
    """

    url: str
    cache_dir: str
    options: dict[str, Any]
    environment: dict[str, str]
    steps: int = 8
    keep: int = 2
    wait_s: float = 60
    num_extra: int = 0

    def trainer(self, *callbacks: Callback) -> Trainer:
        """Return its trainer."""
        os.environ.update(self.environment)
        return Trainer(
            model=lambda: Biased(self.num_extra) if self.num_extra else TinyModel(dropout=0.5),
            optimizer=sgd,
            loop=TrainingLoop(max_steps=self.steps),
            checkpoint=Checkpoint(steps=1),
            callbacks=[KeepNCheckpoints(self.keep), *callbacks],
            loggers=[JsonlLogger()],
            seed=1,
            progress="none",
            model_dir=self.url,
            object_store=ObjectStore(
                cache_dir=self.cache_dir,
                lease_seconds=30,
                wait_seconds=self.wait_s,
                options=self.options,
            ),
        )

    def train(self, *callbacks: Callback) -> dict[str, Any]:
        """Train, and return what must not depend on how often it was killed."""
        with self.trainer(*callbacks) as trainer:
            trainer.fit(tiny_batches(20))
            return {
                "weights": digest(trainer.model.state_dict()),
                "optimizer": digest(trainer.optimizer.state_dict()),
                "begun_at": trainer.checkpoint.begun_with[1],
                "step": trainer.global_step,
            }


def _train(plan: dict[str, Any], result: str) -> None:
    try:
        found = Plan(**plan).train(Pause())
    except ConfigError as error:
        Path(result).write_text(json.dumps({"error": str(error)}), encoding="ascii")
        sys.exit(2)
    Path(result).write_text(json.dumps(found), encoding="ascii")


class Process:
    """A process that trains.

    Args:
        plan: What it trains.
        result: Where it writes what came out.
    """

    def __init__(self, plan: Plan, result: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["tests.distributed.imported", "tests.checkpointing.stores.training"]
        )
        self.result_path = result
        self.process: BaseProcess = context.Process(
            target=_train, args=(asdict(plan), str(result)), daemon=True
        )
        self.process.start()

    def kill(self) -> None:
        """Kill it at once."""
        self.process.kill()

    def wait(self) -> int:
        """Wait for its end and return its exit code."""
        self.process.join(120)
        assert self.process.exitcode is not None
        return self.process.exitcode

    @property
    def result(self) -> dict[str, Any]:
        """What came out of it."""
        found: dict[str, Any] = json.loads(self.result_path.read_text(encoding="ascii"))
        return found
