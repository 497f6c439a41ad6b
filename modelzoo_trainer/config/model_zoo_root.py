"""`$MODELZOO_ROOT` at the beginning of a path: the user's folder of the Cerebras Model Zoo."""

from __future__ import annotations

import os
from typing import Any, Final

_PREFIX: Final = "$MODELZOO_ROOT/"


def with_root(value: Any) -> Any:
    """Return a value, in which a path under `$MODELZOO_ROOT` is one under the user's folder.

    It is that of the environment variable; without it, the path stays as it is, so that nothing
    exists there.
    """
    if not isinstance(value, str) or not value.startswith(_PREFIX):
        return value
    from modelzoo_trainer.devices import MODELZOO_ROOT, from_environment

    root = from_environment(MODELZOO_ROOT)
    return value if root is None else os.path.join(root, value.removeprefix(_PREFIX))
