"""Scaling of rotary positions to contexts longer than in pre-training.

Frequencies are the angles in radians per position, w_i = theta ** (-2i / R) with i < R / 2. Fields
of the classes are named like the keys of `pos_scaling_extra_args`.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Final, Literal, Protocol, get_type_hints

import torch
from annotated_types import Gt
from torch import Tensor

from modelzoo_trainer.base.constraints import FiniteFloat, FinitePositiveFloat, Flag, check
from modelzoo_trainer.errors import ConfigError, suggest

ScalingType = Literal["linear", "llama3", "yarn", "YaRN", "longrope"]
Length = Annotated[float, Gt(1)]
_ARGUMENT: Final = "pos_scaling_extra_args"


class Scaling(Protocol):
    """How the frequencies change, and what cosines and sines are multiplied by."""

    @property
    def magnitude(self) -> float:
        """The factor on cosines and sines; scores are multiplied by its square."""

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        """Return the changed frequencies, (R / 2,)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Position interpolation: every position is divided by `factor`."""

    factor: float = 1.0

    @property
    def magnitude(self) -> float:
        """See `Scaling`."""
        return 1.0

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        """See `Scaling`."""
        return frequencies / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Only long wavelengths are stretched, as in Llama 3.1.

    With L = `original_max_position_embeddings`, wavelengths above L / `low_freq_factor` are
    multiplied by `factor`, those below L / `high_freq_factor` stay.
    """

    factor: float
    low_freq_factor: FinitePositiveFloat = 1.0
    high_freq_factor: FinitePositiveFloat = 4.0
    original_max_position_embeddings: Length = 8192

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"{_ARGUMENT}: high_freq_factor ({self.high_freq_factor}) must be larger than "
                f"low_freq_factor ({self.low_freq_factor})."
            )

    @property
    def magnitude(self) -> float:
        """See `Scaling`."""
        return 1.0

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        """See `Scaling`."""
        turns = frequencies * (self.original_max_position_embeddings / (2 * math.pi))
        spread = self.high_freq_factor - self.low_freq_factor
        share_kept = ((turns - self.low_freq_factor) / spread).clamp(0, 1)
        return torch.lerp(frequencies / self.factor, frequencies, share_kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al., 2023, arXiv:2309.00071).

    Frequencies with more than `beta_fast` turns over the original length stay, those with fewer
    than `beta_slow` are divided by `factor`, with a linear ramp over the dimensions in between.
    """

    factor: float
    original_max_position_embeddings: Length
    beta_fast: FinitePositiveFloat = 32.0
    beta_slow: FinitePositiveFloat = 1.0
    extrapolation_factor: FiniteFloat = 1.0
    mscale_a: FiniteFloat = 0.1
    mscale_b: FiniteFloat = 1.0
    truncate: Flag = True

    @property
    def magnitude(self) -> float:
        """See `Scaling`."""
        return 1.0 if self.factor <= 1 else self.mscale_a * math.log(self.factor) + self.mscale_b

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        """See `Scaling`."""
        num = frequencies.shape[0]
        low, high = (
            num
            * math.log(self.original_max_position_embeddings / (2 * math.pi * turns))
            / math.log(theta)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * num - 1)
        high = high + 0.001 if low == high else high
        dims = torch.arange(num, device=frequencies.device, dtype=torch.float32)
        share_kept = 1 - ((dims - low) / (high - low)).clamp(0, 1)
        return torch.lerp(
            frequencies / self.factor, frequencies, share_kept * self.extrapolation_factor
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (Ding et al., 2024, arXiv:2402.13753): each frequency has its own divisor.

    They come from `long_factor` if `max_length` exceeds the original length, whatever the length
    of a batch, else from `short_factor`.
    """

    max_length: int
    original_max_position_embeddings: Length
    long_factor: list[FinitePositiveFloat]
    short_factor: list[FinitePositiveFloat]
    long_mscale: FinitePositiveFloat | None = None
    short_mscale: FinitePositiveFloat | None = None
    attention_factor: FinitePositiveFloat | None = None

    @property
    def is_long(self) -> bool:
        """Whether the model is for more than the original length."""
        return self.max_length > self.original_max_position_embeddings

    @property
    def magnitude(self) -> float:
        """See `Scaling`."""
        own = self.long_mscale if self.is_long else self.short_mscale
        for given in (own, self.attention_factor):
            if given is not None:
                return given
        if not self.is_long:
            return 1.0
        original = self.original_max_position_embeddings
        return math.sqrt(1 + math.log(self.max_length / original) / math.log(original))

    def scaled(self, frequencies: Tensor, theta: float) -> Tensor:
        """See `Scaling`."""
        divisors = self.long_factor if self.is_long else self.short_factor
        return frequencies / torch.tensor(divisors, device=frequencies.device, dtype=torch.float32)


