"""A vocabulary file: one token a line; the number of the line, from 0, is its id."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Literal

from modelzoo_trainer.errors import ConfigError, reason_of, suggest

_KIND: Final = "a text file with a token per line"

Case = Literal["counts", "lower_if_missing", "lower"]


class Vocabulary:
    """The tokens of a file, in the order of their ids.

    Args:
        path: The file, UTF-8, with or without a byte order mark.
        argument: The argument that names it, for messages.
        oov_token: In place of a token that the file lacks.
        extra_ids: Ids after the file's, without tokens.
        case: Whether case counts. `lower_if_missing`: a token that the file lacks is looked up in
            lower case. `lower`: tokens are compared in lower case; of equal lines the first counts.

    Raises:
        ConfigError: If the file cannot be read, has a token twice, or lacks `oov_token`.
    """

    def __init__(
        self,
        path: str,
        *,
        argument: str = "vocab_file",
        oov_token: str = "[UNK]",
        extra_ids: int = 0,
        case: Case = "counts",
    ) -> None:
        self.path = path
        self._argument = argument
        self._case: Case = case
        text = _text_of(path, argument)
        self._ids, self._num_lines = _ids_of(text, path, lower=case == "lower")
        self.size = self._num_lines + extra_ids
        """Number of ids."""
        self._unknown = self.id_of(oov_token, "oov_token")
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.settings: tuple[str, int, str, int] = (digest, self.size, case, self._unknown)
        """What decides the id of a token, to compare vocabularies."""

    @property
    def ids(self) -> dict[str, int]:
        """The id of each token."""
        return dict(self._ids)

    def id_of(self, token: str, argument: str) -> int:
        """Return the id of a token that must be there.

        Args:
            token: The token.
            argument: Where it comes from, for the message.

        Raises:
            ConfigError: If the file lacks it.
        """
        found = None if self._case == "lower" else self._ids.get(token)
        if found is None and self._case != "counts":
            found = self._ids.get(token.lower())
        if found is None:
            near = suggest(token, [one for one in self._ids if one[:1] in "[<"])
            raise ConfigError(
                f"{argument}: {token!r} is not in {self._argument} {self.path!r}, which has "
                f"{self._num_lines} tokens. "
                f"{near if near.startswith('Did') else f'Add it, or set {argument}.'}"
            )
        return found

    def find(self, tokens: Iterable[str]) -> set[int]:
        """Return the ids of those tokens that the file has."""
        return {self._ids[token] for token in tokens if token in self._ids}

    def ids_of(self, tokens: Iterable[str]) -> list[int]:
        """Return the ids of tokens, and the id of `oov_token` for tokens that the file lacks.

        Tokens of a vocabulary in lower case must be in lower case, as from `pieces_of`.
        """
        ids, unknown = self._ids, self._unknown
        if self._case != "lower_if_missing":
            return [ids.get(token, unknown) for token in tokens]
        return [ids[token] if token in ids else ids.get(token.lower(), unknown) for token in tokens]

    def pieces_of(self, text: str) -> list[str]:
        """Return the tokens of a text, which blanks separate."""
        return (text.lower() if self._case == "lower" else text).split()

    def num_unknown(self, pieces: Iterable[str]) -> int:
        """Return how many of the pieces the file lacks."""
        return sum(piece not in self._ids for piece in pieces)

    def check_model(self, vocab_size: int | None) -> None:
        """Check that a model has all ids.

        Raises:
            ConfigError: If not.
        """
        if vocab_size is not None and self.size > vocab_size:
            raise ConfigError(
                f"{self._argument} {self.path!r} has {self.size} tokens, but the model's "
                f"vocab_size is {vocab_size}. Use the vocabulary of the model, or increase "
                f"vocab_size."
            )


def missing_vocabulary(path: str, argument: str = "vocab_file", kind: str = _KIND) -> list[str]:
    """Return a message if the file does not exist now, in a list."""
    if Path(path).expanduser().is_file():
        return []
    return [f"{argument} {path!r} does not exist. Give {kind}."]


def _text_of(path: str, argument: str) -> str:
    try:
        return Path(path).expanduser().read_text("utf-8-sig")  # without a byte order mark
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{argument} {path!r} cannot be read: {reason_of(error)}. Give {_KIND}."
        ) from error


def _ids_of(text: str, path: str, *, lower: bool) -> tuple[Mapping[str, int], int]:
    """Return the id of each token, and the number of lines; empty lines have no token."""
    ids: dict[str, int] = {}
    lines = text.removesuffix("\n").split("\n") if text else []
    for number, line in enumerate(lines):
        token = line.strip()
        token = token.lower() if lower else token
        if token and ids.setdefault(token, number) != number and not lower:
            raise ConfigError(
                f"{path}: the lines {ids[token] + 1} and {number + 1} are both {token!r}. Remove "
                f"one of them: each line is a token id."
            )
    return ids, len(lines)
