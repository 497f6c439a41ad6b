"""The best checkpoints of a run: their ranking, and their directories."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from modelzoo_trainer import checkpointing
from modelzoo_trainer.callbacks.checkpoint_files import free_path, remove
from modelzoo_trainer.errors import CheckpointError, is_refusal_of_disk

log = logging.getLogger("modelzoo_trainer.checkpoint")

_FACT = "save_best"


class BestCheckpoints:
    """Ranks checkpoints by a value, and keeps the first few of them on the disk.

    What it has written carries a mark in its manifest, which is part of the state. So a run that
    resumes finds what was written after its checkpoint, and takes it over instead of writing it
    again, and nothing else is ever deleted.

    Args:
        k: How many to keep, > 0.
        mode: "min" or "max".
        template: Their names, with the field `{step}`.
    """

    def __init__(self, k: int, mode: str, template: str) -> None:
        self._k = k
        self._sign = 1.0 if mode == "min" else -1.0
        self._template = template
        self._mark = secrets.token_hex(8)
        self.entries: list[dict[str, Any]] = []
        """Best first: `name`, `step`, `value`."""

    def has_place_for(self, value: float) -> bool:
        """Return whether a value would be among the best."""
        return self._rank(value) < self._k

    def _rank(self, value: float) -> int:
        """Return how many are at least as good: of equal ones the earlier is better."""
        return sum(self._sign * entry["value"] <= self._sign * value for entry in self.entries)

    def forget(self) -> None:
        """Begin anew; what was kept so far stays on the disk."""
        self._mark = secrets.token_hex(8)
        self.entries = []

    def name_of(self, step: int) -> str:
        """Return the name of a step's checkpoint, if it is not in use."""
        return self._template.format(step=step)

    def add(self, name: str, step: int, value: float) -> None:
        """Put a checkpoint in its place; those behind the k-th are no longer listed."""
        self.entries.insert(self._rank(value), {"name": name, "step": step, "value": value})
        del self.entries[self._k :]

    # ---- on the disk

    def find_or_name(self, root: Path, step: int, facts: Any) -> tuple[str, bool]:
        """Return the name of a step's checkpoint, and whether it was written before a restart.

        Args:
            root: The folder.
            step: The global step.
            facts: What makes it one and the same: metric and value.
        """
        facts = {_FACT: self._mark, **facts}
        for path, manifest in self._own(root).items():
            is_same = manifest.step == step and manifest.facts == facts
            if is_same and not checkpointing.verify(path):
                return path.name, True
        return free_path(root / self.name_of(step)).name, False

    def write(self, write: Callable[[Mapping[str, Any]], None], step: int, facts: Any) -> bool:
        """Write a checkpoint.

        Args:
            write: Does so, with the facts that it is given in the manifest.
            step: The global step.
            facts: What makes it one and the same: metric and value.

        Returns:
            Whether it was written; if the disk has refused it, that is logged.
        """
        try:
            write({_FACT: self._mark, **facts})
        except CheckpointError as error:
            if not is_refusal_of_disk(error):
                raise
            log.error("NO BEST CHECKPOINT WAS WRITTEN at step %d: %s", step, error)
            return False
        return True

    def sweep(self, root: Path, step: int) -> None:
        """Delete what was written and is not listed; what a restart left is found when due.

        Args:
            root: The folder.
            step: The last one whose checkpoints may be deleted.
        """
        listed = {entry["name"] for entry in self.entries}
        for path, manifest in self._own(root).items():
            if path.name not in listed and manifest.step <= step:
                remove(path)

    def _own(self, root: Path) -> dict[Path, checkpointing.Manifest]:
        before, after = self._template.split("{step}")
        pattern = re.compile(rf"{re.escape(before)}\d+{re.escape(after)}(_\d+)?")
        found = {}
        for info in checkpointing.list_checkpoints(root):
            if pattern.fullmatch(info.path.name):
                manifest = checkpointing.read_manifest(info.path)
                if manifest.facts.get(_FACT) == self._mark:
                    found[info.path] = manifest
        return found

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the list and the mark."""
        return {"best": [dict(entry) for entry in self.entries], "mark": self._mark}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.entries = [dict(entry) for entry in state["best"]]
        self._mark = state["mark"]
