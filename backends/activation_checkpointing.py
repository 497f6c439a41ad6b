"""Activations that are computed again for the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final, Literal, get_args

import torch
from torch.nn import Module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from .blocks import find_blocks
from .errors import BackendError
from .suggestions import suggest

Mode = Literal["full", "selective"]

_MATRIX_PRODUCTS: Final = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm"})
_ATTENTION: Final = "_scaled_dot_product"
_COLLECTIVES: Final = "_c10d_functional"


def checkpoint_activations(
    model: Module, mode: Mode, blocks: Collection[str] | None = None
) -> None:
    """Have blocks keep their inputs only, and be computed again in the backward pass.

    Losses and gradients stay the same bit by bit, with dropout too. No module is wrapped, so that
    parameters keep their names. To be called before the model is compiled or sharded.

    Args:
        model: Changed in place.
        mode: "full" = all of a block is computed again; "selective" = all but matrix products,
            attention and collectives, whose results are kept. Attention with dropout is computed
            again, so that the random numbers after it are the same.
        blocks: Names of classes; None = the elements of every `ModuleList`.

    Raises:
        BackendError: If the mode is none of these, or there are no blocks.

    Cost:
        "full" computes the forward pass of the blocks twice.
    """
    option = "backend.activation_checkpointing"
    if mode not in get_args(Mode):
        raise BackendError(f"{option} is {mode!r}. {suggest(str(mode), get_args(Mode))}")
    found = find_blocks(model, blocks, option)
    if not found:
        raise BackendError(
            f"{option} is {mode!r}, but {type(model).__name__} has no ModuleList. Put its "
            f"repeated parts into one, or leave the option out."
        )
    for block in found:
        vars(block)["forward"] = Recomputed(block, mode)


class Recomputed:
    """The forward pass of a module, computed again when its backward pass needs it.

    Args:
        block: The module; this is to be its `forward`.
        mode: As in `checkpoint_activations`.
    """

    def __init__(self, block: Module, mode: Mode) -> None:
        self.block = block
        self.mode = mode
        self.inner: Callable[..., Any] | None = vars(block).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module's own forward pass does."""
        forward = self.inner or partial(type(self.block).forward, self.block)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self.mode == "selective":
            kwargs["context_fn"] = _selective_contexts
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_decide)  # type: ignore[no-untyped-call]


def _decide(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Say whether the result of an operation is kept."""
    name = op.name().partition("::")[2].partition(".")[0]
    if op.namespace == _COLLECTIVES or (op.namespace == "aten" and name in _MATRIX_PRODUCTS):
        return CheckpointPolicy.MUST_SAVE
    if name.startswith(_ATTENTION) and not _draws(op, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an attention has dropout."""
    for place, argument in enumerate(op._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(given != 0.0)
    return False
