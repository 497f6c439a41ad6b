"""Settings of diffusion transformers, with the names of Cerebras configurations."""

# Annotations are evaluated here: the fields are constructor parameters, hence the schema.
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_type_hints

from typing_extensions import TypedDict

from modelzoo_trainer.base.constraints import (
    FinitePositiveFloat,
    Fraction,
    HeightAndWidth,
    PositiveFloat,
    Share,
    Size,
    check,
    checked_dataclass,
)
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.models.feed_forward import GATED, Nonlinearity
from modelzoo_trainer.zoo.models.initializers import (
    Initializer,
    InitializerSetting,
    normal,
    read_initializer,
)
from modelzoo_trainer.zoo.models.vision.settings import VisionSettings

_REFERENCE_STEPS = 1000


class VaeParams(TypedDict, total=False):
    """The autoencoder that has encoded the images; it is no part of the model.

    Attributes:
        latent_size: Height and width of the latents.
        latent_channels: Channels of the latents.
        scaling_factor: Factor on the latents, which the data processor takes from here.
        in_channels: No effect, as the images are encoded already.
        out_channels: No effect.
        sample_size: No effect.
        block_out_channels: No effect.
        layers_per_block: No effect.
        down_block_types: No effect.
        up_block_types: No effect.
        act_fn: No effect.
        norm_num_groups: No effect.
    """

    __pydantic_config__ = {"extra": "allow"}  # type: ignore[misc]  # noqa: RUF012

    latent_size: HeightAndWidth
    latent_channels: Size
    scaling_factor: FinitePositiveFloat
    in_channels: Size
    out_channels: Size
    sample_size: Size | None
    block_out_channels: list[Size]
    layers_per_block: Size | None
    down_block_types: list[str]
    up_block_types: list[str]
    act_fn: str
    norm_num_groups: Size


class SamplerParams(TypedDict, total=False):
    """How images would be generated; no effect.

    Attributes:
        name: No effect.
        beta_start: No effect.
        beta_end: No effect.
        num_inference_steps: No effect.
        num_diffusion_steps: No effect.
        variance_type: No effect.
    """

    __pydantic_config__ = {"extra": "allow"}  # type: ignore[misc]  # noqa: RUF012

    name: str
    beta_start: float
    beta_end: float
    num_inference_steps: Size
    num_diffusion_steps: Size
    variance_type: str | None


class PipelineParams(TypedDict, total=False):
    """What would be generated; no effect.

    Attributes:
        guidance_scale: No effect.
        num_cfg_channels: No effect.
        num_classes: No effect.
        custom_labels: No effect.
    """

    __pydantic_config__ = {"extra": "allow"}  # type: ignore[misc]  # noqa: RUF012

    guidance_scale: float
    num_cfg_channels: Size
    num_classes: Size
    custom_labels: list[int] | str | None


class ReverseProcess(TypedDict, total=False):
    """How images would be generated, which is no part of training; no effect.

    Attributes:
        sampler: No effect.
        pipeline: No effect.
        batch_size: No effect.
    """

    __pydantic_config__ = {"extra": "allow"}  # type: ignore[misc]  # noqa: RUF012

    sampler: SamplerParams
    pipeline: PipelineParams
    batch_size: Size


