"""The state that an optimizer creates at its first step, known before that step.

An optimizer says what it is in `first_state(param, group)`; torch's are listed here. Any other is
measured by a step on meta tensors, or unknown.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from modelzoo_trainer.optim.scheduler import Group

State = Mapping[str, Any]
Rule = Callable[[Tensor, Group], State]

_PACKAGES: Final = ("torch", "modelzoo_trainer")
_STEPPERS: Final = ("step", "_init_group", "_update")  # methods that create state
_KERNELS: Final = ("capturable", "differentiable", "foreach", "fused")
_NOT_COPIED: Final = ("state", "step")  # `step`: schedulers of torch set a wrapper


def like(*names: str) -> Rule:
    """Return the rule of an optimizer whose state has tensors of the parameter's shape and type.

    Args:
        names: Their keys.
    """
    return lambda param, group: dict.fromkeys(names, param)


def adam_state(param: Tensor, group: Group) -> State:
    """Return the state of torch's Adam."""
    names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group["amsgrad"])
    return dict.fromkeys(names, param)


def sgd_state(param: Tensor, group: Group) -> State:
    """Return the state of torch's SGD."""
    return {"momentum_buffer": param} if group["momentum"] else {}


def _rmsprop_state(param: Tensor, group: Group) -> State:
    names = {"momentum_buffer": group["momentum"], "grad_avg": group["centered"]}
    return {name: param for name, has in ({"square_avg": True} | names).items() if has}


def _adafactor_state(param: Tensor, group: Group) -> State:
    """Return the state of torch's Adafactor, which our own does not derive from."""
    if param.dim() < 2:
        return {"variance": param}
    return {"row_var": param.select(-1, 0), "col_var": param.select(-2, 0)}


_OF_TORCH: Final[Mapping[type, Rule]] = MappingProxyType(
    {
        optim.ASGD: like("ax"),
        optim.Adafactor: _adafactor_state,
        optim.Adadelta: like("square_avg", "acc_delta"),
        optim.Adagrad: like("sum"),
        optim.Adam: adam_state,
        optim.Adamax: like("exp_avg", "exp_inf"),
        optim.NAdam: like("exp_avg", "exp_avg_sq"),
        optim.RAdam: like("exp_avg", "exp_avg_sq"),
        optim.RMSprop: _rmsprop_state,
        optim.Rprop: like("prev", "step_size"),
        optim.SGD: sgd_state,
        optim.SparseAdam: like("exp_avg", "exp_avg_sq"),
    }
)


def first_states(optimizer: Optimizer, *, is_alone: bool) -> dict[Tensor, State] | None:
    """Return the state that each trainable parameter has after its first step; None if unknown.

    Tensors in it have the right shape and type, not the values; lazy parameters are left out.

    Args:
        optimizer: Any optimizer. Nothing in it changes.
        is_alone: Whether this is the only process: a step that the user wrote may communicate, and
            is not tried in one of several.
    """
    is_known = _is_known(optimizer)
    rule = _rule_of(optimizer, is_known)
    if rule is not None:
        return {param: rule(param, group) for param, group in _trainable(optimizer)}
    return _measured(optimizer) if is_known or is_alone else None


def bytes_to_come(optimizer: Optimizer, *, is_alone: bool = True) -> int | None:
    """Return about how many bytes of state an optimizer adds at its next step; None if unknown.

    Args:
        optimizer: Any optimizer. Nothing in it changes.
        is_alone: Whether this is the only process.
    """
    states = first_states(optimizer, is_alone=is_alone)
    if states is None:
        return None
    return sum(_bytes(own) for param, own in states.items() if not optimizer.state.get(param))


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    parts = value.values() if isinstance(value, Mapping) else value
    return sum(map(_bytes, parts)) if isinstance(value, Mapping | list | tuple) else 0


def _trainable(optimizer: Optimizer) -> Iterator[tuple[Tensor, Group]]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad and not is_lazy(param):
                yield param, group


