"""Threads of Hugging Face's fast tokenizers. Imports no torch."""

import os
from typing import Final

_NAME: Final = "TOKENIZERS_PARALLELISM"


def hold_tokenizers_to_one_thread() -> None:
    """Make tokenizers of this process use one thread: it is one of several.

    Only the library itself sees it: `os.environ` stays as it is.
    """
    os.putenv(_NAME, "false")
