"""Optimizer steps on a device that traces each step and compiles each new graph.

The graph of a step must be equal each time, without reads. So changing settings are inputs of the
graph instead of constants, steps are counted on the device, and initial state is an input too:

    prepare   flags of the groups, and existing state
    step      changed numbers -> tensors, in one transfer
              groups hold these tensors only during the step
              a parameter's first step: its state is created on the host and sent
              where `keep` is false, everything is restored
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Adadelta, Optimizer

from ..conditional_step import moved, numbers_in
from ..errors import BackendError
from ..fast_step import plain_step, step_of
from .optimizer_settings import DeviceSettings, MadeOnHost
from .tensors import OutOfPlace

log = logging.getLogger("modelzoo_trainer.backends.lazy_optimizers")

Send: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
State: TypeAlias = dict[str, Any]
Begun: TypeAlias = dict[int, tuple[Tensor, Tensor]]

# By the name of the torch.optim class that defines an optimizer's `step`.
_REFUSED: Final = {
    "Adafactor": (
        "it reads norms on the host in every step. Use modelzoo_trainer's Adafactor, or AdamW"
    ),
    "LBFGS": "it reads losses and norms on the host in every step. Use AdamW or SGD",
    "SparseAdam": "the device has no sparse gradients. Use AdamW, and layers with sparse=False",
}
# These accept a tensor as the learning rate; calls of the others are rewritten.
_FOR_TENSORS: Final = frozenset({"Adam", "NAdam", "RAdam", "Adamax", "ASGD", "Rprop"})
# This one stores its learning rate in the state, and must be given a number.
_FOR_NUMBERS: Final = frozenset({"modelzoo_trainer.optim.sgd.ASGD"})
# These divide by it; for a gradient that was always zero, 0 / 0 would be NaN.
_DIVIDES: Final = frozenset({"Adam", "Adamax"})
_HARDLY_ANY: Final = 1e-30  # replaces a learning rate of 0: the update underflows in float32
_UNSEEN: Final = object()


@dataclass(slots=True)
class _Group:
    """A group's settings that are numbers, and their tensors in a step."""

    settings: State
    seen: dict[str, object]
    betas: object = None
    numbers: dict[str, float] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


class _Prepared:
    """Cached facts about an optimizer, until it loads a state or gets another group."""

    def __init__(self, optimizer: Optimizer) -> None:
        names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(optimizer).__mro__}
        self.base = _implementation(optimizer)
        self.kind = "" if self.base is None else self.base.__name__
        self.is_rewritten = self.kind not in _FOR_TENSORS
        self.keeps_numbers = not names.isdisjoint(_FOR_NUMBERS)
        self.param_groups = optimizer.param_groups
        self.num_groups = len(self.param_groups)
        self.groups = [
            _Group(group, {key: _UNSEEN for key, value in group.items() if _is_watched(key, value)})
            for group in self.param_groups
        ]
        self.numbers: dict[int, float] = {}
        self.waiting = [param for group in self.param_groups for param in group["params"]]
        self.is_checked = False
        self.begun: list[Tensor] = []

    def fits(self, optimizer: Optimizer) -> bool:
        """Return whether the optimizer still has the same groups."""
        groups = optimizer.param_groups
        return self.param_groups is groups and self.num_groups == len(groups)

    def starts(self) -> bool:
        """Return whether a parameter is updated for the first time."""
        return any(param.grad is not None for param in self.waiting)


