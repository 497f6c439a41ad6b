"""The repeated blocks of a model: found, compiled, checkpointed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, Literal, get_args

import torch
from torch.nn import Module, ModuleDict, ModuleList
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from .errors import BackendError, suggest


def find_blocks(model: Module, names: Collection[str] | None, option: str) -> list[Module]:
    """Return the blocks of a model, each once, those inside others before them.

    `names` are those of classes; None = the elements of every `ModuleList` that is not itself
    inside such an element. Messages start with `option`, where the names were given.

    Raises:
        BackendError: If no module is of a class that was named.
    """
    if names is None:
        return list(dict.fromkeys(_elements(model)))
    parts = [module for module in model.modules() if module is not model]
    classes = {type(module).__name__ for module in parts}
    for name in names:
        if name not in classes:
            raise BackendError(
                f"{option}: no module of {type(model).__name__} is a {name!r}. "
                f"{suggest(name, classes)}"
            )
    return [module for module in reversed(parts) if type(module).__name__ in names]


def _elements(owner: Module, *, in_list: bool = False) -> Iterator[Module]:
    for child in owner.children():
        if isinstance(child, (ModuleList, ModuleDict)):  # has no forward pass of its own
            yield from _elements(child, in_list=in_list or isinstance(child, ModuleList))
        elif in_list:
            yield child
        else:
            yield from _elements(child)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """How a model is compiled.

    Args:
        target: "model" = as one graph; "blocks" = each element of every `ModuleList`, so that
            equal blocks are compiled once.
        fullgraph: Refuse graph breaks.
        dynamic: Compile for changing shapes; None = when one has changed.
        mode: torch.compile's mode.
        backend: torch.compile's backend.
    """

    target: Literal["model", "blocks"] = "model"
    fullgraph: bool = False
    dynamic: bool | None = None
    mode: str | None = None
    backend: str = "inductor"


def compile_model(model: Module, options: CompileOptions) -> None:
    """Compile a model in place: modules are not wrapped, so parameter names stay as they are.

    Raises:
        BackendError: If blocks are asked for and the model has no `ModuleList`.
    """
    arguments: dict[str, Any] = asdict(options)
    if arguments.pop("target") == "model":
        model.compile(**arguments)
        return
    blocks = [
        block for owner in model.modules() if isinstance(owner, ModuleList) for block in owner
    ]
    if not blocks:
        raise BackendError(
            f"backend.compile.target is 'blocks', but {type(model).__name__} has no ModuleList. "
            f"Use target: model."
        )
    for block in blocks:
        block.compile(**arguments)


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

    "full" computes all of a block again; "selective" all but matrix products, attention and
    collectives, whose results are kept. Attention with dropout is computed again, so that the
    random numbers after it are the same. `blocks` are names of classes, as in `find_blocks`; the
    model is changed in place.

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
    """The forward pass of a module, computed again when its backward pass needs it."""

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
