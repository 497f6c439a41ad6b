"""Compares the initial values of two models that differ in how they were drawn."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

_FEW = 400  # numbers whose mean and standard deviation vary much


def check_drawn_alike(found: nn.Module, expected: nn.Module) -> None:
    """Check that two models have the same constants, and random numbers of one distribution."""
    assert list(_constants(found)) == list(_constants(expected))
    others = dict(_random(expected))
    for name, value in _random(found):
        other = others.pop(name)
        assert (value.shape, value.dtype) == (other.shape, other.dtype), name
        if value.numel() >= _FEW:
            spread, limit = other.std(), 6 / value.numel() ** 0.5
            assert abs(value.std() / spread - 1) < limit, name
            assert abs(value.mean() - other.mean()) < limit * spread, name
            assert value.abs().max() < 1.5 * other.abs().max(), name
    assert not others


def _constants(model: nn.Module) -> Iterator[tuple[str, list[float]]]:
    for name, value in _tensors(model):
        if _is_constant(value):
            yield name, value.flatten().tolist()


def _random(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, value) for name, value in _tensors(model) if not _is_constant(value))


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _is_constant(value: Tensor) -> bool:
    """Return whether a tensor has no random numbers: a buffer, or a single number."""
    is_buffer = not isinstance(value, nn.Parameter)
    return is_buffer or not value.is_floating_point() or bool((value == value.flatten()[0]).all())
