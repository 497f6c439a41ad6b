"""BERT's encoder: every token sees all tokens of its sequence.

https://arxiv.org/abs/1810.04805

    tokens + positions + segments -> scale -> norm -> dropout -> layers (-> norm)

Dimension letters: B batch, T positions, H hidden size, N heads.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import ClassVar, Final

import torch
from torch import Tensor, nn

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.attention import Attention
from modelzoo_trainer.zoo.models.bert.settings import EncoderSettings
from modelzoo_trainer.zoo.models.context import Context, make_position_bias
from modelzoo_trainer.zoo.models.decoder_layers import reset_plain
from modelzoo_trainer.zoo.models.feed_forward import FeedForward, activation_of
from modelzoo_trainer.zoo.models.initializers import Initializer
from modelzoo_trainer.zoo.models.masks import (
    POSITIONS_KEY,
    SPAN_KEY,
    check_batch,
    hidden_padding,
)
from modelzoo_trainer.zoo.models.position_bias import (
    AlibiBias,
    BidirectionalRelativeBias,
    RelativeBias,
    fixed_positions,
)
from modelzoo_trainer.zoo.models.visible import Visible

_KEPT_IN_TRAINING: Final = 1 - 0.15 * 0.8  # hidden tokens: 80 % of the 15 % that are predicted
Step = tuple[nn.Module, Callable[[], None]]


class EncoderLayer(nn.Module):
    """Attention, then a feed-forward network, each with a residual and a normalization.

    h = norm(h + attention(h));  h = norm(h + ffn(h))
    With `norm_first`: h = h + attention(norm(h));  h = h + ffn(norm(h))
    """

    cast_inputs: ClassVar[tuple[str, ...]] = ("hidden",)  # angles and biases need float32

    def __init__(self, settings: EncoderSettings) -> None:
        super().__init__()
        size, epsilon = settings.hidden_size, settings.layer_norm_epsilon
        self.norm_first = settings.norm_first
        self.attention = Attention(settings)
        self.attention_norm = nn.LayerNorm(size, eps=epsilon)
        self.ffn = FeedForward(
            size,
            settings.filter_size,
            settings.nonlinearity,
            settings.use_ffn_bias,
            inner_dropout_rate=settings.dropout_rate,
        )
        self.ffn_norm = nn.LayerNorm(size, eps=epsilon)
        self.dropout = nn.Dropout(settings.dropout_rate)

    def draw(self, initializer: Initializer) -> None:
        """Initialize the projections; reset norms and biases."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                initializer(module.weight)
            reset_plain(module)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """Return the states after this layer, of the same shape."""
        if self.norm_first:
            hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), context))
            hidden = hidden + self.dropout(self.ffn(self.ffn_norm(hidden)))
        else:
            hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, context)))
            hidden = self.ffn_norm(hidden + self.dropout(self.ffn(hidden)))
        return hidden


