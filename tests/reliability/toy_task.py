"""The model and the samples of the training program."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

FEATURES: Final = 6
PAUSE_S: Final = 0.006


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Points and their targets."""

    def __init__(
        self,
        num: int,
        seed: int,
        *,
        augment: bool,
        fault: str | None = None,
        pause_s: float = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(num, FEATURES, generator=generator)
        self.targets = self.inputs.sin().sum(1, keepdim=True)
        self.augment = augment
        self.fault = fault
        self.pause_s = pause_s

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, idx: int) -> tuple[Tensor, Tensor]:
        if self.fault is not None and idx == 40 and get_worker_info() is not None:
            fail(self.fault)
        time.sleep(self.pause_s)
        inputs = self.inputs[idx]
        if self.augment:
            by_numpy = torch.from_numpy(np.random.standard_normal(FEATURES).astype(np.float32))
            inputs = inputs * (0.9 + 0.2 * random.random()) + 0.1 * by_numpy
            inputs = inputs + 0.1 * torch.randn(FEATURES)
        return inputs, self.targets[idx]


def fail(fault: str) -> None:
    """Do what a broken worker does."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "raise":
        raise ValueError("sample 40 cannot be read")
    time.sleep(60)


class Net(nn.Module):
    """Two layers with normalisation and dropout; returns a mapping."""

    def __init__(self, dropout: float = 0.3, pad: int = 0) -> None:
        super().__init__()
        self.hidden = nn.Linear(FEATURES, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 1)
        self.register_buffer("pad", torch.zeros(pad))
        self.register_buffer("spoil", torch.zeros(()), persistent=False)

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        inputs, targets = batch
        outputs = self.head(self.dropout(torch.relu(self.norm(self.hidden(inputs)))))
        loss = ((outputs - targets) ** 2).mean()
        return {"loss": loss + self.spoil * loss, "outputs": outputs}


class Points:
    """The training data as a configuration names it.

    Args:
        num: Samples.
        seed: Of the points.
        shuffle: Whether the order is random.
        num_workers: Processes that load.
        slow: Sleep at each sample.
    """

    def __init__(
        self,
        num: int = 94,
        seed: int = 1,
        shuffle: bool = True,
        num_workers: int = 0,
        slow: bool = False,
    ) -> None:
        self.shuffle = shuffle
        self.num_workers = num_workers
        self.samples = Samples(num, seed, augment=True, pause_s=PAUSE_S / 4 if slow else 0)

    def create_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            self.samples, batch_size=4, shuffle=self.shuffle, num_workers=self.num_workers
        )
