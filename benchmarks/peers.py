"""The same training by other trainers, as plain as each of them allows; each is optional."""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any

import torch
from torch import nn

Timed = Callable[[], float]  # seconds a step


def _timed(run: Callable[[], object], steps: int) -> Timed:
    def timed() -> float:
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) / steps

    return timed


def ignite(model: nn.Module, batches: list[Any], steps: int) -> Timed:
    """Ignite's Engine without handlers."""
    from ignite.engine import Engine

    optimizer = torch.optim.AdamW(model.parameters())

    def update(engine: Any, batch: Any) -> None:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    engine = Engine(update)
    data = list(islice(cycle(batches), steps))
    return _timed(lambda: engine.run(data, max_epochs=1), steps)


def lightning(model: nn.Module, batches: list[Any], steps: int) -> Timed:
    """Lightning's Trainer with bar, logger, checkpoints and summary switched off."""
    import lightning.pytorch as pl

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):  # type: ignore[misc]  # untyped base
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    data = list(islice(cycle(batches), steps))

    def run() -> None:
        pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Module(), data)

    return _timed(run, steps)


def _dataset(batches: list[Any], steps: int) -> torch.utils.data.Dataset[Any]:
    xs, ys = zip(*islice(cycle(batches), steps), strict=True)
    return torch.utils.data.TensorDataset(torch.cat(xs), torch.cat(ys))


def pytorch_accelerated(model: nn.Module, batches: list[Any], steps: int) -> Timed:
    """pytorch-accelerated's Trainer without callbacks; its loader collates every batch."""
    from pytorch_accelerated import Trainer

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target)

    net: Any = model.net
    trainer = Trainer(
        model=net, loss_func=loss_of, optimizer=torch.optim.AdamW(net.parameters()), callbacks=()
    )
    data = _dataset(batches, steps)
    size = batches[0][0].shape[0]
    return _timed(
        lambda: trainer.train(
            train_dataset=data,
            num_epochs=1,
            per_device_batch_size=size,
            train_dataloader_kwargs={"num_workers": 0, "shuffle": False},
        ),
        steps,
    )


def hugging_face(model: nn.Module, batches: list[Any], steps: int) -> Timed:
    """Hugging Face's Trainer without reports and checkpoints; its loader collates every batch."""
    from transformers import Trainer, TrainingArguments

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.model((x, y))}

    data = _dataset(batches, steps)
    rows = [{"x": data[i][0], "y": data[i][1]} for i in range(len(data))]  # type: ignore[arg-type]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        num_train_epochs=1,
        per_device_train_batch_size=batches[0][0].shape[0],
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )

    def run() -> None:
        Trainer(model=Wrapped(), args=arguments, train_dataset=rows).train()

    return _timed(run, steps)


# name -> module that must be installed, and what makes the run
PEERS: dict[str, tuple[str, Callable[[nn.Module, list[Any], int], Timed]]] = {
    "Ignite": ("ignite", ignite),
    "pytorch-accelerated": ("pytorch_accelerated", pytorch_accelerated),
    "Lightning": ("lightning", lightning),
    "Hugging Face": ("transformers", hugging_face),
}
