"""The encoder of vision transformers: every token sees all tokens of its image.

https://arxiv.org/abs/2010.11929

    patches + class token + positions -> dropout (-> norm) -> layers (-> norm)

Dimension letters: B batch, C channels, P patches, T tokens, H hidden size.
"""

from collections.abc import Iterator
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from modelzoo_trainer.zoo.models.attention import Attention
from modelzoo_trainer.zoo.models.bert.encoder import Step, draw_weight
from modelzoo_trainer.zoo.models.context import Context
from modelzoo_trainer.zoo.models.decoder_layers import reset_plain
from modelzoo_trainer.zoo.models.feed_forward import GATED, FeedForward, activation_of
from modelzoo_trainer.zoo.models.initializers import Initializer
from modelzoo_trainer.zoo.models.visible import EVERYTHING
from modelzoo_trainer.zoo.models.vision.embeddings import ImageEmbedding
from modelzoo_trainer.zoo.models.vision.settings import VisionSettings


class LayerScale(nn.Module):
    """A trained factor per channel.

    Source: Touvron et al. 2021, https://arxiv.org/abs/2103.17239, section 2.
    """

    def __init__(self, size: int, value: float) -> None:
        super().__init__()
        self.value = value
        self.weight = nn.Parameter(torch.full((size,), value))

    def reset_parameters(self) -> None:
        """Initialize the factors."""
        nn.init.constant_(self.weight, self.value)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the scaled states, of the same shape."""
        return hidden * self.weight


class StochasticDepth(nn.Module):
    """Drop the output of a branch in training, per batch or per image.

    The probability is a buffer that is not saved, so that layers of different rates, also of 0, are
    compiled once.

    `rate`: probability of it; kept outputs are divided by 1 - `rate`.
    `by_row`: whether each image is drawn on its own.
    """

    keep: Tensor  # 1 - rate, ()

    def __init__(self, rate: float, *, by_row: bool) -> None:
        super().__init__()
        self.rate = rate
        self.by_row = by_row
        self.register_buffer("keep", torch.tensor(1 - rate, dtype=torch.float32), persistent=False)

    def reset_parameters(self) -> None:
        """Fill the buffer."""
        nn.init.constant_(self.keep, 1 - self.rate)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the states, or zeros, of the same shape."""
        if not self.training:
            return hidden
        num = hidden.shape[0] if self.by_row else 1
        kept = torch.bernoulli(self.keep.expand(num, 1, 1))
        return hidden * (kept / self.keep).to(hidden.dtype)


class VisionLayer(nn.Module):
    """Attention, then a feed-forward network, each with a residual and a normalization.

    With f = drop(scale(dropout(branch))): h = h + f(attention(norm(h))); h = h + f(ffn(norm(h))).
    Without `norm_first`: h = norm(h + f(attention(h))); h = norm(h + f(ffn(h))).

    `drop_rate`: of stochastic depth.
    """

    cast_inputs: ClassVar[tuple[str, ...]] = ("hidden",)

    def __init__(self, settings: VisionSettings, drop_rate: float) -> None:
        super().__init__()
        size, epsilon = settings.hidden_size, settings.layer_norm_epsilon
        self.norm_first = settings.norm_first
        self.attention = Attention(settings.for_attention())
        self.attention_norm = nn.LayerNorm(size, eps=epsilon)
        self.ffn = FeedForward(
            size, settings.filter_size, settings.nonlinearity, settings.use_ffn_bias
        )
        self.ffn_norm = nn.LayerNorm(size, eps=epsilon)
        self.dropout = nn.Dropout(settings.dropout_rate)
        value = settings.layerscale_value
        self.attention_scale = None if value is None else LayerScale(size, value)
        self.ffn_scale = None if value is None else LayerScale(size, value)
        self.drop_path: StochasticDepth | None = None
        if settings.stochastic_depth_drop_prob > 0:
            by_row = settings.stochastic_depth_mode == "row"
            self.drop_path = StochasticDepth(drop_rate, by_row=by_row)

    def draw(self, attention: Initializer, ffn: Initializer) -> None:
        """Initialize the projections; reset norms, biases, factors and buffers."""
        for part, initializer in ((self.attention, attention), (self.ffn, ffn)):
            for module in part.modules():
                if isinstance(module, nn.Linear):
                    initializer(module.weight)
        for module in self.modules():
            if isinstance(module, LayerScale | StochasticDepth):
                module.reset_parameters()
            reset_plain(module)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """Return the states after this layer, of the same shape."""
        if self.norm_first:
            attended = self.attention(self.attention_norm(hidden), context)
            hidden = hidden + self._branch(attended, self.attention_scale)
            return hidden + self._branch(self.ffn(self.ffn_norm(hidden)), self.ffn_scale)
        attended = self.attention(hidden, context)
        hidden = self.attention_norm(hidden + self._branch(attended, self.attention_scale))
        states: Tensor = self.ffn_norm(hidden + self._branch(self.ffn(hidden), self.ffn_scale))
        return states

    def _branch(self, output: Tensor, scale: LayerScale | None) -> Tensor:
        output = self.dropout(output)
        if scale is not None:
            output = scale(output)
        if self.drop_path is not None:
            output = self.drop_path(output)
        return output


