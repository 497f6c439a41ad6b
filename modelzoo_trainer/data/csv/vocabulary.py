"""The tokens of a vocabulary file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from modelzoo_trainer.errors import ConfigError, reason_of, suggest

_ROOT: Final = "$MODELZOO_ROOT"  # which a file may begin a path with
_KIND: Final = "a text file with a token per line"


class Vocabulary:
    """The tokens of a file, one a line, in the order of their ids.

    Args:
        path: The file, UTF-8.
        oov_token: In place of a token that the file lacks.
        do_lower: Whether a token that the file lacks is looked up in lower case.

    Raises:
        ConfigError: If the file cannot be read, is empty, or lacks `oov_token`.
    """

    def __init__(self, path: str, *, oov_token: str = "[UNK]", do_lower: bool = False) -> None:
        try:
            lines = Path(path).expanduser().read_text("utf-8").split("\n")
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"vocab_file {path!r} cannot be read: {reason_of(error)}. {_advice(path, _KIND)}"
            ) from error
        if lines and not lines[-1]:
            lines.pop()
        self.path = path
        self.do_lower = do_lower
        self.size = len(lines)
        """Number of ids."""
        self._ids = {line.strip(): number for number, line in enumerate(lines)}
        self._unknown = self.id_of(oov_token, "oov_token")

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
        found = self._ids.get(token)
        if found is None and self.do_lower:
            found = self._ids.get(token.lower())
        if found is None:
            near = suggest(token, [one for one in self._ids if one[:1] in "[<"])
            raise ConfigError(
                f"{argument}: {token!r} is not in vocab_file {self.path!r}, which has {self.size} "
                f"tokens. {near if near.startswith('Did') else f'Set {argument}.'}"
            )
        return found

    def find(self, tokens: Iterable[str]) -> set[int]:
        """Return the ids of those tokens that the file has."""
        return {self._ids[token] for token in tokens if token in self._ids}

    def ids_of(self, tokens: Iterable[str]) -> list[int]:
        """Return the ids of tokens, that of `oov_token` for those that the file lacks."""
        ids, unknown = self._ids, self._unknown
        if not self.do_lower:
            return [ids.get(token, unknown) for token in tokens]
        return [ids[token] if token in ids else ids.get(token.lower(), unknown) for token in tokens]

    def check_model(self, vocab_size: int | None) -> None:
        """Check that a model has all ids.

        Raises:
            ConfigError: If not.
        """
        if vocab_size is not None and self.size > vocab_size:
            raise ConfigError(
                f"vocab_file {self.path!r} has {self.size} tokens, but the model's vocab_size is "
                f"{vocab_size}. Use the vocabulary of the model, or increase vocab_size."
            )


def missing_vocabulary(path: str, argument: str = "vocab_file", kind: str = _KIND) -> list[str]:
    """Return a message if the file does not exist now, in a list."""
    if Path(path).expanduser().is_file():
        return []
    return [f"{argument} {path!r} does not exist. {_advice(path, kind)}"]


def _advice(path: str, kind: str) -> str:
    if path.startswith(_ROOT):
        return (
            f"Set the environment variable {_ROOT[1:]} to the folder of the Cerebras Model Zoo "
            f"that has the folder models, or give the path of {kind}."
        )
    return f"Give {kind}."
