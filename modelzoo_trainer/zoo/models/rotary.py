"""Rotary position embedding (RoPE): rotates queries and keys by an angle proportional to position.

Dimension letters: B batch, T positions, R rotary dimensions of a head, D head dimension.
Dimension k is paired with k + R/2 (the layout of the published Llama weights).
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelzoo_trainer.zoo.models.rotary_scaling import LinearScaling, Scaling


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """The angles of a rotary embedding; it has no tensors, hence no device."""

    rotary_dim: int  # number of rotated dimensions, even
    theta: float  # base of the wavelengths
    scaling: Scaling = field(default_factory=LinearScaling)  # default: none

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of positions, times the magnitude of the scaling.

        They are computed on use: a buffer could be corrupted by a checkpoint, a cast or a move
        from the meta device.

        Shapes:
            positions: (T,), or (B, T) if sequences differ; integer.
            Returns: twice (T, R) or (B, 1, T, R), float32: either broadcasts over heads.
        """
        device = positions.device
        exponents = torch.arange(0, self.rotary_dim, 2, device=device, dtype=torch.float32)
        frequencies = torch.exp(exponents * (-math.log(self.theta) / self.rotary_dim))
        frequencies = self.scaling.scaled(frequencies, self.theta)
        angles = positions.float()[..., None] * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        if positions.dim() == 2:
            angles = angles[:, None]
        cosines, sines, factor = angles.cos(), angles.sin(), self.scaling.magnitude
        return (cosines, sines) if factor == 1 else (cosines * factor, sines * factor)


def rotate(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate the first R dimensions of every head by the angle of its position.

    Shapes:
        states: (..., T, D), with D >= R. cosines, sines: (T, R), or (B, 1, T, R) if states are
        (B, N, T, D) with N heads. Returns: as states.
    """
    rotary_dim = cosines.shape[-1]
    turning = states[..., :rotary_dim]
    first, second = turning.chunk(2, dim=-1)
    quarter = torch.cat((-second, first), dim=-1)
    turned = (turning * cosines + quarter * sines).to(states.dtype)
    if rotary_dim == states.shape[-1]:
        return turned
    return torch.cat((turned, states[..., rotary_dim:]), dim=-1)
