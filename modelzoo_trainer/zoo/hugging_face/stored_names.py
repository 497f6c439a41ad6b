"""The tensors of a Hugging Face folder and of a model of `transformers`, by their names.

For some architectures the library stores weights under other names, or in other pieces, than
its modules: each expert of a layer by itself, older names of a head. It converts them while
it loads and saves; the functions for that are not part of its documented interface, so that they
are used here alone (transformers 5.23).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module


@dataclass
class _Group:
    """Tensors of a folder that become others of a model, all at once."""

    converter: Any
    sources: dict[str, list[Tensor]] = field(default_factory=dict)  # by pattern
    names: list[str] = field(default_factory=list)


def in_memory(
    model: Module, found: Mapping[str, Tensor], own: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Return the tensors of a folder by the names in a model's state dict.

    Tensors that the model does not have keep their names. Lazy tensors stay so: those that are made
    of several others are read and joined when their values are needed.

    Args:
        model: A model of `transformers`, possibly on `meta` or sharded.
        found: Tensors by their names in the folder, or already by their names in the model.
        own: The tensors of the model; None = its state dict, whose names adapters change.
    """
    if not hasattr(model, "base_model_prefix"):
        return dict(found)
    loading = import_module("transformers.core_model_loading")
    mapping = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, loading.WeightConverter)]
    of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    own = model.state_dict() if own is None else own
    named: dict[str, Tensor] = {}
    groups: dict[str, _Group] = {}
    for name in sorted(found, key=loading.dot_natural_key):
        if name in own:
            named[name] = found[name]
            continue
        target, pattern = loading.rename_source_key(
            name, renamings, converters, model.base_model_prefix, own
        )
        if target not in own:
            named[name] = found[name]
        elif pattern is None:
            named[target] = found[name]
        else:
            group = groups.setdefault(target, _Group(of_pattern[pattern]))
            group.sources.setdefault(pattern, []).append(found[name])
            group.names.append(name)
    for target, group in groups.items():
        named |= _joined(model, target, group)
    return named


def _joined(model: Module, target: str, group: _Group) -> dict[str, Tensor]:
    """Return the tensors that a group becomes, by name, without reading lazy ones."""
    planned = _convert(model, target, group, _shape_only)
    kinds = {type(one) for parts in group.sources.values() for one in parts}
    if not all(hasattr(kind, "read_rows") for kind in kinds):
        return _convert(model, target, group, lambda one: one)
    make: Any = kinds.pop()

    def read(name: str) -> Tensor:
        return _convert(model, target, group, lambda one: one.read())[name]

    return {
        name: make(tuple(one.shape), one.dtype, lambda name=name: read(name))
        for name, one in planned.items()
    }


def _shape_only(one: Tensor) -> Tensor:
    return torch.empty(one.shape, dtype=one.dtype, device="meta")


def _convert(
    model: Module, target: str, group: _Group, values: Callable[[Any], Tensor]
) -> dict[str, Tensor]:
    """Apply the operations of a group; each tensor that comes of it has its own memory."""
    converter = group.converter
    tensors: Any = {
        pattern: [values(one) for one in parts] for pattern, parts in group.sources.items()
    }
    config: Any = model.config
    with torch.no_grad():
        for operation in converter.operations:
            tensors = operation.convert(
                tensors,
                source_patterns=converter.source_patterns,
                target_patterns=converter.target_patterns,
                full_layer_name=target,
                model=model,
                config=config,
                missing_keys=None,
            )
    prefix, pattern, suffix = next(
        target.partition(one) for one in converter.target_patterns if one in target
    )
    del pattern
    found = {}
    for name, value in tensors.items():
        found[prefix + name + suffix] = value[0] if isinstance(value, list) else value
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensors:
    """Tensors of a folder that are made at once of tensors of a model.

    Attributes:
        names: Names in the model.
        stored: Tensors of the folder, without values: on `meta`.
        make: Returns tensors of the folder, given a function that returns one of the model.
    """

    names: tuple[str, ...]
    stored: Mapping[str, Tensor]
    make: Callable[[Callable[[str], Tensor]], dict[str, Tensor]]


def on_disk(model: Module, own: Mapping[str, Tensor]) -> Iterator[StoredTensors]:
    """Yield the tensors of a folder from which `transformers` loads a model: reverse `in_memory`.

    Args:
        model: A model of `transformers`, possibly on `meta` or sharded.
        own: Tensors by their names in the model, on `meta`.
    """
    loading = import_module("transformers.core_model_loading")
    conversions = import_module("transformers.conversion_mapping")
    mapping = conversions.get_model_conversion_mapping(model, add_legacy=False)
    kept = [one for one in mapping if not isinstance(one, loading.PrefixChange)]
    reverse = [one.reverse_transform() for one in reversed(kept)]
    renamings = [one for one in reverse if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in reverse if isinstance(one, loading.WeightConverter)]
    of_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    groups: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for name in sorted(own, key=loading.dot_natural_key):
        renamed, pattern = loading.apply_converters(name, converters)
        if pattern is None:
            stored = loading.apply_renamings(name, renamings)
            yield _renamed(name, stored, own[name])
        else:
            group = groups.setdefault(renamed, (of_pattern[pattern], []))
            group[1].append((name, pattern))
    for target, (converter, members) in groups.items():
        yield _split(model, target, converter, members, own, renamings)


def _renamed(name: str, stored: str, value: Tensor) -> StoredTensors:
    return StoredTensors(
        names=(name,), stored={stored: value}, make=lambda read: {stored: read(name)}
    )


def _split(
    model: Module,
    target: str,
    converter: Any,
    members: list[tuple[str, str]],
    own: Mapping[str, Tensor],
    renamings: list[Any],
) -> StoredTensors:
    def convert(read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        used = copy.deepcopy(converter)
        for name, pattern in members:
            used.add_tensor(target, name, pattern, read(name))
        with torch.no_grad():
            made = used.convert(target, model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }

    renamings_of = import_module("transformers.core_model_loading").apply_renamings
    made = convert(own.__getitem__)
    stored = {name: renamings_of(name, renamings) for name in made}
    return StoredTensors(
        names=tuple(name for name, _ in members),
        stored={stored[name]: value for name, value in made.items()},
        make=lambda read: {stored[name]: value for name, value in convert(read).items()},
    )