class Encoder(nn.Module):
    """The encoder without a head, with a pooler if the settings say so."""

    def __init__(self, settings: EncoderSettings) -> None:
        super().__init__()
        self._settings = (settings,)  # in a tuple: the model, its parent, is no part of this
        size, epsilon = settings.hidden_size, settings.layer_norm_epsilon
        self.token_embeddings = nn.Embedding(settings.vocab_size, size)
        self.position_embeddings: nn.Embedding | None = None
        if settings.position_embedding_type == "learned":
            num_rows = settings.max_position_embeddings
            if settings.mask_padding_in_positional_embed:
                num_rows += settings.pad_token_id + 1
            self.position_embeddings = nn.Embedding(num_rows, size)
        self.segment_embeddings: nn.Embedding | None = None
        if settings.segments:
            self.segment_embeddings = nn.Embedding(settings.segments, size)
        self.embedding_norm: nn.LayerNorm | None = None
        if settings.embedding_layer_norm:
            self.embedding_norm = nn.LayerNorm(size, eps=epsilon)
        rate = settings.embedding_dropout_rate
        self.embedding_dropout = nn.Dropout(settings.dropout_rate if rate is None else rate)
        self.position_bias: AlibiBias | RelativeBias | BidirectionalRelativeBias | None
        if settings.position_embedding_type == "relative":
            self.position_bias = BidirectionalRelativeBias(settings.num_heads, settings.num_buckets)
        else:
            self.position_bias = make_position_bias(settings, two_sided=True)
        self.layers = nn.ModuleList(
            EncoderLayer(settings) for _ in range(settings.num_hidden_layers)
        )
        self.final_norm: nn.LayerNorm | None = None
        if settings.use_final_layer_norm:
            self.final_norm = nn.LayerNorm(size, eps=epsilon)
        self.pooler: nn.Linear | None = None
        if settings.has_pooler:
            self.pooler = nn.Linear(size, size, bias=settings.use_ffn_bias)
            pooled_by = settings.pooler_nonlinearity or settings.encoder_nonlinearity
            self._activate = activation_of(pooled_by)
        self._rotary = settings.rotary()

    @property
    def settings(self) -> EncoderSettings:
        """The settings."""
        return self._settings[0]

    def initial_steps(self) -> Iterator[Step]:
        """Yield the parts, each with the function that initializes it."""
        start = self.settings.initializers()
        yield self.token_embeddings, partial(self._draw_tokens, start["embeddings"])
        for table in ("position_embeddings", "segment_embeddings"):
            embedding: nn.Embedding | None = getattr(self, table)
            if embedding is not None:
                yield embedding, partial(draw_weight, embedding, start[table])
        if self.position_bias is not None:
            yield self.position_bias, self.position_bias.reset_parameters
        for layer in self.layers:
            assert isinstance(layer, EncoderLayer)
            yield layer, partial(layer.draw, start["default"])
        for norm in (self.embedding_norm, self.final_norm):
            if norm is not None:
                yield norm, norm.reset_parameters
        if self.pooler is not None:
            yield self.pooler, partial(draw_weight, self.pooler, start["default"])

    def _draw_tokens(self, initializer: Initializer) -> None:
        weight, pad = self.token_embeddings.weight, self.settings.pad_token_id
        initializer(weight)
        if pad:
            with torch.no_grad():
                weight[pad].zero_()

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the states after the last layer.

        Args:
            batch: `input_ids`; `token_type_ids`, the segments, if the model has them;
                `attention_mask`, 0 for padding, which nothing sees. For packed sequences, instead
                of the mask: `attention_span` and `position_ids`, by which a query sees a key if it
                is at most its span before it, or at most its position after it.

        Shapes:
            In batch: (B, T) integer, T at most `max_position_embeddings`. Returns: (B, T, H).

        Cost:
            No host read, no data-dependent shape.

        Raises:
            ConfigError: If the batch does not fit the model.
        """
        input_ids = batch["input_ids"]
        self._check(batch)
        positions = batch.get(POSITIONS_KEY)
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self._embed(batch, positions)
        bias = None
        if self.position_bias is not None:
            bias = self.position_bias(input_ids.shape[1], input_ids.device)
        visible = _visible(batch)._replace(bias=bias)
        angles = None if self._rotary is None else self._rotary.angles(positions)
        context = Context(angles=angles, visible=(visible, visible))
        for layer in self.layers:
            hidden = layer(hidden, context)
        return hidden if self.final_norm is None else self.final_norm(hidden)

    def pool(self, hidden: Tensor) -> Tensor:
        """Return the state of the first token after the pooler.

        Shapes:
            hidden: (B, T, H). Returns: (B, H).
        """
        assert self.pooler is not None
        return self._activate(self.pooler(hidden[:, 0]))

    def _embed(self, batch: Mapping[str, Tensor], positions: Tensor) -> Tensor:
        input_ids, settings = batch["input_ids"], self.settings
        is_padding = input_ids == settings.pad_token_id
        hidden: Tensor = self.token_embeddings(input_ids)
        hidden = torch.where(is_padding[..., None], hidden.detach(), hidden)
        if settings.dropped_token is not None:
            hidden = _without(settings.dropped_token, hidden, batch)
        if self.position_embeddings is not None:
            rows = positions
            if settings.mask_padding_in_positional_embed:
                rows = settings.pad_token_id + torch.where(is_padding, 0, positions + 1)
            hidden = hidden + self.position_embeddings(rows)
        elif settings.position_embedding_type == "fixed":
            hidden = hidden + fixed_positions(positions, settings.hidden_size).to(hidden.dtype)
        if self.segment_embeddings is not None:
            hidden = hidden + self.segment_embeddings(batch["token_type_ids"])
        if settings.embeddings_scale != 1:
            hidden = hidden * settings.embeddings_scale
        if self.embedding_norm is not None:
            hidden = self.embedding_norm(hidden)
        dropped: Tensor = self.embedding_dropout(hidden)
        return dropped

    def _check(self, batch: Mapping[str, Tensor]) -> None:
        settings, length = self.settings, batch["input_ids"].shape[1]
        if length > settings.max_position_embeddings:
            raise ConfigError(
                f"max_position_embeddings is {settings.max_position_embeddings}, but a sequence "
                f"has {length} tokens. Increase it, or decrease max_sequence_length of the data."
            )
        has_segments = "token_type_ids" in batch
        if has_segments != bool(settings.segments):
            raise ConfigError(
                f"The model has {settings.segments} segments (num_segments), but the batch has "
                f"{'' if has_segments else 'no '}token_type_ids. Set the same disable_nsp in the "
                f"model and the data processor, or num_segments: {2 if has_segments else 0}."
            )
        if SPAN_KEY in batch and POSITIONS_KEY not in batch:
            raise ConfigError(
                f"The batch has {SPAN_KEY} without {POSITIONS_KEY}, but packed sequences require "
                f"both."
            )
        check_batch(
            batch,
            has_window=False,
            uses_positions=settings.position_embedding_type in ("learned", "fixed", "rotary"),
        )


def _without(token: int, hidden: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return embeddings (B, T, H), 0 at a token, the others scaled by what a sequence has of them.

    hidden * (1 - 0.15 * 0.8) / (1 - dropped / tokens), as ESM-2.
    """
    is_dropped = batch["input_ids"] == token
    mask = batch.get("attention_mask")
    num_tokens = is_dropped.shape[1] if mask is None else (mask != 0).sum(dim=-1)
    num_kept = (num_tokens - is_dropped.sum(dim=-1)).clamp(min=1)
    scale = (_KEPT_IN_TRAINING * num_tokens / num_kept).to(hidden.dtype)
    return hidden.masked_fill(is_dropped[..., None], 0.0) * scale[:, None, None]


def _visible(batch: Mapping[str, Tensor]) -> Visible:
    """Return which keys each query sees."""
    if SPAN_KEY in batch:
        return Visible(causal=False, after=batch[SPAN_KEY], before=batch[POSITIONS_KEY])
    return Visible(causal=False, padding=hidden_padding(batch.get("attention_mask")))


def draw_weight(module: nn.Embedding | nn.Linear, initializer: Initializer) -> None:
    """Initialize the weight; the bias is 0."""
    initializer(module.weight)
    reset_plain(module)
