"""Vision transformer with classes of images.

https://arxiv.org/abs/2010.11929

Dimension letters: B batch, C channels, H hidden size.
"""

# Annotations are evaluated here: the fields are constructor parameters, hence the schema.
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from typing_extensions import override

from modelzoo_trainer.base.constraints import Fraction, Size, checked_dataclass
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.bert.encoder import Step, draw_weight
from modelzoo_trainer.zoo.models.freezing import check_patterns, freeze_matching
from modelzoo_trainer.zoo.models.initializers import truncated_normal
from modelzoo_trainer.zoo.models.language_loss import mean_loss, num_counted, token_accuracy
from modelzoo_trainer.zoo.models.published_names import renamed
from modelzoo_trainer.zoo.models.vision.encoder import VisionEncoder
from modelzoo_trainer.zoo.models.vision.settings import VisionSettings

_LAYER: Final = r"encoder\.layers\.(\d+)\."
_THEIR_LAYER: Final = r"vit_model.encoder.transformer_encoder.layers.\1."
_NAMES: Final = {
    r"encoder\.embedding\.patches\.projection\.": "vit_model.embedding_layer.linear_proj.",
    r"encoder\.embedding\.cls_token\.weight": "vit_model.embedding_layer.cls_embedding",
    r"encoder\.embedding\.mask_token\.weight": "vit_model.embedding_layer.mask_token",
    r"encoder\.embedding\.position_embeddings\.": "vit_model.embedding_layer.position_embeddings.",
    r"encoder\.embedding\.norm\.": "vit_model.embedding_layer.post_embed_ln.",
    rf"{_LAYER}attention\.([qkv])_proj\.": rf"{_THEIR_LAYER}self_attn.proj_\2_dense_layer.",
    rf"{_LAYER}attention\.o_proj\.": rf"{_THEIR_LAYER}self_attn.proj_output_dense_layer.",
    rf"{_LAYER}attention_norm\.": rf"{_THEIR_LAYER}norm1.",
    rf"{_LAYER}ffn\.up_proj\.": rf"{_THEIR_LAYER}ffn.ffn.0.linear_layer.",
    rf"{_LAYER}ffn\.gate_proj\.": rf"{_THEIR_LAYER}ffn.ffn.0.linear_layer_for_glu.",
    rf"{_LAYER}ffn\.down_proj\.": rf"{_THEIR_LAYER}ffn.ffn.1.linear_layer.",
    rf"{_LAYER}ffn_norm\.": rf"{_THEIR_LAYER}norm2.",
    # Ours, under the prefix of the layer: the published names of these two are not known.
    rf"{_LAYER}attention_scale\.": rf"{_THEIR_LAYER}layer_scale1.",
    rf"{_LAYER}ffn_scale\.": rf"{_THEIR_LAYER}layer_scale2.",
    r"encoder\.final_norm\.": "vit_model.encoder.transformer_encoder.norm.",
    r"encoder\.pooler\.": "vit_model.encoder.pooler.pooler.ffn.0.linear_layer.",
    r"head\.": "classifier.classifier.ffn.0.linear_layer.",
}


def published_name(name: str) -> str | None:
    """Return the name of a parameter in the Cerebras Model Zoo, None if it has none.

    `name`: as of `named_parameters()`.
    """
    return renamed(name, _NAMES)


@checked_dataclass(kw_only=True)
class VitSettings(VisionSettings):
    """Settings of a vision transformer with classes.

    Args:
        attention_dropout_rate: Dropout of attention weights.
        num_classes: Number of classes; labels are 0 to `num_classes` - 1.
        use_bias_in_output: Whether the head has a bias.
        use_dinov2_classifier: Whether the head gets the state of the class token and the mean of
            the states of the patches, instead of the former only.
        freeze: Regular expressions; parameters and modules in whose names, or names in the Model
            Zoo (`vit_model...`), one is found are not trained.
        compute_eval_metrics: Whether the output has `accuracy_cls` in eval mode.
    """

    attention_dropout_rate: Fraction = 0.1
    num_classes: Size = 2
    use_bias_in_output: bool = True
    use_dinov2_classifier: bool = False
    freeze: list[str] | None = None
    compute_eval_metrics: bool = True

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prepend_cls_token:
            raise ConfigError(
                "prepend_cls_token is false, but the head gets the state of that token. Set "
                "prepend_cls_token: true."
            )
        if self.use_masked_patches:
            raise ConfigError(
                "use_masked_patches is true, but this model masks no patches, so that nothing "
                "would train their embedding. Set use_masked_patches: false."
            )
        check_patterns(self.freeze or ())


