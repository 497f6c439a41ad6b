"""Layers that repeat: measure a few of them, and extrapolate to all.

A model is measured with a few periods of each kind of repeated layers, then with one period more of
one kind. All figures are linear in the number of periods: sums over layers, and the peak memory of
each phase of a step (`MemoryTracker.mark`), such as the forward pass of the first layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torch import Tensor
from torch.nn import Module, ModuleList
from torch.utils._pytree import tree_leaves

_NUM_ENDS: Final = 2  # layers that have a neighbour on one side only
_LONGEST_PERIOD: Final = 8  # layers
_PLAIN: Final = (bool, int, str, type(None))
_NUMBERS: Final = ("index", "idx", "number", "layer_id", "training")
"""Attributes that make no other kind of layer: its number, and its mode."""

Signature = tuple[Any, ...]
Numbers = dict[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Lists of layers that are equal and equally long, and how many of these are measured."""

    names: tuple[str, ...]
    num_layers: int
    period: int

    @property
    def num_measured(self) -> int:
        """Layers of the smallest model that is measured: one at each end, and all kinds between."""
        least = self.period + _NUM_ENDS
        return least + (self.num_layers - least) % self.period

    @property
    def num_left_out(self) -> int:
        """Periods that this model lacks."""
        return (self.num_layers - self.num_measured) // self.period

    def place(self, index: int, num: int) -> str:
        """Return the phase of a layer: the first one, the last one, or those between."""
        if index == 0:
            return "first"
        return "last" if index == num - 1 else "middle"


def repeats_of(model: Module) -> list[Repeat]:
    """Return the repeated layers of a model: of each `ModuleList` that is not inside another.

    Lists with equal layers, such as a copy that is not trained, are repeated together.
    """
    groups: dict[Signature, dict[str, ModuleList]] = defaultdict(dict)
    for name, layers in _lists(model):
        groups[tuple(map(_signature, layers))][name] = layers
    found = []
    for group in groups.values():
        trained = zip(*(map(_trained, layers) for layers in group.values()), strict=True)
        first = next(iter(group.values()))
        period = _period(list(zip(map(_signature, first), trained, strict=True)))
        if period is not None:
            found.append(Repeat(tuple(group), len(first), period))
    return [one for one in found if one.num_left_out > 1]


def _lists(model: Module, name: str = "") -> Iterator[tuple[str, ModuleList]]:
    for key, child in model.named_children():
        path = f"{name}.{key}" if name else key
        if isinstance(child, ModuleList):
            yield path, child
        else:
            yield from _lists(child, path)


def _period(signatures: Sequence[Signature]) -> int | None:
    num = len(signatures)
    for period in range(1, min(_LONGEST_PERIOD, num // 2) + 1):
        if all(signatures[i] == signatures[i + period] for i in range(num - period)):
            return period
    return None


def _signature(layer: Module) -> Signature:
    """Return what decides which memory and operations a layer takes."""
    return tuple((name, type(one), *_own(one)) for name, one in layer.named_modules())


def _trained(layer: Module) -> Signature:
    return tuple(param.requires_grad for param in layer.parameters())


def _own(module: Module) -> Iterator[Any]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tuple(tensor.shape), tensor.dtype
    for name, value in sorted(vars(module).items()):
        if isinstance(value, float):
            yield name, value != 0  # such as a rate of dropout that increases with the depth
        elif isinstance(value, _PLAIN) and not any(one in name for one in _NUMBERS):
            yield name, value


def leave_out(model: Module, repeats: Sequence[Repeat]) -> None:
    """Remove the layers of a model that `shorten` always removes."""
    for one in repeats:
        for name in one.names:
            layers: Any = model.get_submodule(name)
            del layers[one.num_measured + one.period :]


def shorten(
    model: Module, repeats: Sequence[Repeat], more: int | None, mark: Callable[[str], None]
) -> None:
    """Remove layers from a model that has just been built, and mark the phases of the others.

    Args:
        model: The model.
        repeats: Its repeated layers.
        more: Index of the layers that get one period more; None = all have the least.
        mark: Called with the name of each phase that begins.
    """
    for number, one in enumerate(repeats):
        num = one.num_measured + (one.period if number == more else 0)
        for name in one.names:
            layers: Any = model.get_submodule(name)
            del layers[num:]
            for index, layer in enumerate(layers):
                _watch(layer, f"{number} {one.place(index, num)}", mark)
            layers[-1].register_forward_hook(partial(_after, mark, f"after {number}"))


def _watch(layer: Module, phase: str, mark: Callable[[str], None]) -> None:
    def begin(module: Module, args: Any) -> None:
        mark(f"forward {phase}")

    def begin_backward(grad: Tensor) -> None:
        mark(f"backward {phase}")

    def end(module: Module, args: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(begin_backward)  # type: ignore[no-untyped-call]  # in torch
                return

    layer.register_forward_pre_hook(begin)
    layer.register_forward_hook(end)


def _after(mark: Callable[[str], None], phase: str, *args: Any) -> None:
    mark(phase)


def extrapolated(
    least: Mapping[tuple[str, ...], float],
    longer: Sequence[Mapping[tuple[str, ...], float]],
    repeats: Sequence[Repeat],
) -> Numbers:
    """Return the figures of the whole model.

    Args:
        least: Figures of the smallest model.
        longer: Figures with one period more, for each of the repeated layers.
        repeats: The repeated layers.
    """
    found: Numbers = dict(least)
    for one, numbers in zip(repeats, longer, strict=True):
        for key in {*least, *numbers}:
            change = numbers.get(key, 0) - least.get(key, 0)
            found[key] = found.get(key, 0) + one.num_left_out * change
    return {key: max(0, value) for key, value in found.items()}
