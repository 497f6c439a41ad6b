"""The same training in other trainers, with as few features as each allows; all are optional.

The data are a list of batches, or a shuffled DataLoader without workers over pairs of input and
label; a trainer that creates its own DataLoader gets the data set and the batch size. Time is
measured from the start of training, not from the call, except for Ignite, which starts at once.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

EPOCH = 100  # batches of a stream, which has no length
Data = list[Any] | DataLoader[Any]
Timed = Callable[[], float]  # seconds per step


class Batches:
    """A dataloader over a list; Lightning treats a plain list as several dataloaders."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def _epochs(data: Data, steps: int) -> tuple[Data, int]:
    """Return the data and the number of epochs; a list is one epoch of `steps` batches."""
    if isinstance(data, DataLoader):
        return data, steps // len(data)
    if not hasattr(data, "__len__"):
        return data, steps // EPOCH
    return list(islice(cycle(data), steps)), 1


def _dataset(data: Data, steps: int) -> tuple[Any, int, int]:
    """Return the data set of `_epochs`, the batch size, and the number of epochs."""
    given, num_epochs = _epochs(data, steps)
    if isinstance(given, DataLoader):
        assert given.batch_size is not None  # it has no custom batch_sampler
        return given.dataset, given.batch_size, num_epochs
    xs, ys = zip(*given, strict=True)
    return TensorDataset(torch.cat(xs), torch.cat(ys)), len(ys[0]), num_epochs


def ignite(model: nn.Module, data: Data, steps: int) -> Timed:
    """Ignite's Engine without handlers."""
    from ignite.engine import Engine

    optimizer = torch.optim.AdamW(model.parameters())

    def update(engine: Any, batch: Any) -> None:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    engine = Engine(update)
    given, num_epochs = _epochs(data, steps)
    epoch_length = None if hasattr(given, "__len__") else EPOCH

    def run() -> float:
        begin = time.perf_counter()
        engine.run(given, max_epochs=num_epochs, epoch_length=epoch_length)
        return (time.perf_counter() - begin) / steps

    return run


def lightning(model: nn.Module, data: Data, steps: int) -> Timed:
    """Lightning's Trainer without progress bar, logger, checkpoints and summary."""
    import lightning.pytorch as pl

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):  # type: ignore[misc]  # untyped base
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def on_train_start(self) -> None:
            self.begin = time.perf_counter()

        def on_train_end(self) -> None:
            self.end = time.perf_counter()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    given, num_epochs = _epochs(data, steps)
    batches = Batches(given) if isinstance(given, list) else given

    def run() -> float:
        module = Module()
        pl.Trainer(
            max_epochs=num_epochs,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, batches)
        return (module.end - module.begin) / steps

    return run


def pytorch_accelerated(model: nn.Module, data: Data, steps: int) -> Timed:
    """pytorch-accelerated's Trainer without callbacks; its loader collates every batch."""
    from pytorch_accelerated import Trainer

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target)

    class Stopwatch(Trainer):  # type: ignore[misc]  # untyped base
        def training_run_start(self) -> None:
            self.begin = time.perf_counter()

        def training_run_end(self) -> None:
            self.end = time.perf_counter()
            super().training_run_end()

    net: Any = model.net
    trainer = Stopwatch(
        model=net, loss_func=loss_of, optimizer=torch.optim.AdamW(net.parameters()), callbacks=()
    )
    dataset, batch_size, num_epochs = _dataset(data, steps)

    def run() -> float:
        trainer.train(
            train_dataset=dataset,
            num_epochs=num_epochs,
            per_device_batch_size=batch_size,
            train_dataloader_kwargs={"num_workers": 0, "shuffle": isinstance(data, DataLoader)},
        )
        return float(trainer.end - trainer.begin) / steps

    return run


def hugging_face(model: nn.Module, data: Data, steps: int) -> Timed:
    """Hugging Face's Trainer without reports and checkpoints; its loader collates every batch."""
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.model((x, y))}

    class Stopwatch(TrainerCallback):
        def on_train_begin(self, *arguments: Any, **options: Any) -> None:
            self.begin = time.perf_counter()

        def on_train_end(self, *arguments: Any, **options: Any) -> None:
            self.end = time.perf_counter()

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        x, y = default_collate(samples)
        return {"x": x, "y": y}

    dataset, batch_size, num_epochs = _dataset(data, steps)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=num_epochs,
        per_device_train_batch_size=batch_size,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )

    def run() -> float:
        stopwatch = Stopwatch()
        trainer = Trainer(
            model=Wrapped(),
            args=arguments,
            train_dataset=dataset,
            data_collator=collate,
            callbacks=[stopwatch],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return float(stopwatch.end - stopwatch.begin) / steps

    return run


# name -> module that must be installed, and the function that creates the run
PEERS: dict[str, tuple[str, Callable[[nn.Module, Data, int], Timed]]] = {
    "Ignite": ("ignite", ignite),
    "pytorch-accelerated": ("pytorch_accelerated", pytorch_accelerated),
    "Lightning": ("lightning", lightning),
    "Hugging Face": ("transformers", hugging_face),
}
