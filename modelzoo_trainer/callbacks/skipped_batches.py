"""A file that names the batches that the next run is to leave out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from modelzoo_trainer.callbacks.step_finding import Batches
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.regular_files import require_regular

FILE_NAME: Final = "skip_batches.json"


def file_at(path: Path) -> Path:
    """Return the file that a path stands for: itself, or one of a fixed name in that folder."""
    return path if path.suffix == ".json" else path / FILE_NAME


def read_batches(path: Path, num_shards: int) -> tuple[Batches, int]:
    """Return the batches that a file names, and of how many processes their numbers are.

    Args:
        path: The file; without it there are none.
        num_shards: Of how many processes they are if it does not say so.

    Raises:
        ConfigError: If it is there and cannot be read.
    """
    require_regular(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return [], num_shards
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{str(path)!r}, the batches to leave out, cannot be read: {error}"
        ) from None
    try:
        raw = json.loads(text)
        pairs = [_pair(place) for place in raw["batches"]]
        return pairs, int(raw.get("num_shards", num_shards))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{str(path)!r} does not name batches to leave out. Write "
            f'{{"batches": [[0, 17], [0, 18]]}}: pairs of a pass and a batch in it, both counted '
            f"from 0."
        ) from None


def _pair(place: Any) -> tuple[int, int]:
    epoch, idx = place
    if type(epoch) is not int or type(idx) is not int or min(epoch, idx) < 0:
        raise ValueError(place)
    return epoch, idx


def write_batches(path: Path, batches: Batches, num_shards: int) -> None:
    """Write the file anew, at once or not at all.

    Args:
        path: The file; its folder is made if it is not there.
        batches: The pass, and the number in it, of each.
        num_shards: Of how many processes these numbers are.

    Raises:
        OSError: If that fails.
    """
    content = {"batches": [list(place) for place in batches], "num_shards": num_shards}
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    with fresh.open("x", encoding="utf-8") as file:
        file.write(json.dumps(content) + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
