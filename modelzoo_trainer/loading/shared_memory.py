"""Errors of shared memory: name its folder and size, which the system's messages do not."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Final

from torch import Tensor

FOLDER: Final = Path("/dev/shm")
_ALMOST_FULL: Final = 0.05  # of it is free
_SIGNS: Final = ("shared memory", "Bus error", "unable to mmap", "torch_shm_manager")
_FULL: Final = ("No space left on device", f"[Errno {errno.ENOSPC}]")


def note_shared_memory(error: BaseException) -> None:
    """Add a note to an error that a lack of shared memory may have caused. Idempotent.

    Workers send their batches through it, and semaphores are in it. Where it is full, the system
    says "No space left on device", or ends a worker with a bus error.
    """
    text = f"{error} {getattr(error, 'errno', '')}"
    is_full = getattr(error, "errno", None) == errno.ENOSPC or any(one in text for one in _FULL)
    if not is_full and not any(sign in text for sign in _SIGNS):
        return
    try:
        total, _, free = shutil.disk_usage(FOLDER)
    except OSError:  # there is none on this system
        return
    is_known = any(note.startswith(str(FOLDER)) for note in getattr(error, "__notes__", ()))
    if is_known or (is_full and free > total * _ALMOST_FULL and free > 1 << 20):
        return
    error.add_note(
        f"{FOLDER} has {_shown(free)} of {_shown(total)} free. Workers of a DataLoader need it for "
        f"their batches. Make it larger (docker run --shm-size=8g; in Kubernetes a volume emptyDir "
        f"with medium: Memory at {FOLDER}), or use a smaller num_workers, prefetch_factor or batch "
        f"size; with num_workers=0 it is not needed."
    )


def shared(tensor: Tensor) -> Tensor:
    """Move a tensor to shared memory and return it."""
    try:
        moved: Tensor = tensor.share_memory_()  # type: ignore[no-untyped-call]
    except (OSError, RuntimeError) as error:
        note_shared_memory(error)
        raise
    return moved


def _shown(size: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
