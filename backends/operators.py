"""Operators of this project: each is one operation for autograd, compilation and plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils.flop_counter import register_flop_formula

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
