"""A small run with the Trainer, alone or as one of several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.core import MixedPrecision
from modelzoo_trainer.loggers import Logger

NUM_SAMPLES, WIDTH = 26, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Net(nn.Module):
    """In float64; its loss is a mean over the items whose mask is 1, or over samples.

    Args:
        counts: "int" or "tensor": `num_items` is told; None = the loss is a mean over samples.
    """

    tensor_plan: ClassVar[dict[str, str]] = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self, counts: str | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.counts = counts
        self.double()

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        hidden, mask = batch
        for block in self.blocks:
            hidden = block(hidden)
        terms = self.head(hidden).squeeze(-1) ** 2
        if self.counts is None:
            return {"loss": terms.mean(), "size": terms.detach().mean()}
        loss = (terms * mask).sum() / mask.sum().clamp_min(1)
        num = mask.sum().to(torch.int64)
        return {"loss": loss, "num_items": int(num) if self.counts == "int" else num}


class Record(Callback):
    """Keeps gradients, after the window's weights and the clipping are done, and weights."""

    def __init__(self) -> None:
        self.grads: list[list[float]] = []
        self.batches: list[int] = []

    def on_after_optimizer_step(self, trainer, model, optimizer):
        found = trainer.backend.host_state([param.grad for param in model.parameters()])
        self.grads.append(torch.cat([grad.flatten() for grad in found]).tolist())

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.batches.append(0 if trainer.is_padding else len(batch[0]))


class CrashAt(Callback):
    """Raises after the first batch of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            raise RuntimeError(f"crash at step {self.step}")


class Metrics(Logger):
    name = "metrics"

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics, step):
        self.rows.append((step, dict(metrics)))


def samples(num: int = NUM_SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(num, WIDTH, generator=generator, dtype=torch.float64)
    mask = torch.randint(0, 2, (num,), generator=generator).double()
    return TensorDataset(inputs, mask)


def make_trainer(model_dir: Path, **options: Any) -> Trainer:
    """Return a trainer; options with a default here are keys of `TrainingLoop` and others."""
    record, metrics = Record(), Metrics()
    lr, optimizer = options.pop("lr", 0.05), options.pop("optimizer", torch.optim.SGD)
    counts = options.pop("counts", None)
    callbacks, crash = [record, *options.pop("callbacks", ())], options.pop("crash", None)
    callbacks += [] if crash is None else [CrashAt(crash)]
    trainer = Trainer(
        device="cpu",
        backend=options.pop("backend", None),
        model_dir=model_dir,
        model=lambda: Net(counts),
        optimizer=lambda model: optimizer(model.parameters(), lr=lr),
        precision=MixedPrecision(enabled=False, max_gradient_norm=options.pop("clip", None)),
        loop=TrainingLoop(
            num_epochs=options.pop("epochs", 2),
            max_steps=options.pop("max_steps", None),
            num_steps=options.pop("num_steps", None),
            grad_accum_steps=options.pop("accumulate", 1),
            eval_frequency=options.pop("eval_frequency", 1.0),
        ),
        checkpoint=Checkpoint(steps=options.pop("save", None), **options.pop("checkpoint", {})),
        callbacks=callbacks,
        loggers=[metrics],
        seed=1,
    )
    assert not options, options
    trainer.record, trainer.metrics = record, metrics
    return trainer


def loader(batch_size: int, num: int = NUM_SAMPLES, *, shuffle: bool = True) -> DataLoader[Any]:
    return DataLoader(samples(num), batch_size=batch_size, shuffle=shuffle)


def train(rank: int, model_dir: Path, batch_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Run a fit with validation, and return what came of it."""
    options = dict(options)
    num, micro = options.pop("num", NUM_SAMPLES), options.pop("micro", None)
    trainer = make_trainer(model_dir, **options)
    if micro is not None:
        trainer.split_train_batches(micro)
    trainer.raise_on_interrupt = False
    trainer.fit(loader(batch_size, num), loader(batch_size, 11, shuffle=False))
    weights = trainer.backend.host_state(dict(trainer.model.named_parameters()))
    return {
        "rank": rank,
        "is_main": trainer.backend.comm.is_main,
        "rows": trainer.metrics.rows,
        "grads": trainer.record.grads,
        "batches": trainer.record.batches,
        "weights": {name: value.tolist() for name, value in weights.items()},
        "step": trainer.global_step,
        "interrupted": trainer.interrupted,
    }
