"""The repeated blocks of a model: find, compile and checkpoint them."""

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

from .errors import BackendError, check_choice, check_flag, suggest
from .operators import NAMESPACE


def find_blocks(model: Module, names: Collection[str] | None, option: str) -> list[Module]:
    """Return the blocks of a model, each once, inner blocks first.

    `names`: class names; None = the elements of every `ModuleList` that is not itself inside such
    an element. Error messages start with `option`.

    Raises:
        BackendError: If no module has one of the classes.
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
        if isinstance(child, (ModuleList, ModuleDict)):  # a container without a forward pass
            yield from _elements(child, in_list=in_list or isinstance(child, ModuleList))
        elif in_list:
            yield child
        else:
            yield from _elements(child)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """How a model is compiled.

    Args:
        target: "model" = as one graph; "blocks" = each element of every `ModuleList`, so that equal
            blocks are compiled once; None = "blocks" for a sharded model that has some, whose graph
            would break at each of them, else "model".
        fullgraph: Raise on graph breaks.
        dynamic: Compile for dynamic shapes; None = after a shape has changed.
        mode: torch.compile's mode.
        backend: torch.compile's backend.

    Raises:
        BackendError: If an option has a wrong type, or the target is unknown.
    """

    target: Literal["model", "blocks"] | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    mode: str | None = None
    backend: str = "inductor"

    def __post_init__(self) -> None:
        check_choice("compile.target", self.target, ("model", "blocks", None))
        check_flag("compile.fullgraph", self.fullgraph)
        check_choice("compile.dynamic", self.dynamic, (True, False, None))
        if not isinstance(self.mode, str | None):
            raise BackendError(f"backend.compile.mode: expected a name or null, got {self.mode!r}.")
        if not (isinstance(self.backend, str) or callable(self.backend)):
            raise BackendError(f"backend.compile.backend: expected a name, got {self.backend!r}.")


def compile_model(model: Module, options: CompileOptions, *, is_sharded: bool = False) -> None:
    """Compile a model in place: modules are not wrapped, so parameter names are unchanged.

    `is_sharded`: whether its parameters are gathered block by block.

    Raises:
        BackendError: If the target is "blocks" and the model has no `ModuleList`, or torch.compile
            does not know the mode or the backend.
    """
    blocks = [
        block for owner in model.modules() if isinstance(owner, ModuleList) for block in owner
    ]
    target = options.target or ("blocks" if is_sharded and blocks else "model")
    if target == "model":
        _compile(model, options)
        return
    if not blocks:
        raise BackendError(
            f"backend.compile.target is 'blocks', but {type(model).__name__} has no ModuleList. "
            f"Set backend.compile.target: model."
        )
    for block in blocks:
        _compile(block, options)


def _compile(module: Module, options: CompileOptions) -> None:
    arguments: dict[str, Any] = asdict(options)
    del arguments["target"]
    try:
        module.compile(**arguments)  # this compiles nothing yet
    except RuntimeError as error:
        raise BackendError(f"backend.compile: {error}") from error


Mode = Literal["full", "selective"]

_MATRIX_PRODUCTS: Final = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm"),
        *("_grouped_mm", "grouped_linear"),
    }
)
_NAMESPACES: Final = ("aten", NAMESPACE)
_ATTENTION: Final = "_scaled_dot_product"
_OWN_ATTENTION: Final = f"{NAMESPACE}::attend"  # drops the same weights for the same input
_COLLECTIVES: Final = "_c10d_functional"
# What an all-gather returns is large, and other ranks have it; waiting returns its input.
_RECOMPUTED_COLLECTIVES: Final = ("all_gather", "wait")


def checkpoint_activations(
    model: Module, mode: Mode, blocks: Collection[str] | None = None
) -> None:
    """Enable activation checkpointing: blocks keep only their inputs and are recomputed.

    Losses and gradients are bitwise unchanged, also with dropout. Modules are not wrapped, so
    parameter names are unchanged. Call before the model is compiled or sharded.

    "full" recomputes whole blocks; "selective" everything but matrix products, attention and
    collectives that reduce. Attention with dropout is recomputed, so that later random numbers are
    the same.
    `blocks`: class names, as in `find_blocks`. The model is changed in place.

    Raises:
        BackendError: If the mode is invalid, or there are no blocks.

    Cost:
        "full" computes the forward pass of the blocks twice.
    """
    option = "backend.activation_checkpointing"
    if mode not in get_args(Mode):
        raise BackendError(f"{option}: invalid mode {mode!r}. {suggest(str(mode), get_args(Mode))}")
    found = find_blocks(model, blocks, option)
    if not found:
        raise BackendError(
            f"{option} is {mode!r}, but {type(model).__name__} has no ModuleList. Put its "
            f"repeated blocks into a ModuleList, or remove the option."
        )
    for block in found:
        vars(block)["forward"] = Recomputed(block, mode)


class Recomputed:
    """A module's forward pass that is recomputed in the backward pass."""

    def __init__(self, block: Module, mode: Mode) -> None:
        self.block = block
        self.mode = mode
        self.inner: Callable[..., Any] | None = vars(block).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward pass."""
        forward = self.inner or partial(type(self.block).forward, self.block)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if self.mode == "selective":
            kwargs["context_fn"] = _selective_contexts
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(_decide)  # type: ignore[no-untyped-call]


def _decide(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide whether to keep the result of an operation."""
    name = op.name().partition("::")[2].partition(".")[0]
    is_product = op.namespace in _NAMESPACES and name in _MATRIX_PRODUCTS
    is_kept = op.namespace == _COLLECTIVES and not name.startswith(_RECOMPUTED_COLLECTIVES)
    if is_kept or is_product or op.name() == _OWN_ATTENTION:
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
