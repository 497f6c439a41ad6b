"""Linear layers that bring features of images to the width of a decoder.

Dimension letters: B batch, P patches, F width of features, H width of the decoder.
"""

# Annotations are evaluated here: the fields are settings.
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Final

from annotated_types import MinLen
from torch import Tensor, nn

from modelzoo_trainer.base.constraints import Fraction, Size
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.bert.encoder import Step
from modelzoo_trainer.zoo.models.feed_forward import GATED, Nonlinearity, activation_of
from modelzoo_trainer.zoo.models.initializers import (
    Initializer,
    InitializerSetting,
    read_initializer,
)
from modelzoo_trainer.zoo.models.multimodal.reading import check_name, read_settings

_NAMES: Final = ("FeedForwardNetwork",)
_AS_LINEAR: Final[dict[str, Any]] = {"name": "kaiming_uniform", "a": 5**0.5}


@dataclass(frozen=True, kw_only=True)
class ProjectorSettings:
    """Settings of linear layers, with the names of Cerebras configurations.

    Args:
        input_unit: Width of their input.
        layers_units: Width of each layer.
        layers_activation: Of each layer, null = none; null = none at all.
        layers_dropout_rates: Dropout after each layer; null = none.
        use_bias: Whether the layers have biases.
        kernel_initializer: Of the weights; default: as `torch.nn.Linear`.
        bias_initializer: Of the biases.
    """

    input_unit: Size
    layers_units: Annotated[list[Size], MinLen(1)]
    layers_activation: list[Nonlinearity | None] | None = None
    layers_dropout_rates: list[Fraction | None] | None = None
    use_bias: bool = False
    kernel_initializer: InitializerSetting | None = None
    bias_initializer: InitializerSetting = "zeros"

    def __post_init__(self) -> None:
        num = len(self.layers_units)
        for name in ("layers_activation", "layers_dropout_rates"):
            values: list[Any] | None = getattr(self, name)
            if values is not None and len(values) != num:
                raise ConfigError(
                    f"{name} has {len(values)} elements, but layers_units {num}: each layer needs "
                    f"one; null = none."
                )
        for one in self.layers_activation or ():
            if one in GATED:
                raise ConfigError(
                    f"layers_activation has {one}, which is gated: it needs two projections, and "
                    f"these layers have one. Use another one, such as gelu."
                )
        self.initializers()

    def initializers(self) -> tuple[Initializer, Initializer]:
        """Return the initializers of weights and of biases.

        Raises:
            ConfigError: If one is unknown.
        """
        kernel = _AS_LINEAR if self.kernel_initializer is None else self.kernel_initializer
        return (
            read_initializer("kernel_initializer", kernel),
            read_initializer("bias_initializer", self.bias_initializer),
        )


def read_projector(where: str, given: object, input_size: int, output_size: int) -> Any:
    """Return the settings of the layers from features to states of a decoder; None = no layers.

    Args:
        where: The argument of the model, for messages.
        given: Its value; None = features are used as they are.
        input_size: Width of the features.
        output_size: Width of the decoder.

    Raises:
        ConfigError: If a setting is invalid, or widths do not fit.
    """
    if given is None:
        if input_size != output_size:
            raise ConfigError(
                f"model.{where} is missing, but features of images have the width {input_size}, "
                f"and the text model has {output_size}. Set it."
            )
        return None
    lacks = {"input_unit", "layers_units"} - given.keys() if isinstance(given, Mapping) else ()
    if lacks:
        raise ConfigError(f"model.{where}: {', '.join(sorted(lacks))} is missing. Set it.")
    settings = read_settings(where, given, ProjectorSettings, others=("name",))
    assert isinstance(given, Mapping)
    check_name(where, given, _NAMES, "linear layers")
    for what, found, expected, of in (
        ("input_unit", settings.input_unit, input_size, "features of images have"),
        ("layers_units", settings.layers_units[-1], output_size, "the text model has"),
    ):
        if found != expected:
            at_end = " at its end" if what == "layers_units" else ""
            raise ConfigError(
                f"model.{where}.{what} is {found}{at_end}, but {of} the width {expected}. Set both "
                f"to the same."
            )
    return settings


class Projector(nn.Module):
    """Linear layers, each with an activation and dropout."""

    def __init__(self, settings: ProjectorSettings) -> None:
        super().__init__()
        self._initializers = settings.initializers()
        widths = [settings.input_unit, *settings.layers_units]
        # No ModuleList: its elements would be blocks for engines, which are too small.
        self.layers = nn.ModuleDict(
            {
                str(number): nn.Linear(before, after, bias=settings.use_bias)
                for number, (before, after) in enumerate(pairwise(widths))
            }
        )
        num = len(self.layers)
        names = settings.layers_activation or [None] * num
        self._activations = [None if one is None else activation_of(one) for one in names]
        self._rates = [rate or 0.0 for rate in settings.layers_dropout_rates or [None] * num]

    def initial_steps(self) -> Iterator[Step]:
        """Yield the layers, each with the function that initializes it."""
        for layer in self.layers.values():
            yield layer, partial(self._draw, layer)

    def _draw(self, layer: nn.Module) -> None:
        assert isinstance(layer, nn.Linear)
        kernel, bias = self._initializers
        kernel(layer.weight)
        if layer.bias is not None:
            bias(layer.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Return the projected features.

        Shapes:
            features: (B, P, F). Returns: (B, P, H).
        """
        parts = zip(self.layers.values(), self._activations, self._rates, strict=True)
        for layer, activate, rate in parts:
            features = layer(features)
            if activate is not None:
                features = activate(features)
            if rate:
                features = nn.functional.dropout(features, rate, self.training)
        return features
