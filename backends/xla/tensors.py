"""Tensors of a tracing device: snapshots, in-place arithmetic, batch norm."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import TorchFunctionMode

from ..errors import BackendError

log = logging.getLogger("modelzoo_trainer.backends.xla")


class Snapshot:
    """A tensor's current value, without an extra operation in the graph.

    Values are immutable: an in-place operation gives the tensor a new one. But the graph that does
    so reuses the memory of the old value, so it must be copied.

    The tensor is detached and shares its memory with the source.
    """

    __slots__ = ("_tensor", "kept")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = None
        if torch._is_functional_tensor(tensor) and not _num_changes(tensor):
            self.kept = torch._from_functional_tensor(tensor)
            self._tensor = tensor
        else:
            self.kept = tensor.clone()  # changed in place before, so expected to change again

    def forget(self) -> None:
        """Stop following the tensor."""
        self._tensor = None

    def save(self) -> bool:
        """Copy the value if the tensor has changed; return whether it may still change."""
        if self._tensor is None:
            return False
        if _num_changes(self._tensor):
            if torch._from_functional_tensor(self._tensor) is self.kept:
                log.warning(
                    "A tensor was overwritten (copy_) between the request to read it and the read, "
                    "so the new value is read. Request a clone of the tensor instead."
                )
            self.kept = self.kept.clone()
            self._tensor = None
        return self._tensor is not None


def _num_changes(tensor: Tensor) -> int:
    """Return how often a tensor's memory was changed in place, through any of its views."""
    # A tensor's own version does not include changes of its `.data`.
    num: int = torch._functionalize_mutation_counter(tensor)
    return num


_METHODS: Final = (
    *("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "pow", "maximum", "minimum"),
    *("sqrt", "rsqrt", "neg", "reciprocal", "abs", "exp", "sign", "clamp", "clamp_min"),
    *("clamp_max", "addmm", "sigmoid", "tanh"),
)


class OutOfPlace(TorchFunctionMode):
    """Replace in-place operations by out-of-place ones: x.mul_(y) becomes x = x * y.

    The graph and the memory of the result are the same; elements of a list must not share memory.
    For in-place operations torch infers shapes with Python functions, which takes about 200 us on
    the host for an `addcmul_`, and 25 us this way.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function, or its out-of-place form."""
        kwargs = kwargs or {}
        beside = _BESIDE.get(func)
        if beside is not None:
            return _fill(args[0], beside(*args, **kwargs))
        beside = _LISTS_BESIDE.get(func)
        if beside is not None:
            for target, result in zip(args[0], beside(*args, **kwargs), strict=True):
                _fill(target, result)
            return args[0]
        return func(*args, **kwargs)


def _fill(target: Tensor, result: Tensor) -> Tensor:
    if target.dtype is not result.dtype and not torch.can_cast(result.dtype, target.dtype):
        raise RuntimeError(
            f"result type {result.dtype} can't be cast to the desired output type {target.dtype}"
        )
    if (
        target.dtype is not result.dtype
        or target.shape != result.shape
        or not torch._is_functional_tensor(target)
    ):
        return target.copy_(result)
    # What torch does after an in-place operation. A `copy_` would change the value itself,
    # which an earlier read may still hold.
    before = torch._from_functional_tensor(target)
    torch._functionalize_replace(target, torch._from_functional_tensor(result))
    torch._functionalize_commit_update(target)
    torch._functionalize_sync(target)
    torch._propagate_xla_data(before, torch._from_functional_tensor(target))  # the same memory
    torch.autograd.graph.increment_version(target)
    return target


def _beside() -> dict[Any, Any]:
    return {
        getattr(Tensor, f"{name}_"): getattr(Tensor, name)
        for name in _METHODS
        if hasattr(Tensor, f"{name}_")
    }


def _lists_beside() -> dict[Any, Any]:
    return {
        getattr(torch, f"_foreach_{name}_"): getattr(torch, f"_foreach_{name}")
        for name in _METHODS
        if hasattr(torch, f"_foreach_{name}_")
    }


_BESIDE: Final = _beside()
_LISTS_BESIDE: Final = _lists_beside()


_Norm = _BatchNorm | _InstanceNorm


def check_batch_norms(model: Module) -> None:
    """Raise if a module reads on the host in each step.

    Raises:
        BackendError: If a running average has no momentum.
    """
    for name, module in model.named_modules():
        if isinstance(module, _Norm) and module.track_running_stats and module.momentum is None:
            raise BackendError(
                f"{name or type(module).__name__} is a {type(module).__name__} with "
                f"momentum=None, which reads its count on the CPU in every step. Set a momentum."
            )


def correct_batch_norms(model: Module) -> None:
    """Make running variances average unbiased variances, as torch documents.

    torch_xla 2.9.0 averages biased ones, smaller by (n - 1) / n for n values per channel. Training
    steps are correct; validation, which uses the average, is not.
    """
    for module in model.modules():
        is_meant = isinstance(module, _Norm) and module.track_running_stats
        if is_meant and not _is_corrected(module):
            correction = _Correction()
            module.register_forward_pre_hook(correction.remember)
            module.register_forward_hook(correction.correct)


def _is_corrected(module: Module) -> bool:
    hooks = module._forward_hooks.values()
    return any(isinstance(getattr(hook, "__self__", None), _Correction) for hook in hooks)


class _Correction:
    """Corrects the average of one module after each forward pass in training."""

    def __init__(self) -> None:
        self._before: Tensor | None = None

    def remember(self, module: _Norm, args: tuple[Any, ...]) -> None:
        """Store the previous average."""
        variance = module.running_var
        is_here = module.training and variance is not None and variance.device.type == "xla"
        self._before = variance.clone() if is_here and variance is not None else None

    def correct(self, module: _Norm, args: tuple[Any, ...], output: Tensor) -> None:
        """Scale the new contribution by n / (n - 1)."""
        before, self._before = self._before, None
        if before is None or module.running_var is None or module.momentum is None:
            return
        num = _num_values(module, output)
        # Autograd has recorded the average's version, though it is not needed any more.
        with torch.no_grad(), _unsafe_preserve_version_counter(module.running_var):
            part = module.running_var - (1 - module.momentum) * before
            module.running_var.add_(part / (num - 1))


def _num_values(module: _Norm, output: Tensor) -> int:
    """Return the number of values behind a variance."""
    if isinstance(module, _InstanceNorm):  # per sample; variances are averaged
        num_dims: int = module._get_no_batch_dim() - 1  # type: ignore[no-untyped-call]  # untyped in torch
        return output.shape[-num_dims:].numel()
    return output.numel() // output.shape[1]
