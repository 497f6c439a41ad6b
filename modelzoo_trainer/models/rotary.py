"""Rotary position embedding (RoPE): rotates queries and keys by an angle proportional to position.

Dimension letters: B batch, T positions, R rotary dimensions of a head, D head dimension.
Dimension k is paired with k + R/2 (the layout of the published Llama weights).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ScalingType = Literal["linear", "llama3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """The angles of a rotary embedding; it has no tensors, hence no device."""

    rotary_dim: int  # number of rotated dimensions, even
    theta: float  # base of the wavelengths
    # `linear` divides every position by `scaling_factor`; `llama3` stretches only the long
    # wavelengths
    scaling_type: ScalingType = "linear"
    scaling_factor: float = 1.0  # ratio of the context length to that of pre-training, >= 1
    # `llama3`: wavelengths above the original length over this are stretched fully
    low_freq_factor: float = 1.0
    high_freq_factor: float = (
        4.0  # `llama3`: those below the original length over this are unchanged
    )
    original_length: int = 8192  # `llama3`: the context length of pre-training

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of all positions.

        They are computed on use: a buffer could be corrupted by a checkpoint, a cast or a move
        from the meta device.

        Shapes:
            positions: (T,), or (B, T) if they differ between rows. Returns: twice (T, R) or
            (B, 1, T, R), float32.
        """
        exponents = torch.arange(
            0, self.rotary_dim, 2, device=positions.device, dtype=torch.float32
        )
        frequencies = torch.exp(exponents * (-math.log(self.theta) / self.rotary_dim))
        angles = positions[..., None].float() * self._scaled(frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        if positions.dim() > 1:
            angles = angles[:, None]  # the same for all heads
        return angles.cos(), angles.sin()

    def _scaled(self, frequencies: Tensor) -> Tensor:
        slow = frequencies / self.scaling_factor
        if self.scaling_type == "linear":
            return slow
        turns = frequencies * (self.original_length / (2 * math.pi))
        spread = self.high_freq_factor - self.low_freq_factor
        share_kept = ((turns - self.low_freq_factor) / spread).clamp(0, 1)
        return torch.lerp(slow, frequencies, share_kept)


def rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the first R dimensions of every head by the angle of its position.

    Shapes:
        states: (..., T, D), with D >= R. cosines, sines: as of `angles`. Returns: as states.
    """
    rotary_dim = cosines.shape[-1]
    turning = states[..., :rotary_dim]
    first, second = turning.chunk(2, dim=-1)
    quarter = torch.cat((-second, first), dim=-1)
    turned = (turning * cosines + quarter * sines).to(states.dtype)
    if rotary_dim == states.shape[-1]:
        return turned
    return torch.cat((turned, states[..., rotary_dim:]), dim=-1)
