"""Which checkpoint a fit, a validation or a rollback starts from."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from modelzoo_trainer import checkpointing
from modelzoo_trainer.callback import StateDict
from modelzoo_trainer.checkpointing.folder import refuse_newer
from modelzoo_trainer.core.parts.checkpoint_writer import was_written_before
from modelzoo_trainer.core.parts.named_checkpoints import (
    BEST,
    LAST,
    best_in,
    none_in,
    note_best,
    note_untrained,
)
from modelzoo_trainer.errors import CheckpointError, ConfigError, NoCheckpoint

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.checkpoint")


class CheckpointChoice:
    """Choose the checkpoint that a fit, a validation or a rollback starts from.

    The main process searches the folder of `trainer.checkpoint`, its snapshots in memory, and what
    the user names; all processes get its choice. Nothing is loaded into the trainer.
    """

    def __init__(self) -> None:
        self.is_own = False
        """Whether the chosen checkpoint is the newest one of this run's folder."""
        self.damaged: set[Path] = set()
        """The checkpoints that the last search found damaged."""
        self._found: tuple[Path, StateDict] | None = None
        self._others: frozenset[Path] = frozenset()
        self._not_fresh: WeakSet[Trainer] = WeakSet()
        self._num_validations = 0  # that are running
        self._noted_untrained = 0  # the level of the message; 0 = none yet

    # ---- what the trainer does

    def is_fresh(self, trainer: Trainer) -> bool:
        """Return whether a trainer has neither trained nor loaded anything yet."""
        return trainer not in self._not_fresh

    def note_used(self, trainer: Trainer) -> None:
        """Note that a trainer trains, or has loaded something."""
        self._not_fresh.add(trainer)

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Context manager around a validation: within a fit, it may not choose another state."""
        self._num_validations += 1
        try:
            yield
        finally:
            self._num_validations -= 1

    def begin_fit(self, trainer: Trainer) -> None:
        """Note the checkpoints of other runs in the folder: a fit never rolls back to them."""
        self._others = frozenset()
        if not self.is_own:
            begun, step = trainer.checkpoint.begun_with
            self._others = frozenset(
                path
                for path in trainer.checkpoint.candidates(trainer)
                if path.resolve() != begun or step != trainer.global_step
            )

    def taken(self, path: Path) -> StateDict | None:
        """Return the content of the chosen checkpoint, which was read to verify it; once."""
        found, self._found = self._found, None
        return found[1] if found is not None and found[0] == path else None

    # ---- a fit or a validation

    def choose(self, trainer: Trainer, ckpt_path: Any) -> Path | None:
        """Return the checkpoint of a `ckpt_path` argument. Collective.

        None = none; Ellipsis = the newest intact one, if autoload is enabled and this trainer has
        neither trained nor loaded anything yet; "last" = that one in any case, if there is one, and
        required unless a fit begins; "best" = the best one of `SaveBest`.

        Raises:
            CheckpointError: If there are checkpoints but none is intact, or none of that name.
            ConfigError: If it is none of these.
        """
        is_restart = (
            trainer.is_resuming and self.is_fresh(trainer) and trainer.autorestart.is_restart
        )
        _check_kind(ckpt_path)
        if self._num_validations and trainer.is_fitting and ckpt_path not in (None, ...):
            raise ConfigError(
                f"ckpt_path: {str(ckpt_path)!r} cannot be validated while fit is running: it would "
                f"replace the weights and the state that are being trained. Validate it after the "
                f"fit or in another Trainer; without ckpt_path, the current weights are used."
            )
        self.is_own = ckpt_path in (..., LAST) or is_restart
        self._found = None
        is_main = trainer.backend.comm.is_main
        path = self._choose(trainer, ckpt_path, is_restart) if is_main else None
        path, self.is_own = trainer.object_store.shared(trainer, [path, self.is_own])
        return path  # type: ignore[no-any-return]  # that path

    def _choose(self, trainer: Trainer, ckpt_path: Any, is_restart: bool) -> Path | None:
        if not self.is_own:
            return None if ckpt_path is None else self._named(trainer, ckpt_path)
        is_default = trainer.checkpoint.autoload_last_checkpoint and self.is_fresh(trainer)
        if is_default or is_restart or ckpt_path == LAST:
            # A restarted run has already started from its ckpt_path.
            self._found = self._last_written(trainer) if ckpt_path is not ... else None
            self._found = self._found or self._newest_intact(trainer)
            self._found = self._in_memory(trainer) or self._found
            self._warn_of_others(trainer)
            if self._found is None and ckpt_path not in (..., LAST, None):
                self.is_own = False  # it has ended before its first checkpoint
                return self._named(trainer, ckpt_path)
        if self._found is None:
            _require_last(trainer, ckpt_path)
            if not (trainer.is_resuming or trainer.global_step) and self.is_fresh(trainer):
                self._noted_untrained = note_untrained(trainer, self._noted_untrained)
            return None
        if not trainer.is_resuming and ckpt_path is ...:
            note_best(trainer, self._found[0])
        return self._found[0]

    def _named(self, trainer: Trainer, ckpt_path: Any) -> Path:
        """Return the checkpoint that a user named; warn if the folder has others."""
        is_best = isinstance(ckpt_path, str) and ckpt_path == BEST
        root = trainer.checkpoint.root(trainer)
        path = best_in(trainer, root) if is_best else trainer.object_store.checkpoint_at(ckpt_path)
        own = trainer.checkpoint.get_latest_checkpoint(trainer) if trainer.is_resuming else None
        if self.is_fresh(trainer) and own is not None and own.resolve() != path.resolve():
            log.warning(
                "Starting from ckpt_path=%s although the folder already contains %s; omit "
                "ckpt_path to resume from that.",
                path,
                own,
            )
        return path

    def _warn_of_others(self, trainer: Trainer) -> None:
        """Warn if the checkpoint is of another run, or only other names are in the folder."""
        own = trainer.checkpoint
        root = own.root(trainer)
        if self._found is not None:
            path, state = self._found
            home = own.home(trainer)
            if state.get("model_dir", home) != home:
                log.warning(
                    "%s was saved by a run in another model_dir, %s. Give each run its own "
                    "checkpoint_root.",
                    path,
                    os.path.normpath(root / state["model_dir"]),
                )
        elif trainer.is_resuming and (others := checkpointing.list_checkpoints(root)):
            log.warning(
                "Starting at step 0: no checkpoint in %s matches checkpoint.checkpoint_name %r "
                "(found: %d with other names, such as %s). To resume from one, pass its path as "
                "ckpt_path.",
                root,
                own.checkpoint_name,
                len(others),
                others[-1].path.name,
            )

    # ---- the newest intact one

    def _newest_intact(
        self, trainer: Trainer, others: frozenset[Path] = frozenset()
    ) -> tuple[Path, StateDict] | None:
        """Return the newest intact checkpoint and its content.

        Raises:
            CheckpointError: If there are some, but none is intact, or a newer one is of a newer
                format.
        """
        problems = []
        self.damaged.clear()
        for path in trainer.checkpoint.candidates(trainer):
            if path in others:
                continue
            refuse_newer(path)
            try:
                return path, _content(path, trainer)
            except CheckpointError as error:
                log.warning("Skipped %s: %s", path, error)
                self.damaged.add(path)
                problems.append(f"  {path.name}: {error}")
        if problems:
            raise CheckpointError(
                f"No checkpoint in {str(trainer.checkpoint.root(trainer))!r} is intact:\n"
                + "\n".join(problems)
                + "\nMove them away to start from scratch, or choose another one with ckpt_path."
            )
        return None

    def _last_written(self, trainer: Trainer) -> tuple[Path, StateDict] | None:
        """Return the last checkpoint of the previous attempt and its content, if intact."""
        path = trainer.autorestart.last_checkpoint
        return None if path is None else _if_intact(path, trainer)

    def _in_memory(self, trainer: Trainer) -> tuple[Path, StateDict] | None:
        """Return the newest intact snapshot and its content, if newer than any checkpoint."""
        memory = trainer.checkpoint.memory
        if memory is None or not trainer.is_resuming:
            return None
        newest = trainer.checkpoint.get_latest_checkpoint(trainer)
        for path in memory.newer_than(trainer, newest):
            found = _if_intact(path, trainer)
            if found is not None:
                than = "there is no checkpoint" if newest is None else f"newer than {newest.name}"
                step = checkpointing.read_manifest(path).step
                log.info("Resuming from step %d, which is in memory (%s).", step, than)
                return found
        return None

    # ---- a rollback, and a check before a validation

    def before(self, trainer: Trainer, step: int) -> Path | None:
        """Return the newest intact checkpoint of this fit before a step's first batch.

        None = there is none, or this is not the main process.
        """
        self._found = None
        if not trainer.backend.comm.is_main:
            return None
        paths = trainer.checkpoint.candidates(trainer)
        self._others |= {path for path in paths if not was_written_before(path, step)}
        self._found = self._newest_intact(trainer, self._others)
        return None if self._found is None else self._found[0]

    def require_any(self, trainer: Trainer, method: str, ckpt_path: Any) -> None:
        """Check that a validation has a checkpoint to load, before it begins. Collective.

        `method`: "validate", "test" or "predict". Without a `ckpt_path` (`...`), a no-op if one has
        been loaded already.

        Raises:
            ConfigError: If there is none, or none of that name.
        """
        own, comm = trainer.checkpoint, trainer.backend.comm
        root = own.root(trainer)
        if comm.is_main and ckpt_path == BEST:
            best_in(trainer, root)
        if comm.is_main and ckpt_path == LAST and not own.candidates(trainer):
            _require_last(trainer, LAST)
        if ckpt_path is not ...:
            return
        if not self.is_fresh(trainer) or not trainer.backend.caps.holds_values:
            return
        why = "checkpoint.autoload_last_checkpoint is false."
        is_any = False
        if own.autoload_last_checkpoint:
            why = none_in(root)
            is_any = comm.is_main and bool(own.candidates(trainer))
        if not comm.broadcast_object(is_any):
            raise ConfigError(
                f"There are no weights to {method}: ckpt_path is not set, and {why} Pass "
                f"--checkpoint_path, or set {method}.ckpt_path in the YAML file; null uses the "
                f"untrained weights."
            )


def _require_last(trainer: Trainer, ckpt_path: Any) -> None:
    """Raise an error if a validation of the last checkpoint finds none."""
    if ckpt_path == LAST and not trainer.is_resuming:
        raise NoCheckpoint(f"ckpt_path: 'last': {none_in(trainer.checkpoint.root(trainer))}")


def _check_kind(ckpt_path: Any) -> None:
    """Raise a `ConfigError` for a `ckpt_path` of another type, such as True."""
    if ckpt_path is None or ckpt_path is ... or isinstance(ckpt_path, (str, os.PathLike)):
        return
    given = repr(ckpt_path) if isinstance(ckpt_path, bool) else f"a {type(ckpt_path).__name__}"
    raise ConfigError(
        f"ckpt_path got {given}. Pass a path, 'last', 'best', or None for the current weights; "
        f"omit it to use the newest checkpoint of this run, if there is one."
    )


def _if_intact(path: Path, trainer: Trainer) -> tuple[Path, StateDict] | None:
    """Return a checkpoint and its content; log a warning if it is damaged."""
    try:
        return path, _content(path, trainer)
    except CheckpointError as error:
        log.warning("Skipped %s: %s", path, error)
        return None


def _content(path: Path, trainer: Trainer) -> StateDict:
    """Verify a checkpoint and return its content, empty if several processes will load it.

    Called by the main process, before `ObjectStore.shared`.

    Raises:
        CheckpointError: If it is damaged.
    """
    if trainer.backend.comm.process_group is None:
        return checkpointing.load(path)
    problems = trainer.object_store.verify(trainer, path)
    if problems:
        raise CheckpointError("; ".join(problems))
    return {}