@checked_dataclass(kw_only=True)
class DitSettings:
    """Settings of a diffusion transformer on latents.

    Args:
        hidden_size: Width of the model; a multiple of `num_heads`.
        num_hidden_layers: Number of layers.
        num_heads: Number of attention heads.
        filter_size: Hidden width of the feed-forward layers.
        latent_size: Height and width of the latents, multiples of `patch_size`; null =
            from `vae`, else [32, 32].
        latent_channels: Channels of the latents; null = from `vae`, else 4.
        patch_size: Height and width of a patch; null = [16, 16].
        vae: The autoencoder that has encoded the images. Only its `latent_size`,
            `latent_channels` and `scaling_factor` (default: 0.18215) are used.
        num_classes: Number of classes; labels are 0 to `num_classes` - 1.
        label_dropout_rate: Probability that the data processor replaces a label by `num_classes`,
            the label of no class; 0 = there is no such label.
        num_diffusion_steps: Number of timesteps.
        schedule_name: How betas grow with the timestep.
        beta_start: The first beta, times `num_diffusion_steps` / 1000.
        beta_end: The last beta, times `num_diffusion_steps` / 1000.
        var_loss: Must be false: variances are not predicted.
        block_type: How time and class act on the layers.
        frequency_embedding_size: Sines of a timestep, an even number.
        embedding_nonlinearity: Activation between the two layers of the time embedding.
        use_conv_patchified_embedding: Whether the patches are embedded by a convolution, instead of
            a linear layer on values in the order row, column, channel; both compute the same.
        use_conv_transpose_unpatchify: Whether the noise of patches is predicted by a transposed
            convolution, instead of a linear layer.
        position_embedding_type: `learned`, `fixed` (sines of row and column), or null for none.
        norm_first: Must be true: the layers normalize what attention and the feed-forward network
            get.
        layer_norm_epsilon: Added to variances, > 0.
        nonlinearity: Activation of the feed-forward layers.
        attention_type: Whether query-key products are divided by the root of the head dimension.
        use_projection_bias_in_attention: Whether queries, keys and values have a bias.
        use_ffn_bias_in_attention: Whether the output projection of attention has a bias.
        use_ffn_bias: Whether the feed-forward layers have biases.
        dropout_rate: Dropout after attention and after the feed-forward network, not inside it.
        attention_dropout_rate: Dropout of attention weights.
        embedding_dropout_rate: Dropout of the embedded patches.
        initializer_range: Standard deviation of the default initializers.
        attention_initializer: Of the projections of attention.
        ffn_initializer: Of the feed-forward layers.
        projection_initializer: Of the embedding of patches.
        init_conv_like_linear: Whether that one, if it is a convolution, is initialized like a
            linear layer; null = yes.
        position_embedding_initializer: Of learned positions; null = a normal distribution,
            truncated at two standard deviations.
        timestep_embedding_initializer: Of the time embedding; null = a normal distribution.
        label_embedding_initializer: Of the labels; null = a normal distribution.
        head_initializer: Of the last projection.
        reverse_process: How images would be generated; no effect in training.
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
    latent_size: HeightAndWidth | None = None
    latent_channels: Size | None = None
    patch_size: HeightAndWidth | None = None
    vae: VaeParams | None = None
    num_classes: Size = 1000
    label_dropout_rate: Fraction = 0.1
    num_diffusion_steps: Size = 1000
    schedule_name: Literal["linear"] = "linear"
    beta_start: Share = 0.0001
    beta_end: Share = 0.02
    var_loss: bool = False
    block_type: Literal["adaln_zero"] = "adaln_zero"
    frequency_embedding_size: Size = 256
    embedding_nonlinearity: Nonlinearity = "silu"
    use_conv_patchified_embedding: bool = False
    use_conv_transpose_unpatchify: bool = True
    position_embedding_type: Literal["learned", "fixed"] | None = "learned"
    norm_first: bool = True
    layer_norm_epsilon: PositiveFloat = 1e-5
    nonlinearity: Nonlinearity = "gelu"
    attention_type: Literal["scaled_dot_product", "dot_product"] = "scaled_dot_product"
    use_projection_bias_in_attention: bool = True
    use_ffn_bias_in_attention: bool = True
    use_ffn_bias: bool = True
    dropout_rate: Fraction = 0.0
    attention_dropout_rate: Fraction = 0.0
    embedding_dropout_rate: Fraction = 0.1
    initializer_range: PositiveFloat = 0.02
    attention_initializer: InitializerSetting = "xavier_uniform"
    ffn_initializer: InitializerSetting = "xavier_uniform"
    projection_initializer: InitializerSetting = "xavier_uniform"
    init_conv_like_linear: bool | None = None
    position_embedding_initializer: InitializerSetting | None = None
    timestep_embedding_initializer: InitializerSetting | None = None
    label_embedding_initializer: InitializerSetting | None = None
    head_initializer: InitializerSetting = "zeros"
    reverse_process: ReverseProcess | None = None
    attention_softmax_fp32: bool = True
    mixed_precision: bool | None = None
    fp16_type: str | None = None

    def __post_init__(self) -> None:
        _check_keys("vae", self.vae, VaeParams)
        parts = {"sampler": SamplerParams, "pipeline": PipelineParams}
        _check_keys("reverse_process", self.reverse_process, ReverseProcess, tuple(parts))
        for part, keys in parts.items():
            inner: Any = (self.reverse_process or {}).get(part)
            _check_keys(f"reverse_process.{part}", inner, keys)
        self.latent_size = self._of_latents("latent_size", [32, 32])
        self.latent_channels = self._of_latents("latent_channels", 4)
        self._check_sizes()
        for key, expected, why in (
            ("var_loss", False, "variances are not predicted"),
            ("norm_first", True, "the layers of adaln_zero normalize their inputs"),
        ):
            given = getattr(self, key)
            if given is not expected:
                shown = str(expected).lower()
                raise ConfigError(
                    f"{key} is {str(given).lower()}, which is not supported: {why}. Set "
                    f"{key}: {shown}."
                )
        if self.embedding_nonlinearity in GATED:
            raise ConfigError(
                f"embedding_nonlinearity is {self.embedding_nonlinearity}, which is gated: it "
                f"needs two projections, and this layer has one. Set it to another one, such as "
                f"silu."
            )
        self._check_betas()
        self.vision().for_attention()
        self.initializers()

    @property
    def vae_scaling_factor(self) -> float:
        """Factor on the latents."""
        return (self.vae or {}).get("scaling_factor", 0.18215)

    @property
    def _channels(self) -> int:
        assert self.latent_channels is not None  # set by the constructor
        return self.latent_channels

    @property
    def notes(self) -> list[str]:
        """What to say of settings that are given and have no effect."""
        used = ("latent_size", "latent_channels", "scaling_factor")
        found = [f"vae.{key}" for key in self.vae or {} if key not in used]
        found += ["reverse_process"] * bool(self.reverse_process)
        if not found:
            return []
        what = "the model neither encodes nor generates images"
        return [f"{', '.join(found)}: no effect, as {what}."]

    def vision(self) -> VisionSettings:
        """Return the settings of the patches and of the layers, without diffusion's.

        Raises:
            ConfigError: As the constructor.
        """
        shared = {one.name for one in fields(VisionSettings)} & {one.name for one in fields(self)}
        return VisionSettings(
            image_size=self.latent_size,
            num_channels=self._channels,
            prepend_cls_token=False,
            **{name: getattr(self, name) for name in shared},
        )

    def initializers(self) -> dict[str, Initializer]:
        """Return the initializers by part: `attention`, `ffn`, `timestep_embedding` and so on.

        Raises:
            ConfigError: If one is unknown.
        """
        found = self.vision().initializers()
        for part in ("timestep_embedding", "label_embedding", "head"):
            key = f"{part}_initializer"
            setting: InitializerSetting | None = getattr(self, key)
            default = normal(self.initializer_range)
            found[part] = default if setting is None else read_initializer(key, setting)
        return found

    def _of_latents(self, key: str, default: Any) -> Any:
        """Return a setting that may stand in `vae`, or in both places if it is the same."""
        own, of_vae = getattr(self, key), (self.vae or {}).get(key)
        if own is not None and of_vae is not None and own != of_vae:
            raise ConfigError(
                f"{key} is {own}, but vae.{key} is {of_vae}. Remove {key}, or set both to the same."
            )
        found = of_vae if own is None else own
        return default if found is None else found

    def _check_sizes(self) -> None:
        assert self.latent_size is not None
        patch = self.patch_size or [16, 16]
        for size, part, axis in zip(self.latent_size, patch, ("height", "width"), strict=True):
            if size % part:
                raise ConfigError(
                    f"latent_size {self.latent_size} has a {axis} of {size}, which is not a "
                    f"multiple of the {part} of patch_size {patch}. Change one of them."
                )
        if self.frequency_embedding_size % 2:
            raise ConfigError(
                f"frequency_embedding_size is {self.frequency_embedding_size}, but must be even: "
                f"half of them are cosines."
            )

    def _check_betas(self) -> None:
        if self.beta_start > self.beta_end:
            raise ConfigError(
                f"beta_start is {self.beta_start}, but beta_end is {self.beta_end}: betas grow. "
                f"Swap them."
            )
        last = self.beta_end * _REFERENCE_STEPS / self.num_diffusion_steps
        if last > 1:
            raise ConfigError(
                f"num_diffusion_steps is {self.num_diffusion_steps}: the last beta, beta_end "
                f"({self.beta_end}) * {_REFERENCE_STEPS} / {self.num_diffusion_steps}, is "
                f"{last:.3g}, but must be at most 1. Increase num_diffusion_steps, or decrease "
                f"beta_end."
            )


def _check_keys(
    place: str, given: Any, known: type[Any], checked_later: tuple[str, ...] = ()
) -> None:
    """Check the keys and values of a mapping.

    `checked_later`: keys whose values are not checked here.

    Raises:
        ConfigError: If one is unknown or invalid.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(f"{place}: expected a mapping or null, got {given!r}.")
    kinds = get_type_hints(known, include_extras=True)
    for key, value in (given or {}).items():
        if key not in kinds:
            raise ConfigError(f"{place}.{key}: no such setting. {suggest(str(key), kinds)}")
        if key not in checked_later:
            check(f"{place}.{key}", value, kinds[key])
