"""When checkpoints are due, and writing them, synchronously or in the background."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch.nn.parameter import is_lazy

from modelzoo_trainer import checkpointing
from modelzoo_trainer.base.devices import map_tensors
from modelzoo_trainer.base.shown_path import shown_path
from modelzoo_trainer.core.early_exit import SAVE
from modelzoo_trainer.errors import CheckpointError, ConfigError, in_bytes
from modelzoo_trainer.optim.first_state import bytes_to_come

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class CheckpointSchedule:
    """The step boundaries at which a checkpoint is due: by steps, minutes or epochs."""

    def __init__(
        self, steps: int | None = None, minutes: float | None = None, epochs: int | None = None
    ) -> None:
        self.steps = steps or None
        self.epochs = epochs
        self.minutes = minutes
        self._interval_s = None if minutes is None else 60.0 * minutes
        self._next_s = 0.0
        self._is_asked = False

    @property
    def is_any(self) -> bool:
        """Whether checkpoints are ever due."""
        return not self.steps is self.epochs is self._interval_s is None

    def start(self) -> None:
        """Restart the clock."""
        self._is_asked = False
        if self._interval_s is not None:
            self._next_s = time.monotonic() + self._interval_s

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether a checkpoint is due at the current step boundary."""
        if self.steps is not None and trainer.global_step % self.steps == 0:
            return True
        if self._interval_s is not None and self._time_is_up(trainer):
            return True
        data = trainer.data
        return self.epochs is not None and data.is_last and (data.epoch + 1) % self.epochs == 0

    def ask(self) -> None:
        """Request a checkpoint at the next step boundary."""
        self._is_asked = True

    def _time_is_up(self, trainer: Trainer) -> bool:
        """Return whether the time is up, by the clock of the main process."""
        backend = trainer.backend
        if backend.comm.world_size == 1:
            return time.monotonic() >= self._next_s
        if backend.comm.is_main and time.monotonic() >= self._next_s:
            self._next_s = math.inf  # until all processes have received it
            backend.comm.propose(SAVE)
        asked, self._is_asked = self._is_asked, False
        return asked


log = logging.getLogger("modelzoo_trainer.checkpoint")

_HEADROOM: Final = 1.1
_WITHIN_STEP: Final = "within_step"  # written between two batches of a step


