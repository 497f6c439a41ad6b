"""Operators of this project: each is one operation for autograd, compilation and plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils.flop_counter import (
    flop_registry,
    register_flop_formula,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)

NAMESPACE: Final = "modelzoo_trainer"

_TORCH_LIBRARY: Final[Any] = torch.library  # untyped in torch
# `torch.library.custom_op` would import torch's compiler with the first call, for seconds.
_LIBRARY: Final[Any] = _TORCH_LIBRARY.Library(NAMESPACE, "FRAGMENT")


def define_operator(
    schema: str,
    run: Callable[..., Any],
    shapes: Callable[..., Any],
    *,
    flops: Callable[..., int] | None = None,
    keep: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Any:
    """Define an operator that changes none of its inputs, and return it.

    Args:
        schema: Name, inputs and outputs, as `torch.library` takes them.
        run: Computes the outputs, on every device; its operations are not differentiated.
        shapes: Returns empty outputs, for `meta` and fake tensors.
        flops: Returns the floating-point operations from the shapes of the inputs; None = 0.
        keep: Keeps what `backward` needs: the `setup_context` of `torch.library`.
        backward: Returns the gradients of the inputs; None = there are none.
    """
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            f"{NAMESPACE}::{name}", backward, setup_context=keep, lib=_LIBRARY
        )
    operator = getattr(getattr(torch.ops, NAMESPACE), name)
    if flops is not None:
        register_flop_formula(operator)(flops)
    return operator


def refuse_second_derivatives(what: str, instead: str) -> None:
    """Raise in a backward pass whose gradients are to be differentiated: they would be constants.

    Args:
        what: Has no second derivatives.
        instead: What to do.

    Raises:
        RuntimeError: If so, as of torch's own operations without second derivatives.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"create_graph=True: {what} has no second derivatives. {instead}")


def attention_formulas() -> dict[Any, Callable[..., int]]:
    """Return the operations of attention kernels that torch's own counter does not know."""
    found: dict[Any, Callable[..., int]] = {}
    for kernel in ("flash_attention_for_cpu", "fused_attention_overrideable"):
        for end, formula in (("", _attention), ("_backward", _attention_backward)):
            packet = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}{end}", None)
            if packet is not None and packet not in flop_registry:
                found[packet] = shape_wrapper(formula)  # type: ignore[no-untyped-call]
                found[packet]._get_raw = True  # type: ignore[attr-defined]  # takes tensors
    return found


def _attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))  # type: ignore[no-untyped-call]
