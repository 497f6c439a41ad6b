"""Layers of encoder-decoder models, and the stacks of them.

Dimension letters: B batch, T positions, S positions of the input of the encoder, H width, N heads,
G groups of keys and values, D head dimension.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from modelzoo_trainer.zoo.models.attend import attend
from modelzoo_trainer.zoo.models.decoder_layers import reset_plain
from modelzoo_trainer.zoo.models.feed_forward import FeedForward, make_norm
from modelzoo_trainer.zoo.models.initializers import Initializer
from modelzoo_trainer.zoo.models.position_bias import (
    AlibiBias,
    BidirectionalRelativeBias,
    RelativeBias,
    fixed_positions,
)
from modelzoo_trainer.zoo.models.t5.scaling import (
    LayerInitializers,
    attention_scale,
    embedding_initializer,
    embeddings_scale,
    layer_initializers,
)
from modelzoo_trainer.zoo.models.t5.settings import T5Settings
from modelzoo_trainer.zoo.models.visible import Visible

Step = tuple[nn.Module, Callable[[], None]]


class T5Attention(nn.Module):
    """Multi-head attention of states over the same or other states."""

    def __init__(self, settings: T5Settings, *, is_decoder: bool) -> None:
        super().__init__()
        size, self.head_dim = settings.d_model, settings.d_kv
        self.scale = attention_scale(settings, is_decoder=is_decoder)
        self.dropout_rate = settings.dropout_rate
        inner_size = settings.d_kv * settings.num_heads
        kv_size = settings.d_kv * settings.num_kv_groups
        bias = settings.use_projection_bias_in_attention
        self.q_proj = nn.Linear(size, inner_size, bias=bias)
        self.k_proj = nn.Linear(size, kv_size, bias=bias)
        self.v_proj = nn.Linear(size, kv_size, bias=bias)
        self.o_proj = nn.Linear(inner_size, size, bias=False)

    def draw(self, start: LayerInitializers) -> None:
        """Initialize the projections."""
        start.queries(self.q_proj.weight)
        for projection in (self.k_proj, self.v_proj):
            start.keys_and_values(projection.weight)
        start.attention_output(self.o_proj.weight)

    def forward(self, hidden: Tensor, sources: Tensor, visible: Visible) -> Tensor:
        """Return the attention output.

        `sources`: the states that are seen, according to `visible`.

        Shapes:
            hidden: (B, T, H). sources: (B, S, H). Returns: as hidden.
        """
        # The number of heads is inferred: with tensor parallelism, a rank has only some of them.
        queries, keys, values = (
            projection(states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection, states in (
                (self.q_proj, hidden),
                (self.k_proj, sources),
                (self.v_proj, sources),
            )
        )
        attended = attend(
            queries,
            keys,
            values,
            scale=self.scale,
            visible=visible,
            dropout=self.dropout_rate if self.training else 0.0,
        )
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(-2))
        return output


class T5Layer(nn.Module):
    """Attention, in a decoder also over the encoder's states, then a feed-forward network.

    h = h + attention(norm(h));  h = h + cross_attention(norm(h));  h = h + ffn(norm(h))
    Without `use_pre_encoder_decoder_layer_norm`: h = norm(h + attention(h)), and so on.
    """

    # With sharded parameters of another dtype, only the states are cast, not the mask.
    cast_inputs: ClassVar[tuple[str, ...]] = ("hidden", "sources")

    def __init__(self, settings: T5Settings, *, is_decoder: bool) -> None:
        super().__init__()
        norm = partial(make_norm, settings.norm_type, settings.d_model, settings.layer_norm_epsilon)
        rate = settings.relu_dropout_rate
        self.norm_first = settings.use_pre_encoder_decoder_layer_norm
        self.attention = T5Attention(settings, is_decoder=is_decoder)
        self.attention_norm = norm()
        self.cross_attention: T5Attention | None = None
        self.cross_attention_norm: nn.Module | None = None
        if is_decoder:
            self.cross_attention = T5Attention(settings, is_decoder=True)
            self.cross_attention_norm = norm()
        self.ffn = FeedForward(
            settings.d_model,
            settings.d_ff,
            settings.nonlinearity(is_decoder=is_decoder),
            settings.use_ffn_bias,
            inner_dropout_rate=settings.dropout_rate if rate is None else rate,
        )
        self.ffn_norm = norm()
        self.dropout = nn.Dropout(settings.dropout_rate)

    def draw(self, start: LayerInitializers) -> None:
        """Initialize the projections; reset norms and biases."""
        for attention in (self.attention, self.cross_attention):
            if attention is not None:
                attention.draw(start)
        for widening in (self.ffn.up_proj, self.ffn.gate_proj):
            if widening is not None:
                start.ffn_input(widening.weight)
        start.ffn_output(self.ffn.down_proj.weight)
        for module in self.modules():
            reset_plain(module)

    def forward(
        self,
        hidden: Tensor,
        visible: Visible,
        sources: Tensor | None = None,
        sources_visible: Visible | None = None,
    ) -> Tensor:
        """Return the states after this layer.

        `sources`: the encoder's states, in a decoder.

        Shapes:
            hidden: (B, T, H). sources: (B, S, H). Returns: as hidden.
        """
        hidden = self._added(
            hidden, self.attention_norm, lambda states: self.attention(states, states, visible)
        )
        cross, norm = self.cross_attention, self.cross_attention_norm
        seen = sources_visible
        if cross is not None and norm is not None and sources is not None and seen is not None:
            hidden = self._added(hidden, norm, lambda states: cross(states, sources, seen))
        return self._added(hidden, self.ffn_norm, self.ffn)

    def _added(
        self, hidden: Tensor, norm: nn.Module, transform: Callable[[Tensor], Tensor]
    ) -> Tensor:
        if self.norm_first:
            added: Tensor = hidden + self.dropout(transform(norm(hidden)))
        else:
            added = norm(hidden + self.dropout(transform(hidden)))
        return added


class Stack(nn.Module):
    """The encoder or the decoder, from embeddings to normalized states.

    embeddings + positions -> scale -> dropout -> layers -> norm -> dropout
    """

    def __init__(self, settings: T5Settings, *, is_decoder: bool) -> None:
        super().__init__()
        self._settings = (settings,)  # in a tuple: the model, its parent, is no part of this
        self.is_decoder = is_decoder
        rate, kind = settings.dropout_rate, settings.position_embedding_type
        self.scale = embeddings_scale(settings)
        self.position_embeddings: nn.Embedding | None = None
        if kind == "learned_absolute":
            assert self.longest is not None  # checked in the settings
            self.position_embeddings = nn.Embedding(self.longest, settings.d_model)
        self.position_bias: AlibiBias | RelativeBias | BidirectionalRelativeBias | None = None
        if kind == "alibi":
            self.position_bias = AlibiBias(settings.num_heads, two_sided=not is_decoder)
        elif kind == "relative":
            bias = RelativeBias if is_decoder else BidirectionalRelativeBias
            self.position_bias = bias(settings.num_heads, settings.relative_attention_num_buckets)
        has_more = settings.use_pre_encoder_decoder_dropout
        self.input_dropouts = nn.Sequential(*(nn.Dropout(rate) for _ in range(1 + has_more)))
        num = settings.num_layers(is_decoder=is_decoder)
        self.layers = nn.ModuleList(T5Layer(settings, is_decoder=is_decoder) for _ in range(num))
        self.final_norm = make_norm(
            settings.norm_type, settings.d_model, settings.layer_norm_epsilon
        )
        outside = settings.use_dropout_outside_residual_path
        self.output_dropout = nn.Dropout(rate if outside else 0.0)

    @property
    def settings(self) -> T5Settings:
        """The settings."""
        return self._settings[0]

    @property
    def longest(self) -> int | None:
        """Longest sequence; None = any."""
        settings = self.settings
        if self.is_decoder:
            return settings.tgt_max_position_embeddings
        return settings.src_max_position_embeddings

    def initial_steps(self) -> Iterator[Step]:
        """Yield the parts, each with the function that initializes it."""
        if self.position_embeddings is not None:
            start = embedding_initializer(self.settings)
            yield self.position_embeddings, partial(draw, self.position_embeddings, start)
        if self.position_bias is not None:
            yield self.position_bias, self.position_bias.reset_parameters
        of_layers = layer_initializers(self.settings, is_decoder=self.is_decoder)
        for layer in self.layers:
            assert isinstance(layer, T5Layer)
            yield layer, partial(layer.draw, of_layers)
        yield self.final_norm, partial(reset_plain, self.final_norm)

    def forward(
        self,
        embedded: Tensor,
        padding: Tensor | None = None,
        sources: Tensor | None = None,
        sources_padding: Tensor | None = None,
    ) -> Tensor:
        """Return the states after the last layer and the normalization.

        Args:
            embedded: Embeddings of the tokens.
            padding: In the encoder: True for positions that are hidden from all others.
            sources: In the decoder: the encoder's states.
            sources_padding: In the decoder: True for those that are hidden.

        Shapes:
            embedded: (B, T, H). padding: (B, T), bool. sources: (B, S, H). sources_padding:
            (B, S), bool. Returns: (B, T, H).
        """
        hidden = self._with_positions(embedded)
        if self.scale != 1:
            hidden = hidden * self.scale
        hidden = self.input_dropouts(hidden)
        bias = None
        if self.position_bias is not None:
            bias = self.position_bias(embedded.shape[1], embedded.device)
        visible = Visible(causal=self.is_decoder, padding=padding, bias=bias)
        sources_visible = Visible(causal=False, padding=sources_padding)
        for layer in self.layers:
            hidden = layer(hidden, visible, sources, sources_visible)
        states: Tensor = self.output_dropout(self.final_norm(hidden))
        return states

    def _with_positions(self, embedded: Tensor) -> Tensor:
        positions = torch.arange(embedded.shape[1], device=embedded.device)
        if self.position_embeddings is not None:
            added: Tensor = embedded + self.position_embeddings(positions)
            return added
        if self.settings.position_embedding_type == "fixed":
            return embedded + fixed_positions(positions, embedded.shape[-1]).to(embedded.dtype)
        return embedded


def draw(module: nn.Embedding | nn.Linear, initializer: Initializer) -> None:
    """Initialize the weight of a module without bias."""
    initializer(module.weight)