class Vit(VitSettings, nn.Module):
    """Vision transformer with a linear head for classes of images."""

    builds_without_values = True
    """Whether `reset_steps` draws all initial values, so that the constructor need not."""

    published_name = staticmethod(published_name)
    hints_for_missing: ClassVar[Mapping[str, str]] = {
        "head.bias": " (written without it, once the default: set use_bias_in_output: false)"
    }

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        nn.Module.__init__(self)
        self.encoder = VisionEncoder(self)
        width = self.hidden_size * (2 if self.use_dinov2_classifier else 1)
        self.head = nn.Linear(width, self.num_classes, bias=self.use_bias_in_output)
        self.reset_parameters()
        freeze_matching(self, self.freeze or (), "'^encoder', '^vit_model' or '^head'")

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None:
        """Check the constructor's arguments without building the model.

        Raises:
            ConfigError: As the constructor, except for expressions in `freeze` without a match.
        """
        VitSettings(**arguments)

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Tensor parallelism: how layers are split, by module name patterns.

        The embedding of patches, the pooler and the head are whole everywhere.
        """
        return {f"encoder.{name}": style for name, style in self.encoder.tensor_plan.items()}

    def reset_parameters(self) -> None:
        """Initialize all weights; also after `to_empty`."""
        for _, draw in self.reset_steps():
            draw()

    def reset_steps(self) -> Iterator[Step]:
        """Yield the parts of the model, each with the function that initializes it."""
        yield from self.encoder.initial_steps()
        start = truncated_normal(self.initializer_range)
        yield self.head, partial(draw_weight, self.head, start)

    def forward(self, batch: Any) -> dict[str, Any]:
        """Return the mean cross entropy, the logits and the number of labels that count.

        Args:
            batch: `(images, labels)`.

        Returns:
            `loss`, `logits`, `num_items`, and in eval mode `accuracy_cls`.

        Shapes:
            images: (B, C, height, width) floating. labels: (B,) integer, -100 where one does not
            count. logits: (B, `num_classes`). loss, num_items, accuracy_cls: (), float32.

        Cost:
            No host read, no data-dependent shape.

        Raises:
            ConfigError: If the batch does not fit the model.
        """
        images, labels = _unpack(batch)
        states = self.encoder(images)
        pooled = self.encoder.pool(states.cls)
        if self.use_dinov2_classifier:
            pooled = torch.cat((pooled, states.patches.mean(dim=1)), dim=-1)
        logits = self.head(pooled)
        loss, num_items = mean_loss(logits, labels)
        outputs = {"loss": loss, "logits": logits, "num_items": num_items}
        if self.compute_eval_metrics and not self.training:
            outputs["accuracy_cls"] = token_accuracy(logits, labels, None)
        return outputs

    def count_labels(self, batch: Any) -> Tensor | None:
        """Return how many labels of a batch count; see `zoo/models/language_loss.py`."""
        return num_counted(_unpack(batch)[1])

    def validation_means(
        self, outputs: Mapping[str, Any], batch: Any
    ) -> dict[str, tuple[Tensor, Tensor | int, Callable[[Tensor], Tensor] | None]]:
        """Return the metric that `ModelEvalMetrics` averages over images, with its weight."""
        if "accuracy_cls" not in outputs:
            return {}
        return {"accuracy_cls": (outputs["accuracy_cls"], outputs["num_items"], None)}


def _unpack(batch: Any) -> tuple[Tensor, Tensor]:
    match batch:
        case (Tensor() as images, Tensor() as labels):
            if images.dim() == 4 and labels.shape == images.shape[:1]:
                return images, labels
            what = f"tensors of the shapes {tuple(images.shape)} and {tuple(labels.shape)}"
        case Mapping():
            what = f"a mapping with the keys {sorted(map(str, batch))}"
        case _:
            what = f"a {type(batch).__name__}"
    raise ConfigError(
        f"vision_transformer requires batches (images, labels) of the shapes (batch, channels, "
        f"height, width) and (batch,), got {what}. Use another data processor or model."
    )
