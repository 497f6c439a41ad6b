"""When checkpoints are written, and which one a run starts from."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from modelzoo_trainer import checkpointing
from modelzoo_trainer.base.constraints import (
    FinitePositiveFloat,
    Flag,
    NonNegativeInt,
    PositiveInt,
    checked,
)
from modelzoo_trainer.base.shown_path import shown_path
from modelzoo_trainer.callback import CoreCallback, Loader, StateDict
from modelzoo_trainer.checkpointing.folder import name_pattern, name_problem, refuse_newer
from modelzoo_trainer.checkpointing.restoring import parts_of, restoring
from modelzoo_trainer.checkpointing.stores.urls import is_url, parse_url
from modelzoo_trainer.checkpointing.weight_readers import read_weights_for
from modelzoo_trainer.core.artifact_dir import folder_of
from modelzoo_trainer.core.model import ModelCallback
from modelzoo_trainer.core.parts.checkpoint_choice import CheckpointChoice
from modelzoo_trainer.core.parts.checkpoint_writer import (
    CheckpointSaver,
    CheckpointSchedule,
    facts_of,
    prepare,
)
from modelzoo_trainer.core.parts.memory_snapshots import MemorySettings, MemorySnapshots
from modelzoo_trainer.core.parts.named_checkpoints import (
    listed,
)
from modelzoo_trainer.core.parts.states import like_of, log_skipped, part_of
from modelzoo_trainer.core.run_lock import FolderLock
from modelzoo_trainer.errors import (
    CheckpointError,
    ConfigError,
    NoCheckpoint,
    is_refusal_of_disk,
)
from modelzoo_trainer.hooks.interceptors import Interceptable, event
from modelzoo_trainer.hooks.states import load_states

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.checkpoint")

_ALWAYS: Final = ("global_step", "dataloader", "schedulers", "rng")
"""Parts of a checkpoint that every run saves, beside the model and its optimizers."""

SAVING_END: Final = "saving_end"
"""Custom event after `on_save_checkpoint`, before training continues: the checkpoint, of the run or
of `SaveBest` and the like, is written, has failed, or is being written in the background."""


@contextmanager
def saving(trainer: Trainer, *, waits: bool = False) -> Iterator[None]:
    """Context manager in which a checkpoint is written; the model has its trained weights.

    Tells callbacks when it ends, after which training continues.

    `waits`: first finish the one that is being written in the background.
    """
    owner: ModelCallback = trainer.callbacks["model"]
    try:
        with owner.trained_weights():
            if waits:
                trainer.checkpoint.finish(trainer)
            yield
    finally:
        trainer.call(SAVING_END)


class Checkpoint(CoreCallback, Interceptable):
    """Write checkpoints at step boundaries, and find the newest intact one.

    With any of `steps`, `minutes`, `epochs` and `save_final_checkpoint`, a checkpoint is also
    written at the end of a run, even if it stops early. With none of them, as in `Checkpoint()`,
    none is written, unless the run is interrupted other than by Ctrl-C. If one cannot be written
    (a full disk, a read-only folder), training continues: the failure is logged, earlier ones are
    kept, and the next one is attempted when it is due; only the final one must succeed.

    Args:
        steps: Write one on every n-th step; None or 0 = none.
        autoload_last_checkpoint: Start from the newest intact checkpoint of the folder, unless
            `fit` gets a `ckpt_path`.
        disable_strict_checkpoint_loading: Load what fits and ignore the rest.
        save_initial_checkpoint: Write one before the first step.
        checkpoint_root: The folder of checkpoints, or the URL of an object store; None =
            `model_dir`. For one run at a time.
        checkpoint_name: Their names; contains `{step}` once, and does not start with a dot.
        strict_version: Accepted for compatibility: an unreadable version is always refused.
        minutes: Write one at the first step boundary n minutes after the last; None = none.
        epochs: Write one at the end of every n-th epoch; None = never.
        asynchronous: Train while a checkpoint is written. It has the state of its step, from a
            copy in host memory. At most one at a time.
        save_final_checkpoint: Write one at the end of a run; on its own, only then.
        memory: Keep the newest states in memory of this machine, too, for a restart after a crash:
            `steps`, write one on every n-th step; `path`, a folder on tmpfs, None = /dev/shm.

    State: `callbacks`, the callbacks' `state_dict`s; `model_dir`, the run's, if checkpoints
        are elsewhere.

    Raises:
        ConfigError: If a number is negative, `checkpoint_name` is invalid, or
            `save_final_checkpoint` is not a bool; at the start of a fit, if the folder is not
            writable, has too little space for one checkpoint, or is in use by another run.
    """

    @checked("checkpoint")
    def __init__(  # noqa: PLR0913  # the YAML section's keys
        self,
        steps: NonNegativeInt | None = None,
        autoload_last_checkpoint: bool = True,
        disable_strict_checkpoint_loading: bool = False,
        save_initial_checkpoint: bool = False,
        checkpoint_root: str | Path | None = None,
        checkpoint_name: str = "checkpoint_{step}",
        strict_version: bool = True,
        minutes: FinitePositiveFloat | None = None,
        epochs: PositiveInt | None = None,
        asynchronous: bool = False,
        save_final_checkpoint: Flag = False,
        memory: dict[str, Any] | None = None,
    ) -> None:
        problem = name_problem(checkpoint_name)
        if problem is not None:
            raise ConfigError(
                f"checkpoint.checkpoint_name is {checkpoint_name!r}; {problem}. Use a name such as "
                f"'checkpoint_{{step}}'."
            )
        self.times = CheckpointSchedule(steps, minutes, epochs)
        self.steps = self.times.steps
        self.autoload_last_checkpoint = autoload_last_checkpoint
        self.disable_strict_checkpoint_loading = disable_strict_checkpoint_loading
        self.save_initial_checkpoint = save_initial_checkpoint
        self.save_final_checkpoint = save_final_checkpoint
        self.checkpoint_url: str | None = None
        """The folder of checkpoints as given, if it is a URL."""
        self.checkpoint_root: Path | None = None
        if isinstance(checkpoint_root, (str, Path)) and is_url(checkpoint_root):
            parse_url(checkpoint_root, "checkpoint.checkpoint_root")
            self.checkpoint_url = str(checkpoint_root)
        elif checkpoint_root is not None:
            self.checkpoint_root = folder_of("checkpoint_root", checkpoint_root)
        self.checkpoint_name = checkpoint_name
        self.strict_version = strict_version
        self.asynchronous = asynchronous
        self.memory = None
        """The snapshots in memory; None = none are written."""
        if memory is not None:
            from modelzoo_trainer.base.nested_settings import made  # imports pydantic, slowly

            self.memory = MemorySnapshots(made(MemorySettings, memory, "checkpoint.memory"))
        self.is_in_memory = False
        """Whether the state being collected is for a snapshot in memory, not for a checkpoint."""
        self._saving = CheckpointSaver()
        self._lock = FolderLock("checkpoint_root")
        self._saved: tuple[Path | None, int | None] = (None, None)  # path, step
        self._has_written = False  # in this fit
        self._begun: tuple[Path | None, int | None] = (None, None)
        self._parts: frozenset[str] = frozenset()  # of the last checkpoint, as it was read
        self._is_partial = False
        self._choice = CheckpointChoice()
        self.expected: Any = None
        """The `ckpt_path` of a fit that follows set-up at once, as in a run of a file."""

    # ---- names

    def root(self, trainer: Trainer) -> Path:
        """Return the folder of the checkpoints."""
        return self.checkpoint_root or trainer.model_dir

    def is_in_folder(self, trainer: Trainer, path: Path) -> bool:
        """Return whether a checkpoint is in the run's checkpoint folder."""
        return path.resolve().parent == self.root(trainer).resolve() or self._is_snapshot(
            trainer, path
        )

    def _is_snapshot(self, trainer: Trainer, path: Path) -> bool:
        return self.memory is not None and self.memory.holds(trainer, path)

    def get_checkpoint_path(self, trainer: Trainer) -> Path:
        """Return an unused path for the current step."""
        plain = self.root(trainer) / self.checkpoint_name.format(step=trainer.global_step)
        path, number = plain, 1
        while path.exists() or path == self._saving.path:
            number += 1
            path = plain.with_name(f"{plain.name}_{number}")
        return path

    def get_latest_checkpoint(self, trainer: Trainer) -> Path | None:
        """Return the newest checkpoint of the folder: highest step, then latest attempt."""
        return checkpointing.newest(self.root(trainer), self._pattern())

    def is_any_in(self, root: Path) -> bool:
        """Return whether a folder has matching checkpoint names, intact or not.

        Raises:
            CheckpointError: If the folder cannot be listed.
        """
        return bool(checkpointing.candidates(root, self._pattern()))

    def candidates(self, trainer: Trainer) -> list[Path]:
        """Return the checkpoints of the folder by their names, newest first, intact or not.

        Raises:
            CheckpointError: If the folder cannot be listed.
        """
        return checkpointing.candidates(self.root(trainer), self._pattern())

    def _pattern(self) -> re.Pattern[str]:
        return name_pattern(self.checkpoint_name)

    def home(self, trainer: Trainer) -> str | None:
        """Return the path of `model_dir` relative to the checkpoint folder; None = the same."""
        root, home = os.path.realpath(self.root(trainer)), os.path.realpath(trainer.model_dir)
        return None if root == home else os.path.relpath(home, root)

    def all_of(self, trainer: Trainer) -> list[Path]:
        """Return all checkpoints of the folder, by step.

        Raises:
            ConfigError: If there is none.
        """
        pattern = self._pattern()
        if trainer.backend.comm.is_main:
            for path in self.candidates(trainer):
                refuse_newer(path)
        listed = checkpointing.list_checkpoints(self.root(trainer))
        own = [info.path for info in listed if pattern.fullmatch(info.path.name)]
        found: list[Path] = trainer.object_store.shared(trainer, own)
        if not found:
            raise ConfigError(
                f"There is no checkpoint in {str(self.root(trainer))!r} to validate. Is it the "
                f"right folder? Set ckpt_paths to a path or glob, or to null to validate the "
                f"untrained model."
            )
        return found

    # ---- which one

    @property
    def is_own(self) -> bool:
        """Whether the chosen checkpoint is the newest one of this run's folder."""
        return self._choice.is_own

    def will_load(self, trainer: Trainer) -> bool:
        """Return whether the method that follows set-up will load all weights. Collective."""
        if self.disable_strict_checkpoint_loading or not trainer.backend.caps.holds_values:
            return False
        if self.expected is None or (self.expected is ... and not self.autoload_last_checkpoint):
            return False
        if self.expected not in (..., "last", "best"):
            return True
        is_any = False
        if trainer.backend.comm.is_main:
            with suppress(CheckpointError):  # raised again when it is loaded
                is_any = self.is_any_in(self.root(trainer))
        return bool(trainer.backend.comm.broadcast_object(is_any))

    def choose(self, trainer: Trainer, ckpt_path: Any) -> Path | None:
        """Return the checkpoint of a `ckpt_path` argument, as `CheckpointChoice.choose`."""
        return self._choice.choose(trainer, ckpt_path)

    def require_any(self, trainer: Trainer, method: str, ckpt_path: Any) -> None:
        """Check that a validation has one to load, as `CheckpointChoice.require_any`."""
        self._choice.require_any(trainer, method, ckpt_path)

    def to_roll_back_to(self, trainer: Trainer, step: int) -> Path | None:
        """Return the newest intact checkpoint before a step's first batch, or None.

        `step` is the bad `global_step`; this fit never loads checkpoints written after its start.
        """
        self.finish(trainer)
        path = self._choice.before(trainer, step)
        if self.memory is not None:
            self.memory.forget(trainer)
        return trainer.object_store.shared(trainer, path)  # type: ignore[no-any-return]  # that path

    # ---- when

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._saved, self._has_written = (None, None), False
        if self._writes(trainer) and self.home(trainer) is not None:
            stack.callback(self._lock.release)
            self._lock.take(self.root(trainer))
            self._lock.begin_fit(stack)
        stack.callback(self._saving.finish)

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        stack.enter_context(self._choice.validating())

    @override
    def on_enter_validate_all(
        self,
        trainer: Trainer,
        stack: ExitStack,
        val_dataloaders: list[Loader],
        loop: Any,
        ckpt_paths: list[Any],
    ) -> None:
        stack.enter_context(self._choice.validating())

    def _writes(self, trainer: Trainer) -> bool:
        """Return whether this process will write checkpoints in a fit."""
        saves = self.saves_at_end or self.save_initial_checkpoint
        return saves and trainer.backend.caps.holds_values and trainer.backend.comm.is_main

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        if self._writes(trainer):
            is_locked = self._lock.is_held or self.home(trainer) is None
            prepare(self.root(trainer), trainer, is_locked=is_locked)
            self._mend_latest(trainer)
            checkpointing.forget_deleted(self.root(trainer))
        if self.save_initial_checkpoint and self._choice.is_fresh(trainer):
            self._save(trainer, wait=True)
        self._choice.note_used(trainer)
        self._choice.begin_fit(trainer)
        self._prepare_memory(trainer)
        if not self._has_written:
            begun = self._begun[0] if self._begins_here(trainer) else None
            self._saved = begun, None if self._begins_in_memory(trainer) else trainer.global_step
        self.times.start()

    def _prepare_memory(self, trainer: Trainer) -> None:
        if self.memory is not None and trainer.backend.caps.holds_values:
            begun = self._begun[0] if self._begins_in_memory(trainer) else None
            is_main = trainer.backend.comm.is_main
            newest = self.get_latest_checkpoint(trainer) if is_main else None
            self.memory.prepare(trainer, begun, newest)

    def _begins_in_memory(self, trainer: Trainer) -> bool:
        """Return whether the current state comes from a snapshot in memory."""
        path, step = self._begun
        if path is None or step != trainer.global_step:
            return False
        return self._is_snapshot(trainer, path)

    def _mend_latest(self, trainer: Trainer) -> None:
        """Point `latest` to the newest checkpoint that is not known to be damaged."""
        listed = checkpointing.list_checkpoints(self.root(trainer))
        paths = [info.path for info in listed if self._pattern().fullmatch(info.path.name)]
        intact = [path for path in paths if path not in self._choice.damaged]
        checkpointing.mend_latest(self.root(trainer), intact[-1].name if intact else None)

    @property
    def begun_with(self) -> tuple[Path | None, int | None]:
        """The last loaded checkpoint and its step; None = none, or only weights."""
        return self._begun

    def _begins_here(self, trainer: Trainer) -> bool:
        """Return whether the current state comes from a checkpoint of the folder."""
        path, step = self._begun
        if path is None or step != trainer.global_step or self._is_snapshot(trainer, path):
            return False
        return self.is_in_folder(trainer, path)

    @property
    def saves_at_end(self) -> bool:
        """Whether a checkpoint is written at the end of a run."""
        return self.times.is_any or self.save_final_checkpoint

    def ask(self) -> None:
        """Request a checkpoint at the next step boundary, on all processes."""
        self.times.ask()

    @override
    def on_step_committed(self, trainer: Trainer) -> None:
        self._save_on_disk(trainer)
        if self.memory is not None and self.memory.is_due(trainer.global_step):
            self._save_in_memory(trainer, self.memory)

    @override
    def on_train_start(
        self, trainer: Trainer, model: Any, train_dataloader: Loader, loop: Any, loop_idx: int
    ) -> None:
        if self.memory is not None:
            self.memory.note_use(trainer)

    def _save_in_memory(self, trainer: Trainer, memory: MemorySnapshots) -> None:
        """Write a snapshot, unless the state is on disk already."""
        if self._is_saved(trainer) and self._saving.path is None:
            return
        trainer.drain()
        state: StateDict = {}
        with saving(trainer), self._in_memory_only():
            trainer.hooks.on_save_checkpoint(trainer, state)
            trainer.hooks.postprocess_checkpoint(trainer, state)
            whole = trainer.backend.writable(state)
            group = trainer.backend.comm.process_group
            part = whole if group is None else part_of(whole, trainer)
            memory.save(trainer, part, self._saving.path)

    @contextmanager
    def _in_memory_only(self) -> Iterator[None]:
        self.is_in_memory = True
        try:
            yield
        finally:
            self.is_in_memory = False

    @override
    def on_after_save_checkpoint(self, trainer: Trainer, ckpt_path: Path) -> None:
        if self.memory is not None and trainer.backend.comm.is_main:
            self.memory.note_newest(ckpt_path)

    def _save_on_disk(self, trainer: Trainer) -> None:
        if not self.times.is_any:
            return
        try:
            self.report_committed(trainer)
        except CheckpointError as error:
            self._tell(trainer, error)
        if self.times.is_due(trainer):
            self._try_save(trainer)

    def finish(self, trainer: Trainer) -> None:
        """Wait for the pending checkpoint; log a failure."""
        try:
            trainer.after_save(self._saving.wait())
        except CheckpointError as error:
            self._tell(trainer, error)

    def _try_save(self, trainer: Trainer) -> None:
        try:
            self._save(trainer, wait=not self.asynchronous)
        except CheckpointError as error:
            self._tell(trainer, error)

    def _tell(self, trainer: Trainer, error: CheckpointError) -> None:
        """Log a checkpoint that a disk or a store refused; raise any other error."""
        if not is_refusal_of_disk(error):
            raise error
        self._saved, self._has_written = (None, None), False
        self.times.start()
        if trainer.backend.comm.is_main:  # all processes have the same error
            log.error(
                "NO CHECKPOINT WAS SAVED: %s Training continues, and the next checkpoint will be "
                "attempted as scheduled. Fix the cause before then, if it does not pass by itself.",
                error,
            )

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        self.finish(trainer)
        is_preempted = trainer.interrupted not in (None, "SIGINT")
        if (self.saves_at_end or is_preempted) and not self._is_saved(trainer):
            self._save(trainer, wait=True)

    def _is_saved(self, trainer: Trainer) -> bool:
        """Return whether nothing has changed since the last checkpoint or the start of the fit."""
        return self._saved[1] == trainer.global_step

    @override
    def on_fit_committed(self, trainer: Trainer, loop: Any) -> None:
        """Mark the last checkpoint as belonging to a finished fit. Done by the main process."""
        if self.memory is not None:
            self.memory.remove(trainer)  # for a crash; this end was in order
        if not trainer.schedule.is_finished(trainer) or trainer.interruptions.will_raise(trainer):
            return
        path = self._saved[0] if self._is_saved(trainer) else None
        if not trainer.backend.comm.is_main or path is None:
            return
        self._saving.finish()
        try:
            checkpointing.note_finished(path)
        except CheckpointError as error:
            log.warning(
                "%s Therefore this fit is not marked as finished, and a new run with the same "
                "loop.num_steps will take no steps. To train further, increase loop.num_steps.",
                error,
            )

    def begins_finished(self, trainer: Trainer) -> bool:
        """Return whether a fit starts from the last checkpoint of a finished one.

        Cost: A collective, if it starts from a checkpoint of the folder.
        """
        if not self._begins_here(trainer):
            return False
        path, backend = self._begun[0], trainer.backend
        assert path is not None  # it starts from one
        return bool(
            backend.comm.broadcast_object(backend.comm.is_main and checkpointing.is_finished(path))
        )

    def saved_by_fit(self, trainer: Trainer, *, is_new: bool) -> str:
        """Return what the last fit has saved, for a message.

        `is_new`: whether it has taken a step.
        """
        path = self._saved[0] if self._has_written else None
        if path is not None and self._is_saved(trainer):
            return f"saved {shown_path(path)}"
        if not is_new:
            return "no step was taken; there is nothing new to save"
        if not trainer.backend.caps.holds_values:
            return "a dry run saves nothing"
        hint = "set checkpoint.steps or checkpoint.save_final_checkpoint to save one at the end"
        if path is not None:
            return f"steps after {shown_path(path)} were not saved; {hint}"
        return f"nothing was saved because no checkpoint is configured; {hint}"

    def _save(self, trainer: Trainer, *, wait: bool) -> None:
        if trainer.backend.caps.holds_values:  # a dry run has nothing to save
            trainer.save_checkpoint(wait=wait)

    # ---- what

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        self._lock.check()
        states = {name: callback.state_dict() for name, callback in trainer.stateful_callbacks()}
        if states:
            state_dict["callbacks"] = trainer.backend.state_view(states)
        home = self.home(trainer)
        if home is not None:
            state_dict["model_dir"] = home

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        strict = not self.disable_strict_checkpoint_loading
        path = self._begun[0]
        skipped = load_states(
            dict(trainer.stateful_callbacks()),
            state_dict.get("callbacks", {}),
            strict=strict,
            is_foreign=path is not None and not self.is_in_folder(trainer, path),
            ignored=trainer.callbacks.stateless_names,
            is_quiet=trainer.summary.is_evaluation,
        )
        if skipped and not trainer.summary.is_evaluation:
            log_skipped(trainer, skipped)
        self._choice.note_used(trainer)  # also if loading fails halfway
        if path is not None:
            log.info("Loaded checkpoint %s.", shown_path(path))

    @contextmanager
    def restoring(self, trainer: Trainer, path: Path | None = None) -> Iterator[StateDict]:
        """Read a checkpoint and yield its content; blame it for errors in the block.

        `path` None: continue restoring the last one; yields an empty state.

        Raises:
            CheckpointError: As `read`; or if the block fails because of invalid content.
        """
        state = {} if path is None else self.read(trainer, path)
        with restoring(self._begun[0], parts_of(trainer.callbacks, trainer.stateful_callbacks())):
            yield state

    @event("save")
    def write(self, trainer: Trainer, state: StateDict, *, wait: bool) -> Path:
        """Write a checkpoint of the current step and return its path.

        The state shares memory with the run.

        Raises:
            CheckpointError: If it, or the pending one, cannot be written.
        """
        backend = trainer.backend
        path: Path = trainer.object_store.shared(trainer, self.get_checkpoint_path(trainer))
        group = backend.comm.process_group
        part = state if group is None else part_of(state, trainer)
        self._saving.points_latest = backend.comm.is_main
        self._saving.save(
            path, part, trainer.global_step, wait=wait, group=group, facts=facts_of(state)
        )
        self._saved, self._has_written = (path, trainer.global_step), True
        self.times.start()
        return path

    def report_committed(self, trainer: Trainer) -> None:
        """Call `on_after_save_checkpoint` for checkpoints committed since the last call."""
        trainer.after_save(self._saving.collect())

    @event("load")
    def read(self, trainer: Trainer, path: Path) -> StateDict:
        """Verify a checkpoint and return its content.

        A file of weights, or a folder with them, has nothing else. They are read later, one tensor
        at a time, when their values are needed. `checkpointing.register_weights_reader` adds
        formats.

        Raises:
            CheckpointError: If it does not exist, is damaged, or has another format.
        """
        verified = self._choice.taken(path)
        group = trainer.backend.comm.process_group
        trainer.object_store.bring(trainer, path)
        weights = read_weights_for(trainer.model, path)
        state: StateDict
        if weights is not None:
            state = {"model": weights}
        elif group is not None and path.exists():
            self._saving.finish()  # a pending one uses the same process group
            state = checkpointing.load_like(path, like_of(trainer), process_group=group)
        elif verified is not None:
            state = verified
        elif not path.exists():
            raise NoCheckpoint(
                f"ckpt_path: {str(path)!r} does not exist. {self._instead_of(trainer, path)}"
            )
        else:
            state = checkpointing.load(path)
        self._begun = path.resolve(), state.get("global_step")
        self._parts, self._is_partial = frozenset(state), False
        return state

    def load_parts(self) -> None:
        """Load only what the state has; called in `preprocess_checkpoint`."""
        self._is_partial = True

    def check_parts(self, trainer: Trainer) -> None:
        """Check that the checkpoint has what a run cannot do without, before any of it is used.

        A checkpoint of a run, which has a step, is required to have all that every run saves.

        Raises:
            CheckpointError: If a part is missing, unless only parts are to be loaded.
        """
        if self._is_partial:
            return
        needed = ["model"]
        if trainer.is_resuming and (self.is_own or "global_step" in self._parts):
            needed += _ALWAYS
            if trainer.has_optimizer and self._begun[1] and "optimizers" not in self._parts:
                needed.append("optimizer")
        missing = [name for name in needed if name not in self._parts]
        if not missing:
            return
        problem = f"Checkpoint {str(self._begun[0])!r} has no state {', '.join(map(repr, missing))}"
        if self.disable_strict_checkpoint_loading:
            log.warning("%s; the run starts without it.", problem)
            return
        raise CheckpointError(
            f"{problem}, so the run would not continue from it. Use another checkpoint. To load "
            f"only the parts that it has, name them in the callback LoadCheckpointStates, and pass "
            f"the path as ckpt_path."
        )

    def _instead_of(self, trainer: Trainer, path: Path) -> str:
        """Return which checkpoints are beside a missing one, and in the run's folder."""
        newest = self.get_latest_checkpoint(trainer)
        if newest is None or self.is_in_folder(trainer, path):
            return listed(path.parent)
        return f"{listed(path.parent)} Newest checkpoint of this run: {str(newest)!r}."
