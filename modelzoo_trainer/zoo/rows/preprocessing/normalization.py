"""Normalization of text before tokenization: ftfy, and the spacing of WikiText."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.sections import Processing

_SUSPECT: Final = re.compile(r"[^\t\n -~]|&#?[0-9A-Za-z]{1,24};")
"""What ftfy may change: anything but printable ASCII, tab and line feed; HTML entities."""
_INSTALL: Final = 'pip install "modelzoo-trainer[preprocess]"'


def make_normalization(settings: Processing) -> Callable[[str], str] | None:
    """Return the function that normalizes a text; None if the settings ask for none.

    Raises:
        ConfigError: If ftfy is needed and not installed.
    """
    functions: list[Callable[[str], str]] = []
    if settings.use_ftfy:
        functions.append(partial(fix_text, normalizer=settings.ftfy_normalizer))
        _ftfy()
    if settings.wikitext_detokenize:
        functions.append(detokenize_wikitext)
    if len(functions) < 2:
        return functions[0] if functions else None
    first, second = functions
    return lambda text: second(first(text))


def fix_text(text: str, *, normalizer: str | None = "NFC") -> str:
    """Return what `ftfy.fix_text` does, reading only the lines in which it may change something.

    ftfy fixes lines one by one; only "a tag occurred, so entities are not unescaped" is carried
    from line to line.

    Args:
        text: Any text.
        normalizer: Unicode normal form; None = none.
    """
    found = _SUSPECT.search(text)
    if found is None:
        return text
    fix = _ftfy().fix_text
    first_tag = text.find("<")
    pieces: list[str] = []
    done = 0
    while found is not None:
        start = text.rfind("\n", done, found.start()) + 1 or done
        stop = text.find("\n", found.end() - 1) + 1 or len(text)
        unescapes: bool | str = "auto" if first_tag < 0 or start <= first_tag else False
        pieces += (
            text[done:start],
            fix(text[start:stop], normalization=normalizer, unescape_html=unescapes),
        )
        done = stop
        found = _SUSPECT.search(text, done)
    pieces.append(text[done:])
    return "".join(pieces)


_SPACING: Final = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r" @([-,.])@ ", r"\1"),  # a hyphen or separator inside a word or number
        (r" ([:;.!?,]) ", r"\1 "),
        (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
        (r"\[\s*([^]]*?)\s*\]", r"[\1]"),
        (r"\{\s*([^}]*?)\s*\}", r"{\1}"),
        (r'"\s*([^"]*?)\s*"', r'"\1"'),
        (r"(?<= )'\s+([^']*?)\s+'(?= )", r"'\1'"),
        (r"= = = =", "===="),
        (r"= = =", "==="),
        (r"= =", "=="),
        (r" '(s|t|d|m|re|ve|ll)\b", r"'\1"),
        (r" n't\b", "n't"),
        (r" ([.,!?;:])(?=\n|$)", r"\1"),
    )
]


def detokenize_wikitext(text: str) -> str:
    """Return text of WikiText with the usual spacing: `1 @,@ 000 .` becomes `1,000.`."""
    for pattern, replacement in _SPACING:
        text = pattern.sub(replacement, text)
    return text


def _ftfy() -> Any:
    try:
        return import_module("ftfy")
    except ImportError as error:
        raise ConfigError(
            f"processing.use_ftfy (default: true) requires ftfy, which is not installed: "
            f"{_INSTALL}, or set use_ftfy: false."
        ) from error