class CheckpointSaver:
    """Write checkpoints, one at a time, and record which are committed."""

    def __init__(self) -> None:
        self._background = checkpointing.BackgroundSaver()
        self._committed: list[Path] = []
        self.path: Path | None = None
        """The pending checkpoint."""
        self.points_latest = True
        """Whether this process updates the link `latest`."""

    def save(
        self,
        path: Path,
        state: Mapping[str, Any],
        step: int,
        *,
        wait: bool,
        group: Any = None,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint.

        The state may change after this returns. `wait`: until it is committed. `group`: the
        processes that write it together; None = only this one. `facts`: for the manifest.

        Raises:
            CheckpointError: If it, or the pending one, cannot be written.
        """
        begin = time.perf_counter()
        self._note(self._background.wait())
        if wait:
            if group is None:
                checkpointing.save(path, state, step=step, facts=facts)
            else:
                checkpointing.save_sharded(path, state, step=step, process_group=group, facts=facts)
            self._note([path])
        else:
            self.path = path
            if group is None:
                self._background.save(path, state, step=step, facts=facts)
            else:
                self._background.save_sharded(
                    path, state, step=step, process_group=group, facts=facts
                )
        held_up_s = time.perf_counter() - begin
        if not wait:
            log.info(
                "Writing checkpoint %s in the background; training was paused for %.3f s.",
                shown_path(path),
                held_up_s,
            )
        else:
            log.info("Saved checkpoint %s in %.3f s.", shown_path(path), held_up_s)

    def _note(self, committed: list[Path]) -> None:
        self._committed += committed
        for path in committed:
            if self.points_latest:
                checkpointing.point_latest(path.parent, path.name)
            if path == self.path:
                log.info("Saved checkpoint %s.", shown_path(path))
                self.path = None

    def collect(self) -> list[Path]:
        """Return the checkpoints committed since the last call.

        Raises:
            CheckpointError: If a background write failed.
        """
        if self.path is not None:
            self._note(self._take(wait=False))
        committed, self._committed = self._committed, []
        return committed

    def wait(self) -> list[Path]:
        """Wait for the pending checkpoint, then `collect`."""
        if self.path is not None:
            self._note(self._take(wait=True))
        return self.collect()

    def _take(self, *, wait: bool) -> list[Path]:
        try:
            return self._background.wait() if wait else self._background.collect()
        except CheckpointError:
            self.path = None
            raise

    def finish(self) -> None:
        """Wait for the pending checkpoint; log a failure, which must not hide another error."""
        try:
            self.wait()
        except CheckpointError as error:
            log.error("%s", error)


def facts_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts for the manifest: whether it was written within a step."""
    return {_WITHIN_STEP: True} if "window" in state.get("dataloader", {}) else {}


def was_written_before(path: Path, step: int) -> bool:
    """Return whether a checkpoint precedes a step, according to its manifest.

    The weights after `step` are the first with its update. True if the manifest is unreadable.
    """
    try:
        manifest = checkpointing.read_manifest(path)
    except CheckpointError:
        return True
    is_within = bool(manifest.facts.get(_WITHIN_STEP))
    return manifest.step + is_within < step


def prepare(root: Path, trainer: Trainer, *, is_locked: bool) -> None:
    """Check at the start of a fit that checkpoints can be written to a folder; create it.

    `is_locked`: no other process writes there, so remnants of a crash are removed.

    Raises:
        ConfigError: If it is not writable or has too little space for one checkpoint, or if the
            state of the model or of a callback cannot be saved.
    """
    if is_locked:  # before the probe, which may be killed, too
        for path in checkpointing.clean(root):
            log.info("Removed %s, an incomplete checkpoint of an earlier run.", path.name)
    try:
        checkpointing.probe(root)
    except CheckpointError as error:
        raise ConfigError(f"checkpoints cannot be written: {error}") from None
    if any(is_lazy(parameter) for parameter in trainer.model.parameters()):
        return  # it takes its shape from the first batch
    check_states(trainer)
    free = checkpointing.free_bytes(root)
    needed = _HEADROOM * least_bytes(trainer)
    if free is not None and free < needed:
        raise ConfigError(
            f"{str(root)!r} has {in_bytes(free)} of free space, and one checkpoint takes at "
            f"least {in_bytes(needed)}. Free space, or set checkpoint.checkpoint_root or "
            f"model_dir to another disk."
        )


def check_states(trainer: Trainer) -> None:
    """Check that the states of the model and of callbacks can be saved.

    Callbacks whose `state_dict` fails before training are ignored.

    Raises:
        ConfigError: If a state cannot be saved.
    """
    callbacks = {}
    for name, callback in trainer.stateful_callbacks():
        with suppress(Exception):
            callbacks[name] = callback.state_dict()
    try:
        view = trainer.backend.state_view({"model": trainer.model.state_dict()})
        whole = trainer.backend.writable({**view, "callbacks": callbacks})
        checkpointing.check_savable(map_tensors(whole, trainer.backend.comm.local_part))
    except CheckpointError as error:
        raise ConfigError(f"checkpoints cannot be written: {error}") from None
    for name, callback in trainer.callbacks.items():
        if hasattr(callback, "state_dict") and not hasattr(callback, "load_state_dict"):
            log.warning(
                "The callback %s has state_dict, but no load_state_dict, so its state is not "
                "saved. Define both.",
                name,
            )


def least_bytes(trainer: Trainer) -> int:
    """Return the minimum size of a checkpoint in bytes, including future optimizer state."""
    size = checkpointing.state_bytes(dict(trainer.model.state_dict()))
    is_alone = trainer.backend.comm.world_size == 1
    for optimizer in trainer.optimizers.values():
        size += checkpointing.state_bytes(optimizer.state_dict())
        to_come = bytes_to_come(optimizer, is_alone=is_alone)
        if to_come is None:
            log.info(
                "The free space was checked without the state of %s, whose size is unknown before "
                "its first step. To include it, give the class a method first_state(param, group).",
                type(optimizer).__name__,
            )
        size += to_come or 0
    return size
