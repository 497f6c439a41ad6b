"""Tokenization of text: bytes, or a file of the `tokenizers` library."""

import hashlib
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from modelzoo_trainer.errors import ConfigError

Tokens = npt.NDArray[Any]

END_OF_TEXT: Final = 0
"""The byte that ends a document; it does not occur in text."""


class Tokenization(Protocol):
    """Convert documents to tokens."""

    @property
    def identity(self) -> str:
        """Identifier that differs between any two tokenizations with different tokens."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token."""

    def encode(self, text: bytes) -> Tokens:
        """Return the tokens of a document, including the one that ends it."""


class ByteTokenization:
    """Every byte is a token; works for any file."""

    identity: Final = "bytes"
    vocab_size: Final = 256

    def encode(self, text: bytes) -> Tokens:
        """Return the bytes of a document and a zero."""
        return np.frombuffer(text + bytes([END_OF_TEXT]), dtype=np.uint8)


class FileTokenization:
    """Tokenizer of a file of the `tokenizers` library.

    `path`: the file, usually `tokenizer.json`. `eos_token`: the token that ends a document; None =
    none.

    Raises:
        ConfigError: If the library or file is missing, or there is no such token.
    """

    def __init__(self, path: str, eos_token: str | None) -> None:
        self._tokenizer = _load(Path(path).expanduser())
        self._end: list[int] = []
        if eos_token is not None:
            number = self._tokenizer.token_to_id(eos_token)
            if number is None:
                raise ConfigError(f"eos_token {eos_token!r} is not a token of {path!r}.")
            self._end = [number]
        content = self._tokenizer.to_str() + repr(self._end)
        self.identity = hashlib.sha256(content.encode()).hexdigest()
        self.vocab_size: int = max(self._tokenizer.get_vocab().values(), default=0) + 1

    def encode(self, text: bytes) -> Tokens:
        """Return the tokens of a document; invalid UTF-8 becomes a replacement character."""
        encoding = self._tokenizer.encode(
            text.decode("utf-8", errors="replace"), add_special_tokens=False
        )
        return np.array(encoding.ids + self._end, dtype=np.uint32)


def make_tokenization(tokenizer_file_path: str | None, eos_token: str | None) -> Tokenization:
    """Return the tokenization for the arguments.

    `tokenizer_file_path`: of the `tokenizers` library; None = tokens are bytes.

    Raises:
        ConfigError: If it cannot be loaded.
    """
    if tokenizer_file_path is not None:
        return FileTokenization(tokenizer_file_path, eos_token)
    if eos_token is not None:
        raise ConfigError(
            f"eos_token ({eos_token!r}) requires tokenizer_file_path. Without a tokenizer, tokens "
            f"are bytes, and documents end with byte {END_OF_TEXT}."
        )
    return ByteTokenization()


def missing_file(tokenizer_file_path: str) -> str:
    """Return a message for a path that is not a file."""
    problem = "is not a file" if Path(tokenizer_file_path).exists() else "does not exist"
    return f"tokenizer_file_path {tokenizer_file_path!r} {problem}. Pass a tokenizer.json file."


def _load(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(missing_file(str(path)))
    try:
        tokenizers = import_module("tokenizers")
    except ImportError as error:
        raise ConfigError(
            "tokenizer_file_path requires the tokenizers library, which is not installed: "
            "pip install tokenizers"
        ) from error
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(
            f"tokenizer_file_path {str(path)!r} cannot be loaded by the tokenizers library: "
            f"{error}. Pass a tokenizer.json file."
        ) from error
