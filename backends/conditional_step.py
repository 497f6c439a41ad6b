"""Optimizer steps that are undone depending on a flag on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim import Optimizer

from .fast_step import plain_step

log = logging.getLogger("modelzoo_trainer.backends.masking")

_MISSING: Final = object()
State = dict[str, Any]


class ConditionalSteps:
    """Take steps that change nothing where a flag is false, usually without waiting for it.

    torch's fused optimizers skip a step themselves. For others, parameters and state are copied
    before the step and restored after it, on the device.

    Two kinds of steps are decided on the host: the first of a parameter, as its state does not
    exist yet, and steps of an optimizer that counts on the host, as its count cannot be restored
    on the device. They call `look`, which waits for the device; `num_looks` counts these calls.
    """

    def __init__(self, look: Callable[[Tensor], bool]) -> None:
        self.num_looks = 0
        self._look = look
        self._known: WeakKeyDictionary[Optimizer, dict[Tensor, Any]] = WeakKeyDictionary()
        self._hosted: WeakSet[Optimizer] = WeakSet()

    def step(self, optimizer: Optimizer, keep: Tensor) -> None:
        """Update the parameters, or leave them and the optimizer's state bitwise unchanged.

        `keep`: (), bool, on the device of the parameters.
        """
        params = moved(optimizer)
        if optimizer in self._hosted or not self._knows(optimizer, params):
            self._decide_on_host(optimizer, params, keep)
        elif all(group.get("fused") for group in optimizer.param_groups):
            _fused_step(optimizer, keep)
        else:
            _undoable_step(optimizer, params, keep)

    def _knows(self, optimizer: Optimizer, params: Sequence[Tensor]) -> bool:
        # By identity: loading a checkpoint makes new states, with or without content.
        known = self._known.get(optimizer, {})
        states = optimizer.state
        return all(known.get(param, _MISSING) is states.get(param) for param in params)

    def _decide_on_host(self, optimizer: Optimizer, params: Sequence[Tensor], keep: Tensor) -> None:
        self.num_looks += 1
        if not self._look(keep):  # host read: waits for the device
            skip_step(optimizer)
            return
        before = numbers_in(optimizer)
        plain_step(optimizer)
        if optimizer in self._hosted:
            return
        states = [optimizer.state.get(param) for param in params]
        if before == numbers_in(optimizer) and all(map(_is_on_device, params, states)):
            self._known.setdefault(optimizer, {}).update(zip(params, states, strict=True))
            return
        self._hosted.add(optimizer)
        has_choice = any(group.get("capturable") is False for group in optimizer.param_groups)
        log.info(
            "%s counts its steps on the CPU, so conditional steps (such as skipping a non-finite "
            "loss) wait for the device.%s",
            type(optimizer).__name__,
            " Pass capturable=True to the optimizer to avoid this." if has_choice else "",
        )


def skip_step(optimizer: Optimizer) -> None:
    """Take no step, but mark the optimizer as stepped: torch's schedulers warn otherwise."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # checked by schedulers


def put_back(tensors: Sequence[Tensor], copies: Sequence[Tensor], keep: Tensor) -> None:
    """Overwrite tensors by their copies where a flag is false, without waiting for it.

    `keep`: (), bool, on their device; each copy has its tensor's shape and dtype.
    """
    with torch.no_grad():
        for tensor, copy in zip(tensors, copies, strict=True):
            own = tensor.detach()
            torch.where(keep, own, copy, out=own)


def moved(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that have a gradient."""
    return [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if param.grad is not None
    ]


def numbers_in(optimizer: Optimizer) -> list[State]:
    """Return the numbers in the param groups, where some optimizers count steps."""
    return [
        {key: value for key, value in group.items() if isinstance(value, (int, float))}
        for group in optimizer.param_groups
    ]


def _is_on_device(param: Tensor, state: State | None) -> bool:
    """Return whether a parameter's state consists only of tensors on its device."""
    return all(
        value is None
        or isinstance(value, (bool, str))
        or (isinstance(value, Tensor) and value.device == param.device)
        for value in (state or {}).values()
    )


def _fused_step(optimizer: Any, keep: Tensor) -> None:
    # Like torch's GradScaler: the fused kernels skip such a step and do not count it.
    optimizer.grad_scale = None
    optimizer.found_inf = keep.logical_not().to(torch.float32)
    try:
        plain_step(optimizer)
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def _undoable_step(optimizer: Optimizer, params: Sequence[Tensor], keep: Tensor) -> None:
    values = [param.detach() for param in params]
    entries = list(_entries(optimizer, params))
    saved = [value.clone() for value in values]
    saved_entries = [tensor.clone() for _, _, tensor in entries]
    plain_step(optimizer)
    put_back(values, saved, keep)
    for (state, key, tensor), before in zip(entries, saved_entries, strict=True):
        if state.get(key) is tensor:
            put_back([tensor], [before], keep)
        elif isinstance(state.get(key), Tensor):
            state[key] = torch.where(keep, state[key], before)


def _entries(optimizer: Optimizer, params: Sequence[Tensor]) -> Iterator[tuple[State, str, Tensor]]:
    for param in params:
        state = optimizer.state.get(param, {})
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield state, key, value
