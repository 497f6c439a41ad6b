"""Train a GAN: two optimizers, stepped by a `training_step` of one's own.

    python docs/examples/gan.py runs/gan --steps 2000

The generator learns to draw points from eight normal distributions on a circle. Killed at any time
and started again, the run resumes and ends with the same weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset

from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import LogOptimizerParamGroup

NUM_MODES = 8
NOISE_SIZE = 16


class Gan(nn.Module):
    """A generator and a discriminator; a call draws points from noise."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.generator = mlp(NOISE_SIZE, width, 2)
        self.discriminator = mlp(2, width, 1)

    def forward(self, noise: Tensor) -> Tensor:
        """Return points for noise."""
        points: Tensor = self.generator(noise)
        return points


def mlp(size_in: int, width: int, size_out: int) -> nn.Sequential:
    """Return a network of three layers."""
    return nn.Sequential(
        nn.Linear(size_in, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, width),
        nn.LeakyReLU(0.2),
        nn.Linear(width, size_out),
    )


class GanTrainer(Trainer):
    """Steps the discriminator, then the generator, with each batch."""

    def training_step(self, batch: Sequence[Tensor]) -> dict[str, Tensor]:
        """Take one step of each; returns the generator's loss."""
        (real,) = batch
        discriminator = self.model.discriminator
        fake = self.model.generator(torch.randn(len(real), NOISE_SIZE, device=real.device))

        d_loss = judged(discriminator(real), is_real=True)
        d_loss = d_loss + judged(discriminator(fake.detach()), is_real=False)
        self.manual_backward(d_loss)
        self.optimizer_step("discriminator")

        g_loss = judged(discriminator(fake), is_real=True)
        self.manual_backward(g_loss)
        self.optimizer_step("generator")

        self.log_metrics(discriminator_loss=d_loss.detach())
        return {"loss": g_loss}


def judged(logits: Tensor, *, is_real: bool) -> Tensor:
    """Return the loss of logits that should say whether points are real."""
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(is_real)))


def centers() -> Tensor:
    """Return the means of the distributions."""
    angles = torch.arange(NUM_MODES) * (2 * torch.pi / NUM_MODES)
    return 2 * torch.stack((angles.cos(), angles.sin()), dim=1)


def points(num: int) -> Tensor:
    """Return points to learn from, the same each time."""
    noise = torch.randn(num, 2, generator=torch.Generator().manual_seed(0))
    return centers()[torch.arange(num) % NUM_MODES] + 0.1 * noise


def distance(model: Gan, num: int = 1000) -> float:
    """Return the mean distance of generated points from the nearest center."""
    noise = torch.randn(num, NOISE_SIZE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        drawn = model(noise.to(next(model.parameters()).device)).cpu()
    return float(torch.cdist(drawn, centers()).min(dim=1).values.mean())


def make_trainer(
    model_dir: Path,
    steps: int,
    checkpoint: Checkpoint | None = None,
    callbacks: Iterable[Any] = (),
) -> GanTrainer:
    """Return a trainer with an optimizer and a schedule for each network."""
    return GanTrainer(
        device="cpu",
        model_dir=model_dir,
        model=Gan,
        optimizer={
            "generator": lambda model: adam(model.generator),
            "discriminator": lambda model: adam(model.discriminator),
        },
        schedulers={
            name: lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
            for name in ("generator", "discriminator")
        },
        loop=TrainingLoop(max_steps=steps),
        checkpoint=checkpoint or Checkpoint(steps=500),
        callbacks=[LogOptimizerParamGroup("lr"), *callbacks],
        seed=0,
    )


def adam(network: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of one of the networks."""
    return torch.optim.Adam(network.parameters(), lr=1e-3, betas=(0.5, 0.9))


def fit(trainer: GanTrainer) -> None:
    """Train on points in another order each epoch."""
    trainer.fit(DataLoader(TensorDataset(points(4096)), batch_size=128, shuffle=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print how far generated points are from the centers."""
    parser = argparse.ArgumentParser(description="Train a GAN on points around a circle.")
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    given = parser.parse_args(arguments)
    with make_trainer(given.model_dir, given.steps) as trainer:
        before = distance(trainer.model)
        fit(trainer)
        print(
            f"mean distance from the nearest center: {before:.2f} -> {distance(trainer.model):.2f}"
        )


if __name__ == "__main__":
    main()
