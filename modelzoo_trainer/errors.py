"""The exceptions of modelzoo_trainer.

ModelZooError
|-- ConfigError (ValueError)             a setting is wrong; nothing has run
|-- HookError (TypeError)                a callback does not fit the hooks
`-- CheckpointError (RuntimeError)       a checkpoint cannot be written or read
    `-- CheckpointMismatch               it is intact, but belongs to something else

Devices have `backends.BackendError` (RuntimeError) with `backends.BackendUnavailable`.
Everything else is a builtin; an exception of the user's keeps its type.
"""

import difflib
from collections.abc import Iterable


class ModelZooError(Exception):
    """Base of the exceptions that this package defines."""


class ConfigError(ModelZooError, ValueError):
    """A setting is wrong: an unknown name, a value that does not fit, options that exclude."""


class HookError(ModelZooError, TypeError):
    """A callback does not fit the hooks: a misspelt name, wrong parameters."""


class CheckpointError(ModelZooError, RuntimeError):
    """A checkpoint cannot be written or read."""


class CheckpointMismatch(CheckpointError):
    """A checkpoint is intact, but does not belong to what it is loaded into."""


def suggest(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return a sentence that helps with a wrong name.

    Args:
        given: What the user wrote.
        known: What would have fitted.
        cutoff: Least similarity, 0 to 1, of a suggestion (`difflib`'s ratio).

    Returns:
        "Did you mean 'x'?" if one name is near, else "Known: a, b, c.".
    """
    names = sorted(set(known))
    lowered = {name.lower(): name for name in names}
    near = difflib.get_close_matches(given.lower(), lowered, n=1, cutoff=cutoff)
    if near:
        return f"Did you mean {lowered[near[0]]!r}?"
    return f"Known: {', '.join(names)}." if names else "Nothing is known here."
