"""Digests of all that determines the rows of a run, by which an unfinished one is recognized."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelzoo_trainer.zoo.rows.preprocessing.journal import digest_of, rows_settings
from modelzoo_trainer.zoo.rows.preprocessing.worker import UnitWork
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings
from modelzoo_trainer.zoo.rows.tokenizers import Tokenizer


def identity_of(settings: PreprocessingSettings, work: UnitWork, inputs: str) -> dict[str, str]:
    """Return the digests of a run, by name; see `journal.Journal`.

    Modules that a user's module imports are not covered.

    Args:
        settings: The settings of the run.
        work: Has the objects that are made of them.
        inputs: Fingerprint of the input files.
    """
    code = {
        "read_hook": work.hook.function,
        "custom_tokenizer": type(work.tokenizer.engine),
        "token_generator": type(work.mode),
    }
    found = {
        "settings": digest_of(rows_settings(settings.given)),
        "inputs": inputs,
        "tokenizer": digest_of(_tokenizer(work.tokenizer, settings)),
    }
    sources = {name: _source(made) for name, made in code.items()}
    return found | {name: digest for name, digest in sources.items() if digest is not None}


def _tokenizer(tokenizer: Tokenizer, settings: PreprocessingSettings) -> list[Any]:
    """Return what a tokenizer does, as far as it is known: its content, or its files."""
    to_text: Callable[[], str] | None = getattr(tokenizer.engine, "to_str", None)
    if to_text is not None:
        content: Any = to_text()
    else:
        given = settings.processing.tokenizer_params or {}
        content = [_content(value) for _, value in sorted(given.items())]
    known = [tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size, dict(tokenizer.tokens)]
    return [content, *known, tokenizer.template]


def _content(value: Any) -> str | None:
    """Return a digest of the file, or of the files directly in the folder, that a value names."""
    if not isinstance(value, str) or not value:
        return None
    path = Path(value).expanduser()
    if path.is_dir():
        names = sorted(one for one in path.iterdir() if one.is_file())
        return digest_of([[one.name, _file_digest(one)] for one in names])
    return _file_digest(path) if path.is_file() else None


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _source(made: Any) -> str | None:
    """Return a digest of the file with a user's function or class; None if it is not a user's."""
    inner = inspect.unwrap(made)
    module = sys.modules.get(getattr(inner, "__module__", None) or type(inner).__module__)
    name = getattr(module, "__name__", "")
    path = getattr(module, "__file__", None)
    if path is None or name.partition(".")[0] in ("modelzoo_trainer", "tokenizers"):
        return None
    return _file_digest(Path(path))
