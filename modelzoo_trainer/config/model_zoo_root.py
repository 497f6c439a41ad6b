"""`$MODELZOO_ROOT` at the beginning of a path: the user's folder of the Cerebras Model Zoo."""

from __future__ import annotations

import os
import re
from typing import Any, Final

_BEGINNING: Final = re.compile(r"\$(?:MODELZOO_ROOT|\{MODELZOO_ROOT\})(?:/|$)")
_ANYWHERE: Final = re.compile(r"\$(?:MODELZOO_ROOT\b|\{MODELZOO_ROOT\})")
_VARIABLE: Final = "environment variable MODELZOO_ROOT"


def with_root(value: Any) -> Any:
    """Return a value, in which paths under `$MODELZOO_ROOT` are ones under the user's folder.

    Lists and mappings are searched, too. The folder comes from the environment variable; without
    it, a path stays as it is, so that nothing exists there.
    """
    if type(value) is list:
        return [with_root(item) for item in value]
    if type(value) is dict:
        return {key: with_root(item) for key, item in value.items()}
    found = _BEGINNING.match(value) if isinstance(value, str) else None
    if found is None:
        return value
    from modelzoo_trainer.base.devices import MODELZOO_ROOT, from_environment

    root = from_environment(MODELZOO_ROOT)
    rest = value[found.end() :]
    return value if root is None else os.path.join(root, rest) if rest else root


def with_advice(message: str) -> str:
    """Return a message, with what to set if a path in it still begins with the variable."""
    if _ANYWHERE.search(message) is None or _VARIABLE in message:
        return message
    return (
        f"{message} Set the {_VARIABLE}, which the path begins with, to the folder of the Cerebras "
        f"Model Zoo that has the folder models."
    )
