"""What of the process's environment a run reads and sets."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Final

from .process_settings import Overrides

LIMIT_BATCHES: Final = "MODELZOO_LIMIT_BATCHES"


def limit_batches(environ: Mapping[str, str] | None = None) -> int | None:
    """Return after how many batches an epoch ends; None = with the data.

    Raises:
        ValueError: If it is not a number > 0, "none" or empty.
    """
    text = (os.environ if environ is None else environ).get(LIMIT_BATCHES, "").strip()
    if text.lower() in ("", "none"):
        return None
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ValueError(f"{text!r} is not a whole number > 0, or 'none' for no limit.")
    return int(text)


# The names that the configuration format's documentation gives.
NOTIFICATION_ENDPOINT: Final = "CEREBRAS_NOTIFICATION_ENDPOINT"
NOTIFICATION_MAILFROM: Final = "CEREBRAS_NOTIFICATION_MAILFROM"
NOTIFICATION_PASSWORD: Final = "CEREBRAS_NOTIFICATION_PASSWORD"
SLACK_BOT_TOKEN: Final = "CEREBRAS_SLACK_BOT_TOKEN"

# HF_HUB_CACHE is the newer name of TRANSFORMERS_CACHE.
_HF_FOLDERS: Final = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE")
_HF_LIBRARIES: Final = ("huggingface_hub", "transformers", "datasets")


def from_environment(name: str) -> str | None:
    """Return a variable of the environment; None if it is not set, or empty."""
    return os.environ.get(name) or None


def hold_hf_cache_dir(folder: str) -> Callable[[], None]:
    """Have Hugging Face's libraries, here and in processes started from now on, use a folder.

    Returns:
        What puts the environment back.
    """
    return _overrides().hold(dict.fromkeys(_HF_FOLDERS, folder))


def loaded_hf_libraries() -> list[str]:
    """Return which of those libraries have been imported: they have read the environment."""
    return [name for name in _HF_LIBRARIES if name in sys.modules]


@cache
def _overrides() -> Overrides:
    return Overrides(os.environ.get, _set)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
