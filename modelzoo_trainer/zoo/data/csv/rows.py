"""Batches of rows of CSV files."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.batch_dataset import BatchDataset
from modelzoo_trainer.zoo.data.csv.files import CsvFiles, Ints

_STRING: Final = re.compile(r"""'([^'\\\n\r]*)'|"([^"\\\n\r]*)\"""")
IGNORED_LABEL: Final = -100
_DIGEST_BYTES: Final = 4

Arrays = dict[str, NDArray[Any]]


class CsvRows(BatchDataset):
    """A dataset of the rows of CSV files.

    Subclasses make arrays of the cells of a batch, and have `settings`.

    Args:
        files: The files.
        seed: Of random numbers, which are a function of it, the epoch and the row.
    """

    def __init__(self, files: CsvFiles, *, seed: int = 0) -> None:
        self.files = files
        self.seed = seed
        self.epoch = 0

    @property
    def settings(self) -> tuple[object, ...]:
        """What decides the values of a batch, besides the files; as text the same in each run."""
        return ()

    @property
    def fingerprint(self) -> int:
        """A number that changes with the files and the settings."""
        digest = hashlib.sha256(repr((self.files.fingerprint, self.settings)).encode())
        return int.from_bytes(digest.digest()[:_DIGEST_BYTES], "big")

    def __len__(self) -> int:
        return self.files.num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return one sample, without a batch dimension.

        Raises:
            IndexError: If there is no sample of this index.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return {key: one[0] for key, one in self.__getitems__([index % len(self)]).items()}

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """Return the batch of these samples.

        Raises:
            ConfigError: With the file and the row, if one cannot be read or does not fit.
        """
        rows = np.asarray(indices, dtype=np.int64)
        arrays = self.make_batch(self.files.read(rows), rows)
        return {key: torch.from_numpy(one) for key, one in arrays.items()}

    @abstractmethod
    def make_batch(self, cells: list[list[str]], rows: Ints) -> Arrays:
        """Return a batch of the cells of these rows."""

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and check that the files are unchanged.

        Raises:
            ConfigError: With the file that has changed.
        """
        self.epoch = epoch
        self.files.check_unchanged()

    def check_model(self, vocab_size: int | None, max_position_embeddings: int | None) -> None:
        """Check that samples fit a model: here, that the first one can be made.

        Raises:
            ConfigError: If not.
        """
        self.__getitems__([0])

    def refused(self, row: int, problem: str) -> ConfigError:
        """Return an error about a row."""
        return ConfigError(f"{self.files.place_of(row)}: {problem}")

    def check_limit(self, values: Any, limit: int | None, column: str, row: int) -> None:
        """Check the integers of a row.

        Args:
            values: The integers.
            limit: What they must be below; None = not known.
            column: Their column.
            row: Its number.

        Raises:
            ConfigError: With the first that is negative or too large.
        """
        found = np.asarray(values)
        wrong = found < 0
        if limit is not None:
            wrong |= found >= limit
        if wrong.any():
            place = int(np.argmax(wrong))
            known = "" if limit is None else f" and below {limit}"
            raise self.refused(
                row, f"{column} has {found[place]} at {place}, but must be >= 0{known}."
            )

    def parse(self, text: str, column: str, row: int) -> list[Any]:
        """Return the list that a cell has as text.

        Raises:
            ConfigError: If it is none.
        """
        try:
            return parse_list(text)
        except ValueError as error:
            raise self.refused(
                int(row), f"{column} is {_shown(text)}, expected a list such as [1, 2]."
            ) from error


def parse_list(text: str) -> list[Any]:
    """Return the list that a text is the literal of, in Python or JSON; nothing is evaluated.

    Raises:
        ValueError: If it is not the literal of a list.
    """
    text = text.strip()
    if text[1:2] in ("'", '"') and "\\" not in text:
        first, *parts = _STRING.split(text)  # what is between strings, and two groups of each
        between = parts[2::3]
        if first == "[" and between[-1:] == ["]"] and set(between[:-1]) <= {", "}:
            return [
                other if one is None else one
                for one, other in zip(parts[::3], parts[1::3], strict=True)
            ]
    try:
        found = json.loads(text)
    except ValueError:
        try:
            found = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise ValueError(f"{text!r} is not a list") from error
    if not isinstance(found, list):
        raise ValueError(f"{text!r} is not a list")
    return found


def check_pad(
    argument: str, value: int, limit: int | None, limited_by: str, *, may_be_ignored: bool = False
) -> None:
    """Check a value that fills sequences.

    Args:
        argument: Name of the argument that has it.
        value: The value.
        limit: What it must be below; None = not known.
        limited_by: Name of this limit in the model.
        may_be_ignored: Whether -100 is allowed, a label that does not count.

    Raises:
        ConfigError: If it does not fit.
    """
    if may_be_ignored and value == IGNORED_LABEL:
        return
    if value < 0 or (limit is not None and value >= limit):
        known = "" if limit is None else f" and below {limited_by} of the model ({limit})"
        other = f", or {IGNORED_LABEL}" if may_be_ignored else ""
        raise ConfigError(f"{argument} is {value}, but must be >= 0{known}{other}. Correct it.")


def integers(values: Sequence[Any]) -> NDArray[np.int32] | None:
    """Return numbers as int32; None if they are none, have a fraction or are in lists again."""
    try:
        found = np.asarray(values)
        with np.errstate(invalid="ignore"):
            whole = found.astype(np.int32)
    except (ValueError, TypeError, OverflowError):
        return None
    is_numeric = found.dtype.kind in "biuf" or not found.size
    return whole if is_numeric and found.ndim == 1 and np.array_equal(whole, found) else None


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")
