"""How a model is spread over processes, as a file says it: how many along each axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any, ClassVar, Final

import torch

from ..errors import BackendError, suggest

AXES: Final = ("replicate", "shard", "tensor")
REST: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The number of processes along each axis; their product is the number of processes."""

    replicate: int = 1  # copies of the model, each with data of its own
    shard: int = 1  # processes that share one copy, each with data of its own
    tensor: int = 1  # processes that share the arithmetic of one layer, on the same data

    @property
    def num_data_shards(self) -> int:
        """The number of processes with data of their own."""
        return self.replicate * self.shard


def fit_sizes(asked: Mapping[str, int], world_size: int) -> Sizes:
    """Return the sizes that were asked for, with the rest filled in.

    At most one of the sizes asked for is -1 = the rest.

    Raises:
        BackendError: If the sizes do not multiply to the number of processes.
    """
    fixed = prod(size for size in asked.values() if size != REST)
    rest, left_over = divmod(world_size, fixed)
    has_rest = REST in asked.values()
    if left_over or (not has_rest and rest != 1):
        given = ", ".join(f"{axis}: {size}" for axis, size in asked.items())
        fits = "a multiple of " if has_rest else ""
        raise BackendError(
            f"backend.parallel is {{{given}}}, which fits {fits}{fixed} processes, but there are "
            f"{world_size}. Start another number of processes, or set one axis to -1 (the rest) "
            f"and the others so that their product divides {world_size}."
        )
    return Sizes(**{axis: rest if size == REST else size for axis, size in asked.items()})


STYLES: Final = ("colwise", "colwise_gather", "rowwise")
"""How a module is split.

colwise         by its outputs, of which each process keeps its part (Linear, Embedding).
colwise_gather  by its outputs, which every process gets whole.
rowwise         Linear: by its inputs, of which each process has its part. Embedding: by its rows.
                Every process gets the sum.
"""

TIMEOUT_S: Final = 600.0
"""That a process waits for the others, from the second step on."""
_LONGEST_S: Final = 86400.0
_SHARDING: Final = (
    "blocks",
    "param_dtype",
    "reduce_dtype",
    "reshard_after_forward",
    "meta_init",
)
_DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """The axes of a run and what is done along each.

    Args:
        replicate: Copies of the model; -1 = as many as there are processes for.
        shard: Processes that share one copy; -1 = the rest.
        tensor: Processes that share the arithmetic of each layer; -1 = the rest.
        blocks: Classes, by name, whose modules are gathered and freed as one; None = the elements
            of every `ModuleList`.
        param_dtype: What sharded parameters are gathered and computed in; None = their own type.
        reduce_dtype: What gradients are added up in; None = that of the computation.
        reshard_after_forward: Free a block's parameters after its forward pass and gather them
            again for the backward pass.
        meta_init: The model is built without memory, and its weights are drawn when it is
            sharded.
        tensor_plan: Pattern of module names to how those are split; None = the model's own.
        find_unused_parameters: Some parameters get no gradient in some steps.

    Raises:
        BackendError: If more than one axis is the rest.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = (
        "parallel",
        "sharding",
        "tensor_plan",
        "find_unused_parameters",
    )

    replicate: int = REST
    shard: int = 1
    tensor: int = 1
    blocks: tuple[str, ...] | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    meta_init: bool = False
    tensor_plan: Mapping[str, str] | None = None
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        rests = [axis for axis, size in self.axes.items() if size == REST]
        if len(rests) > 1:
            raise BackendError(
                f"backend.parallel: {' and '.join(rests)} are both -1; only one axis can have the "
                f"rest of the processes. Give the size of the other."
            )

    @property
    def axes(self) -> dict[str, int]:
        """The sizes as they were asked for, by axis."""
        return {"replicate": self.replicate, "shard": self.shard, "tensor": self.tensor}

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ParallelSettings:
        """Return the settings that a configuration's options describe.

        Only those in `OPTIONS` are accepted; what is not given has its default. Where `shard` or
        `tensor` has the rest, `replicate` is 1 if it is not given.

        Raises:
            BackendError: For the first key, type or value that does not fit.
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
        found["find_unused_parameters"] = _flag(
            "backend.find_unused_parameters", options.get("find_unused_parameters", False)
        )
        settings = cls(**found)
        settings._check_use()
        return settings

    def _check_use(self) -> None:
        default = {field.name: field.default for field in fields(self)}
        given = [key for key in _SHARDING if getattr(self, key) != default[key]]
        if given and self.shard == 1:
            raise BackendError(
                f"backend.sharding.{given[0]} is given, but nothing is sharded: "
                f"backend.parallel.shard is 1. Set it, or leave backend.sharding out."
            )
        if self.tensor_plan is not None and self.tensor == 1:
            raise BackendError(
                "backend.tensor_plan is given, but backend.parallel.tensor is 1. Set it, or leave "
                "the plan out."
            )
        if self.find_unused_parameters and (self.shard != 1 or self.tensor != 1):
            raise BackendError(
                "backend.find_unused_parameters is for copies of a whole model; with "
                "backend.parallel.shard or tensor it has no meaning. Leave it out."
            )

    def sizes(self, world_size: int) -> Sizes:
        """Return the number of processes along each axis.

        Raises:
            BackendError: If the axes do not fit the number of processes.
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
        raise BackendError(f"{place} is {value!r}; it must be a mapping.")
    return value


def _size(place: str, value: Any) -> int:
    if type(value) is not int or (value < 1 and value != REST):
        raise BackendError(
            f"{place} is {value!r}; it must be a whole number of processes, at least 1, or -1 for "
            f"the rest."
        )
    return value


def _flag(place: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BackendError(f"{place} is {value!r}; it must be true or false.")
    return value


def _sharding_value(key: str, value: Any) -> Any:
    place = f"backend.sharding.{key}"
    if key in ("reshard_after_forward", "meta_init"):
        return _flag(place, value)
    if value is None:
        return None
    return _classes(place, value) if key == "blocks" else _dtype(place, value)


def _classes(place: str, value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)
    if not is_list or not value:
        raise BackendError(f"{place} is {value!r}; it must be a list of class names.")
    return tuple(value)


def _dtype(place: str, value: Any) -> torch.dtype:
    if value in _DTYPES.values():
        return value  # type: ignore[no-any-return]  # one of those
    if not isinstance(value, str) or value not in _DTYPES:
        raise BackendError(f"{place} is {value!r}. {suggest(str(value), _DTYPES)}")
    return _DTYPES[value]


def _plan(value: Any) -> dict[str, str] | None:
    if value is None:
        return None
    plan = dict(_mapping("backend.tensor_plan", value))
    for pattern, style in plan.items():
        check_style(pattern, style)
    return plan


def check_style(pattern: str, style: Any) -> None:
    """Refuse what is none of `STYLES`."""
    if style not in STYLES:
        raise BackendError(
            f"backend.tensor_plan[{pattern!r}] is {style!r}. {suggest(str(style), STYLES)}"
        )


def check_timeout(timeout: Any) -> float:
    """Return a time-out in seconds.

    Raises:
        BackendError: If it is not a number > 0.
    """
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not is_number or not 0 < timeout <= _LONGEST_S:
        raise BackendError(
            f"backend.timeout is {timeout!r}; it must be a number of seconds > 0, at most a day."
        )
    return float(timeout)
