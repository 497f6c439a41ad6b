"""Settings that all decoders have, with the names of Cerebras configurations.

`gpt2.Gpt2Settings` and `gptj.GptJSettings` add the settings of one class, and change defaults.
"""

# Annotations are evaluated here: the fields are constructor parameters, hence the schema.
from collections.abc import Collection, Mapping
from dataclasses import field, fields
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from modelzoo_trainer.base.constraints import (
    AtLeastOne,
    Count,
    Fraction,
    PositiveFloat,
    Size,
    checked_dataclass,
)
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.models.attend import Implementation
from modelzoo_trainer.zoo.models.feed_forward import Nonlinearity, NormType
from modelzoo_trainer.zoo.models.initializers import InitializerSetting
from modelzoo_trainer.zoo.models.masks import WindowPattern
from modelzoo_trainer.zoo.models.moe_settings import MoeParams, MoeSettings, read_moe
from modelzoo_trainer.zoo.models.position_bias import MAX_BUCKETS
from modelzoo_trainer.zoo.models.rotary import Rotary
from modelzoo_trainer.zoo.models.rotary_scaling import ScalingType, read_scaling

PositionEmbedding = Literal["learned", "fixed", "relative", "rotary", "alibi"]


@checked_dataclass(kw_only=True)
class DecoderSettings:
    """Settings of a decoder; a class with other defaults declares the field again.

    Args:
        vocab_size: Vocabulary size.
        hidden_size: Width of the model; a multiple of `num_heads`.
        max_position_embeddings: Maximum sequence length.
        position_embedding_type: `learned` or `fixed` (sinusoidal) embeddings, `rotary`, `relative`
            (T5's bias of the scores) or `alibi` (a bias that falls with the distance), or null for
            none.
        num_relative_attention_buckets: For `relative`: number of buckets of distances, 2 to 255.
        rotary_dim: Rotated dimensions per head, even; default: a quarter of `hidden_size` /
            `num_heads`.
        rope_theta: Base of the rotary wavelengths, > 0.
        pos_scaling_type: How rotary positions are scaled to a longer context; `YaRN` = `yarn`.
        pos_scaling_factor: Ratio of the context to the context of pre-training, >= 1; not for
            `longrope`. For `alibi`: divides all distances.
        pos_scaling_extra_args: Of `llama3`: `low_freq_factor` (default 1), `high_freq_factor` (4),
            `original_max_position_embeddings` (8192). Of `yarn`: `original_max_position_embeddings`
            (required), `beta_fast` (32), `beta_slow` (1), `extrapolation_factor` (1), `mscale_a`
            (0.1), `mscale_b` (1), `truncate` (true). Of `longrope`:
            `original_max_position_embeddings`, `long_factor`, `short_factor` (lists of
            `rotary_dim` / 2 numbers; all required), `long_mscale`, `short_mscale`,
            `attention_factor`.
        share_embedding_weights: Whether the output layer shares the weights of the embedding.
        num_hidden_layers: Number of layers.
        norm_type: Type of all normalization layers.
        layer_norm_epsilon: Added to variances, > 0.
        dropout_rate: Dropout after attention and feed-forward, before the residual addition.
        embedding_dropout_rate: Dropout of embeddings; null = `dropout_rate`.
        embd_pdrop: Another name of `embedding_dropout_rate`.
        attention_dropout_rate: Dropout of attention weights; null = `dropout_rate`.
        num_heads: Number of attention heads.
        attention_type: Whether query-key products are divided by the root of the head dimension.
        attention_module: `multiquery_attention` shares keys and values among heads.
        extra_attention_params: For `multiquery_attention`: `num_kv_groups`, which divides
            `num_heads`; default: 1.
        attention_sliding_window_length: Number of keys that a query sees, with its own; null = all.
        attention: Implementation of attention: `auto` = the fastest for the device; `blocks` of
            queries, on every device; `flex`, on CUDA without attention dropout; `dense`, whose
            memory grows with the square of the length. Not a published key.
        use_projection_bias_in_attention: Whether queries, keys and values have a bias.
        use_ffn_bias_in_attention: Whether the output projection of attention has a bias.
        filter_size: Hidden width of the feed-forward layers.
        nonlinearity: Activation of the feed-forward layers. `gelu` and `geglu` are exact;
            `gelu_new` and `geglu_new` are the tanh form, as in published GPT-2 and Gemma 2.
        use_ffn_bias: Whether the feed-forward layers have biases.
        moe: A mixture of experts instead of each feed-forward network; see `MoeParams`.
        moe_params: Another name of `moe`.
        use_bias_in_output: Whether the output layer has a bias.
        initializer_range: Standard deviation of the default initializer, a normal distribution
            truncated at two standard deviations.
        embedding_initializer: Of the embeddings.
        initializer: Of all projections.
        output_layer_initializer: Of the projections before a residual addition; default:
            `initializer` if set, else the default initializer times (2 * layers) ** -0.5. With
            muP: the default initializer, regardless of `initializer`, and always with that factor.
        ffn_initializer: Of the input projections of feed-forward layers; default: `initializer`.
        ffn_output_layer_initializer: Of their output projections; default: as
            `output_layer_initializer`, with `ffn_initializer` before `initializer`. With muP: the
            default initializer.
        mup_base_hidden_size: Hidden size of the tuned model; together with the next, enables muP.
        mup_base_filter_size: `filter_size` of the tuned model.
        embeddings_scale: Factor on the embeddings.
        scale_qk_dot_by_d: Whether to divide scaled products by the head dimension instead of its
            root; default: only with muP.
        attention_logits_alpha: Additional factor on the products.
        scale_output_logits_by_d: With muP, whether to divide logits by the width ratio instead of
            its root.
        output_logits_alpha: With muP, factor on the logits; null or 0 = 1.
        loss_scaling: `num_tokens` = mean over counted tokens; `batch_size` = sum divided by the
            number of sequences.
        loss_weight: Factor on the loss with `loss_scaling: batch_size`.
        compute_eval_metrics: Whether the output has `accuracy` in eval mode.
        attention_softmax_fp32: Accepted for compatibility; no effect.
        attention_kernel: Accepted for compatibility; no effect.
        fold_rope_consts: Accepted for compatibility; no effect.
        mixed_precision: Accepted for compatibility; no effect: use the section `precision`.
        fp16_type: Accepted for compatibility; no effect: use the section `precision`.

    Raises:
        ConfigError: For the first setting that is out of range or contradicts others.
    """

    vocab_size: Size = 50257
    hidden_size: Size = 768
    max_position_embeddings: Size = 1024
    position_embedding_type: PositionEmbedding | None = "learned"
    num_relative_attention_buckets: Size | None = 32
    rotary_dim: int | None = None
    rope_theta: PositiveFloat = 10000.0
    pos_scaling_type: ScalingType = "linear"
    pos_scaling_factor: AtLeastOne = 1.0
    pos_scaling_extra_args: dict[str, bool | float | list[float]] | None = None
    share_embedding_weights: bool = True
    num_hidden_layers: Count = 12
    norm_type: NormType = "layernorm"
    layer_norm_epsilon: float = 1e-5
    dropout_rate: Fraction = 0.1
    embedding_dropout_rate: Fraction | None = None
    embd_pdrop: Fraction | None = None
    attention_dropout_rate: Fraction | None = 0.1
    num_heads: Size = 12
    attention_type: Literal["scaled_dot_product", "dot_product"] = "scaled_dot_product"
    attention_module: Literal["aiayn_attention", "multiquery_attention"] = "aiayn_attention"
    extra_attention_params: dict[str, int] | None = None
    attention_sliding_window_length: Size | None = None
    attention: Implementation = "auto"
    use_projection_bias_in_attention: bool = True
    use_ffn_bias_in_attention: bool = True
    filter_size: Size = 3072
    nonlinearity: Nonlinearity = "gelu"
    use_ffn_bias: bool = True
    moe: MoeParams | None = None
    moe_params: MoeParams | None = None
    use_bias_in_output: bool = False
    initializer_range: PositiveFloat = 0.02
    embedding_initializer: InitializerSetting | None = None
    initializer: InitializerSetting | None = None
    output_layer_initializer: InitializerSetting | None = None
    ffn_initializer: InitializerSetting | None = None
    ffn_output_layer_initializer: InitializerSetting | None = None
    mup_base_hidden_size: AtLeastOne | None = None
    mup_base_filter_size: AtLeastOne | None = None
    embeddings_scale: float = 1.0
    scale_qk_dot_by_d: bool | None = None
    attention_logits_alpha: float = 1.0
    scale_output_logits_by_d: bool = True
    output_logits_alpha: float | None = None
    loss_scaling: Literal["num_tokens", "batch_size"] = "num_tokens"
    loss_weight: float = 1.0
    compute_eval_metrics: bool = True
    attention_softmax_fp32: bool = True
    attention_kernel: str | None = None
    fold_rope_consts: bool = False
    mixed_precision: bool | None = None
    fp16_type: str | None = None
    # Only one of the classes makes these arguments; their features are in the shared code.
    embedding_layer_norm: bool = field(default=False, init=False)
    alibi_trainable_slopes: bool = field(default=False, init=False)
    attention_inner_dim: int | None = field(default=None, init=False)
    attention_logit_softcapping: float | None = field(default=None, init=False)
    attention_qk_norm: NormType | None = field(default=None, init=False)
    attention_sink_tokens: int | None = field(default=None, init=False)
    final_logit_softcapping: float | None = field(default=None, init=False)
    norm_first_sandwich: bool = field(default=False, init=False)
    output_logits_scale: float | None = field(default=None, init=False)
    position_embedding_offset: int = field(default=0, init=False)
    scale_qk_dot_by_layer_idx: bool = field(default=False, init=False)
    sliding_window_every_other_decoder_layer: bool = field(default=False, init=False)
    sliding_window_every_other_decoder_layer_pattern: WindowPattern | None = field(
        default=None, init=False
    )

    ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"embd_pdrop": "embedding_dropout_rate", "moe_params": "moe"}
    )
    """Further names of settings; null = not given."""
    initializer_rules: ClassVar[Literal["gpt2", "gptj"]] = "gpt2"
    """How initializers that are not given follow from others: see `parametrization`."""

    @property
    def head_dim(self) -> int:
        """Dimension of an attention head."""
        return (self.attention_inner_dim or self.hidden_size) // self.num_heads

    @property
    def num_kv_groups(self) -> int:
        """Number of heads of keys and values."""
        if self.attention_module == "aiayn_attention":
            return self.num_heads
        return (self.extra_attention_params or {}).get("num_kv_groups", 1)

    @property
    def turning_dim(self) -> int:
        """Number of rotated dimensions per head."""
        if self.rotary_dim is not None:
            return self.rotary_dim
        return self.hidden_size // self.num_heads // 4  # as there, without attention_inner_dim

    @property
    def num_buckets(self) -> int:
        """Number of buckets of relative positions."""
        return self.num_relative_attention_buckets or 32

    @property
    def experts(self) -> MoeSettings | None:
        """The settings of the mixture of experts, or None if there is none."""
        settings = read_moe(self.moe or {})
        return settings if settings.is_on else None

    @property
    def uses_mup(self) -> bool:
        """Whether weights and activations are scaled for muP."""
        return self.mup_base_hidden_size is not None

    def rotary(self) -> Rotary | None:
        """Return the angles of rotary positions, if positions are rotary."""
        if self.position_embedding_type != "rotary":
            return None
        scaling = read_scaling(
            self.pos_scaling_type,
            self.pos_scaling_factor,
            self.pos_scaling_extra_args or {},
            rotary_dim=self.turning_dim,
            theta=self.rope_theta,
            max_length=self.max_position_embeddings,
        )
        return Rotary(rotary_dim=self.turning_dim, theta=self.rope_theta, scaling=scaling)

    def __post_init__(self) -> None:
        self._apply_aliases()
        self._check()

    @classmethod
    def refuse_both_names(cls, given: Collection[str]) -> None:
        """Refuse a setting that is given under two names.

        `given`: names of the arguments that are given and not null.

        Raises:
            ConfigError: With both names.
        """
        for alias, name in cls.ALIASES.items():
            if alias in given and name in given:
                raise ConfigError(
                    f"{alias} and {name} are both given, but are the same setting. Keep {name}."
                )

    def _apply_aliases(self) -> None:
        defaults = {one.name: one.default for one in fields(self)}
        names = {*self.ALIASES, *self.ALIASES.values()}
        self.refuse_both_names([one for one in names if getattr(self, one) != defaults[one]])
        for alias, name in self.ALIASES.items():
            if getattr(self, alias) is not None:
                setattr(self, name, getattr(self, alias))
                setattr(self, alias, None)

    def _check(self) -> None:
        """Refuse settings that contradict each other; a class with more of them extends it."""
        self._check_heads()
        self._check_positions()
        read_moe(self.moe or {})
        if (self.mup_base_hidden_size is None) != (self.mup_base_filter_size is None):
            raise ConfigError(
                f"mup_base_hidden_size is {self.mup_base_hidden_size} and mup_base_filter_size is "
                f"{self.mup_base_filter_size}: muP requires both, or neither."
            )

    def _check_heads(self) -> None:
        for name in ("hidden_size", "attention_inner_dim"):
            size = getattr(self, name)
            if size is not None and size % self.num_heads:
                raise ConfigError(
                    f"{name} ({size}) is not a multiple of num_heads ({self.num_heads})."
                )
        extra = self.extra_attention_params or {}
        _check_keys("extra_attention_params", extra, ("num_kv_groups",))
        if extra and self.attention_module == "aiayn_attention":
            raise ConfigError(
                f"extra_attention_params ({extra}) is not supported by attention_module: "
                "aiayn_attention. Set attention_module: multiquery_attention, or remove "
                "extra_attention_params."
            )
        if self.num_kv_groups < 1 or self.num_heads % self.num_kv_groups:
            raise ConfigError(
                f"extra_attention_params.num_kv_groups ({self.num_kv_groups}) does not divide "
                f"num_heads ({self.num_heads})."
            )

    def _check_positions(self) -> None:
        dim = self.turning_dim
        fits = 2 <= dim <= self.head_dim and dim % 2 == 0
        if self.position_embedding_type == "rotary" and not fits:
            unset = " (the default, a quarter of the head size)" if self.rotary_dim is None else ""
            of = "hidden_size" if self.attention_inner_dim is None else "attention_inner_dim"
            raise ConfigError(
                f"rotary_dim is {dim}{unset}; it must be even, at least 2 and at most "
                f"{self.head_dim} ({of} / num_heads)."
            )
        if self.position_embedding_type == "relative" and not 2 <= self.num_buckets <= MAX_BUCKETS:
            raise ConfigError(
                f"num_relative_attention_buckets is {self.num_buckets}, but must be 2 to "
                f"{MAX_BUCKETS}: half of the buckets are of one distance each, below 128."
            )
        is_scaled = self.pos_scaling_type != "linear" or self.pos_scaling_extra_args
        if self.position_embedding_type != "rotary" and is_scaled:
            raise ConfigError(
                f"pos_scaling_type {self.pos_scaling_type!r} with pos_scaling_extra_args "
                f"{self.pos_scaling_extra_args} requires position_embedding_type: rotary, which is "
                f"{self.position_embedding_type}. Set it, or remove both."
            )
        self.rotary()


def _check_keys(argument: str, given: dict[str, Any], known: tuple[str, ...]) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{argument}.{key}: no such setting. {suggest(key, known)}")
