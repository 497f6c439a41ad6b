"""The names of a model's tensors, whatever it is wrapped in."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_COMPILED: Final = re.compile(r"(?:^|(?<=\.))_orig_mod\.")  # what torch.compile puts into names
WRAPPED: Final = "module."  # what wrappers for several processes put before them


def uncompiled(name: str) -> str:
    """Return a name as it is in a model that is not compiled."""
    return _COMPILED.sub("", name)


def bare_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names by what they are in the bare model; by themselves if that is ambiguous.

    Args:
        names: All of a model.
    """
    given = list(names)
    bare = [uncompiled(name) for name in given]
    if all(name.startswith(WRAPPED) for name in bare):
        bare = [name.removeprefix(WRAPPED) for name in bare]
    if len(set(bare)) < len(given):
        return {name: name for name in given}
    return dict(zip(bare, given, strict=True))
