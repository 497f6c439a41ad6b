"""Where a document is, as a user finds it: the line of a file, or the row of a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from modelzoo_trainer.zoo.rows.preprocessing.inputs import Input

_BLOCK: Final = 1 << 20


class DocumentPlace(NamedTuple):
    """A document of the input.

    Args:
        file: Its file, below the source, with `/`.
        number: Row in the file; in a file of lines the byte, after decompression, at which the
            document starts.
        line: Line of that byte, from 1; None = not known yet.
    """

    file: str
    number: int
    line: int | None = None

    def shown(self, file: Input | None) -> str:
        """Return the place for messages; lines that are not known are counted in the file.

        `file`: The one named `self.file`; None = it is not known.
        """
        if self.line is not None:
            return f"{self.file}:{self.line}"
        if file is None or not file.has_lines:
            return f"{self.file}, row {self.number}"
        try:
            return f"{self.file}:{line_at(file.path, self.number)}"
        except OSError:  # it is gone by now
            return f"{self.file}, byte {self.number}"


def line_at(path: str, position: int) -> int:
    """Return the line of a byte of a file, from 1."""
    line = 1
    with Path(path).open("rb") as file:
        while position > 0 and (block := file.read(min(position, _BLOCK))):
            line += block.count(b"\n")
            position -= len(block)
    return line
