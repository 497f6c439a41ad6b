"""Scaled rotary positions against the published formulas, written out, and transformers."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.rotary import Rotary
from modelzoo_trainer.zoo.models.rotary_scaling import ScalingType, read_scaling

DIM, THETA = 16, 10000.0
LONG = [1.0 + 0.5 * idx for idx in range(DIM // 2)]
SHORT = [1.0 + 0.1 * idx for idx in range(DIM // 2)]
LONGROPE = {"original_max_position_embeddings": 64, "long_factor": LONG, "short_factor": SHORT}


def make(kind: ScalingType, factor: float = 1.0, *, length: int = 256, **extra: Any) -> Rotary:
    scaling = read_scaling(kind, factor, extra, rotary_dim=DIM, theta=THETA, max_length=length)
    return Rotary(rotary_dim=DIM, theta=THETA, scaling=scaling)


def turns(rotary: Rotary, position: int = 1) -> tuple[list[float], list[float]]:
    """Return the angles of a position, below pi, and their magnitudes."""
    cosines, sines = rotary.angles(torch.tensor([position]))
    half = DIM // 2
    assert torch.equal(cosines[..., :half], cosines[..., half:])
    assert torch.equal(sines[..., :half], sines[..., half:])
    angles, sizes = torch.atan2(sines, cosines), torch.hypot(sines, cosines)
    return angles[0, :half].tolist(), sizes[0, :half].tolist()


def frequency(idx: int) -> float:
    return float(THETA ** (-2 * idx / DIM))


def test_linear_scaling_stretches_positions() -> None:
    angles, sizes = turns(make("linear", 4.0))

    assert angles == pytest.approx([frequency(idx) / 4 for idx in range(8)], rel=1e-5)
    assert sizes == pytest.approx([1.0] * 8)


def test_llama3_scaling_keeps_short_waves_and_slows_long_ones() -> None:
    angles, _ = turns(make("llama3", 8.0, original_max_position_embeddings=128))

    wavelengths = [2 * math.pi / frequency(idx) for idx in range(8)]
    expected = []
    for idx, wavelength in enumerate(wavelengths):
        smooth = min(max((128 / wavelength - 1) / 3, 0), 1)
        expected.append((1 - smooth) * frequency(idx) / 8 + smooth * frequency(idx))
    assert angles == pytest.approx(expected, rel=1e-5)
    assert angles[0] == pytest.approx(1.0)
    assert angles[7] == pytest.approx(frequency(7) / 8)
    assert any(128 / 4 < wavelength < 128 for wavelength in wavelengths)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"truncate": False},
        {"beta_fast": 8, "beta_slow": 2.0, "extrapolation_factor": 0.5},
        {"mscale_a": 0.2, "mscale_b": 0.9},
    ],
)
def test_yarn_is_its_formula(extra: dict[str, Any]) -> None:
    angles, sizes = turns(make("yarn", 4.0, original_max_position_embeddings=4096, **extra))

    fast, slow = extra.get("beta_fast", 32), extra.get("beta_slow", 1)

    def dim_of(num: float) -> float:
        return DIM * math.log(4096 / (2 * math.pi * num)) / (2 * math.log(THETA))

    low, high = dim_of(fast), dim_of(slow)
    if extra.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    expected = []
    for idx in range(8):
        ramp = min(max((idx - low) / (high - low), 0), 1)
        kept = (1 - ramp) * extra.get("extrapolation_factor", 1)
        expected.append(frequency(idx) / 4 * (1 - kept) + frequency(idx) * kept)
    assert angles == pytest.approx(expected, rel=1e-5)
    size = extra.get("mscale_a", 0.1) * math.log(4) + extra.get("mscale_b", 1)
    assert sizes == pytest.approx([size] * 8, rel=1e-5)
    assert 0 < low < high < 8  # some frequencies are kept, some changed, some between


def test_yarn_with_equal_bounds_and_without_a_factor_is_finite_and_plain() -> None:
    angles, sizes = turns(
        make(
            "YaRN",
            1.0,
            original_max_position_embeddings=512,
            beta_fast=9,
            beta_slow=9,
            truncate=False,
        )
    )
    assert angles == pytest.approx([frequency(idx) for idx in range(8)], rel=1e-5)
    assert sizes == pytest.approx([1.0] * 8)


@pytest.mark.parametrize(
    ("length", "extra", "divisors", "size"),
    [
        (256, {}, LONG, math.sqrt(1 + math.log(4) / math.log(64))),
        (64, {}, SHORT, 1.0),
        (256, {"attention_factor": 1.5}, LONG, 1.5),
        (256, {"attention_factor": 1.5, "long_mscale": 1.2, "short_mscale": 1.1}, LONG, 1.2),
        (64, {"attention_factor": 1.5, "long_mscale": 1.2, "short_mscale": 1.1}, SHORT, 1.1),
    ],
)
def test_longrope_is_its_formula(
    length: int, extra: dict[str, Any], divisors: list[float], size: float
) -> None:
    angles, sizes = turns(make("longrope", length=length, **LONGROPE, **extra))

    expected = [frequency(idx) / divisors[idx] for idx in range(8)]
    assert angles == pytest.approx(expected, rel=1e-5)
    assert sizes == pytest.approx([size] * 8, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "factor", "extra", "facts"),
    [
        ("linear", 2.0, {"beta_fast": 1.0}, ("beta_fast", "'linear'", "'yarn' or 'YaRN'")),
        ("linear", 2.0, {"beta": 1.0}, ("beta", "'linear'")),
        ("llama3", 2.0, {"low_freq": 1.0}, ("low_freq:", "Did you mean 'low_freq_factor'?")),
        ("llama3", 2.0, {"low_freq_factor": 4.0}, ("low_freq_factor (4.0)", "(4.0)")),
        ("yarn", 2.0, {"beta_fast": 8.0}, ("'yarn'", "original_max_position_embeddings")),
        ("yarn", 2.0, {"mscale": 1.0}, ("mscale", "Did you mean 'mscale_")),
        (
            "yarn",
            2.0,
            {"original_max_position_embeddings": 64, "truncate": "no"},
            ("pos_scaling_extra_args.truncate", "'no'"),
        ),
        ("yarn", 2.0, {"original_max_position_embeddings": 0}, ("original_max", "0")),
        ("longrope", 1.0, {}, ("original_max", "long_factor", "short_factor")),
        ("longrope", 2.0, LONGROPE, ("pos_scaling_factor (2.0)", "'longrope'")),
        ("longrope", 1.0, LONGROPE | {"long_factor": [1.0]}, ("long_factor has 1", "8")),
        ("longrope", 1.0, LONGROPE | {"short_factor": 2.0}, ("short_factor", "list", "2.0")),
        ("longrope", 1.0, LONGROPE | {"short_factor": [1.0, -2.0]}, ("short_factor[1]", "-2.0")),
    ],
)
def test_what_does_not_fit_the_type_is_refused(
    kind: ScalingType, factor: float, extra: dict[str, Any], facts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(kind, factor, **extra)
    assert [fact for fact in facts if fact not in str(caught.value)] == []


def test_yarn_needs_a_base_above_one() -> None:
    extra = {"original_max_position_embeddings": 64}
    with pytest.raises(ConfigError, match=r"rope_theta is 1.*'yarn'"):
        read_scaling("yarn", 2.0, extra, rotary_dim=8, theta=1, max_length=64)


def their_angles(kind: str, length: int, **rope: Any) -> tuple[Tensor, Tensor]:
    reason = "needs transformers"
    transformers = pytest.importorskip("transformers", reason=reason)
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama", reason=reason)
    config = transformers.LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        max_position_embeddings=length,
        rope_parameters={"rope_type": kind, "rope_theta": THETA, **rope},
    )
    embedding = modeling.LlamaRotaryEmbedding(config)
    positions = torch.arange(length)[None]
    cosines, sines = embedding(torch.zeros(1), positions)
    return cosines[0], sines[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "length", "factor", "ours", "theirs"),
    [
        ("linear", 200, 4.0, {}, {}),
        (
            "llama3",
            300,
            8.0,
            {"original_max_position_embeddings": 128},
            {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        ),
        ("yarn", 256, 4.0, {"original_max_position_embeddings": 64}, {}),
        (
            "yarn",
            256,
            4.0,
            {"original_max_position_embeddings": 64, "truncate": False, "beta_fast": 16},
            {},
        ),
        ("longrope", 256, 1.0, LONGROPE, {"factor": None}),
        ("longrope", 64, 1.0, LONGROPE, {"factor": None}),
        ("longrope", 256, 1.0, LONGROPE | {"attention_factor": 1.3}, {"factor": None}),
    ],
)
def test_angles_are_those_of_transformers(
    kind: ScalingType, length: int, factor: float, ours: dict[str, Any], theirs: dict[str, Any]
) -> None:
    expected = their_angles(kind, length, **({"factor": factor} | ours | theirs))

    found = make(kind, factor, length=length, **ours).angles(torch.arange(length))

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