_CLASSES: Final[Mapping[str, Any]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "YaRN": YarnScaling,
    "longrope": LongRopeScaling,
}
_NOT_EXTRA: Final = ("factor", "max_length")


def read_scaling(
    kind: ScalingType,
    factor: float,
    extra: Mapping[str, Any],
    *,
    rotary_dim: int,
    theta: float,
    max_length: int,
) -> Scaling:
    """Return the scaling for settings.

    Args:
        kind: `pos_scaling_type`.
        factor: `pos_scaling_factor`.
        extra: `pos_scaling_extra_args`.
        rotary_dim: Number of rotated dimensions.
        theta: Base of the wavelengths.
        max_length: Maximum sequence length.

    Raises:
        ConfigError: If a key is unknown, missing, invalid, or not one of this type.
    """
    keys = {one.name: one for one in fields(_CLASSES[kind]) if one.name not in _NOT_EXTRA}
    for key in extra:
        if key not in keys:
            raise ConfigError(_unknown(key, kind, list(keys)))
    missing = [key for key, one in keys.items() if one.default is MISSING and key not in extra]
    if missing:
        raise ConfigError(
            f"pos_scaling_type {kind!r} requires {', '.join(missing)} in {_ARGUMENT}, which has "
            f"{', '.join(extra) or 'no keys'}."
        )
    hints = get_type_hints(_CLASSES[kind], include_extras=True)
    for key, value in extra.items():
        check(f"{_ARGUMENT}.{key}", value, hints[key])
    if kind == "longrope":
        if factor != 1:
            raise ConfigError(
                f"pos_scaling_factor ({factor}) has no effect with pos_scaling_type {kind!r}: "
                f"its factors are lists. Remove it."
            )
        _check_lengths(extra, rotary_dim // 2)
        return LongRopeScaling(max_length=max_length, **extra)
    if _CLASSES[kind] is YarnScaling and theta <= 1:
        raise ConfigError(f"rope_theta is {theta}; pos_scaling_type {kind!r} requires more than 1.")
    made: Scaling = _CLASSES[kind](factor=factor, **extra)
    return made


def _unknown(key: str, kind: str, keys: list[str]) -> str:
    others = [
        other
        for other, cls in _CLASSES.items()
        if key in {one.name for one in fields(cls)} - {*_NOT_EXTRA}
    ]
    if others:
        return (
            f"{_ARGUMENT}.{key} has no effect with pos_scaling_type {kind!r}, only with "
            f"{' or '.join(map(repr, others))}. Remove it, or change pos_scaling_type."
        )
    advice = suggest(key, keys) if keys else f"pos_scaling_type {kind!r} has none; remove it."
    return f"{_ARGUMENT}.{key}: no such setting. {advice}"


def _check_lengths(extra: Mapping[str, Any], expected: int) -> None:
    for key in ("long_factor", "short_factor"):
        if len(extra[key]) != expected:
            raise ConfigError(
                f"{_ARGUMENT}.{key} has {len(extra[key])} numbers, but there are {expected} "
                f"frequencies (rotary_dim / 2)."
            )
