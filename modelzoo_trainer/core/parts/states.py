"""The part of a checkpoint that each process writes, and what is missing in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from modelzoo_trainer.base.devices import Backend
from modelzoo_trainer.base.shown_path import shown_path
from modelzoo_trainer.checkpointing.state_json import uncompiled
from modelzoo_trainer.core.attribute_states import like_of_attributes
from modelzoo_trainer.core.precision import parameters_of

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.checkpoint")


def log_skipped(trainer: Trainer, names: list[str]) -> None:
    """Log which callbacks a fit starts without their state, as the checkpoint is of another run."""
    checkpoint = trainer.checkpoint
    path, _ = checkpoint.begun_with
    assert path is not None  # it was read
    key = "model_dir" if checkpoint.checkpoint_root is None else "checkpoint.checkpoint_root"
    log.info(
        "%s: starting from scratch, without the state in %s, because that checkpoint is not in the "
        "checkpoint folder of this run, %s. To keep the state, resume in the folder of the "
        "checkpoint: set %s to %s.",
        ", ".join(names),
        shown_path(path),
        shown_path(checkpoint.root(trainer)),
        key,
        shown_path(path.parent),
    )


_OF_ALL: Final = (
    "model",
    "optimizer",
    "optimizers",
)  # replicated, or sharded


def part_of(state: Mapping[str, Any], trainer: Trainer) -> Mapping[str, Any]:
    """Return the part of the state that this process writes.

    The main process writes all of its state. The others share the writing of large tensors, and
    write their own: shards of tensors, random generators (`host_<rank>`), and the positions of
    their loaders (`loader_<data shard>`).
    """
    backend = trainer.backend
    if backend.comm.is_main:
        return state
    params = {uncompiled(name) for name, _ in trainer.model.named_parameters()}
    own = (f"host_{backend.comm.rank}", f"loader_{backend.comm.data_shard[0]}")
    part = {key: value for key, value in state.items() if key in _OF_ALL}
    if "model" in part:  # buffers may differ: those of the main process are saved
        part["model"] = {
            name: value
            for name, value in part["model"].items()
            if name in params or (isinstance(value, Tensor) and backend.comm.is_sharded(value))
        }
    for key, value in state.items():
        if key not in _OF_ALL:
            kept = _kept(value, own, backend)
            if kept is not None:
                part[key] = kept
    return part


def _kept(value: Any, own: tuple[str, ...], backend: Backend) -> Any:
    """Return the part of a value that this process writes; None if empty."""
    if isinstance(value, Tensor):
        return value if backend.comm.is_sharded(value) else None
    if not isinstance(value, Mapping):
        return None
    found = {key: item if key in own else _kept(item, own, backend) for key, item in value.items()}
    return {key: item for key, item in found.items() if item is not None} or None


def like_of(trainer: Trainer) -> dict[str, Any]:
    """Return tensors with the sharding of a checkpoint's tensors, by the same names.

    Tensors of modules; for the optimizer state of a parameter, that parameter.
    """
    if not trainer.backend.caps.sharded_state:
        return {}
    like: dict[str, Any] = {"model": trainer.model.state_dict()}
    states = {
        name: {"state": dict(enumerate(parameters_of(optimizer)))}
        for name, optimizer in trainer.optimizers.items()
    }
    if trainer.manual_steps is not None:
        like["optimizers"] = states
    elif states:
        (like["optimizer"],) = states.values()
    like["attributes"] = like_of_attributes(trainer)
    return like
