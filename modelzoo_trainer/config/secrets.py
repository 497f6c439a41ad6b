"""Which settings are secrets: they are neither printed nor written."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

HIDDEN: Final = "***"

# At the end of a key: `hub_token`, `api-key`; not `pad_token_id`, `max_tokens` or `eos_token`.
_SECRET: Final = re.compile(
    r"(?:^|[._-])(?:passwords?|passwd|pwd|passphrase|secrets?|credentials|authorization"
    r"|(?:api|access|secret|private|wandb)[_-]?keys?"
    r"|(?:api|auth|access|bearer|bot|hub|hf|refresh|secret|session)[_-]?tokens?)$"
    r"|(?:^|\.)token$"
)
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_KEYS: Final = re.compile(r"(?<![\w-])([\w-]+)[\"']?\s*:")
# A user with a password, which may have an @ itself; or alone, as that may be a token.
_LOGIN: Final = re.compile(r"(?<=://)(?:[^/\s:@]*:[^/\s]+|[^/?#\s]+)(?=@)")
_CHANGE: Final = re.compile(r"(?P<path>[^=]+)=")


def is_secret(key: object, value: object = "") -> bool:
    """Return whether the value of a key is a secret: what is no number under a telling name.

    Args:
        key: As the file writes it.
        value: Its value; null, true and false are none either.
    """
    if not isinstance(key, str) or value is None or isinstance(value, int | float):
        return False
    return _SECRET.search(_CAMEL.sub("_", key).lower()) is not None


def without_secrets(plain: Any) -> Any:
    """Return a copy of plain values: without keys of secrets, and with logins in addresses hidden.

    Args:
        plain: Dictionaries, lists and values.
    """
    if isinstance(plain, dict):
        return {
            key: without_secrets(value) for key, value in plain.items() if not is_secret(key, value)
        }
    if isinstance(plain, list):
        return [without_secrets(item) for item in plain]
    return _LOGIN.sub(HIDDEN, plain) if isinstance(plain, str) else plain


def hide_in_command(words: Iterable[str]) -> list[str]:
    """Return the words of a command with secrets, and logins in addresses, hidden.

    Args:
        words: Such as `--set`, `init.loggers[WandbLogger].api_key=...`.
    """
    shown = []
    for word in words:
        change = _CHANGE.match(word)
        if change is None:
            shown.append(_LOGIN.sub(HIDDEN, word))
            continue
        path, value = change["path"], word[change.end() :]
        if path == "--set":
            shown.append(f"--set={hide_in_command([value])[0]}")
            continue
        inner = any(is_secret(name) for name in _KEYS.findall(value))
        hide = inner or is_secret(path.rpartition(".")[2].strip('"'))
        shown.append(f"{path}={HIDDEN}" if hide else _LOGIN.sub(HIDDEN, word))
    return shown
