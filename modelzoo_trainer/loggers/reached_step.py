"""The last step that a run has sent to a service, kept on disk: a restart sends none twice."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from modelzoo_trainer.regular_files import require_regular


class ReachedStep:
    """A number in a small file, which outlives the process.

    It is written before the step is sent: what a process that is killed had sent and not told is
    lost, and nothing is sent twice.

    Args:
        path: The file; made with the first step.

    Raises:
        ConfigError: If it is a named pipe, a socket or a device.
    """

    def __init__(self, path: Path) -> None:
        require_regular(path)
        self.path = path
        self.step = self._read()
        self._fd: int | None = None

    def _read(self) -> int:
        try:
            return int(self.path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return -1

    def note(self, step: int) -> None:
        """Note a step, if it is beyond the last one; on a full disk, for this process alone."""
        if step <= self.step:
            return
        self.step = step
        with suppress(OSError):
            self._write(step)

    def _write(self, step: int) -> None:
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)
        os.pwrite(self._fd, f"{step:<20d}\n".encode("ascii"), 0)

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
