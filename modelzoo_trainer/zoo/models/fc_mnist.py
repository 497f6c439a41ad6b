"""Multilayer perceptron for small images: `fc_mnist`."""

from typing import Annotated, Any, Literal

from annotated_types import MinLen
from torch import Tensor, nn

from modelzoo_trainer.base.constraints import Fraction, Size, checked
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.language_loss import mean_loss, num_counted, token_accuracy


class FcMnist(nn.Module):
    """Multilayer perceptron on flattened inputs, with cross entropy over classes.

    Args:
        hidden_sizes: Width of each hidden layer; excludes `depth` and `hidden_size`.
        depth: Number of hidden layers of width `hidden_size`.
        hidden_size: Width of all hidden layers.
        input_size: Number of values per sample, flattened.
        num_classes: Number of classes; labels are 0 to `num_classes` - 1.
        activation_fn: Activation after each hidden layer; default: none.
        dropout: Dropout rate after each hidden layer, in [0, 1).
        use_bias: Whether layers have a bias.
        compute_eval_metrics: Whether the output has `accuracy` in eval mode.
        to_float16: Only false; for 16-bit training use the section `precision`.

    Raises:
        ConfigError: If sizes are missing, contradictory or out of range.
    """

    @checked()
    def __init__(
        self,
        *,
        hidden_sizes: Annotated[list[Size], MinLen(1)] | None = None,
        depth: Size | None = None,
        hidden_size: Size | None = None,
        input_size: Size = 784,
        num_classes: Size = 10,
        activation_fn: Literal["relu", "gelu", "tanh"] | None = None,
        dropout: Fraction = 0.0,
        use_bias: bool = True,
        compute_eval_metrics: bool = True,
        to_float16: bool = False,
    ) -> None:
        super().__init__()
        widths = self.check_arguments(
            hidden_sizes=hidden_sizes,
            depth=depth,
            hidden_size=hidden_size,
            to_float16=to_float16,
        )
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in zip([input_size, *widths], widths, strict=False):
            layers.append(nn.Linear(fan_in, fan_out, bias=use_bias))
            if activation_fn is not None:
                layers.append(_ACTIVATIONS[activation_fn]())
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
        layers.append(nn.Linear(widths[-1], num_classes, bias=use_bias))
        self.layers = nn.Sequential(*layers)
        self.compute_eval_metrics = compute_eval_metrics

    @classmethod
    def check_arguments(  # as the constructor
        cls,
        *,
        hidden_sizes: list[int] | None = None,
        depth: int | None = None,
        hidden_size: int | None = None,
        to_float16: bool = False,
        **others: Any,
    ) -> list[int]:
        """Check the arguments without building the model; return the widths of the hidden layers.

        Raises:
            ConfigError: As the constructor.
        """
        if to_float16:
            raise ConfigError(
                "to_float16 is true, but the weights are always float32. Set to_float16: false, "
                "and for mixed precision precision.enabled: true."
            )
        return _hidden_widths(hidden_sizes, depth, hidden_size)

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return the mean loss, the logits and the number of labels, in eval mode the accuracy.

        Args:
            batch: `(inputs, labels)`, or a mapping with these two keys.

        Shapes:
            inputs: (B, ...) floating, `input_size` values per sample. labels: (B,) integer, -100
            where one does not count.
            Returns: loss, accuracy and num_items (), float32; logits (B, num_classes).
        """
        inputs, labels = _unpack(batch)
        logits = self.layers(inputs)
        loss, num_items = mean_loss(logits, labels)
        outputs = {"loss": loss, "logits": logits, "num_items": num_items}
        if self.compute_eval_metrics and not self.training:
            outputs["accuracy"] = token_accuracy(logits, labels, None)
        return outputs

    def count_labels(self, batch: Any) -> Tensor | None:
        """Return how many labels of a batch count; see `zoo/models/language_loss.py`."""
        return num_counted(_unpack(batch)[1])


_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}


def _hidden_widths(sizes: list[int] | None, depth: int | None, width: int | None) -> list[int]:
    if sizes is not None and (depth is not None or width is not None):
        raise ConfigError(
            f"Set either hidden_sizes, or depth and hidden_size; got hidden_sizes={sizes}, "
            f"depth={depth} and hidden_size={width}."
        )
    if sizes is None:
        if depth is None or width is None:
            raise ConfigError(
                f"the hidden layers are not specified: depth is {depth}, hidden_size is {width}. "
                f"Give both, or the list hidden_sizes, for example hidden_sizes: [64, 32]."
            )
        return [width] * depth
    return sizes


def _unpack(batch: Any) -> tuple[Tensor, Tensor]:
    parts: Any = batch
    if isinstance(batch, dict):
        parts = (batch.get("inputs"), batch.get("labels"))
    match parts:
        case (Tensor() as inputs, Tensor() as labels):
            return inputs, labels
    what = sorted(map(str, batch)) if isinstance(batch, dict) else type(batch).__name__
    raise ConfigError(
        f"fc_mnist requires batches (inputs, labels) or a dict with 'inputs' and 'labels', got "
        f"{what}. Use another data processor or model."
    )
