"""The exceptions of modelzoo_trainer.

ModelZooError
|-- ConfigError (ValueError)             a setting is invalid; nothing has run
|-- HookError (TypeError)                a callback does not fit the hooks
|-- CheckpointError (RuntimeError)       a checkpoint cannot be written or read
|   |-- CheckpointMismatch               there is none, or it belongs to something else
|   |   `-- NoCheckpoint (ConfigError)   there is none where one is required
|   |-- NewerFormat                      a newer version of this package has written it
|   `-- DiskError                        a disk error, in this process or another one
|-- StoreError (OSError)                 an object store refused a request or does not answer
|   |-- NoSuchObject (FileNotFoundError) there is no object of a name
|   |-- ObjectChanged                    an object is no longer the one that was read
|   `-- DamagedObject                    data do not match their checksum
|-- PredictionError (RuntimeError)       predictions cannot be written or read
|-- StopTraining                         requests a graceful stop of the run
|-- RollBack                             raised by a callback: the run continues from its checkpoint
`-- TrainingSpike (RuntimeError)         a loss spike; the next run skips its batches

Devices have `backends.BackendError` (RuntimeError) with `backends.BackendUnavailable` and
`backends.UnsplittableBatch`.
All other exceptions are built-in ones, or the user's, which keep their type.
"""

import errno
import os
import shutil
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

_MAX_NAME: Final = 255  # bytes of a file's name, on all usual file systems
_SHOWN: Final = 200  # characters of a path


class ModelZooError(Exception):
    """Base class of the exceptions of this package."""


class ConfigError(ModelZooError, ValueError):
    """A setting is invalid: an unknown name, an invalid value, or contradictory options."""


class HookError(ModelZooError, TypeError):
    """A callback does not fit the hooks: a misspelt name, or other parameters."""


class CheckpointError(ModelZooError, RuntimeError):
    """A checkpoint cannot be written or read."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint does not exist, or does not belong to what it is loaded into."""


class NoCheckpoint(CheckpointMismatch, ConfigError):
    """There is no checkpoint at a given path, or no "last" or "best" one."""


class NewerFormat(CheckpointError):
    """A checkpoint has a format of a newer version: it is not damaged, but cannot be read here."""


OF_ANOTHER_RUN: Final = (
    "If the checkpoint is of another run, use a new model_dir or pass another ckpt_path. "
    "ckpt_path=None (null in YAML) loads none, but a later start without it finds this one again."
)
"""Advice for a checkpoint that does not fit; for Python and YAML, and for every method."""
ONLY_MODEL: Final = (
    "To load only its model, pass its path as ckpt_path, with the callback "
    "LoadCheckpointStates('model')."
)
ONLY_WHAT_FITS: Final = (
    "To load only the entries of its model that fit, pass its path as ckpt_path, with the callback "
    "LoadCheckpointStates('model') and Checkpoint(disable_strict_checkpoint_loading=True), in YAML "
    "checkpoint.disable_strict_checkpoint_loading: true."
)
WHAT_FITS: Final = (
    "To load what fits, use Checkpoint(disable_strict_checkpoint_loading=True), in YAML "
    "checkpoint.disable_strict_checkpoint_loading: true."
)


class DiskError(CheckpointError):
    """A disk error prevented writing a checkpoint, in this process or another one."""


class StoreError(ModelZooError, OSError):
    """An object store refused a request, or does not answer.

    Args:
        message: What failed; without secrets.
        is_temporary: Whether a later attempt may succeed without a change by the user.
    """

    def __init__(self, message: str, *, is_temporary: bool = False) -> None:
        super().__init__(message)
        self.is_temporary = is_temporary


class NoSuchObject(StoreError, FileNotFoundError):
    """There is no object of this name."""


class ObjectChanged(StoreError):
    """An object is no longer the one that was read, or no longer exists."""


class DamagedObject(StoreError):
    """Data do not match their checksum."""


class PredictionError(ModelZooError, RuntimeError):
    """Predictions cannot be written or read."""


def is_refusal_of_disk(error: BaseException) -> bool:
    """Return whether a checkpoint failed because of a disk error, not because of a mistake."""
    return isinstance(error, DiskError) or (
        isinstance(error, CheckpointError) and isinstance(error.__cause__, OSError)
    )


def reason_of(error: BaseException) -> str:
    """Return an error as part of a message: its text, and its type if that says more."""
    kind, text = type(error).__name__, str(error)
    if isinstance(error, OSError):
        return error.strerror or text or kind
    if type(error) is ValueError and text:
        return text
    return f"{kind}: {text}" if text else kind


