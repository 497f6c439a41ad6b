"""What takes the place of the published configurations' models and data, and a callback that sees
what their runs do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn

from modelzoo_trainer import Callback

WIDTH: Final = 2
NUM_BATCHES: Final = 3


class TinyNamed(nn.Module):
    """Parameters of given names, a normalization and a linear layer; returns the loss.

    Args:
        names: Of the parameters, besides `norm.*` and `head.*`.
        adjustment_groups: Globs of names, by the name of a group that has a learning rate of its
            own; the model asks for no factor itself.
    """

    def __init__(
        self, names: list[str], adjustment_groups: dict[str, list[str]] | None = None
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.named = [_add(self, name) for name in names]
        if adjustment_groups is not None:
            self.lr_adjustment_groups = {
                group: SimpleNamespace(param_filter_patterns=patterns, scale=1.0)
                for group, patterns in adjustment_groups.items()
            }
        self.sizes: list[int] = []
        """Samples of each forward pass."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.sizes.append(len(batch["inputs"]))
        shift = torch.stack([param.mean() for param in self.named]).mean()
        error = self.head(self.norm(batch["inputs"])) + shift - batch["targets"]
        return {"loss": error.float().square().mean()}


def _add(model: nn.Module, name: str) -> nn.Parameter:
    """Add a matrix where the name ends in "weight", else a vector; return it."""
    *parents, last = name.split(".")
    module = model
    for parent in parents:
        if not hasattr(module, parent):
            module.add_module(parent, nn.Module())
        module = module.get_submodule(parent)
    shape = (3, WIDTH) if last == "weight" else (WIDTH,)
    param = nn.Parameter(torch.randn(shape))
    module.register_parameter(last, param)
    return param


class TinySamples:
    """A few batches of random numbers.

    Args:
        batch_size: Samples of each.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def create_dataloader(self) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        return [
            {
                "inputs": torch.randn(self.batch_size, WIDTH, generator=generator),
                "targets": torch.randn(self.batch_size, 1, generator=generator),
            }
            for _ in range(NUM_BATCHES)
        ]


class Watch(Callback):
    """Keeps what each optimizer step of a run had to do with."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.losses: list[Tensor] = []
        self.num_samples: list[list[int]] = []
        """Of each forward pass, for each optimizer step."""
        self.rates: list[dict[str, float]] = []
        """Learning rates by parameter, for each optimizer step."""
        self.decays: list[dict[str, float]] = []
        """Weight decay by parameter, for each optimizer step."""

    def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
        self.trainer = trainer

    def on_train_step_end(self, trainer, model, outputs, batch):
        self.losses.append(outputs["loss"].detach())

    def on_before_optimizer_step(self, trainer, model, optimizer):
        self.num_samples.append(model.sizes)
        model.sizes = []
        names = {param: name for name, param in model.named_parameters()}
        found = [
            (names[param], group) for group in optimizer.param_groups for param in group["params"]
        ]
        self.rates.append({name: group["lr"] for name, group in found})
        self.decays.append({name: group["weight_decay"] for name, group in found})