def _is_known(optimizer: Optimizer) -> bool:
    """Return whether torch or this package has written what a step does."""
    methods = [getattr(type(optimizer), name, None) for name in _STEPPERS]
    return all(_is_of_package(method) for method in methods if method is not None)


def _is_of_package(method: Any) -> bool:
    module: str = inspect.unwrap(method).__module__
    return module.partition(".")[0] in _PACKAGES


def _rule_of(optimizer: Optimizer, is_known: bool) -> Rule | None:
    """Return what an optimizer says about its state; None if it says nothing.

    What a base class says does not count if a user has overridden the step.
    """
    said = getattr(type(optimizer), "first_state", None)
    if said is not None and not getattr(said, "__isabstractmethod__", False):
        if is_known or not _is_of_package(said):
            return _on_meta(optimizer.first_state)  # type: ignore[attr-defined]  # looked up above
    elif is_known:
        return next((_OF_TORCH[cls] for cls in type(optimizer).__mro__ if cls in _OF_TORCH), None)
    return None


def _on_meta(rule: Rule) -> Rule:
    """Return a rule that is asked once per group, shape and type, with a meta tensor."""
    known: dict[Any, State] = {}

    def ask(param: Tensor, group: Group) -> State:
        key = (id(group), param.shape, param.dtype)
        if key not in known:
            known[key] = rule(_empty(param), group)
        return known[key]

    return ask


def _empty(param: Tensor) -> Tensor:
    return torch.empty(param.shape, dtype=param.dtype, device="meta")


# ---- an optimizer that says nothing


def _measured(optimizer: Optimizer) -> dict[Tensor, State] | None:
    """Return the state after a step of a copy on meta tensors; None if that fails.

    One parameter stands for all of a group that have its shape and type.
    """
    if not _is_of_package(type(optimizer).state_dict):
        return None  # what it saves is not its attribute `state`
    states: dict[Tensor, State] = {}
    stands_in: dict[Tensor, nn.Parameter] = {}
    of_kind: dict[Any, nn.Parameter] = {}
    for param, group in _trainable(optimizer):
        if optimizer.state.get(param):
            states[param] = optimizer.state[param]
            continue
        kind = (id(group), param.shape, param.dtype)
        if kind not in of_kind:
            of_kind[kind] = nn.Parameter(_empty(param))
        stands_in[param] = of_kind[kind]
    if not stands_in:
        return states
    try:
        stepped = _step_on_meta(optimizer, stands_in)
    except Exception:  # noqa: BLE001  # the user's code need not work on meta tensors
        return None
    return states | {param: stepped.get(own, {}) for param, own in stands_in.items()}


def _step_on_meta(
    optimizer: Optimizer, stands_in: Mapping[Tensor, nn.Parameter]
) -> Mapping[Tensor, State]:
    """Return the states after a step of a copy of an optimizer with other parameters."""
    memo: dict[int, Any] = {id(param): own for param, own in stands_in.items()}
    attributes = {key: one for key, one in vars(optimizer).items() if key not in _NOT_COPIED}
    with _Meta(), _generators_kept():
        twin = object.__new__(type(optimizer))
        vars(twin).update(copy.deepcopy(attributes, memo))
    twin.state = defaultdict(dict)
    chosen = set(stands_in.values())
    for group in twin.param_groups:
        group["params"] = list(dict.fromkeys(one for one in group["params"] if one in chosen))
        group.update({key: False for key in _KERNELS if key in group})
        group.update({key: 0.5 for key, one in group.items() if isinstance(one, Tensor)})
    for param in chosen:
        param.grad = _empty(param)
    step: Any = type(twin).step
    with _generators_kept():
        # without the hooks that torch puts around it
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(twin)
    return twin.state


class _Meta(TorchFunctionMode):
    """Make copies of tensors meta tensors, which need no memory."""

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            made = torch.empty_like(tensor, device="meta")
            return memo.setdefault(id(tensor), made.requires_grad_(tensor.requires_grad))
        if func is torch._C.TensorBase.clone:  # called by copies of parameters
            return torch.empty_like(args[0], device="meta")
        return func(*args, **(kwargs or {}))


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the states of the host's random generators."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
