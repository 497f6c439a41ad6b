"""How much space a state takes, and how much there is."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

_OF_A_VALUE = 16  # bytes: a number, with what is around it in a text
_OF_A_TENSOR = 256  # bytes: its name, type and shape, and the reference to it


def state_bytes(state: Any) -> int:
    """Return about how many bytes a state takes on the disk: tensors exactly, the rest roughly.

    Tensors that are the same memory count once.
    """
    total, known, waiting = 0, set(), [state]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            place = value.data_ptr() if value.numel() and not value.is_meta else id(value)
            key = (place, value.dtype, value.shape, value.stride())
            total += _OF_A_TENSOR + (0 if key in known else value.nbytes)
            known.add(key)
        elif isinstance(value, Mapping):
            waiting += value.keys()
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, np.ndarray | np.generic):
            total += _OF_A_TENSOR + value.nbytes
        else:
            total += _OF_A_VALUE + (2 * len(value) if isinstance(value, str | bytes) else 0)
    return total


def free_bytes(folder: Path) -> int | None:
    """Return how many bytes this user may still write on a folder's disk; None = unknown.

    The nearest folder above it that is there is asked for.
    """
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return shutil.disk_usage(folder).free
    except OSError:
        return None
