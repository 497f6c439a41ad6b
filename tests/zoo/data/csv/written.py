"""CSV files for the tests of processors."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "'", '"', "the", "##m", "a", "b", "c", "d"]


def write_csv(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> None:
    """Write rows with a header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def write_folder(folder: Path, *parts: list[dict[str, Any]]) -> str:
    """Write files and the list of them; return the folder."""
    lines = []
    for number, rows in enumerate(parts):
        write_csv(folder / f"part {number}.csv", rows)
        lines.append(f"part {number}.csv {len(rows)}\n")
    (folder / "meta.dat").write_text("".join(lines))
    return str(folder)


def write_vocabulary(path: Path, tokens: list[str] | None = None) -> str:
    """Write a file of tokens; return its path."""
    path.write_text("\n".join(TOKENS if tokens is None else tokens) + "\n")
    return str(path)
