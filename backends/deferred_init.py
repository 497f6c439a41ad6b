"""Initialize the weights of a model that was built on `meta`, after it was sharded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import Module, Parameter

from .coordination.world import host_group
from .draws import Region, Seeds
from .errors import BackendError
from .recorded import Recorded, Unrecorded, needed, repeat

_RESETS = ("reset_parameters", "_reset_parameters")

Step = tuple[Module, Callable[[], object]]
Slot = tuple[dict[str, Any], str, Tensor]
"""A reference to a parameter or buffer: the dict that has it, its name there, and the tensor."""


def is_on_meta(model: Module) -> bool:
    """Return whether a parameter or buffer of a model is on `meta`."""
    return any(tensor.is_meta for _, _, tensor in _slots(model))


def materialize(
    model: Module, device: torch.device, loaded: Collection[str] = frozenset()
) -> Initialization | None:
    """Allocate and initialize a model that is on `meta`, in place. Collective.

    Modules are reset in the order of their constructors, children before parents, by
    `reset_parameters()`. A module may also have `reset_steps()`, which yields pairs of a part of it
    and a function that initializes it. With `resets_parts`, these also initialize the modules
    within it. No-op if no tensor is on `meta`.

    The values are the same on any device and any number of ranks. A function that only fills
    tensors, or slices of them, with constants and random numbers is repeated by each rank on its
    shard. For any other, its part of the model is unsharded in host memory.

    Args:
        model: On `meta`, sharded or not.
        device: Where the model is allocated.
        loaded: Names of parameters and buffers that are loaded next. If they are floating-point,
            they are filled with NaN; `Initialization.finish` initializes them if they are not
            loaded. The same on all ranks.

    Returns:
        What was done; None if no tensor was on `meta`.

    Raises:
        BackendError: If a parameter or buffer got no value.
    """
    if not is_on_meta(model):
        return None
    _check_other_tensors(model)
    _share_generator()
    seed = int(torch.randint(2**62, (), device="cpu"))
    _allocate(model, device)
    done = Initialization(model, seed, loaded)
    done.run()
    return done


class Initialization:
    """The initialization of a model, step by step.

    Args:
        model: Allocated.
        seed: Of all random numbers; the same on all ranks.
        loaded: As of `materialize`.
    """

    def __init__(self, model: Module, seed: int, loaded: Collection[str]) -> None:
        self.num_drawn = 0
        """How many numbers of parameters this rank has initialized."""
        self._model = model
        self._seed = seed
        self._named = dict([*model.named_parameters(), *model.named_buffers()])
        self._names = {id(tensor): name for name, tensor in self._named.items()}
        self._skipped: set[int] = set()  # ids of tensors that are left as they are
        self._written: set[int] = set()
        self._waiting: set[str] = set()  # names, the same on all ranks
        self._recorded: dict[int, list[Any]] = {}  # what is still to be repeated, by id
        self._part_of = cache(_part)  # layers repeat, and torch makes an index of all rows
        for name, tensor in self._named.items():
            if name in loaded and tensor.is_floating_point():
                _own(tensor).detach().fill_(torch.nan)
                self._waiting.add(name)
                self._skipped.add(id(tensor))
        self._written |= self._skipped

    def run(self) -> None:
        """Initialize all tensors but those that are loaded. Collective.

        Raises:
            BackendError: If a tensor got no value.
        """
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for number, (module, draw) in enumerate(_steps(self._model)):
                self._run_step(module, draw, number)
            self._repeat(self._named.values())
        _check_written(self._model, self._written)

    def note_loaded(self, names: Collection[str]) -> None:
        """Note that tensors were loaded."""
        self._waiting.difference_update(names)

    def finish(self, names: Collection[str] | None = None) -> None:
        """Initialize tensors that were to be loaded and were not. Collective.

        They get the values that they would have got at once, except copies of a loaded tensor.

        Args:
            names: Of these tensors; None = of all. The same on all ranks.
        """
        chosen = self._waiting if names is None else self._waiting.intersection(names)
        if not chosen:
            return
        self._waiting = self._waiting - chosen
        found = {id(self._named[name]) for name in chosen}
        self._skipped = {id(tensor) for tensor in self._named.values()} - found
        self._written -= found
        self.run()

    def _run_step(self, module: Module, draw: Callable[[], object], number: int) -> None:
        """Initialize a part of the model by its function, the `number`-th of the model."""
        slots = list(_slots(module))
        targets = {id(target): target for _, _, target in slots}
        if targets.keys() <= self._skipped:
            return
        seed = Seeds(self._seed, f"step {number}").of_tile(())
        torch.default_generator.manual_seed(seed)
        if not self._record(slots, targets, draw):
            self._repeat(targets.values())
            torch.default_generator.manual_seed(seed)
            self._unshard(slots, targets, draw)

    def _record(
        self, slots: list[Slot], targets: Mapping[int, Tensor], draw: Callable[[], object]
    ) -> bool:
        """Record what a function fills into tensors; False = it does more than that."""
        records = {key: Recorded.of(target) for key, target in targets.items()}
        try:
            with _replaced(slots, records):
                draw()
                if any(own[name] is not records[id(target)] for own, name, target in slots):
                    return False
        except Unrecorded:
            return False
        for key, record in records.items():
            if record.operations and key not in self._skipped:
                self._recorded.setdefault(key, []).extend(record.operations)
        return True

    def _repeat(self, targets: Iterable[Tensor]) -> None:
        """Repeat what was recorded of tensors on this rank's shards."""
        for target in targets:
            operations = self._recorded.pop(id(target), None)
            if operations is not None:
                seeds = Seeds(self._seed, self._names[id(target)])
                rest = needed(operations, target.shape)
                repeat(rest, _own(target), self._part(target), seeds)
                self._note(target)

    def _unshard(
        self, slots: list[Slot], targets: Mapping[int, Tensor], draw: Callable[[], object]
    ) -> None:
        """Call the function with full tensors on the host; keep this rank's shards of them."""
        wholes = {
            key: _host_copy(target, has_value=key in self._written)
            for key, target in targets.items()
        }
        versions = {key: whole._version for key, whole in wholes.items()}
        with _replaced(slots, wholes):
            draw()
            values = {id(target): own[name] for own, name, target in slots}
        for key, value in values.items():
            is_new = value is not wholes[key] or value._version != versions[key]
            if key not in self._skipped and (is_new or not _is_untouched(value)):
                target = targets[key]
                _own(target).copy_(value[self._part(target)])
                self._note(target)

    def _part(self, target: Tensor) -> Region:
        """Return where this rank's values of a tensor are."""
        if isinstance(target, DTensor):
            return self._part_of(target.shape, target.device_mesh, target.placements)
        return tuple(slice(0, size) for size in target.shape)

    def _note(self, target: Tensor) -> None:
        self._written.add(id(target))
        if isinstance(target, Parameter):
            self.num_drawn += _own(target).numel()


