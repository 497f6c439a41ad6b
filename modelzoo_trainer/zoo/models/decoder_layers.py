"""The layer of the GPT-2 class of decoders; the layer of the GPT-J class builds on it."""

from typing import ClassVar

from torch import Tensor, nn

from modelzoo_trainer.zoo.models.attention import Attention
from modelzoo_trainer.zoo.models.context import Context
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings
from modelzoo_trainer.zoo.models.experts import MixtureOfExperts
from modelzoo_trainer.zoo.models.feed_forward import FeedForward, make_norm
from modelzoo_trainer.zoo.models.parametrization import DecoderInitializers

LayerOutput = Tensor | tuple[Tensor, Tensor, Tensor | None]
"""The states; with experts, also `shares` and `probabilities` of the routing."""


class DecoderLayer(nn.Module):
    """Attention, then a feed-forward network, both with pre-normalization and a residual.

    h = h + attention(norm(h));  h = h + ffn(norm(h))
    With sandwich norms: h = h + norm(attention(norm(h)));  h = h + norm(ffn(norm(h)))

    The feed-forward network may be a mixture of experts.

    `is_windowed`: whether its attention has the sliding window.
    """

    # With sharded parameters of another dtype, only the states are cast: angles and biases need
    # float32.
    cast_inputs: ClassVar[tuple[str, ...]] = ("hidden",)

    def __init__(self, settings: DecoderSettings, *, is_windowed: bool = False) -> None:
        super().__init__()
        size, epsilon = settings.hidden_size, settings.layer_norm_epsilon
        self.attention_norm = make_norm(settings.norm_type, size, epsilon)
        self.attention = Attention(settings, is_windowed=is_windowed)
        self.attention_post_norm: nn.Module | None = None
        self.ffn_norm = make_norm(settings.norm_type, size, epsilon)
        self.ffn = make_ffn(settings)
        self.ffn_post_norm: nn.Module | None = None
        if settings.norm_first_sandwich:
            self.attention_post_norm = make_norm(settings.norm_type, size, epsilon)
            self.ffn_post_norm = make_norm(settings.norm_type, size, epsilon)
        self.dropout = nn.Dropout(settings.dropout_rate)

    def draw(self, start: DecoderInitializers) -> None:
        """Initialize the projections; reset norms and biases."""
        for projection in (self.attention.q_proj, self.attention.k_proj, self.attention.v_proj):
            start.projection(projection.weight)
        if isinstance(self.ffn, FeedForward):
            for widening in (self.ffn.up_proj, self.ffn.gate_proj):
                if widening is not None:
                    start.ffn_input(widening.weight)
        start.attention_output(self.attention.o_proj.weight)
        if isinstance(self.ffn, FeedForward):
            start.ffn_output(self.ffn.down_proj.weight)
        else:
            self.ffn.draw(start.router, start.ffn_input, start.ffn_output)
        for module in self.modules():
            reset_plain(module)

    def forward(
        self, hidden: Tensor, context: Context, factor: Tensor | None = None
    ) -> LayerOutput:
        """Return the states after this layer, of the same shape; `factor`: of its scores."""
        attended = self.dropout(self.attention(self.attention_norm(hidden), context, factor))
        if self.attention_post_norm is not None:
            attended = self.attention_post_norm(attended)
        hidden = hidden + attended
        return self.add_ffn(hidden, self.ffn_norm(hidden), context)

    def add_ffn(self, hidden: Tensor, normed: Tensor, context: Context) -> LayerOutput:
        """Return `hidden` plus the output of the feed-forward network, or of the experts."""
        if isinstance(self.ffn, MixtureOfExperts):  # with dropout in each expert
            assert context.token_ids is not None
            output, routing = self.ffn(normed, context.token_ids, context.counted, context.places)
            if self.ffn_post_norm is not None:
                output = self.ffn_post_norm(output)
            return hidden + output, routing.shares, routing.probabilities
        output = self.dropout(self.ffn(normed))
        if self.ffn_post_norm is not None:
            output = self.ffn_post_norm(output)
        added: Tensor = hidden + output
        return added


def make_ffn(settings: DecoderSettings) -> FeedForward | MixtureOfExperts:
    """Return the feed-forward network of a layer, or the experts."""
    size, width = settings.hidden_size, settings.filter_size
    experts, nonlinearity, use_bias = settings.experts, settings.nonlinearity, settings.use_ffn_bias
    if experts is None:
        return FeedForward(size, width, nonlinearity, use_bias)
    return MixtureOfExperts(experts, size, width, nonlinearity, use_bias, settings.dropout_rate)


def reset_plain(module: nn.Module) -> None:
    """Initialize parameters that need no random numbers: norms and biases of projections."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        module.reset_parameters()
    elif isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
