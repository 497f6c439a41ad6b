"""Configuration of parallelism: the number of ranks along each axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, ClassVar, Final

import torch
from torch.nn import Module

from ..dtypes import ALIASES, dtype_name
from ..errors import BackendError, check_flag, suggest

AXES: Final = ("replicate", "shard", "context", "tensor")
REST: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The number of ranks along each axis; their product is the world size."""

    replicate: int = 1  # copies of the model, each with its own data
    shard: int = 1  # ranks that share one copy, each with its own data
    context: int = 1  # ranks that split the positions of each row of the same data
    tensor: int = 1  # ranks that split the layers, on the same data

    @property
    def num_data_shards(self) -> int:
        """The number of data shards."""
        return self.replicate * self.shard

    @property
    def ranks_per_data_shard(self) -> int:
        """The number of ranks with the same data."""
        return self.context * self.tensor

    @property
    def of_parameters(self) -> Sizes:
        """The sizes for parameters, to which ranks along `context` are like ranks with other data.

        They share one copy of the parameters if that is sharded, else each has its own.
        """
        if self.shard > 1:
            return replace(self, shard=self.shard * self.context, context=1)
        return replace(self, replicate=self.replicate * self.context, context=1)


def fit_sizes(asked: Mapping[str, int], world_size: int) -> Sizes:
    """Resolve the configured sizes for a world size.

    At most one of them is -1 = the remaining ranks.

    Raises:
        BackendError: If the product of the sizes is not the world size.
    """
    fixed = prod(size for size in asked.values() if size != REST)
    rest, left_over = divmod(world_size, fixed)
    has_rest = REST in asked.values()
    if left_over or (not has_rest and rest != 1):
        given = ", ".join(f"{axis}: {size}" for axis, size in asked.items())
        fits = "a multiple of " if has_rest else ""
        raise BackendError(
            f"backend.parallel is {{{given}}}, which requires {fits}{fixed} processes, but there "
            f"are {world_size}. Use another number of processes, or set one axis to -1 (the rest) "
            f"and the others so that their product divides {world_size}."
        )
    return Sizes(**{axis: rest if size == REST else size for axis, size in asked.items()})


STYLES: Final = ("colwise", "colwise_gather", "rowwise", "own_part")
"""How a module is split.

colwise         by its outputs; each rank keeps its part (Linear, Embedding).
colwise_gather  by its outputs; every rank gets the full output.
rowwise         Linear: by its inputs; each rank has its part. Embedding: by its rows.
                Every rank gets the sum.
own_part        LayerNorm, RMSNorm: whole on each rank, which normalizes its part of the states,
                such as its heads; gradients are summed.
"""

