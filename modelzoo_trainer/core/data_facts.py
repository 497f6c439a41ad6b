"""What a run remembers of its training data, to see whether a resumed one has the same."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from modelzoo_trainer.callback import Batch
from modelzoo_trainer.core.passes import known_length
from modelzoo_trainer.errors import ConfigError

log = logging.getLogger("modelzoo_trainer.data")

_WORDS: Final = {
    "num_samples": "{} samples",
    "batch_size": "batches of {}",
    "num_batches": "{} batches a pass",
}


def facts_of(loader: Iterable[Batch]) -> dict[str, int]:
    """Return the sizes of the data, as far as the loader tells them."""
    facts = {
        "num_samples": _sized(getattr(loader, "dataset", None)),
        "batch_size": getattr(loader, "batch_size", None),
        "num_batches": known_length(loader),
    }
    return {name: value for name, value in facts.items() if type(value) is int}


def warn_of_changes(before: Mapping[str, Any], now: Mapping[str, int]) -> None:
    """Warn if the data is not what it was when the checkpoint was made.

    Args:
        before: Facts of the checkpoint.
        now: Facts of the run.
    """
    changed = [name for name in _WORDS if name in before and name in now]
    changed = [name for name in changed if before[name] != now[name]]
    if changed:
        log.warning(
            "Exactness is not guaranteed: the training data has changed. train_dataloader has %s; "
            "when the checkpoint was made it had %s.",
            ", ".join(_WORDS[name].format(now[name]) for name in changed),
            ", ".join(_WORDS[name].format(before[name]) for name in changed),
        )


def check_position(num: int, length: int | None, limit: int | None) -> None:
    """Check that a pass can begin after so many batches.

    Args:
        num: Batches that were trained on.
        length: Batches of a pass; None = not known.
        limit: Batches after which `loop.steps_per_epoch` ends a pass; None = none.

    Raises:
        ConfigError: If the pass would be over.
    """
    if limit is not None and limit <= num:
        raise ConfigError(
            f"the checkpoint was made after batch {num} of a pass, but loop.steps_per_epoch "
            f"ends a pass after {limit}. Use the one that it was made with."
        )
    if length is not None and 0 < length <= num:
        raise ConfigError(
            f"the checkpoint was made after batch {num} of a pass, but train_dataloader has "
            f"{length}. Use the data and batch size that it was made with."
        )


def _sized(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
