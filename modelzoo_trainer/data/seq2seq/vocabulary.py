"""A vocabulary file: one piece of text a line; the number of the line is the token id."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from modelzoo_trainer.errors import ConfigError, reason_of


class Vocabulary:
    """Token ids of pieces of text, and of sentinels, which mark spans.

    Args:
        path: The file, in UTF-8.
        extra_ids: Number of sentinels; they have the last ids, the first sentinel the highest.
        lower: Whether pieces are compared in lower case; of equal ones the first counts.
        unknown: The piece whose id others have.

    Raises:
        ConfigError: If the file cannot be read, has a piece twice, or lacks `unknown`.
    """

    def __init__(self, path: str, *, extra_ids: int, lower: bool, unknown: str) -> None:
        self.path = path
        self.lower = lower
        text = _text_of(path)
        self.digest = hashlib.sha256(text.encode()).hexdigest()
        self._ids, num = _ids_of(text, path, lower=lower)
        self.size = num + extra_ids
        self._unknown = self.id_of(unknown, "oov_token")

    def id_of(self, piece: str, argument: str) -> int:
        """Return the id of a piece.

        Raises:
            ConfigError: If there is none; with the name of the argument.
        """
        found = self._ids.get(piece.lower() if self.lower else piece)
        if found is None:
            raise ConfigError(
                f"{argument} is {piece!r}, which is not in the vocabulary {self.path}. Add it to "
                f"the file, or set {argument} to a piece that is there."
            )
        return found

    def ids_of(self, pieces: Iterable[str]) -> NDArray[np.int32]:
        """Return the ids of pieces, in lower case if the vocabulary is."""
        ids, unknown = self._ids, self._unknown
        return np.fromiter((ids.get(piece, unknown) for piece in pieces), dtype=np.int32)

    def num_unknown(self, pieces: Iterable[str]) -> int:
        """Return how many of the pieces the vocabulary lacks."""
        return sum(piece not in self._ids for piece in pieces)

    def pieces_of(self, line: str) -> list[str]:
        """Return the pieces of a line, which blanks separate."""
        return (line.lower() if self.lower else line).split()


def _text_of(path: str) -> str:
    try:
        return Path(path).expanduser().read_text("utf-8-sig")  # without a byte order mark
    except OSError as error:
        raise ConfigError(f"src_vocab_file {path!r} cannot be read: {reason_of(error)}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"src_vocab_file {path!r} is not UTF-8 text: {error}.") from error


def _ids_of(text: str, path: str, *, lower: bool) -> tuple[Mapping[str, int], int]:
    """Return the id of each piece, and the number of ids."""
    ids: dict[str, int] = {}
    lines = text.removesuffix("\n").split("\n") if text else []
    for number, line in enumerate(lines):
        piece = line.strip()
        piece = piece.lower() if lower else piece
        if piece and ids.setdefault(piece, number) != number and not lower:
            raise ConfigError(
                f"{path}: the lines {ids[piece] + 1} and {number + 1} are both {piece!r}. Remove "
                f"one of them: each line is a token id."
            )
    return ids, len(lines)
