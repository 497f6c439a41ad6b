"""Note the former paths of classes and functions in a file.

Python hides the DeprecationWarning, because the import is in this package.
"""

from __future__ import annotations

import re
from typing import Final

from modelzoo_trainer._moved import present_path
from modelzoo_trainer.config.positions import FilePosition, Place, Problems, Scalar

_PATH: Final = re.compile(r"modelzoo_trainer\.(?P<module>\w+(?:\.\w+)*)(?P<name>[.:]\w+)")


def note_former_paths(place: Place, problems: Problems) -> None:
    """Add a note for each former path among the keys and values, at any depth."""
    for key, inner in place.pairs():
        _note(key, inner.key_at, place.path, problems)
        note_former_paths(inner, problems)
    for inner in place.items():
        note_former_paths(inner, problems)
    if isinstance(place.node, Scalar):
        _note(place.node.value, place.node.at, place.path, problems)


def _note(value: object, at: FilePosition, path: str, problems: Problems) -> None:
    found = _PATH.fullmatch(value) if isinstance(value, str) else None
    new = None if found is None else present_path(found["module"])
    if found is not None and new is not None:
        what = (
            f"{value} is now modelzoo_trainer.{new}{found['name']}; the former path will be "
            f"removed in version 1.0. Write the new one."
        )
        problems.note(at, path, what)
