"""torch.compile as an option: the whole model, or each repeated block."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch.nn import Module, ModuleList

from .errors import BackendError


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
