"""When checkpoints are written, and which one a run starts from."""

from __future__ import annotations

import logging
import re
from contextlib import ExitStack
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from modelzoo_trainer import checkpointing
from modelzoo_trainer.callback import CoreCallback, Loader, StateDict
from modelzoo_trainer.errors import CheckpointMismatch, ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.checkpoint")


class Checkpoint(CoreCallback):
    """Writes checkpoints at step boundaries, and finds the newest one.

    Args:
        steps: Write one every so many steps, and at the end; None or 0 = none.
        autoload_last_checkpoint: Start from the newest checkpoint of the folder, unless `fit` is
            told otherwise.
        disable_strict_checkpoint_loading: Load what fits and leave the rest.
        save_initial_checkpoint: Write one before the first step.
        checkpoint_root: Where they are; None = `model_dir`.
        checkpoint_name: Their names; holds the field `{step}` once.
        strict_version: Accepted for the format's sake: another format version is always refused.

    State: `callbacks`, what the callbacks' `state_dict` methods return.

    Raises:
        ConfigError: If `steps` is negative or the name lacks its field.
    """

    def __init__(  # noqa: PLR0913  # the YAML section's keys
        self,
        steps: int | None = None,
        autoload_last_checkpoint: bool = True,
        disable_strict_checkpoint_loading: bool = False,
        save_initial_checkpoint: bool = False,
        checkpoint_root: str | Path | None = None,
        checkpoint_name: str = "checkpoint_{step}",
        strict_version: bool = True,
    ) -> None:
        is_count = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0
        if steps is not None and not is_count:
            raise ConfigError(f"checkpoint.steps is {steps!r}; it must be a whole number or null.")
        if _fields_of(checkpoint_name) != [("step", "", None)] or "/" in checkpoint_name:
            raise ConfigError(
                f"checkpoint.checkpoint_name is {checkpoint_name!r}; it must be a file name with "
                f"the field {{step}} once, such as 'checkpoint_{{step}}'."
            )
        self.steps = steps or None
        self.autoload_last_checkpoint = autoload_last_checkpoint
        self.disable_strict_checkpoint_loading = disable_strict_checkpoint_loading
        self.save_initial_checkpoint = save_initial_checkpoint
        self.checkpoint_root = None if checkpoint_root is None else Path(checkpoint_root)
        self.checkpoint_name = checkpoint_name
        self.strict_version = strict_version
        self._saved_step: int | None = None
        self._is_fresh = True
        self.is_own = False
        """Whether the checkpoint that was chosen last is the newest one of this run's folder."""
        if self.steps is None:
            self.idle_hooks = frozenset({"on_step_boundary"})

    # ---- names

    def root(self, trainer: Trainer) -> Path:
        """Return the folder of the checkpoints."""
        return self.checkpoint_root or trainer.model_dir

    def get_checkpoint_path(self, trainer: Trainer) -> Path:
        """Return a path for the current step that is not in use."""
        plain = self.root(trainer) / self.checkpoint_name.format(step=trainer.global_step)
        path, number = plain, 1
        while path.exists():
            number += 1
            path = plain.with_name(f"{plain.name}_{number}")
        return path

    def get_latest_checkpoint(self, trainer: Trainer) -> Path | None:
        """Return the newest checkpoint of the folder: highest step, then latest attempt."""
        before, after = self.checkpoint_name.split("{step}")
        pattern = re.compile(rf"{re.escape(before)}\d+{re.escape(after)}(_\d+)?")
        return checkpointing.newest(self.root(trainer), pattern)

    def choose(self, trainer: Trainer, ckpt_path: Any) -> Path | None:
        """Return the checkpoint that an argument stands for.

        Args:
            trainer: The trainer.
            ckpt_path: A path; None = none; Ellipsis = the newest one, if autoload is on and this
                trainer has neither trained nor loaded anything yet.
        """
        self.is_own = ckpt_path is ...
        if not self.is_own:
            return None if ckpt_path is None else Path(ckpt_path)
        if self.autoload_last_checkpoint and self._is_fresh:
            return self.get_latest_checkpoint(trainer)
        return None

    def all_of(self, trainer: Trainer) -> list[Path]:
        """Return all checkpoints of the folder, in order of their steps.

        Args:
            trainer: Whose folder it is.

        Raises:
            ConfigError: If there is none.
        """
        found = [info.path for info in checkpointing.list_checkpoints(self.root(trainer))]
        if not found:
            raise ConfigError(
                f"there is no checkpoint in {str(self.root(trainer))!r} to validate. Name some "
                f"with ckpt_paths, or write ckpt_paths: null for the weights as they are."
            )
        return found

    def expand(self, ckpt_paths: Any) -> list[Any]:
        """Return the checkpoints of an argument that takes one or several paths or globs.

        Raises:
            ConfigError: If a glob matches nothing.
        """
        if ckpt_paths is None or ckpt_paths is ...:
            return [ckpt_paths]
        given = [ckpt_paths] if isinstance(ckpt_paths, (str, Path)) else list(ckpt_paths)
        found: list[Path] = []
        for path in map(Path, given):
            matches = sorted(path.parent.glob(path.name), key=_by_number)
            if not matches:
                raise ConfigError(f"ckpt_paths: {str(path)!r} matches nothing.")
            found += matches
        return found

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
        self._saved_step = None

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        if self.save_initial_checkpoint and self._is_fresh:
            self._save(trainer)
        self._is_fresh = False
        self._saved_step = trainer.global_step

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        if self.steps is not None and trainer.global_step % self.steps == 0:
            self._save(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        if self.steps is not None and self._saved_step != trainer.global_step:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if trainer.backend.caps.holds_values:  # a dry run has nothing to save
            trainer.save_checkpoint()

    # ---- what

    @override
    def on_save_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        states = {
            name: callback.state_dict()
            for name, callback in trainer.stateful_callbacks()
            if hasattr(callback, "state_dict")
        }
        if states:
            state_dict["callbacks"] = trainer.backend.host_state(states)

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        states = state_dict.get("callbacks", {})
        strict = not self.disable_strict_checkpoint_loading
        known = dict(trainer.stateful_callbacks())
        for name in states:
            if name not in known:
                log.warning("The checkpoint has state of %s, which is not part of this run.", name)
        for name, callback in known.items():
            if name in states:
                callback.load_state_dict(states[name])
            elif states and strict:
                log.warning("The checkpoint has no state of %s; it starts anew.", name)

    def write(self, trainer: Trainer, state: StateDict) -> Path:
        """Commit a checkpoint of the current step and return its path."""
        path = self.get_checkpoint_path(trainer)
        if trainer.backend.is_main:
            checkpointing.save(path, state, step=trainer.global_step)
        self._saved_step = trainer.global_step
        log.info("Saved checkpoint %s.", path)
        return path

    def read(self, trainer: Trainer, path: Path) -> StateDict:
        """Verify a checkpoint and return its content.

        Raises:
            CheckpointError: If it is not there, not intact, or of another format.
        """
        if not path.exists():
            raise CheckpointMismatch(
                f"ckpt_path: there is no checkpoint {str(path)!r}. Newest in "
                f"{str(self.root(trainer))!r}: {self.get_latest_checkpoint(trainer) or 'none'}."
            )
        log.info("Loading checkpoint %s.", path)
        state = checkpointing.load(path)
        self._is_fresh = False
        return state


def _fields_of(name: str) -> list[tuple[str | None, str | None, str | None]]:
    """Return name, format and conversion of each field; none of what is no format at all."""
    try:
        return [tuple(part[1:]) for part in Formatter().parse(name) if part[1] is not None]  # type: ignore[misc]  # three parts
    except ValueError:
        return []


def _by_number(path: Path) -> list[int | str]:
    """Sort key that puts checkpoint_20 before checkpoint_100."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]
