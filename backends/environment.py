"""Environment variables that a run reads and sets."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Final

from .process_settings import Overrides

LIMIT_BATCHES: Final = "MODELZOO_LIMIT_BATCHES"
MODELZOO_ROOT: Final = "MODELZOO_ROOT"  # files of the format name it


def limit_batches(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the number of batches after which an epoch ends; None = no limit.

    Raises:
        ValueError: If it is not an integer > 0, "none" or empty.
    """
    text = (os.environ if environ is None else environ).get(LIMIT_BATCHES, "").strip()
    if text.lower() in ("", "none"):
        return None
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ValueError(
            f"{text!r} is not an integer > 0. Use a number of batches, or 'none' for no limit."
        )
    return int(text)


# The names in the documentation of the configuration format.
NOTIFICATION_ENDPOINT: Final = "CEREBRAS_NOTIFICATION_ENDPOINT"
NOTIFICATION_MAILFROM: Final = "CEREBRAS_NOTIFICATION_MAILFROM"
NOTIFICATION_PASSWORD: Final = "CEREBRAS_NOTIFICATION_PASSWORD"
SLACK_BOT_TOKEN: Final = "CEREBRAS_SLACK_BOT_TOKEN"

# HF_HUB_CACHE is the newer name of TRANSFORMERS_CACHE.
_HF_FOLDERS: Final = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRANSFORMERS_CACHE")
_HF_LIBRARIES: Final = ("huggingface_hub", "transformers", "datasets")


def from_environment(name: str) -> str | None:
    """Return an environment variable; None if it is not set, or empty."""
    return os.environ.get(name) or None


def hold_hf_cache_dir(folder: str) -> Callable[[], None]:
    """Make Hugging Face's libraries use a cache folder, here and in new subprocesses.

    Returns:
        A function that restores the environment.
    """
    return _overrides().hold(dict.fromkeys(_HF_FOLDERS, folder))


def hold_lm_eval_in_process() -> Callable[[], None]:
    """Make `lm_eval` start no processes: forked from a run, they may hang.

    Returns:
        A function that restores the environment.
    """
    return _overrides().hold({"DISABLE_MULTIPROC": "1"})


def loaded_hf_libraries() -> list[str]:
    """Return the imported ones of these libraries, which have already read the environment."""
    return [name for name in _HF_LIBRARIES if name in sys.modules]


@cache
def _overrides() -> Overrides:
    return Overrides(os.environ.get, _set)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