def not_an_end(error: StopIteration, who: str) -> RuntimeError:
    """Return an error for a StopIteration of user code that is not the end of an iterator.

    Python turns one that leaves a generator into a RuntimeError, too (PEP 479).

    Args:
        error: The StopIteration, for its text.
        who: What raised it.
    """
    text = str(error).strip()
    return RuntimeError(
        f"StopIteration was raised by {who}{f' ({text})' if text else ''}. It does not end an "
        f"epoch or a run. It often comes from next() on an iterator that has no more items: give "
        f"next() a default, or raise another exception."
    )


def folder_reason(folder: Path, error: OSError) -> str:
    """Return why a folder cannot be created or written: what is in its way, or what is full.

    Args:
        folder: The folder, which may be missing.
        error: What the system said about it, or about a file in it.
    """
    if error.errno == errno.ENAMETOOLONG:
        return long_name(Path(os.fsdecode(error.filename or folder)))
    for path in (folder, *folder.parents):
        if os.path.lexists(path) and not os.path.isdir(path):
            return f"{str(path)!r} is {_instead_of_folder(path)}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{reason_of(error)}{_free_in(folder)}"
    where = "" if error.filename is None else f" ({error.filename})"
    return f"{reason_of(error)}{where}"


def unusable(setting: str, folder: Path, error: OSError) -> ConfigError:
    """Return the error of a folder that a run cannot use; `setting` names the folder."""
    shown = str(folder) if len(str(folder)) <= _SHOWN else f"{str(folder)[:_SHOWN]}..."
    return ConfigError(
        f"{setting} {shown!r} cannot be used: {folder_reason(folder, error)}. Choose a writable "
        f"folder."
    )


def _length(name: str) -> int:
    return len(os.fsencode(name))


def long_name(path: Path) -> str:
    """Return what is too long in a path that the system refused for its length."""
    longest = max(path.parts, key=_length, default="")
    if _length(longest) <= _MAX_NAME:
        return f"the path has {_length(str(path))} bytes, which is too long"
    start = f"{longest[:40]}..."
    return f"the name {start!r} has {_length(longest)} bytes; the most is {_MAX_NAME}"


def _instead_of_folder(path: Path) -> str:
    if os.path.islink(path):
        return "a symbolic link, and its target does not exist"
    kind = "a file" if os.path.isfile(path) else "a named pipe, a socket or a device"
    return f"{kind}, not a folder"


def _free_in(folder: Path) -> str:
    there = next((one for one in (folder, *folder.parents) if os.path.isdir(one)), Path())
    try:
        free = shutil.disk_usage(there).free
    except OSError:
        return ""
    return f" ({in_bytes(free)} free in {there})"


class StopTraining(ModelZooError):
    """Stop a run gracefully, at the next step boundary.

    Raised in a callback, the current step is completed. Raised by a model or a dataloader, the
    current step is interrupted, and its batches are trained on again when the run is resumed.
    """


class RollBack(ModelZooError):
    """Roll back to the newest checkpoint of the run, and skip the batches of a bad step.

    Args:
        message: What is wrong.
        step: The `global_step` of the bad step.
        batches: Its batches: epoch and index.
        cause: Raised if there is no checkpoint to roll back to.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int,
        batches: Sequence[tuple[int, int]],
        cause: BaseException,
    ) -> None:
        super().__init__(message)
        self.step = step
        self.batches = list(batches)
        self.cause = cause


class TrainingSpike(ModelZooError, RuntimeError):
    """The loss of a step has spiked, on all processes.

    Args:
        message: What is wrong.
        step: Its `global_step`.
        batches: Its batches and the previous step's: epoch and index.
    """

    def __init__(self, message: str, *, step: int, batches: Sequence[tuple[int, int]]) -> None:
        super().__init__(message)
        self.step = step
        self.batches = list(batches)


def in_bytes(num: float) -> str:
    """Format a number of bytes; see `backends.errors.in_bytes`."""
    text: str = _of_backends().in_bytes(num)
    return text


def suggest(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return a suggestion for an unknown name; see `backends.errors.suggest`."""
    text: str = _of_backends().suggest(given, known, cutoff=cutoff)
    return text


@cache
def _of_backends() -> Any:
    """Return the module with hints of messages, which the backends have, too."""
    from modelzoo_trainer.base.sibling import require_sibling

    require_sibling("backends")
    from backends import errors

    return errors
