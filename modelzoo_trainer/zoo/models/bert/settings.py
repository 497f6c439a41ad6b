"""Settings that BERT's encoder has under every head, with the names of Cerebras configurations."""

# Annotations are evaluated here: the fields are constructor parameters, hence the schema.
import warnings
from dataclasses import field, fields
from typing import Any

from typing_extensions import override

from modelzoo_trainer.base.constraints import Fraction, NonNegativeSize, Size, checked_dataclass
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings, PositionEmbedding
from modelzoo_trainer.zoo.models.feed_forward import GATED, Nonlinearity, NormType
from modelzoo_trainer.zoo.models.initializers import (
    Initializer,
    InitializerSetting,
    read_initializer,
    truncated_normal,
)
from modelzoo_trainer.zoo.models.moe_settings import MoeParams


@checked_dataclass(kw_only=True)
class EncoderSettings(DecoderSettings):
    """Settings of an encoder; sizes, heads, positions and muP are as in the decoders.

    Args:
        max_position_embeddings: Maximum sequence length.
        embedding_dropout_rate: Dropout of embeddings; null = `dropout_rate`.
        attention_dropout_rate: Dropout of attention weights; null = `dropout_rate`.
        dropout_rate: Dropout after attention, and after both matrices of feed-forward layers.
        position_embedding_type: As in the decoders; `relative` has buckets for both directions.
        num_relative_attention_buckets: For `relative`: number of buckets, even, 4 to 254.
        alibi_trainable_slopes: Whether the slopes of `alibi` are trained, from random values.
        encoder_nonlinearity: Activation of the feed-forward layers.
        pooler_nonlinearity: Activation of the pooler; null = `encoder_nonlinearity`. No effect
            where the model has no pooler.
        embedding_layer_norm: Whether embeddings are normalized, after `embeddings_scale`.
        norm_first: Whether layers normalize what attention and the feed-forward network get,
            instead of the sums with their outputs.
        use_final_layer_norm: Whether the states after the last layer are normalized.
        num_segments: Number of segments (`token_type_ids`), 0 = none.
        mask_padding_in_positional_embed: Whether learned positions are counted as in RoBERTa: from
            p + 1, and p for padding tokens, with p = `pad_token_id`, 0 where there is no such
            setting.
        default_initializer: Of all weights that have no own one; default: a normal distribution
            with `initializer_range`, truncated at two standard deviations.
        embeddings_initializer: Of the embeddings of tokens.
        position_embeddings_initializer: Of the embeddings of positions.
        segment_embeddings_initializer: Of the embeddings of segments.
        compute_eval_metrics: Whether the output has metrics in eval mode.

    Raises:
        ConfigError: For the first setting that is out of range or contradicts others.
    """

    max_position_embeddings: Size = field()  # required
    embedding_dropout_rate: Fraction | None = None
    attention_dropout_rate: Fraction | None = None
    dropout_rate: Fraction = 0.1
    position_embedding_type: PositionEmbedding | None = "learned"
    num_relative_attention_buckets: Size | None = 32
    alibi_trainable_slopes: bool = False
    encoder_nonlinearity: Nonlinearity = "gelu"
    pooler_nonlinearity: Nonlinearity | None = None
    embedding_layer_norm: bool = True
    norm_first: bool = False
    use_final_layer_norm: bool = False
    num_segments: NonNegativeSize | None = None
    mask_padding_in_positional_embed: bool = False
    default_initializer: InitializerSetting | None = None
    embeddings_initializer: InitializerSetting | None = None
    position_embeddings_initializer: InitializerSetting | None = None
    segment_embeddings_initializer: InitializerSetting | None = None
    compute_eval_metrics: bool = True
    pad_token_id: NonNegativeSize = field(default=0, init=False)
    # Of decoders only.
    nonlinearity: Nonlinearity = field(default="gelu", init=False)
    norm_type: NormType = field(default="layernorm", init=False)
    embd_pdrop: Fraction | None = field(default=None, init=False)
    attention_sliding_window_length: Size | None = field(default=None, init=False)
    moe: MoeParams | None = field(default=None, init=False)
    moe_params: MoeParams | None = field(default=None, init=False)
    share_embedding_weights: bool = field(default=True, init=False)
    use_bias_in_output: bool = field(default=False, init=False)
    embedding_initializer: InitializerSetting | None = field(default=None, init=False)
    initializer: InitializerSetting | None = field(default=None, init=False)
    output_layer_initializer: InitializerSetting | None = field(default=None, init=False)
    ffn_initializer: InitializerSetting | None = field(default=None, init=False)
    ffn_output_layer_initializer: InitializerSetting | None = field(default=None, init=False)
    loss_scaling: Any = field(default="batch_size", init=False)
    loss_weight: float = field(default=1.0, init=False)

    @override
    def __post_init__(self) -> None:
        self.nonlinearity = self.encoder_nonlinearity
        super().__post_init__()

    @property
    def segments(self) -> int:
        """Number of segments; 0 = the model has none."""
        return 2 if self.num_segments is None else self.num_segments

    @property
    def has_pooler(self) -> bool:
        """Whether the encoder has a pooler, a layer over the first state."""
        return False

    @property
    def dropped_token(self) -> int | None:
        """The token whose embedding is 0, and scales the other embeddings; None = there is none."""
        return None

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None:
        """Check the constructor's arguments without building the model.

        Raises:
            ConfigError: As the constructor.
        """
        settings = cls._settings_class()(**arguments)
        settings.initializers()

    @classmethod
    def _settings_class(cls) -> type["EncoderSettings"]:
        return cls

    def initializers(self) -> dict[str, Initializer]:
        """Return the initializers: `default`, `embeddings`, `position_embeddings`, `segment_...`.

        muP does not scale them, as in the Model Zoo.

        Raises:
            ConfigError: If one is unknown.
        """

        def read(argument: str, otherwise: Initializer) -> Initializer:
            setting = getattr(self, argument)
            return otherwise if setting is None else read_initializer(argument, setting)

        default = read("default_initializer", truncated_normal(self.initializer_range))
        tables = ("embeddings", "position_embeddings", "segment_embeddings")
        return {"default": default} | {
            table: read(f"{table}_initializer", default) for table in tables
        }

    def warn_of_unused(self, *, stacklevel: int, section: str = "") -> None:
        """Warn of settings that have no effect.

        `section`: what is in front of their names in messages, such as `model.q_encoder.`.
        """
        for key, reason in self.unused().items():
            warnings.warn(
                f"{section}{key} ({getattr(self, key)}) has no effect{reason}",
                stacklevel=stacklevel + 1,
            )

    def unused(self) -> dict[str, str]:
        """Return the settings that have no effect, each with the reason and what to do."""
        found = {}
        for key, is_set in self.set_for_logits().items():
            if is_set and not self.uses_mup:
                found[key] = _without("mup_base_hidden_size and mup_base_filter_size", key)
        if self.alibi_trainable_slopes and self.position_embedding_type != "alibi":
            found["alibi_trainable_slopes"] = _without(
                "position_embedding_type: alibi", "alibi_trainable_slopes"
            )
        if self.pooler_nonlinearity is not None and not self.has_pooler:
            found["pooler_nonlinearity"] = ": the model has no pooler. Remove it."
        return found

    def set_for_logits(self) -> dict[str, bool]:
        """Return the settings of the logits, each with whether it differs from its default."""
        return {
            "output_logits_alpha": self.output_logits_alpha not in (None, 0, 1),
            "scale_output_logits_by_d": not self.scale_output_logits_by_d,
        }

    @override
    def _check(self) -> None:
        super()._check()
        for key in ("pooler_nonlinearity", "mlm_nonlinearity"):
            given = getattr(self, key, None)
            if self._needs(key) and (given in GATED or (given is None and self._is_gated)):
                shown = given or f"null, hence encoder_nonlinearity ({self.encoder_nonlinearity})"
                raise ConfigError(
                    f"{key} is {shown}, which is gated: it needs two projections, and this layer "
                    f"has one. Set {key} to another one, such as gelu or tanh."
                )
        if self.pad_token_id >= self.vocab_size:
            raise ConfigError(
                f"pad_token_id ({self.pad_token_id}) is not in the vocabulary of "
                f"{self.vocab_size} tokens (vocab_size)."
            )
        is_learned = self.position_embedding_type == "learned"
        if self.mask_padding_in_positional_embed and not is_learned:
            raise ConfigError(
                f"mask_padding_in_positional_embed requires position_embedding_type: learned, "
                f"which is {self.position_embedding_type}. Set it, or remove "
                f"mask_padding_in_positional_embed."
            )
        is_relative = self.position_embedding_type == "relative"
        if is_relative and (self.num_buckets % 2 or self.num_buckets < 4):
            raise ConfigError(
                f"num_relative_attention_buckets is {self.num_buckets}, but must be even and at "
                f"least 4: half of the buckets are for later keys."
            )

    @property
    def _is_gated(self) -> bool:
        return self.encoder_nonlinearity in GATED

    def _needs(self, key: str) -> bool:
        """Return whether the model has the layer with this activation."""
        if key == "pooler_nonlinearity":
            return self.has_pooler
        return key in {one.name for one in fields(self)}


def _without(needed: str, key: str) -> str:
    return f" without {needed}. Set that, or remove {key}."
