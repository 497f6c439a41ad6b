"""What tests of whole runs share: a small model, small data, a callback that sees all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from modelzoo_trainer import Callback, Logger, Trainer, TrainingLoop
from modelzoo_trainer.hooks.spec import HOOKS, HookFn

Batches = list[tuple[Tensor, Tensor]]
Seen = Callable[[str, tuple[Any, ...]], None]


class TinyModel(nn.Module):
    """Three numbers to one, through four; returns (loss, logits)."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.hidden = nn.Linear(3, 4)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        logits = self.head(self.dropout(torch.tanh(self.hidden(inputs))))
        return ((logits - targets) ** 2).mean(), logits


class Scale(nn.Module):
    """One weight, at first 1, whose loss is that weight times the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: Tensor) -> Tensor:
        return self.weight * batch.mean()


def tiny_batches(num: int = 3, size: int = 4, seed: int = 1) -> Batches:
    """Return batches for `TinyModel`, equal for equal arguments."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 3, generator=generator), torch.randn(size, 1, generator=generator))
        for _ in range(num)
    ]


def constant_batches(*values: float) -> list[Tensor]:
    """Return batches of two samples for `Scale`, each of one value."""
    return [torch.full((2,), float(value)) for value in values]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class History(Logger):
    """Keeps the metrics that it is given."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, Any]]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        self.lines.append((step, dict(metrics)))

    def of(self, name: str) -> list[tuple[int, Any]]:
        return [(step, metrics[name]) for step, metrics in self.lines if name in metrics]

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.lines]


_DECLARED: Final = tuple(name for name in HOOKS if name in vars(Callback))


class RecorderBase(Callback):
    """Notes every hook; `on_call` may be told as well.

    Args:
        on_call: Called with a hook's name and its arguments.
    """

    def __init__(self, on_call: Seen | None = None) -> None:
        self.names: list[str] = []
        self.on_call = on_call

    def note(self, name: str, passed: tuple[Any, ...]) -> None:
        self.names.append(name)
        if self.on_call is not None:
            self.on_call(name, passed)

    @override
    def __enter__(self) -> Self:
        gc.collect()  # trainers that other tests have dropped end now, not in this one
        return super().__enter__()

    def count(self, name: str) -> int:
        return self.names.count(name)


def _noting(name: str) -> HookFn:
    def method(self: RecorderBase, *passed: Any) -> None:
        self.note(name, passed)

    return method


def recorder_class(name: str = "Recorder") -> Any:
    """Return a class that overrides every hook that `Callback` declares."""
    return type(name, (RecorderBase,), {hook: _noting(hook) for hook in _DECLARED})


Recorder: Final = recorder_class()


def run_trainer(
    model_dir: Path, *callbacks: Any, batches: Iterable[Any] | None = None, **settings: Any
) -> Trainer:
    """Return a trainer that has trained.

    Args:
        model_dir: Where it writes.
        *callbacks: Its callbacks.
        batches: The training data; None = three batches.
        **settings: Arguments of the trainer; `val` is the data of its validations.
    """
    val = settings.pop("val", None)
    trainer = make_trainer(model_dir, *callbacks, **settings)
    trainer.fit(tiny_batches() if batches is None else batches, val)
    return trainer


def make_trainer(model_dir: Path, *callbacks: Any, **settings: Any) -> Trainer:
    """Return a trainer on the CPU with a `TinyModel`, plain SGD and seed 0.

    Args:
        model_dir: Where it writes.
        *callbacks: Its callbacks.
        **settings: Arguments of the trainer; `max_steps` and the like are those of its loop.
    """
    loop = {key: settings.pop(key) for key in _LOOP_KEYS if key in settings}
    arguments: dict[str, Any] = {
        "device": "cpu",
        "model_dir": model_dir,
        "model": TinyModel,
        "optimizer": sgd,
        "loop": TrainingLoop(**loop),
        "callbacks": callbacks,
        "seed": 0,
    }
    return Trainer(**(arguments | settings))


_LOOP_KEYS: Final = (
    "num_steps",
    "max_steps",
    "num_epochs",
    "steps_per_epoch",
    "eval_frequency",
    "eval_steps",
    "grad_accum_steps",
    "max_time",
)


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return a copy of the model's state."""
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Return the names of tensors that are not equal bit by bit."""
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


class Cut(Exception):
    """Ends a run as a crash does."""


class SaveAndCut(Callback):
    """Saves a checkpoint after `num` batches, and raises."""

    def __init__(self, num: int) -> None:
        self.num = num

    def on_train_batch_end(
        self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.data.num_batches == self.num:
            trainer.save_checkpoint()
            raise Cut


class Interrupted(Exception):
    """Ends a run as a crash does."""


class Crash(Callback):
    """Raises when a step has been taken, after a checkpoint of it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_after_save_checkpoint(self, trainer, ckpt_path):
        if trainer.global_step == self.step:
            raise Interrupted
