"""The head of DINO: an MLP, normalization, and a layer with normalized weights.

https://arxiv.org/abs/2104.14294, appendix C
"""

# Annotations are evaluated here: the fields are read for the checks of settings.
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from modelzoo_trainer.base.constraints import Size, checked_dataclass
from modelzoo_trainer.zoo.models.bert.encoder import Step, draw_weight
from modelzoo_trainer.zoo.models.initializers import (
    Initializer,
    InitializerSetting,
    read_initializer,
    truncated_normal,
)


@checked_dataclass(kw_only=True)
class DinoHeadSettings:
    """Settings of a head.

    Args:
        input_size: Width of the states that it gets.
        output_size: Number of prototypes.
        hidden_size: Width between the layers.
        bottleneck_size: Width after them.
        num_layers: Layers before the normalization.
        norm_last_layer: Whether the norms of the prototypes stay 1, instead of being trained.
        initializer: Of all weights; null = a normal distribution with a standard deviation of 0.02,
            truncated at two of them.
    """

    input_size: Size
    output_size: Size
    hidden_size: Size = 2048
    bottleneck_size: Size = 256
    num_layers: Size = 3
    norm_last_layer: bool = True
    initializer: InitializerSetting | None = None

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> Initializer:
        """Return the initializer.

        Raises:
            ConfigError: If it is unknown.
        """
        if self.initializer is None:
            return truncated_normal(0.02)
        return read_initializer("initializer", self.initializer)


class NormalizedLinear(nn.Module):
    """A linear layer without a bias, whose rows have trained norms and directions.

    Source: Salimans and Kingma 2016, https://arxiv.org/abs/1602.07868, section 2.

    Shapes:
        weight_g: (outputs, 1), the norms. weight_v: (outputs, inputs), the directions.
    """

    def __init__(self, inputs: int, outputs: int, *, trains_norms: bool) -> None:
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(outputs, 1), requires_grad=trains_norms)
        self.weight_v = nn.Parameter(torch.empty(outputs, inputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the directions uniformly; all norms are 1."""
        nn.init.normal_(self.weight_v)
        nn.init.ones_(self.weight_g)

    def draw(self, initializer: Initializer) -> None:
        """Initialize the directions; all norms are 1."""
        initializer(self.weight_v)
        nn.init.ones_(self.weight_g)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the products of the states and the rows.

        Shapes:
            hidden: (..., inputs). Returns: (..., outputs).
        """
        directions = self.weight_v / self.weight_v.norm(dim=1, keepdim=True)
        return functional.linear(hidden, self.weight_g * directions)


class DinoHead(nn.Module):
    """Map states to scores of prototypes: MLP with gelu, unit length, normalized layer."""

    def __init__(self, settings: DinoHeadSettings) -> None:
        super().__init__()
        self.settings = settings
        inner = [settings.hidden_size] * (settings.num_layers - 1)
        sizes = [settings.input_size, *inner, settings.bottleneck_size]
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.GELU()] if layers else []
            layers.append(nn.Linear(before, after))
        self.mlp = nn.Sequential(*layers)
        self.last_layer = NormalizedLinear(
            settings.bottleneck_size,
            settings.output_size,
            trains_norms=not settings.norm_last_layer,
        )

    def initial_steps(self) -> Iterator[Step]:
        """Yield the parts, each with the function that initializes it."""
        start = self.settings.start()
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                yield layer, partial(draw_weight, layer, start)
        yield self.last_layer, partial(self.last_layer.draw, start)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the scores.

        Shapes:
            hidden: (..., `input_size`). Returns: (..., `output_size`).
        """
        hidden = self.mlp(hidden)
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        unit = functional.normalize(wide, dim=-1).to(hidden.dtype)
        scores: Tensor = self.last_layer(unit)
        return scores
