"""The exceptions of modelzoo_trainer.

ModelZooError
|-- ConfigError (ValueError)             a setting is invalid; nothing has run
|-- HookError (TypeError)                a callback does not fit the hooks
|-- CheckpointError (RuntimeError)       a checkpoint cannot be written or read
|   |-- CheckpointMismatch               it is intact, but belongs to something else
|   `-- DiskError                        the disk refused it, in this process or another
|-- PredictionError (RuntimeError)       predictions cannot be written or read
|-- StopTraining                         raised by anybody: the run stops gracefully
|-- RollBack                             raised by a callback: the run continues from its checkpoint
`-- TrainingSpike (RuntimeError)         the loss has jumped; the next run leaves its batches out

Devices have `backends.BackendError` (RuntimeError) with `backends.BackendUnavailable`.
Everything else is a builtin; an exception of the user's keeps its type.
"""

from collections.abc import Iterable, Sequence


class ModelZooError(Exception):
    """Base of the exceptions that this package defines."""


class ConfigError(ModelZooError, ValueError):
    """A setting is invalid: an unknown name, a value that does not fit, options that exclude."""


class HookError(ModelZooError, TypeError):
    """A callback does not fit the hooks: a misspelt name, wrong parameters."""


class CheckpointError(ModelZooError, RuntimeError):
    """A checkpoint cannot be written or read."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint is intact, but does not belong to what it is loaded into."""


class DiskError(CheckpointError):
    """A disk has refused a checkpoint, in this process or in another one."""


class PredictionError(ModelZooError, RuntimeError):
    """Predictions cannot be written or read."""


def is_refusal_of_disk(error: BaseException) -> bool:
    """Return whether it is a disk that has refused a checkpoint, and no mistake."""
    return isinstance(error, DiskError) or (
        isinstance(error, CheckpointError) and isinstance(error.__cause__, OSError)
    )


class StopTraining(ModelZooError):
    """Stops a run gracefully, from wherever it is raised: at the next step boundary.

    Raised in a callback it is a request: the step at hand is completed. Raised by a model or a
    dataloader it cuts the step off, whose batches are taken again when the run is resumed.
    """


class RollBack(ModelZooError):
    """Takes training back to the newest checkpoint of the run, and past the data that spoilt it.

    Args:
        message: What was found.
        step: The `global_step` that was bad.
        batches: Its batches: epoch and index in it.
        cause: What is raised if there is no checkpoint to go back to.
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
    """The loss of a step has jumped, on all processes.

    Args:
        message: What was found.
        step: Its `global_step`.
        batches: The batches of it and of the step before: epoch and index in it.
    """

    def __init__(self, message: str, *, step: int, batches: Sequence[tuple[int, int]]) -> None:
        super().__init__(message)
        self.step = step
        self.batches = list(batches)


def suggest(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return a sentence that helps with a wrong name; see `backends.errors.suggest`."""
    from modelzoo_trainer.sibling import require_sibling

    require_sibling("backends")
    from backends import errors

    return errors.suggest(given, known, cutoff=cutoff)
