"""The other top-level package of this distribution, which a user's module may shadow."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def require_sibling(name: str) -> None:
    """Check, without importing it, that the top-level package `name` is beside this one.

    Args:
        name: A package of this distribution.

    Raises:
        ImportError: If it is missing, or another folder, module or package shadows it.
    """
    here = Path(__file__).resolve().parents[2]
    found = _found(name)
    if found == here / name:
        return
    own = f"modelzoo-trainer's own is in {here}"
    if name in sys.modules:
        raise ImportError(
            f"a module named {name!r} is already imported ({found or 'from no file'}), but {own}. "
            f"Rename that module: a program can have only one {name!r}."
        )
    if found is None:
        raise ImportError(
            f"package {name!r} is not beside modelzoo_trainer in {here}. It is part of "
            f"modelzoo-trainer: reinstall modelzoo-trainer (the PyPI project {name!r} is "
            f"unrelated)."
        )
    what = "module" if found.suffix else "package"
    raise ImportError(
        f"{what} {found.name!r} was found in {found.parent}, but {own}. {_advice(found)}"
    )


def _found(name: str) -> Path | None:
    """Return the folder or file that `import name` would find."""
    module = sys.modules.get(name)
    spec = find_spec(name) if module is None else module.__spec__
    if spec is None:
        origin = getattr(module, "__file__", None)
        return None if origin is None else Path(origin).resolve()
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).resolve()
    return None if spec.origin is None else Path(spec.origin).resolve()


def _advice(found: Path) -> str:
    if {"site-packages", "dist-packages"} & set(found.parts):
        return "Another installed project provides it: uninstall that, or use another environment."
    return (
        f"Rename {found.name!r}, which comes earlier on sys.path, or start Python in another "
        f"folder or with python -P."
    )