class ImageStates(NamedTuple):
    """What the encoder returns.

    Shapes:
        hidden: (B, T, H), the class token first, if the model has one. cls: (B, H).
        patches: (B, P, H). earlier: each (B, T, H).
    """

    hidden: Tensor  # after the last layer and the final norm
    cls: Tensor | None  # of the class token
    patches: Tensor  # of the patches
    earlier: tuple[Tensor, ...]  # after the asked layers, without the final norm


class VisionEncoder(nn.Module):
    """A vision transformer without a head."""

    def __init__(self, settings: VisionSettings) -> None:
        super().__init__()
        self._settings = (settings,)  # in a tuple: the model, its parent, is no part of this
        size = settings.hidden_size
        self.embedding = ImageEmbedding(settings)
        self.layers = nn.ModuleList(VisionLayer(settings, rate) for rate in settings.drop_rates)
        self.final_norm: nn.LayerNorm | None = None
        if settings.use_final_layer_norm:
            self.final_norm = nn.LayerNorm(size, eps=settings.layer_norm_epsilon)
        self.pooler: nn.Linear | None = None
        if settings.use_encoder_pooler_layer:
            self.pooler = nn.Linear(size, size, bias=settings.use_ffn_bias)
        self._activate = activation_of(settings.pooler_nonlinearity or settings.nonlinearity)

    @property
    def settings(self) -> VisionSettings:
        """The settings."""
        return self._settings[0]

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Tensor parallelism: how layers are split, by module name patterns.

        The embedding of patches and the pooler are whole everywhere.
        """
        attention, ffn = "layers.*.attention.", "layers.*.ffn."
        plan = {f"{attention}{name}_proj": "colwise" for name in "qkv"}
        plan |= {f"{attention}o_proj": "rowwise"}
        plan |= {f"{ffn}up_proj": "colwise", f"{ffn}down_proj": "rowwise"}
        is_gated = self.settings.nonlinearity in GATED
        return plan | ({f"{ffn}gate_proj": "colwise"} if is_gated else {})

    def initial_steps(self) -> Iterator[Step]:
        """Yield the parts, each with the function that initializes it."""
        start = self.settings.initializers()
        yield from self.embedding.initial_steps()
        for layer in self.layers:
            assert isinstance(layer, VisionLayer)
            yield layer, partial(layer.draw, start["attention"], start["ffn"])
        if self.final_norm is not None:
            yield self.final_norm, self.final_norm.reset_parameters
        if self.pooler is not None:
            yield self.pooler, partial(draw_weight, self.pooler, start["pooler"])

    def forward(
        self, images: Tensor, masked: Tensor | None = None, after: tuple[int, ...] = ()
    ) -> ImageStates:
        """Return the states of the class token and of the patches.

        Args:
            images: Pixels, normalized as the data processor does.
            masked: Which patches are replaced by the token for masked ones; None = none.
            after: Layers whose states are returned, too, from 0; negative ones count from the end.

        Shapes:
            images: (B, C, height, width) floating. masked: (B, P) bool.

        Cost:
            No host read, no data-dependent shape.

        Raises:
            ConfigError: If the images do not fit the model.
        """
        hidden = self.embedding(images, masked)
        context = Context(angles=None, visible=(EVERYTHING, EVERYTHING))
        asked = {layer % len(self.layers) for layer in after}
        kept: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, context)
            if index in asked:
                kept[index] = hidden
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        has_cls = self.settings.prepend_cls_token
        return ImageStates(
            hidden=hidden,
            cls=hidden[:, 0] if has_cls else None,
            patches=hidden[:, int(has_cls) :],
            earlier=tuple(kept[layer % len(self.layers)] for layer in after),
        )

    def states_after(self, images: Tensor, layer: int) -> Tensor:
        """Return the states after a layer, without the final norm; later layers do not run.

        Args:
            images: As of `forward`.
            layer: From 0; negative ones count from the end.

        Shapes:
            images: (B, C, height, width) floating. Returns: (B, T, H).
        """
        hidden: Tensor = self.embedding(images)
        context = Context(angles=None, visible=(EVERYTHING, EVERYTHING))
        for index in range(layer % len(self.layers) + 1):
            hidden = self.layers[index](hidden, context)
        return hidden

    def pool(self, state: Tensor) -> Tensor:
        """Return the state of the class token, after the pooler if there is one.

        Shapes:
            state: (B, H). Returns: (B, H).
        """
        return state if self.pooler is None else self._activate(self.pooler(state))
