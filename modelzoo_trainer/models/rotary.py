"""Rotary position embedding: queries and keys are turned by an angle that grows with position.

Dimension letters: T positions, R rotary dimensions of a head, D dimensions of a head.
Dimension k is paired with k + R/2 (the layout of the Llama weights that are published).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

ScalingType = Literal["linear", "llama3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """The angles of a rotary embedding; has no tensors, so it lives on no device."""

    rotary_dim: int  # number of dimensions that turn, even; the rest of a head stays
    theta: float  # base of the wavelengths
    # `linear` divides every position by `scaling_factor`; `llama3` slows only the long wavelengths
    # down
    scaling_type: ScalingType = "linear"
    scaling_factor: float = 1.0  # by how much longer the context is than in pre-training, >= 1
    # `llama3`: wavelengths above the original length over this are slowed down fully
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0  # `llama3`: those below the original length over this are kept
    original_length: int = 8192  # `llama3`: the context length of pre-training

    def angles(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of all positions.

        Computed where it is used: there is no buffer that a checkpoint, a move from the meta
        device or a cast could spoil.

        Shapes:
            Returns: twice (T, R), float32.
        """
        exponents = torch.arange(0, self.rotary_dim, 2, device=device, dtype=torch.float32)
        frequencies = torch.exp(exponents * (-math.log(self.theta) / self.rotary_dim))
        positions = torch.arange(length, device=device, dtype=torch.float32)
        angles = torch.outer(positions, self._scaled(frequencies))
        angles = torch.cat((angles, angles), dim=-1)
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
    """Turn the first R dimensions of every head by the angle of its position.

    Shapes:
        states: (..., T, D), with D >= R. cosines, sines: (T, R). Returns: as states.
    """
    rotary_dim = cosines.shape[-1]
    turning = states[..., :rotary_dim]
    first, second = turning.chunk(2, dim=-1)
    quarter = torch.cat((-second, first), dim=-1)
    turned = (turning * cosines + quarter * sines).to(states.dtype)
    if rotary_dim == states.shape[-1]:
        return turned
    return torch.cat((turned, states[..., rotary_dim:]), dim=-1)
