"""Parts of diffusion transformers: levels of noise, the time embedding, layers, the head.

https://arxiv.org/abs/2212.09748

Dimension letters: B batch, C channels, P patches, H hidden size, R rows and K columns of patches.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from modelzoo_trainer.zoo.models.attention import Attention
from modelzoo_trainer.zoo.models.bert.encoder import draw_weight
from modelzoo_trainer.zoo.models.context import Context
from modelzoo_trainer.zoo.models.decoder_layers import reset_plain
from modelzoo_trainer.zoo.models.feed_forward import FeedForward, Nonlinearity, activation_of
from modelzoo_trainer.zoo.models.initializers import Initializer
from modelzoo_trainer.zoo.models.vision.settings import VisionSettings

_REFERENCE_STEPS = 1000  # of the schedule whose betas are given


class NoiseSchedule(nn.Module):
    """Add noise to latents: signal[t] * latents + noise[t] * noise.

    With betas that grow linearly from `beta_start` * 1000 / S to `beta_end` * 1000 / S over the S
    timesteps, and a[t] the product of 1 - beta up to t: signal = sqrt(a), noise = sqrt(1 - a).
    Both are buffers that are not saved.

    Source: Ho et al. 2020, https://arxiv.org/abs/2006.11239, equation 4; for other numbers of
    timesteps, Nichol and Dhariwal 2021, https://arxiv.org/abs/2102.09672.

    Args:
        num_steps: Number of timesteps.
        beta_start: The first beta for 1000 timesteps.
        beta_end: The last one for 1000 timesteps.
    """

    signal: Tensor  # (S,), float32
    noise: Tensor  # (S,), float32

    def __init__(self, num_steps: int, beta_start: float, beta_end: float) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.bounds = beta_start, beta_end
        for name in ("signal", "noise"):
            self.register_buffer(name, torch.empty(num_steps), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the buffers."""
        first, last = (beta * _REFERENCE_STEPS / self.num_steps for beta in self.bounds)
        betas = torch.linspace(first, last, self.num_steps, dtype=torch.float64, device="cpu")
        kept = (1 - betas).cumprod(dim=0)
        with torch.no_grad():
            self.signal.copy_(kept.sqrt())
            self.noise.copy_((1 - kept).sqrt())

    def forward(self, latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return the noisy latents.

        Shapes:
            latents, noise: (B, C, height, width) floating. timesteps: (B,) integer, from 0 to
            S - 1. Returns: as latents, at least float32.
        """
        signal, level = (
            table[timesteps][:, None, None, None] for table in (self.signal, self.noise)
        )
        return signal * latents + level * noise


class TimestepEmbedding(nn.Module):
    """Embed timesteps: sines, then two layers with an activation between them.

    `num_channels`: of the sines, even.
    """

    def __init__(self, num_channels: int, size: int, nonlinearity: Nonlinearity) -> None:
        super().__init__()
        self.num_channels = num_channels
        self.in_proj = nn.Linear(num_channels, size)
        self.out_proj = nn.Linear(size, size)
        self.activation = activation_of(nonlinearity)

    def draw(self, initializer: Initializer) -> None:
        """Initialize both layers."""
        draw_weight(self.in_proj, initializer)
        draw_weight(self.out_proj, initializer)

    def forward(self, timesteps: Tensor) -> Tensor:
        """Return the embeddings.

        Shapes:
            timesteps: (B,) integer. Returns: (B, H).
        """
        waves = timestep_waves(timesteps, self.num_channels)
        hidden = self.activation(self.in_proj(waves.to(self.in_proj.weight.dtype)))
        embedded: Tensor = self.out_proj(hidden)
        return embedded


def timestep_waves(timesteps: Tensor, num_channels: int) -> Tensor:
    """Return cosines, then sines, of t * 10000^(-i / (channels / 2)).

    Source: Peebles and Xie 2023, https://arxiv.org/abs/2212.09748, after Vaswani et al. 2017,
    https://arxiv.org/abs/1706.03762, section 3.5.

    Shapes:
        timesteps: (B,) integer. Returns: (B, `num_channels`), float32.
    """
    half = num_channels // 2
    steps = torch.arange(half, device=timesteps.device, dtype=torch.float32)
    angles = timesteps.float()[:, None] * torch.exp(-math.log(10000.0) / half * steps)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class AdaptiveNorm(nn.Module):
    """Normalize states; scale and shift them by linear functions of the condition.

    norm(h) * (1 + scale(c)) + shift(c)

    Source: Peebles and Xie 2023, https://arxiv.org/abs/2212.09748, section 3.2 (adaLN-Zero).
    """

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size, eps=epsilon, elementwise_affine=False)
        self.scale = nn.Linear(size, size)
        self.shift = nn.Linear(size, size)

    def reset_parameters(self) -> None:
        """Initialize both functions to 0."""
        for part in (self.scale, self.shift):
            draw_zeros(part)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        """Return the states, of the same shape.

        Shapes:
            hidden: (B, P, H). condition: (B, H).
        """
        scaled = self.norm(hidden) * (1 + self.scale(condition)[:, None])
        shifted: Tensor = scaled + self.shift(condition)[:, None]
        return shifted


class DitLayer(nn.Module):
    """Attention, then a feed-forward network, each with a residual, a gate and an adaptive norm.

    h = h + gate(c) * attention(norm(h, c)); h = h + gate(c) * ffn(norm(h, c)).

    Gates, and scale and shift of the norms, are linear functions of the condition that start at 0,
    so that a new layer changes nothing.
    """

    cast_inputs: ClassVar[tuple[str, ...]] = ("hidden", "condition")

    def __init__(self, settings: VisionSettings) -> None:
        super().__init__()
        size, epsilon = settings.hidden_size, settings.layer_norm_epsilon
        self.attention_norm = AdaptiveNorm(size, epsilon)
        self.attention = Attention(settings.for_attention())
        self.attention_gate = nn.Linear(size, size)
        self.ffn_norm = AdaptiveNorm(size, epsilon)
        self.ffn = FeedForward(
            size, settings.filter_size, settings.nonlinearity, settings.use_ffn_bias
        )
        self.ffn_gate = nn.Linear(size, size)
        self.dropout = nn.Dropout(settings.dropout_rate)

    def draw(self, attention: Initializer, ffn: Initializer) -> None:
        """Initialize the projections; gates, norms and biases are 0."""
        for part, initializer in ((self.attention, attention), (self.ffn, ffn)):
            for module in part.modules():
                if isinstance(module, nn.Linear):
                    initializer(module.weight)
                    reset_plain(module)
        for norm in (self.attention_norm, self.ffn_norm):
            norm.reset_parameters()
        for gate in (self.attention_gate, self.ffn_gate):
            draw_zeros(gate)

    def forward(self, hidden: Tensor, condition: Tensor, context: Context) -> Tensor:
        """Return the states after this layer, of the same shape.

        Shapes:
            hidden: (B, P, H). condition: (B, H).
        """
        attended = self.attention(self.attention_norm(hidden, condition), context)
        hidden = hidden + self.attention_gate(condition)[:, None] * self.dropout(attended)
        narrow = self.dropout(self.ffn(self.ffn_norm(hidden, condition)))
        added: Tensor = hidden + self.ffn_gate(condition)[:, None] * narrow
        return added


class NoiseHead(nn.Module):
    """Predict the noise of each patch from its state, and put the patches together.

    The projection is a transposed convolution, or a linear layer to the values of a patch in the
    order row, column, channel; both compute the same, but that the former has a bias per channel.

    Args:
        settings: Of the model; `num_channels` are the channels of the latents.
        is_convolution: Whether it is a convolution.
    """

    def __init__(self, settings: VisionSettings, *, is_convolution: bool) -> None:
        super().__init__()
        size, channels = settings.hidden_size, settings.num_channels
        self.grid, self.patch = settings.grid, settings.patch
        self.norm = AdaptiveNorm(size, settings.layer_norm_epsilon)
        self.projection: nn.ConvTranspose2d | nn.Linear
        if is_convolution:
            self.projection = nn.ConvTranspose2d(
                size, channels, kernel_size=self.patch, stride=self.patch
            )
        else:
            self.projection = nn.Linear(size, self.patch[0] * self.patch[1] * channels)

    def draw(self, initializer: Initializer) -> None:
        """Initialize the projection; the norm and the bias are 0."""
        self.norm.reset_parameters()
        initializer(self.projection.weight)
        assert self.projection.bias is not None
        nn.init.zeros_(self.projection.bias)

    def forward(self, hidden: Tensor, condition: Tensor) -> Tensor:
        """Return the predicted noise.

        Shapes:
            hidden: (B, P, H). condition: (B, H). Returns: (B, C, height, width).
        """
        hidden = self.norm(hidden, condition)
        if isinstance(self.projection, nn.ConvTranspose2d):
            image: Tensor = self.projection(torch.unflatten(hidden.transpose(1, 2), -1, self.grid))
            return image
        values = torch.unflatten(self.projection(hidden), -1, (*self.patch, -1))
        cut = torch.unflatten(values, 1, self.grid)  # (B, R, K, h, w, C)
        return cut.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def draw_zeros(module: nn.Linear) -> None:
    """Set the weight and the bias to 0."""
    nn.init.zeros_(module.weight)
    reset_plain(module)
