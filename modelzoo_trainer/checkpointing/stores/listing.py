"""The objects of a prefix, sorted by what they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from modelzoo_trainer.checkpointing.stores.lease import LOCK_NAME
from modelzoo_trainer.checkpointing.stores.mirror import ATTEMPT, MANIFEST, SENT_HIDDEN
from modelzoo_trainer.checkpointing.stores.store import StoredObject


@dataclass(slots=True)
class Listing:
    """The objects of a prefix."""

    checkpoints: set[str] = field(default_factory=set)
    written: dict[str, float] = field(default_factory=dict)
    parts: dict[str, list[StoredObject]] = field(
        default_factory=dict
    )  # files of attempts, by checkpoint
    files: dict[str, StoredObject] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Iterable[StoredObject]) -> Listing:
        """Sort the objects of a store, without objects of other runs below its prefix."""
        found, given = cls(), list(entries)
        others = tuple(
            entry.name.removesuffix(LOCK_NAME)
            for entry in given
            if entry.name.endswith(f"/{LOCK_NAME}")
        )
        for entry in given:
            name: str = entry.name
            if name.startswith(others):
                continue
            folder, _, file = name.rpartition("/")
            part = ATTEMPT.fullmatch(name)
            if not is_safe(name):
                continue
            if part is not None:
                found.parts.setdefault(part["name"], []).append(entry)
            elif file == MANIFEST and folder:
                found.checkpoints.add(folder)
                found.written[folder] = entry.modified
            else:
                found.files[name] = entry
        return found


def is_safe(name: str) -> bool:
    """Return whether an object has the name of a file in the mirror, not of a hidden one."""
    parts = name.split("/")
    return all(part and "\0" not in part and not part.startswith(".") for part in parts[:-1]) and (
        parts[-1] in SENT_HIDDEN or (bool(parts[-1]) and not parts[-1].startswith("."))
    )