TIMEOUT_S: Final = 600.0
"""Default timeout of collectives in seconds, from the second step on."""
_LONGEST_S: Final = 86400.0
_SHARDING: Final = (
    "blocks",
    "param_dtype",
    "reduce_dtype",
    "reshard_after_forward",
    "meta_init",
    "accumulate_shards",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """The axes of a run and their options.

    Args:
        replicate: Copies of the model; -1 = as many as the world size allows.
        shard: Ranks that share one copy; -1 = the remaining ranks.
        context: Ranks that split the positions of each row; -1 = the remaining ranks.
        tensor: Ranks that split each layer; -1 = the remaining ranks.
        blocks: Class names of modules that are gathered and freed as one unit; None = the elements
            of every `ModuleList`.
        param_dtype: Dtype in which sharded parameters are gathered and used; None = bfloat16 if
            `precision` is and all parameters are float32, else their own.
        reduce_dtype: Dtype in which gradients are reduced; None = the dtype of the computation, but
            float32 if `param_dtype` is None.
        reshard_after_forward: Free a block's parameters after its forward pass and gather them
            again for the backward pass.
        meta_init: Build the model on `meta` and initialize weights after sharding; None = a model
            that a configuration file names and that has `reset_steps`.
        accumulate_shards: Reduce the gradients of each micro-batch, so that each rank adds up its
            shards only, instead of full gradients that are reduced once.
        tensor_plan: Pattern of module names to how these are split; None = the model's own.
        sequence_parallel: Whether states between the layers that `tensor` splits are split by
            positions.
        find_unused_parameters: Whether some steps leave parameters without a gradient.

    Raises:
        BackendError: If more than one axis is -1.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = (
        "parallel",
        "sharding",
        "tensor_plan",
        "sequence_parallel",
        "find_unused_parameters",
    )

    replicate: int = REST
    shard: int = 1
    context: int = 1
    tensor: int = 1
    blocks: tuple[str, ...] | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    meta_init: bool | None = None
    accumulate_shards: bool = False
    tensor_plan: Mapping[str, str] | None = None
    sequence_parallel: bool = False
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        rests = [axis for axis, size in self.axes.items() if size == REST]
        if len(rests) > 1:
            raise BackendError(
                f"backend.parallel: {' and '.join(rests)} are -1, but only one axis can be -1 (the "
                f"remaining processes). Set the size of the others."
            )

    @property
    def axes(self) -> dict[str, int]:
        """The configured sizes, by axis."""
        return {axis: getattr(self, axis) for axis in AXES}

    def with_dtypes(self, autocast: torch.dtype | None, model: Module) -> ParallelSettings:
        """Return the settings with the dtypes that are not set, for a model and its autocast.

        In full precision, twice the bytes would be gathered, and autocast would keep a copy of each
        gathered weight for the backward pass.
        """
        is_full = all(param.dtype is torch.float32 for param in model.parameters())
        if self.param_dtype is not None or autocast is not torch.bfloat16 or not is_full:
            return self
        reduce_dtype = self.reduce_dtype or torch.float32
        return replace(self, param_dtype=autocast, reduce_dtype=reduce_dtype)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ParallelSettings:
        """Create the settings from configuration options.

        Only keys in `OPTIONS` are accepted; others have their defaults. If another axis is -1,
        `replicate` defaults to 1.

        Raises:
            BackendError: For the first invalid key, type or value.
        """
        _check_keys("backend", options, cls.OPTIONS, "option")
        axes = _mapping("backend.parallel", options.get("parallel"))
        sharding = _mapping("backend.sharding", options.get("sharding"))
        _check_keys("backend.parallel", axes, AXES, "axis")
        _check_keys("backend.sharding", sharding, _SHARDING, "setting")
        found: dict[str, Any] = {
            axis: _size(f"backend.parallel.{axis}", n) for axis, n in axes.items()
        }
        if REST in found.values():
            found.setdefault("replicate", 1)
        for key, value in sharding.items():
            found[key] = _sharding_value(key, value)
        found["tensor_plan"] = _plan(options.get("tensor_plan"))
        for flag in ("sequence_parallel", "find_unused_parameters"):
            found[flag] = check_flag(flag, options.get(flag, False))
        settings = cls(**found)
        settings._check_use()
        return settings

    def _check_use(self) -> None:
        default = {field.name: field.default for field in fields(self)}
        given = [key for key in _SHARDING if getattr(self, key) != default[key]]
        if given and self.shard == 1:
            raise BackendError(
                f"backend.sharding.{given[0]} is set, but backend.parallel.shard is 1. "
                f"Set backend.parallel.shard, or remove backend.sharding."
            )
        if self.tensor_plan is not None and self.tensor == 1:
            raise BackendError(
                "backend.tensor_plan is set, but backend.parallel.tensor is 1. Set "
                "backend.parallel.tensor, or remove backend.tensor_plan."
            )
        if self.sequence_parallel and self.tensor == 1:
            raise BackendError(
                "backend.sequence_parallel is true, but backend.parallel.tensor is 1. Set "
                "backend.parallel.tensor, or remove backend.sequence_parallel."
            )
        if self.find_unused_parameters and (self.shard != 1 or self.tensor != 1):
            raise BackendError(
                "backend.find_unused_parameters only applies to replicated models, not to "
                "backend.parallel.shard or tensor. Remove it."
            )

    def sizes(self, world_size: int) -> Sizes:
        """Resolve the number of ranks along each axis.

        Raises:
            BackendError: If the axes do not match the world size.
        """
        return fit_sizes(self.axes, world_size)


def _check_keys(place: str, given: Iterable[str], known: tuple[str, ...], kind: str) -> None:
    for key in given:
        if key not in known:
            raise BackendError(f"{place}.{key}: no such {kind}. {suggest(str(key), known)}")


def _mapping(place: str, value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BackendError(f"{place}: expected a dict, got {value!r}.")
    return value


def _size(place: str, value: Any) -> int:
    if type(value) is not int or (value < 1 and value != REST):
        raise BackendError(
            f"{place}: expected a number of processes >= 1, or -1 for the rest, got {value!r}."
        )
    return value


def _sharding_value(key: str, value: Any) -> Any:
    if key == "meta_init" and value is None:
        return None
    if key in ("reshard_after_forward", "meta_init", "accumulate_shards"):
        return check_flag(f"sharding.{key}", value)
    place = f"backend.sharding.{key}"
    if value is None:
        return None
    return _classes(place, value) if key == "blocks" else _dtype(place, value)


def _classes(place: str, value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)
    if not is_list or not value:
        raise BackendError(f"{place}: expected a list of class names, got {value!r}.")
    return tuple(value)


def _dtype(place: str, value: Any) -> torch.dtype:
    name = dtype_name(value)
    if not isinstance(name, str) or name not in ALIASES:
        raise BackendError(
            f"{place}: expected a floating-point dtype, got {value!r}. "
            f"{suggest(str(value), ALIASES)}"
        )
    found: torch.dtype = getattr(torch, name)
    return found


def _plan(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    plan = dict(_mapping("backend.tensor_plan", value))
    for pattern, style in plan.items():
        check_style(pattern, style)
    return plan


def check_style(pattern: str, style: Any) -> None:
    """Check that a style is one of `STYLES`."""
    if style not in STYLES:
        raise BackendError(
            f"backend.tensor_plan[{pattern!r}] is {style!r}. {suggest(str(style), STYLES)}"
        )


def check_timeout(timeout: Any) -> float:
    """Check a timeout in seconds.

    Raises:
        BackendError: If it is not a number > 0.
    """
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout <= _LONGEST_S:
        raise BackendError(
            f"backend.timeout: expected a number of seconds, > 0 and <= {_LONGEST_S:.0f} (one "
            f"day), got {timeout!r}."
        )
    return float(timeout)
