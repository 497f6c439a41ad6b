"""When checkpoints are due, and how they get to the disk: at once, or in the background."""

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
from modelzoo_trainer.core.early_exit import SAVE
from modelzoo_trainer.core.optimizer_facts import bytes_to_come
from modelzoo_trainer.devices import map_tensors
from modelzoo_trainer.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class CheckpointSchedule:
    """The step boundaries at which a checkpoint is due: by steps, by the clock, by epochs."""

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
        """Whether checkpoints are due at all."""
        return not self.steps is self.epochs is self._interval_s is None

    def start(self) -> None:
        """Count the minutes from now."""
        self._is_asked = False
        if self._interval_s is not None:
            self._next_s = time.monotonic() + self._interval_s

    def is_due(self, trainer: Trainer) -> bool:
        """Return whether a checkpoint is due at the step boundary at hand."""
        if self.steps is not None and trainer.global_step % self.steps == 0:
            return True
        if self._interval_s is not None and self._time_is_up(trainer):
            return True
        data = trainer.data
        return self.epochs is not None and data.is_last and (data.epoch + 1) % self.epochs == 0

    def ask(self) -> None:
        """Have a checkpoint due at the next step boundary."""
        self._is_asked = True

    def _time_is_up(self, trainer: Trainer) -> bool:
        """Return whether the minutes are over; of several processes the first one's clock says."""
        backend = trainer.backend
        if backend.comm.world_size == 1:
            return time.monotonic() >= self._next_s
        if backend.comm.is_main and time.monotonic() >= self._next_s:
            self._next_s = math.inf  # until it has been heard
            backend.comm.propose(SAVE)
        asked, self._is_asked = self._is_asked, False
        return asked


log = logging.getLogger("modelzoo_trainer.checkpoint")

_GIB: Final = 2**30
_HEADROOM: Final = 1.1
_WITHIN_STEP: Final = "within_step"  # written between two batches of a step


class CheckpointSaver:
    """Writes checkpoints, one at a time, and says which have been committed."""

    def __init__(self) -> None:
        self._background = checkpointing.BackgroundSaver()
        self._committed: list[Path] = []
        self.path: Path | None = None
        """That of the checkpoint under way."""
        self.points_latest = True
        """Whether this process keeps the link to the newest one."""

    def save(  # what is written, and how
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

        The state may change once this has returned. `wait`: until it is committed. `group`: the
        processes that write it together; None = this one alone does. `facts`: what the manifest
        says besides.

        Raises:
            CheckpointError: If it cannot be written; or, of the one before.
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
            log.info("Writing checkpoint %s; training was held up for %.3f s.", path, held_up_s)
        else:
            log.info("Saved checkpoint %s in %.3f s.", path, held_up_s)

    def _note(self, committed: list[Path]) -> None:
        self._committed += committed
        for path in committed:
            if self.points_latest:
                checkpointing.point_latest(path.parent, path.name)
            if path == self.path:
                log.info("Saved checkpoint %s.", path)
                self.path = None

    def collect(self) -> list[Path]:
        """Return what has been committed since this was asked last.

        Raises:
            CheckpointError: If one that was not waited for could not be written.
        """
        if self.path is not None:
            self._note(self._take(wait=False))
        committed, self._committed = self._committed, []
        return committed

    def wait(self) -> list[Path]:
        """Return likewise, when nothing is under way any more."""
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
        """Wait for what is under way; a failure is logged, as another error may be on its way."""
        try:
            self.wait()
        except CheckpointError as error:
            log.error("%s", error)  # the message says it all


def facts_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the manifest of a checkpoint says of when it was written."""
    return {_WITHIN_STEP: True} if "window" in state.get("dataloader", {}) else {}


def was_written_before(path: Path, step: int) -> bool:
    """Return whether a checkpoint holds nothing of a step, as far as its manifest says.

    The weights after `step` are the first that have its update. True if the manifest cannot be
    read.
    """
    try:
        manifest = checkpointing.read_manifest(path)
    except CheckpointError:
        return True
    is_within = bool(manifest.facts.get(_WITHIN_STEP))
    return manifest.step + is_within < step


def prepare(root: Path, trainer: Trainer, *, is_locked: bool) -> None:
    """Make sure that checkpoints can be written in a folder, before hours are spent on one.

    The folder is made if it is not there. `is_locked`: nobody else writes there, so that what a
    crash has left over is removed.

    Raises:
        ConfigError: If it cannot be written, or has less space than a checkpoint takes, or if the
            state of the model or of a callback cannot be saved.
    """
    if is_locked:  # before more is written: the probe may be killed, too
        for path in checkpointing.clean(root):
            log.info("Removed %s, which an earlier run has left unfinished.", path.name)
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
            f"{str(root)!r} has {free / _GIB:.2f} GiB of free space, and one checkpoint takes at "
            f"least {needed / _GIB:.2f} GiB. Make space, or set checkpoint.checkpoint_root or "
            f"model_dir to another disk."
        )


def check_states(trainer: Trainer) -> None:
    """Make sure that what users wrote returns what can be saved.

    A callback whose state cannot be had before its training has begun is not looked at.

    Raises:
        ConfigError: If something cannot be saved.
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
            log.warning("%s has state_dict, but no load_state_dict: its state is not saved.", name)


def least_bytes(trainer: Trainer) -> int:
    """Return what a checkpoint takes at least, with the state that optimizers will have."""
    size = checkpointing.state_bytes(dict(trainer.model.state_dict()))
    for optimizer in trainer.optimizers.values():
        size += checkpointing.state_bytes(optimizer.state_dict())
        size += bytes_to_come(optimizer)
    return size