class LazyOptimizers:
    """Let any optimizer step on a tracing device, with one graph and without reads.

    Outside of a step, groups hold the numbers for schedules and checkpoints, and a state dict has
    the user's flags, so that it works on every device.

    A learning rate is always an input of the graph; other numbers become one when they change,
    which costs one compilation. A tensor on the host is treated as its number; one on the device is
    left unchanged.

    `send` copies tensors to the device as inputs of a graph, whatever their values.
    """

    def __init__(self, send: Send, device: torch.device) -> None:
        self._send = send
        self._device = device
        self._known: WeakKeyDictionary[Optimizer, _Prepared] = WeakKeyDictionary()
        self._choices: WeakKeyDictionary[Optimizer, list[State]] = WeakKeyDictionary()
        self._new: WeakSet[Optimizer] = WeakSet()
        self._has_warned = False

    @property
    def has_new(self) -> bool:
        """Whether `begin` has work to do."""
        return bool(self._new)

    def begin(self) -> None:
        """Create missing state of torch's optimizers, before a first forward pass.

        Results of a graph are ordered by the age of their tensors: with state as old as in later
        steps, the first step has the same graph.
        """
        for optimizer in self._new:
            prepared = self._known[optimizer]
            if prepared.base is not None and hasattr(optimizer, "_init_group"):
                self._begin_state(optimizer, prepared)
        self._new.clear()

    def prepare(self, optimizer: Optimizer) -> None:
        """Prepare an optimizer in place; its parameters are already on the device.

        Waits for the device if there is state.

        Raises:
            BackendError: If it does not work on the device.
        """
        _refuse(optimizer)
        if optimizer not in self._choices:
            self._choices[optimizer] = []
            optimizer.register_state_dict_post_hook(self._restore_choices)
            optimizer.register_load_state_dict_post_hook(self._prepare_loaded)
            self._new.add(optimizer)
        self._prepare_groups(optimizer)

    def step(self, optimizer: Optimizer, keep: Tensor | None = None) -> None:
        """Update the parameters, or leave them and the optimizer's state bitwise unchanged.

        `keep`: (), bool, on the device: whether to update; None = yes.

        Raises:
            BackendError: If `keep` is given and the optimizer counts steps on the host, as that
                cannot be undone on the device.

        Cost: With `keep`, memory for a copy of parameters and state during the step.
        """
        prepared = self._known.get(optimizer)
        if prepared is None or not prepared.fits(optimizer):
            self.prepare(optimizer)
            prepared = self._known[optimizer]
        if not prepared.keeps_numbers:
            self._refresh(prepared)
        if prepared.begun:
            for param in prepared.begun:
                if param.grad is None:  # perhaps it never has one
                    optimizer.state.pop(param, None)
            _leave_waiting(prepared)
        if keep is not None:
            self._masked_step(optimizer, prepared, keep)
        elif prepared.waiting and prepared.starts():
            self._first_step(optimizer, prepared)
        else:
            _exchanged_step(optimizer, prepared)

    # ---- groups and settings

    def _prepare_groups(self, optimizer: Optimizer) -> None:
        """Set the flags of the groups, and send existing state."""
        prepared = self._known[optimizer] = _Prepared(optimizer)
        choices = self._choices[optimizer]
        groups = optimizer.param_groups[len(choices) :]  # the others are already prepared
        for group in groups:
            switches = _switches(optimizer, group)
            choices.append({key: group[key] for key in switches})
            group.update(switches)
        places = [
            (state, key)
            for group in groups
            for param in group["params"]
            for state in (optimizer.state.get(param) or {},)
            for key, value in state.items()
            if self._belongs_here(value, prepared, group)
        ]
        self._replace(places)

    def _belongs_here(self, value: object, prepared: _Prepared, group: State) -> bool:
        if not isinstance(value, Tensor):
            return False
        # torch's optimizers can count on the device, even where they do not by default.
        on_device = value.device.type == self._device.type
        return on_device or bool(prepared.kind) or bool(group.get("capturable"))

    def _replace(self, places: list[tuple[State, str]]) -> list[Tensor]:
        """Replace tensors in states by inputs of the graph, and return these."""
        if not places:
            return []
        sent = self._send([_on_host(state[key]) for state, key in places])
        for (state, key), tensor in zip(places, sent, strict=True):
            state[key] = tensor
        return sent

    def _prepare_loaded(self, optimizer: Optimizer) -> None:
        self._choices[optimizer] = []  # loading creates new groups, with the file's flags
        self._prepare_groups(optimizer)

    def _restore_choices(self, optimizer: Optimizer, state_dict: State) -> None:
        for group, choices in zip(
            state_dict["param_groups"], self._choices[optimizer], strict=False
        ):
            group.update(choices)

    def _refresh(self, prepared: _Prepared) -> None:
        """Create tensors for input numbers that have changed."""
        changed = []
        for group in prepared.groups:
            settings = group.settings
            betas = settings.get("betas")
            if betas is not group.betas:
                self._note_betas(group, betas)
            for key, before in group.seen.items():
                now = settings.get(key)
                if now is not before and _is_new(group, key, now):
                    changed.append((group, key))
        if not changed:
            return
        least = _HARDLY_ANY if prepared.kind in _DIVIDES else 0.0
        numbers = [group.numbers[key] or (least if key == "lr" else 0.0) for group, key in changed]
        values = torch.tensor(numbers, dtype=torch.float32)
        for (group, key), buffer in zip(changed, self._send(list(values.unbind())), strict=True):
            group.buffers[key] = buffer
            prepared.is_rewritten |= key != "lr"
        prepared.numbers = {
            id(buffer): group.numbers[key]
            for group in prepared.groups
            for key, buffer in group.buffers.items()
        }

    def _note_betas(self, group: _Group, betas: object) -> None:
        before, group.betas = group.betas, betas
        if before not in (None, betas) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "betas of the optimizer change from step to step, and each new value is a constant "
                "of the graph: every such step is recompiled. For a schedule that cycles the "
                "momentum, set cycle_momentum=False."
            )

    # ---- steps

    def _first_step(self, optimizer: Optimizer, prepared: _Prepared) -> Begun:
        """Take a step that creates the state of some parameters.

        Returns:
            By id, each tensor of the new state, and a copy of its initial value.
        """
        begun: Begun = {}
        before = numbers_in(optimizer)
        if prepared.kind == "SGD":
            _note(begun, self._begin_momentum(optimizer))
        if prepared.kind and hasattr(optimizer, "_init_group"):
            with self._groups_begun(optimizer, prepared, begun):
                _exchanged_step(optimizer, prepared)
        else:

            def made(tensor: Tensor) -> Tensor:
                return _note(begun, self._send([tensor]))[0]

            _exchanged_step(optimizer, prepared, MadeOnHost(self._device, prepared.numbers, made))
        _leave_waiting(prepared)
        for group, then, now in zip(prepared.groups, before, numbers_in(optimizer), strict=True):
            for key in [key for key in group.seen if key != "lr"]:
                if then.get(key) != now.get(key):
                    del group.seen[key]  # the optimizer's own count, not a setting
        return begun

    def _begin_state(self, optimizer: Any, prepared: _Prepared) -> None:
        params = [
            param
            for param in prepared.waiting
            if param.requires_grad and param.grad is None and not optimizer.state.get(param)
        ]
        names = inspect.signature(prepared.base._init_group).parameters  # type: ignore[union-attr]
        for param in params:
            param.grad = param.detach()  # placeholder: only its presence matters
        try:
            if prepared.kind == "SGD":
                self._begin_momentum(optimizer)
            with self._groups_begun(optimizer, prepared, {}):
                for group in optimizer.param_groups:
                    optimizer._init_group(group, *([] for _ in range(len(names) - 2)))
        finally:
            for param in params:
                param.grad = None
        prepared.begun = params

    def _begin_momentum(self, optimizer: Optimizer) -> list[Tensor]:
        """Create zero momentum for parameters without one, which is equivalent."""
        places: list[tuple[State, str]] = []
        for group in optimizer.param_groups:
            if group["momentum"] and not group["dampening"]:
                for param in group["params"]:
                    if param.grad is None:
                        continue
                    state = optimizer.state[param]
                    if state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.zeros(param.shape, dtype=param.dtype)
                        places.append((state, "momentum_buffer"))
        return self._replace(places)

    @contextmanager
    def _groups_begun(self, optimizer: Any, prepared: _Prepared, begun: Begun) -> Iterator[None]:
        """Run torch's `_init_group` on the host, and send all its results at once."""
        original = optimizer._init_group

        def begin(group: State, *lists: Any, **named: Any) -> Any:
            with MadeOnHost(self._device, prepared.numbers, lambda tensor: tensor):
                result = original(group, *lists, **named)
            states = [optimizer.state.get(param) or {} for param in group["params"]]
            places = [
                (state, key)
                for state in states
                for key, value in state.items()
                if isinstance(value, Tensor) and value.device.type != self._device.type
            ]
            made = [state[key] for state, key in places]
            sent = _note(begun, self._replace(places))
            by_id = {id(tensor): new for tensor, new in zip(made, sent, strict=True)}
            for items in (*lists, *named.values()):
                if isinstance(items, list):
                    items[:] = [by_id.get(id(item), item) for item in items]
            return result

        optimizer._init_group = begin
        try:
            yield
        finally:
            del optimizer._init_group

    def _masked_step(self, optimizer: Optimizer, prepared: _Prepared, keep: Tensor) -> None:
        params = moved(optimizer)
        saved = [param.detach().clone() for param in params]
        copies = {
            (id(state), key): value.clone()
            for state, key, value in _entries(optimizer, params)
            if isinstance(value, Tensor)
        }
        numbers = numbers_in(optimizer)
        if prepared.waiting and prepared.starts():
            prepared.is_checked = False
            begun = self._first_step(optimizer, prepared)
            for state, key, value in _entries(optimizer, params):
                if id(value) in begun:
                    copies[id(state), key] = begun[id(value)][1]
        else:
            _exchanged_step(optimizer, prepared)
        if not prepared.is_checked:
            _check_copies(optimizer, params, copies, numbers)
            prepared.is_checked = True
        with torch.no_grad():
            for param, copy in zip(params, saved, strict=True):
                param.copy_(torch.where(keep, param, copy))
            for state, key, value in _entries(optimizer, params):
                if isinstance(value, Tensor):
                    # A new tensor, as after other steps: their order affects the graph.
                    state[key] = torch.where(keep, value, copies[id(state), key])


