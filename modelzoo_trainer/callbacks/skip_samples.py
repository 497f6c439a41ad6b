"""Skipping of training data, and the file of batches to skip."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from modelzoo_trainer.base.constraints import PositiveInt, checked
from modelzoo_trainer.base.regular_files import read_text, require_regular
from modelzoo_trainer.callback import Callback, Loader, StateDict
from modelzoo_trainer.callbacks.step_guard import Batches
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

FILE_NAME: Final = "skip_batches.json"


def file_at(path: Path) -> Path:
    """Return the path if it is a file name, or else the path of the default file in the folder."""
    return path if path.suffix == ".json" else path / FILE_NAME


def read_batches(path: Path, num_shards: int) -> tuple[Batches, int]:
    """Return the batches to skip from a file, and the number of data shards they refer to.

    `path`: the file; if it does not exist, there are none.

    Raises:
        ConfigError: If it exists and cannot be read.
    """
    require_regular(path)
    try:
        text = read_text(path)
    except FileNotFoundError:
        return [], num_shards
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"Cannot read the batches to skip from {str(path)!r}: {error}") from None
    try:
        raw = json.loads(text)
        pairs = [_pair(place) for place in raw["batches"]]
        return pairs, int(raw.get("num_shards", num_shards))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{str(path)!r} is not a list of batches to skip. Expected "
            f'{{"batches": [[0, 17], [0, 18]]}}: pairs of an epoch and a batch index, both counted '
            f"from 0 (messages count epochs from 1)."
        ) from None


def _pair(place: Any) -> tuple[int, int]:
    epoch, idx = place
    if type(epoch) is not int or type(idx) is not int or min(epoch, idx) < 0:
        raise ValueError(place)
    return epoch, idx


def write_batches(path: Path, batches: Batches, num_shards: int) -> None:
    """Rewrite the file atomically.

    `path`: the file; its folder is created if necessary.

    Raises:
        OSError: If that fails.
    """
    content = {"batches": [list(place) for place in batches], "num_shards": num_shards}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    with fresh.open("x", encoding="utf-8") as file:
        file.write(json.dumps(content) + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


log = logging.getLogger("modelzoo_trainer.skip_samples")


class SkipSamples(Callback):
    """Skip the next n samples of the training data, once, when a run starts or resumes.

    Whole batches of all processes are skipped, rounded up. They do not count as steps. A run that
    resumes from a checkpoint made after the skipped samples does not skip again, except with
    another `n`, from the position of its checkpoint. `SamplesStreamedInfo` logs the `n` that skips
    a failure.

    Args:
        n: Number of samples of all processes, > 0.

    State: The `n` that has been skipped.

    Raises:
        ConfigError: If `n` is invalid; at the start of a fit, if the batch size of the dataloader
            is unknown.

    Cost: None if the dataloader can start at any position, as a torch DataLoader over a map-style
        dataset; else the samples are loaded and dropped.
    """

    @checked()
    def __init__(self, n: PositiveInt) -> None:
        self.n = n
        self._is_done = False
        self._was_done = False

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        if ckpt_path is not None:
            self._was_done, self._is_done = self._is_done, False

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if "dataloader" not in state_dict:  # weights only: the position does not change
            self._is_done = self._was_done
        elif trainer.is_resuming:
            self._skip(trainer)

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self._skip(trainer)

    def _skip(self, trainer: Trainer) -> None:
        if self._is_done:
            return
        self._is_done = True
        data = trainer.data
        before = (data.epoch, data.batch_idx)
        num = data.skip_samples(self.n)
        log.info(
            "Skipped %d samples: from batch %d of epoch %d to batch %d of epoch %d.",
            num,
            before[1],
            before[0] + 1,
            data.batch_idx,
            data.epoch + 1,
        )
        if data.epoch >= trainer.schedule.end_epoch:
            log.warning(
                "SkipSamples: n=%d skips all samples of the run, so no data is left to train on. "
                "Use a smaller n, or more epochs.",
                self.n,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the number of samples that were skipped."""
        return {"n": self.n if self._is_done else 0}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore whether the current number of samples was skipped."""
        self._is_done = state_dict["n"] == self.n
