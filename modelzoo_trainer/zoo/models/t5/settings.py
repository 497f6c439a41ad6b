"""Settings of encoder-decoder models, with the names of Cerebras configurations."""

# Annotations are evaluated here: the fields are constructor parameters, hence the schema.
import warnings
from typing import Any, Literal

from modelzoo_trainer.base.constraints import (
    AtLeastOne,
    Count,
    FiniteFloat,
    FinitePositiveFloat,
    Fraction,
    NonNegativeSize,
    Size,
    checked_dataclass,
)
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.models.feed_forward import Nonlinearity, NormType
from modelzoo_trainer.zoo.models.position_bias import MAX_BUCKETS

PositionEmbedding = Literal["learned_absolute", "fixed", "relative", "rotary", "alibi"]
LossScaling = Literal["batch_size", "num_masked", "precomputed_num_masked"]


@checked_dataclass(kw_only=True)
class T5Settings:
    """Settings of an encoder-decoder model.

    Args:
        src_vocab_size: Token ids of the inputs, without `extra_ids`.
        tgt_vocab_size: Token ids of the outputs, without `extra_ids`; null = `src_vocab_size`.
        extra_ids: Further token ids, which mark the spans to predict.
        d_model: Width of the model.
        d_kv: Dimension of an attention head; `d_model` need not be a multiple of it.
        d_ff: Hidden width of the feed-forward layers.
        encoder_num_hidden_layers: Number of layers of the encoder.
        decoder_num_hidden_layers: Number of layers of the decoder; null = as the encoder.
        num_heads: Number of attention heads.
        attention_module: `multiquery_attention` shares keys and values among heads.
        extra_attention_params: For `multiquery_attention`: `num_kv_groups`, which divides
            `num_heads`; default: 1.
        use_projection_bias_in_attention: Whether queries, keys and values have a bias; the output
            of attention has none.
        position_embedding_type: `relative` (a trained bias of the scores, of both directions in the
            encoder), `fixed` (sinusoidal) or `learned_absolute` embeddings, `alibi` (a bias that
            falls with the distance), or null for none.
        relative_attention_num_buckets: For `relative`: number of buckets of distances, even, 4 to
            254.
        src_max_position_embeddings: Longest input; null = any, except with `learned_absolute`.
        tgt_max_position_embeddings: Longest output; likewise.
        norm_type: Type of all normalization layers.
        layer_norm_epsilon: Added to variances, > 0.
        use_pre_encoder_decoder_layer_norm: Whether layers normalize what attention and the
            feed-forward network get, instead of the sums with their outputs. The states after the
            last layer are normalized in both cases.
        encoder_nonlinearity: Activation of the encoder's feed-forward layers.
        decoder_nonlinearity: Activation of the decoder's; null = `encoder_nonlinearity`.
        use_ffn_bias: Whether the feed-forward layers have biases.
        dropout_rate: Dropout of embeddings, attention weights, and after attention and
            feed-forward, before the residual addition.
        relu_dropout_rate: Dropout after the activation; null = `dropout_rate`.
        use_pre_encoder_decoder_dropout: Whether embeddings have a second dropout.
        use_dropout_outside_residual_path: Whether the states after the last normalization have one.
        share_encoder_decoder_embedding: Whether encoder and decoder have the same embedding.
        share_embedding_weights: Whether the output layer shares the weights of the decoder's
            embedding.
        initializer_factor: Factor on the standard deviations of initial weights; with
            `use_transformer_initialization` only of an output layer with weights of its own.
        use_transformer_initialization: Whether weights start as in the Transformer, uniform after
            Xavier, and scores are scaled, instead of as in T5.
        mup_base_d_model: `d_model` of the tuned model; together with the next, enables muP.
        mup_base_d_ff: `d_ff` of the tuned model.
        mup_base_d_kv: `d_kv` of the tuned model, if it changes with the width.
        embeddings_alpha: Factor on the embeddings; with muP, besides the root of `d_model`; null =
            1.
        encoder_attention_logits_alpha: Factor on the query-key products of the encoder.
        decoder_attention_logits_alpha: Factor on the decoder's, to the encoder as well.
        scale_encoder_qk_dot_by_d: With muP or `use_transformer_initialization`: whether to divide
            the encoder's products by `d_kv` instead of its root; default: only with muP.
        scale_decoder_qk_dot_by_d: Likewise for the decoder's.
        scale_output_logits_by_d: With muP, whether to divide logits by the width ratio instead of
            its root.
        output_logits_alpha: With muP, factor on the logits; null or 0 = 1.
        mlm_loss_scaling: `batch_size` = sum over tokens divided by the number of sequences, times
            `lm_loss_weight`; `num_masked` = mean over tokens; `precomputed_num_masked` = sum over
            tokens with the `loss_weight` of their sequence, divided by the number of sequences; as
            `batch_size` if batches have none.
        lm_loss_weight: Factor on the loss with `batch_size`.
        label_smoothing: Share of the labels that is spread over the vocabulary, in training.
        compute_eval_metrics: Whether the output has metrics in eval mode.
        attention_softmax_fp32: Accepted for compatibility; no effect.
        attention_kernel: Accepted for compatibility; no effect.
        mixed_precision: Accepted for compatibility; no effect: use the section `precision`.
        fp16_type: Accepted for compatibility; no effect: use the section `precision`.

    Raises:
        ConfigError: For the first setting that is out of range or contradicts others.
    """

    src_vocab_size: Size = 32128
    tgt_vocab_size: Size | None = None
    extra_ids: NonNegativeSize = 0
    d_model: Size = 512
    d_kv: Size = 64
    d_ff: Size = 2048
    encoder_num_hidden_layers: Count = 6
    decoder_num_hidden_layers: Count | None = None
    num_heads: Size = 8
    attention_module: Literal["aiayn_attention", "multiquery_attention"] = "aiayn_attention"
    extra_attention_params: dict[str, int] | None = None
    use_projection_bias_in_attention: bool = False
    position_embedding_type: PositionEmbedding | None = "relative"
    relative_attention_num_buckets: Size = 32
    src_max_position_embeddings: Size | None = None
    tgt_max_position_embeddings: Size | None = None
    norm_type: NormType = "rmsnorm"
    layer_norm_epsilon: FinitePositiveFloat = 1e-5
    use_pre_encoder_decoder_layer_norm: bool = True
    encoder_nonlinearity: Nonlinearity = "relu"
    decoder_nonlinearity: Nonlinearity | None = None
    use_ffn_bias: bool = False
    dropout_rate: Fraction = 0.1
    relu_dropout_rate: Fraction | None = None
    use_pre_encoder_decoder_dropout: bool = False
    use_dropout_outside_residual_path: bool = True
    share_encoder_decoder_embedding: bool = True
    share_embedding_weights: bool = True
    initializer_factor: FinitePositiveFloat = 1.0
    use_transformer_initialization: bool = False
    mup_base_d_model: AtLeastOne | None = None
    mup_base_d_ff: AtLeastOne | None = None
    mup_base_d_kv: AtLeastOne | None = None
    embeddings_alpha: FiniteFloat | None = 1.0
    encoder_attention_logits_alpha: FiniteFloat = 1.0
    decoder_attention_logits_alpha: FiniteFloat = 1.0
    scale_encoder_qk_dot_by_d: bool | None = None
    scale_decoder_qk_dot_by_d: bool | None = None
    scale_output_logits_by_d: bool = False
    output_logits_alpha: FiniteFloat | None = None
    mlm_loss_scaling: LossScaling = "batch_size"
    lm_loss_weight: FiniteFloat = 1.0
    label_smoothing: Fraction = 0.0
    compute_eval_metrics: bool | None = True
    attention_softmax_fp32: bool = True
    attention_kernel: str | None = None
    mixed_precision: bool | None = None
    fp16_type: str | None = None

    def __post_init__(self) -> None:
        self._check()

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None:
        """Check the constructor's arguments without building the model.

        Raises:
            ConfigError: As the constructor.
        """
        T5Settings(**arguments)

    @property
    def num_inputs(self) -> int:
        """Number of token ids of the inputs."""
        return self.src_vocab_size + self.extra_ids

    @property
    def num_outputs(self) -> int:
        """Number of token ids of the outputs."""
        return (self.tgt_vocab_size or self.src_vocab_size) + self.extra_ids

    @property
    def vocab_size(self) -> int:
        """Number of token ids that inputs and outputs both have."""
        return min(self.num_inputs, self.num_outputs)

    @property
    def num_kv_groups(self) -> int:
        """Number of heads of keys and values."""
        if self.attention_module == "aiayn_attention":
            return self.num_heads
        return (self.extra_attention_params or {}).get("num_kv_groups", 1)

    @property
    def uses_mup(self) -> bool:
        """Whether weights and activations are scaled for muP."""
        return self.mup_base_d_model is not None

    def num_layers(self, *, is_decoder: bool) -> int:
        """Return the number of layers of the decoder or the encoder."""
        num = self.encoder_num_hidden_layers
        return (self.decoder_num_hidden_layers or num) if is_decoder else num

    def nonlinearity(self, *, is_decoder: bool) -> Nonlinearity:
        """Return the activation of the feed-forward layers of the decoder or the encoder."""
        name = self.encoder_nonlinearity
        return (self.decoder_nonlinearity or name) if is_decoder else name

    def warn_of_unused(self, *, stacklevel: int) -> None:
        """Warn of settings that have no effect without others."""
        is_scaled = self.uses_mup or self.use_transformer_initialization
        needs_scaling = "muP or use_transformer_initialization"
        by_d = ("scale_encoder_qk_dot_by_d", "scale_decoder_qk_dot_by_d")
        unused = {key: (getattr(self, key) and not is_scaled, needs_scaling) for key in by_d}
        bases = "mup_base_d_model and mup_base_d_ff"
        is_alone = self.output_logits_alpha not in (None, 0, 1) and not self.uses_mup
        unused["output_logits_alpha"] = (is_alone, bases)
        unused["scale_output_logits_by_d"] = (
            self.scale_output_logits_by_d and not self.uses_mup,
            bases,
        )
        unused["initializer_factor"] = (
            self.initializer_factor != 1
            and self.use_transformer_initialization
            and self.share_embedding_weights,
            "use_transformer_initialization: false or share_embedding_weights: false",
        )
        unused["lm_loss_weight"] = (
            self.lm_loss_weight != 1 and self.mlm_loss_scaling == "num_masked",
            "mlm_loss_scaling: batch_size",
        )
        for key, (is_unused, needed) in unused.items():
            if is_unused:
                warnings.warn(
                    f"{key} ({getattr(self, key)}) has no effect without {needed}. Set that, or "
                    f"remove {key}.",
                    stacklevel=stacklevel + 1,
                )

    def _check(self) -> None:
        self._check_heads()
        self._check_positions()
        if self.share_encoder_decoder_embedding and self.num_inputs != self.num_outputs:
            raise ConfigError(
                f"src_vocab_size is {self.src_vocab_size} and tgt_vocab_size is "
                f"{self.tgt_vocab_size}, but with share_encoder_decoder_embedding both must be "
                f"equal. Set share_encoder_decoder_embedding: false, or remove tgt_vocab_size."
            )
        if (self.mup_base_d_model is None) != (self.mup_base_d_ff is None):
            raise ConfigError(
                f"mup_base_d_model is {self.mup_base_d_model} and mup_base_d_ff is "
                f"{self.mup_base_d_ff}: muP requires both, or neither."
            )
        if self.mup_base_d_kv is not None and not self.uses_mup:
            raise ConfigError(
                f"mup_base_d_kv is {self.mup_base_d_kv}, but muP also requires mup_base_d_model "
                f"and mup_base_d_ff. Set them, or remove mup_base_d_kv."
            )
        if self.uses_mup and self.use_transformer_initialization:
            raise ConfigError(
                f"mup_base_d_model ({self.mup_base_d_model}) cannot be set together with "
                f"use_transformer_initialization: true, whose initial weights muP cannot scale. "
                f"Remove one of them."
            )

    def _check_heads(self) -> None:
        extra = self.extra_attention_params or {}
        for key in extra:
            if key != "num_kv_groups":
                near = suggest(str(key), ("num_kv_groups",))
                raise ConfigError(f"extra_attention_params.{key}: no such setting. {near}")
        if extra and self.attention_module == "aiayn_attention":
            raise ConfigError(
                f"extra_attention_params ({extra}) is not supported by attention_module: "
                f"aiayn_attention. Set attention_module: multiquery_attention, or remove "
                f"extra_attention_params."
            )
        if self.num_kv_groups < 1 or self.num_heads % self.num_kv_groups:
            raise ConfigError(
                f"extra_attention_params.num_kv_groups ({self.num_kv_groups}) does not divide "
                f"num_heads ({self.num_heads})."
            )

    def _check_positions(self) -> None:
        if self.position_embedding_type == "rotary":
            raise ConfigError(
                "position_embedding_type: rotary is not supported for encoder-decoder models (nor "
                "by the Cerebras Model Zoo, although its format has it). Use relative, fixed, "
                "learned_absolute or alibi."
            )
        num = self.relative_attention_num_buckets
        is_relative = self.position_embedding_type == "relative"
        if is_relative and (num % 2 or not 4 <= num <= MAX_BUCKETS):
            raise ConfigError(
                f"relative_attention_num_buckets is {num}, but must be even and 4 to "
                f"{MAX_BUCKETS - 1}: half of the encoder's buckets are for later keys."
            )
        if self.position_embedding_type == "learned_absolute":
            for key in ("src_max_position_embeddings", "tgt_max_position_embeddings"):
                if getattr(self, key) is None:
                    raise ConfigError(
                        f"{key} is not set, but position_embedding_type: learned_absolute has one "
                        f"embedding per position. Set {key} to the longest sequence."
                    )