def _steps(model: Module) -> Iterator[Step]:
    """Yield the functions to call, in the order of the constructors."""
    for module in _children_first(model, set()):
        steps: Callable[[], Iterator[Step]] | None = getattr(module, "reset_steps", None)
        if steps is not None:
            yield from steps()
            continue
        for name in _RESETS:
            if hasattr(module, name):
                yield module, getattr(module, name)
                break


def _children_first(module: Module, seen: set[Module]) -> Iterator[Module]:
    if module in seen:
        return
    seen.add(module)
    if not getattr(module, "resets_parts", False):
        for child in module.children():
            yield from _children_first(child, seen)
    yield module


def _slots(model: Module) -> Iterator[Slot]:
    """Yield each reference to a parameter or buffer."""
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    yield own, name, tensor


def _allocate(model: Module, device: torch.device) -> None:
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for own, name, tensor in _slots(model):
        places.setdefault(id(tensor), []).append((own, name))
    model.to_empty(device=device)
    for (first, name), *others in places.values():
        for own, other_name in others:
            own[other_name] = first[name]


def _share_generator() -> None:
    """Make all ranks draw the same numbers as rank 0."""
    if dist.is_initialized():
        state = torch.get_rng_state()
        dist.broadcast(state, src=0, group=host_group())
        torch.set_rng_state(state)


@contextmanager
def _replaced(slots: list[Slot], others: Mapping[int, Tensor]) -> Iterator[None]:
    """Let modules have other tensors meanwhile; `others`: by the ids of theirs."""
    for own, name, target in slots:
        own[name] = others[id(target)]
    try:
        yield
    finally:
        for own, name, target in slots:
            own[name] = target


def _own(tensor: Tensor) -> Tensor:
    """Return this rank's values of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _host_copy(target: Tensor, *, has_value: bool) -> Tensor:
    if has_value:
        value = target.full_tensor() if isinstance(target, DTensor) else target
        whole = value.detach().to("cpu", copy=True)
    else:
        whole = torch.empty(target.shape, dtype=target.dtype, device="cpu")
        if whole.is_floating_point() or whole.is_complex():
            whole.fill_(torch.nan)
    return Parameter(whole, target.requires_grad) if isinstance(target, Parameter) else whole


def _is_untouched(value: Tensor) -> bool:
    """Return whether a tensor is full of NaN; version counters miss some writes."""
    return not (value.is_floating_point() or value.is_complex()) or bool(value.isnan().all())


def _part(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Region:
    """Return the indices of this rank's shard."""
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def _check_written(model: Module, written: set[int]) -> None:
    missing = [
        f"{name} ({type(model.get_submodule(name.rpartition('.')[0])).__name__})"
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if id(tensor) not in written
    ]
    if missing:
        raise BackendError(
            f"backend.sharding.meta_init: nothing initializes {', '.join(missing)}. Add a method "
            f"reset_parameters() that fills the module's parameters and buffers, or set "
            f"meta_init: false."
        )


def _check_other_tensors(model: Module) -> None:
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise BackendError(
                    f"backend.sharding.meta_init: {f'{name}.{key}'.lstrip('.')} is a tensor, but "
                    f"neither a parameter nor a buffer, so it cannot be initialized. Register it "
                    f"as a buffer that reset_parameters() fills, or set meta_init: false."
                )
