"""What steps of training change in memory: kept, and put back bit by bit."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from modelzoo_trainer.core.attribute_states import parts_beside

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

Restore = Callable[[], Any]

_COPIED: Final = (set, deque, bytearray)


class RunSnapshot:
    """A copy of a run's modules, optimizers, loss scale and host generators.

    Of modules and optimizers that is every tensor, also buffers that are not in their state, and
    every plain attribute, in lists and dicts too; other objects in attributes are not looked into.

    Cost: A copy of the tensors, on their devices.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        memo: dict[int, Restore] = {}
        beside = [part for part in parts_beside(trainer).values() if isinstance(part, Module)]
        roots: list[Any] = [*trainer.optimizers.values()]
        roots += [module for root in (trainer.model, *beside) for module in root.modules()]
        self._restores = [_keep(vars(root), memo) for root in roots]
        self._rng = trainer.backend.rng_state()
        scaler = getattr(trainer.precision, "scaler", None)
        self._scale = None if scaler is None else copy.deepcopy(scaler.state_dict())

    def restore(self) -> None:
        """Put everything back."""
        trainer = self._trainer
        for put_back in self._restores:
            put_back()
        if self._scale is not None:
            trainer.precision.scaler.load_state_dict(self._scale)  # type: ignore[attr-defined]  # there is one
        trainer.backend.set_rng_state(self._rng)


def _keep(value: Any, memo: dict[int, Restore]) -> Restore:
    """Return what puts the content of an object back, and returns the object."""
    if id(value) not in memo:
        memo[id(value)] = lambda: value  # within itself
        memo[id(value)] = _kept(value, memo)
    return memo[id(value)]


def _kept(value: Any, memo: dict[int, Restore]) -> Restore:
    if isinstance(value, Tensor):
        return _kept_tensor(value)
    if isinstance(value, dict):
        return _kept_dict(value, memo)
    if isinstance(value, list):
        return _kept_list(value, memo)
    if isinstance(value, tuple):
        parts = [_keep(item, memo) for item in value]
        return lambda: (value, [part() for part in parts])[0]
    if isinstance(value, Optimizer):  # within another one
        attributes = _keep(vars(value), memo)
        return lambda: (value, attributes())[0]
    if isinstance(value, _COPIED):
        return _kept_collection(value)
    return lambda: value


def _kept_tensor(value: Tensor) -> Restore:
    content = value.detach().clone()
    grad = value.grad if value.is_leaf else None

    def put_back() -> Tensor:
        value.detach().copy_(content)
        if value.is_leaf:
            value.grad = grad
        return value

    return put_back


def _kept_dict(value: dict[Any, Any], memo: dict[int, Restore]) -> Restore:
    items = {key: _keep(item, memo) for key, item in value.items()}

    def put_back() -> dict[Any, Any]:
        found = {key: item() for key, item in items.items()}
        value.clear()
        value.update(found)
        return value

    return put_back


def _kept_list(value: list[Any], memo: dict[int, Restore]) -> Restore:
    items = [_keep(item, memo) for item in value]

    def put_back() -> list[Any]:
        value[:] = [item() for item in items]
        return value

    return put_back


def _kept_collection(value: Any) -> Restore:
    content = copy.copy(value)

    def put_back() -> Any:
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(content)
        return value

    return put_back