def _leave_waiting(prepared: _Prepared) -> None:
    prepared.waiting = [param for param in prepared.waiting if param.grad is None]
    prepared.begun = []


def _check_copies(
    optimizer: Optimizer, params: list[Tensor], copies: Container[object], numbers: list[State]
) -> None:
    """Raise unless everything changed by a step has a copy."""
    if numbers != numbers_in(optimizer) or not all(
        value is None
        or isinstance(value, (bool, str))
        or (isinstance(value, Tensor) and (id(state), key) in copies)
        for state, key, value in _entries(optimizer, params)
    ):
        raise BackendError(
            f"{type(optimizer).__name__} keeps a part of its state on the CPU, or initializes it "
            f"in the first step, so its steps cannot be skipped on XLA devices. Use AdamW, or SGD "
            f"without dampening; or remove the callback that skips steps (TerminateOnNaN, or "
            f"CheckLoss with policy 'skip')."
        )


def _implementation(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return the torch.optim class that defines an optimizer's `step`, or that it replaces."""
    cls = type(optimizer)
    step = step_of(cls)
    bases = [base for base in cls.__mro__ if hasattr(base, "step") and step_of(base) is step]
    is_torch = bases[-1].__module__.split(".")[:2] == ["torch", "optim"]
    return bases[-1] if is_torch else None


def _refuse(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    base = _implementation(optimizer)
    reason = None if base is None else _REFUSED.get(base.__name__)
    if reason is not None:
        raise BackendError(f"{name} does not work on XLA devices: {reason}.")
    for key in ("fused", "differentiable"):
        if any(group.get(key) for group in optimizer.param_groups):
            raise BackendError(
                f"{name} with {key}=True does not work on XLA devices. Remove {key}."
            )


def _switches(optimizer: Optimizer, group: State) -> State:
    """Return the flags to change in a group: count on the device, and use one implementation."""
    # Adadelta's flag does not support this device; its count may be there without it.
    wanted = {"capturable": not isinstance(optimizer, Adadelta), "foreach": False, "fused": False}
    return {key: value for key, value in wanted.items() if key in group and group[key] != value}


def _is_watched(key: str, value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0
    return key == "lr" or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _is_new(group: _Group, key: str, now: object) -> bool:
    """Record a setting, and return whether it needs a new tensor."""
    if isinstance(now, Tensor) and now.device.type == "cpu":
        with torch._C.DisableTorchFunction():  # avoids guards: nothing waits
            number = float(now)
    else:
        group.seen[key] = now
        if not isinstance(now, (int, float)):
            group.buffers.pop(key, None)
            return False
        number = float(now)
    before = group.numbers.get(key)
    group.numbers[key] = number
    if before is None or key not in group.buffers:
        return key == "lr" or isinstance(now, Tensor) or before not in (None, number)
    return before != number


def _exchanged_step(
    optimizer: Optimizer, prepared: _Prepared, mode: AbstractContextManager[Any] | None = None
) -> None:
    """Take a step with tensors in place of the input numbers."""
    held = []
    for group in prepared.groups:
        settings = group.settings
        for key, buffer in group.buffers.items():
            held.append((settings, key, settings[key], buffer))
            settings[key] = buffer
    try:
        with OutOfPlace():
            if mode is None and not prepared.is_rewritten:
                plain_step(optimizer)
            else:
                counts = prepared.kind == "Adagrad"
                rewriting = DeviceSettings(prepared.numbers, keeps_counts=counts)
                with rewriting if prepared.is_rewritten else nullcontext(), mode or nullcontext():
                    plain_step(optimizer)
    finally:
        for settings, key, number, buffer in held:
            if settings.get(key) is buffer:
                settings[key] = number


def _on_host(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "cpu" else tensor.detach().to("cpu")


def _note(begun: Begun, tensors: list[Tensor]) -> list[Tensor]:
    begun.update({id(tensor): (tensor, tensor.clone()) for tensor in tensors})
    return tensors


def _entries(optimizer: Optimizer, params: list[Tensor]) -> list[tuple[State, str, Any]]:
    return [
        (state, key, value)
        for param in params
        for state in (optimizer.state.get(param) or {},)
        for key, value in state.items()
    ]
