"""What of a run's state each of several processes writes into a checkpoint, and reads again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from modelzoo_trainer.checkpointing.parameter_names import uncompiled
from modelzoo_trainer.core.attribute_states import like_of_attributes
from modelzoo_trainer.devices import Backend

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

_OF_ALL: Final = ("model", "optimizer")  # the same on all processes, or their parts of it


def part_of(state: Mapping[str, Any], trainer: Trainer) -> Mapping[str, Any]:
    """Return what this process has to write.

    The first process writes all it has. The others write with it what is large, and alone what
    is their own: their parts of tensors, their random generators (`host_<rank>`), and the places
    of their own loaders (`loader_<part of the data>`).

    Args:
        state: All that this process has.
        trainer: Whose state it is; its backend knows which process this is.
    """
    backend = trainer.backend
    if backend.is_main:
        return state
    params = {uncompiled(name) for name, _ in trainer.model.named_parameters()}
    own = (f"host_{backend.rank}", f"loader_{backend.data_shard[0]}")
    part = {key: value for key, value in state.items() if key in _OF_ALL}
    if "model" in part:  # of buffers each process may have others: those of the first count
        part["model"] = {
            name: value
            for name, value in part["model"].items()
            if name in params or (isinstance(value, Tensor) and backend.is_shared(value))
        }
    for key, value in state.items():
        if key not in _OF_ALL:
            kept = _kept(value, own, backend)
            if kept is not None:
                part[key] = kept
    return part


def _kept(value: Any, own: tuple[str, ...], backend: Backend) -> Any:
    """Return what is left of a value; None if nothing is."""
    if isinstance(value, Tensor):
        return value if backend.is_shared(value) else None
    if not isinstance(value, Mapping):
        return None
    found = {key: item if key in own else _kept(item, own, backend) for key, item in value.items()}
    return {key: item for key, item in found.items() if item is not None} or None


def like_of(trainer: Trainer) -> dict[str, Any]:
    """Return tensors that have the places of those of a checkpoint, by the same names.

    These are those of modules, and for what an optimizer keeps of a parameter, that parameter.
    """
    if not trainer.backend.caps.sharded_state:
        return {}
    like: dict[str, Any] = {"model": trainer.model.state_dict()}
    if trainer.has_optimizer:
        groups = trainer.optimizer.param_groups
        params = [param for group in groups for param in group["params"]]
        like["optimizer"] = {"state": dict(enumerate(params))}
    like["attributes"] = like_of_attributes(trainer)
    return like
