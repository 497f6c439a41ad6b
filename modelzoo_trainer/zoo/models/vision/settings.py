"""Settings of vision transformers, with the names of Cerebras configurations."""

# Annotations are evaluated here: the fields are constructor parameters, hence the schema.
from typing import Any, Literal, NamedTuple

from modelzoo_trainer.base.constraints import (
    FiniteFloat,
    Fraction,
    HeightAndWidth,
    PositiveFloat,
    Size,
    checked_dataclass,
)
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.bert.settings import EncoderSettings
from modelzoo_trainer.zoo.models.feed_forward import GATED, Nonlinearity
from modelzoo_trainer.zoo.models.initializers import (
    Initializer,
    InitializerSetting,
    read_initializer,
    truncated_normal,
)

_CHANNEL_PARTS = 4  # sine and cosine of rows and of columns


class LocalGrid(NamedTuple):
    """Smaller images of a model, whose positions are interpolated from its own size's.

    Args:
        rows: Patches in a column of such an image.
        columns: Patches in a row.
        offset: Added to rows and columns when their ratios to the model's are computed.
        antialias: Whether the interpolation averages over the patches that one covers.
    """

    rows: int
    columns: int
    offset: float
    antialias: bool


@checked_dataclass(kw_only=True)
class VisionSettings:
    """Settings of a vision transformer without a head.

    Args:
        hidden_size: Width of the model; a multiple of `num_heads`.
        num_hidden_layers: Number of layers.
        num_heads: Number of attention heads.
        filter_size: Hidden width of the feed-forward layers.
        image_size: Height and width of the images, in pixels; multiples of `patch_size`.
        patch_size: Height and width of a patch, in pixels.
        num_channels: Channels of the images.
        use_conv_patchified_embedding: Whether the patches are embedded by a convolution, instead of
            a linear layer on pixels in the order row, column, channel; both compute the same.
        use_embed_proj_bias: Whether that layer has a bias.
        prepend_cls_token: Whether a trained token precedes the patches.
        use_masked_patches: Whether there is a trained embedding in place of masked patches.
        position_embedding_type: `learned`, `fixed` (sines of row and column; 0 for the class
            token), or null for none.
        use_post_embed_layer_norm: Whether the embeddings are normalized, with epsilon 1e-5.
        norm_first: Whether layers normalize what attention and the feed-forward network get,
            instead of the sums with their outputs.
        use_final_layer_norm: Whether the states after the last layer are normalized.
        layer_norm_epsilon: Added to variances, > 0.
        nonlinearity: Activation of the feed-forward layers.
        attention_type: Whether query-key products are divided by the root of the head dimension.
        attention_module: `multiquery_attention`: all heads share one key and one value.
        use_projection_bias_in_attention: Whether queries, keys and values have a bias.
        use_ffn_bias_in_attention: Whether the output projection of attention has a bias.
        use_ffn_bias: Whether the feed-forward layers have biases.
        dropout_rate: Dropout after attention and after the feed-forward network, not inside it.
        attention_dropout_rate: Dropout of attention weights.
        embedding_dropout_rate: Dropout of the embeddings.
        layerscale_value: Initial value of a trained factor per channel on the output of attention
            and of the feed-forward network; null = no such factor.
        stochastic_depth_drop_prob: Probability in training that the last layer drops the output of
            attention, and the output of the feed-forward network; kept ones are divided by 1 - it.
        stochastic_depth_drop_prob_schedule: `linear`: the probability grows from 0 in the first
            layer; `constant`: all layers have the last one's.
        stochastic_depth_mode: Whether each image of a `batch` is dropped with the others, or each
            `row` on its own.
        use_encoder_pooler_layer: Whether the state of the class token has a layer before the head.
        pooler_nonlinearity: Activation of that layer, if there is one; null = `nonlinearity`.
        initializer_range: Standard deviation of the default initializer, a normal distribution
            truncated at two standard deviations.
        default_initializer: Of all weights that have no own one.
        attention_initializer: Of the projections of attention.
        ffn_initializer: Of the feed-forward layers.
        pooler_initializer: Of the pooler.
        projection_initializer: Of the embedding of patches.
        position_embedding_initializer: Of learned positions.
        cls_token_initializer: Of the class token; the embedding of masked patches starts at 0.
        attention_softmax_fp32: Accepted for compatibility; no effect.
        mixed_precision: Accepted for compatibility; no effect: use the section `precision`.
        fp16_type: Accepted for compatibility; no effect: use the section `precision`.

    Raises:
        ConfigError: For the first setting that is out of range or contradicts others.
    """

    hidden_size: Size = 768
    num_hidden_layers: Size = 12
    num_heads: Size = 12
    filter_size: Size = 3072
    image_size: HeightAndWidth | None = None
    patch_size: HeightAndWidth | None = None
    num_channels: Size = 3
    use_conv_patchified_embedding: bool = False
    use_embed_proj_bias: bool = True
    prepend_cls_token: bool = True
    use_masked_patches: bool = False
    position_embedding_type: Literal["learned", "fixed"] | None = "learned"
    use_post_embed_layer_norm: bool = False
    norm_first: bool = True
    use_final_layer_norm: bool = True
    layer_norm_epsilon: PositiveFloat = 1e-5
    nonlinearity: Nonlinearity = "gelu"
    attention_type: Literal["scaled_dot_product", "dot_product"] = "scaled_dot_product"
    attention_module: Literal["aiayn_attention", "multiquery_attention"] = "aiayn_attention"
    use_projection_bias_in_attention: bool = True
    use_ffn_bias_in_attention: bool = True
    use_ffn_bias: bool = True
    dropout_rate: Fraction = 0.1
    attention_dropout_rate: Fraction = 0.0
    embedding_dropout_rate: Fraction = 0.0
    layerscale_value: FiniteFloat | None = None
    stochastic_depth_drop_prob: Fraction = 0.0
    stochastic_depth_drop_prob_schedule: Literal["linear", "constant"] = "linear"
    stochastic_depth_mode: Literal["batch", "row"] = "batch"
    use_encoder_pooler_layer: bool = False
    pooler_nonlinearity: Nonlinearity | None = None
    initializer_range: PositiveFloat = 0.02
    default_initializer: InitializerSetting | None = None
    attention_initializer: InitializerSetting | None = None
    ffn_initializer: InitializerSetting | None = None
    pooler_initializer: InitializerSetting | None = None
    projection_initializer: InitializerSetting | None = None
    position_embedding_initializer: InitializerSetting | None = None
    cls_token_initializer: InitializerSetting | None = None
    attention_softmax_fp32: bool = True
    mixed_precision: bool | None = None
    fp16_type: str | None = None

    def __post_init__(self) -> None:
        for size, patch, axis in zip(self.image, self.patch, ("height", "width"), strict=True):
            if size % patch:
                raise ConfigError(
                    f"image_size {list(self.image)} has a {axis} of {size} pixels, which is not a "
                    f"multiple of the {patch} of patch_size {list(self.patch)}. Change one of them."
                )
        if self.position_embedding_type == "fixed" and self.hidden_size % _CHANNEL_PARTS:
            raise ConfigError(
                f"hidden_size is {self.hidden_size}, but position_embedding_type: fixed requires a "
                f"multiple of {_CHANNEL_PARTS}. Change one of them."
            )
        pooled_by = self.pooler_nonlinearity or self.nonlinearity
        if self.use_encoder_pooler_layer and pooled_by in GATED:
            raise ConfigError(
                f"pooler_nonlinearity is {pooled_by}, which is gated: it needs two projections, "
                f"and this layer has one. Set pooler_nonlinearity to another one, such as tanh."
            )
        self.for_attention()
        self.initializers()

    @property
    def image(self) -> tuple[int, int]:
        """Height and width of the images, in pixels; by default 224 and 224."""
        height, width = self.image_size or (224, 224)
        return height, width

    @property
    def patch(self) -> tuple[int, int]:
        """Height and width of a patch, in pixels; by default 16 and 16."""
        height, width = self.patch_size or (16, 16)
        return height, width

    @property
    def grid(self) -> tuple[int, int]:
        """Patches in a column and in a row of an image."""
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def local(self) -> LocalGrid | None:
        """The patches of smaller images that the model gets as well; None = it gets none."""
        return None

    @property
    def drop_rates(self) -> list[float]:
        """The rate of stochastic depth of each layer.

        Source: Huang et al. 2016, https://arxiv.org/abs/1603.09382, section 3, with the first layer
        at 0.
        """
        rate, num = self.stochastic_depth_drop_prob, self.num_hidden_layers
        if self.stochastic_depth_drop_prob_schedule == "constant" or num == 1:
            return [rate] * num
        return [rate * layer / (num - 1) for layer in range(num)]

    def for_attention(self) -> EncoderSettings:
        """Return the settings of the attention of a layer.

        Raises:
            ConfigError: If heads and width do not fit.
        """
        return EncoderSettings(
            vocab_size=1,
            max_position_embeddings=self.num_patches + self.prepend_cls_token,
            position_embedding_type=None,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_heads=self.num_heads,
            filter_size=self.filter_size,
            attention_type=self.attention_type,
            attention_module=self.attention_module,
            use_projection_bias_in_attention=self.use_projection_bias_in_attention,
            use_ffn_bias_in_attention=self.use_ffn_bias_in_attention,
            dropout_rate=self.dropout_rate,
            attention_dropout_rate=self.attention_dropout_rate,
        )

    def initializers(self) -> dict[str, Initializer]:
        """Return the initializers by part: `default`, `attention`, `ffn`, `cls_token` and so on.

        Raises:
            ConfigError: If one is unknown.
        """
        default = truncated_normal(self.initializer_range)
        if self.default_initializer is not None:
            default = read_initializer("default_initializer", self.default_initializer)
        found = {"default": default}
        for part in ("attention", "ffn", "pooler", "projection", "position_embedding", "cls_token"):
            setting: Any = getattr(self, f"{part}_initializer")
            found[part] = (
                default if setting is None else read_initializer(f"{part}_initializer", setting)
            )
        return found
