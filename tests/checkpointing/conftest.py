"""A disk that counts, and refuses what it is told to."""

from __future__ import annotations

import os

import pytest

from modelzoo_trainer.checkpointing import disk

ACTS = ("make_new_folder", "open_new", "write", "sync", "close", "sync_folder", "rename")


class Disk:
    """Notes every act that changes the disk; one of them may raise an error.

    Args:
        patch: Undoes it.
        failing: The number of the act that fails, from 1; 0 = none.
        error: What it raises.
    """

    def __init__(self, patch, failing=0, error=None):
        self.acts = []
        self.failing = failing
        self.error = error
        for name in ACTS:
            patch.setattr(disk, name, self._counted(name, getattr(disk, name)))

    def _counted(self, name, real):
        def act(*args):
            self.acts.append((name, args))
            if len(self.acts) == self.failing:
                if name == "write":  # half of it is there then
                    os.write(args[0], args[1][: len(args[1]) // 2])
                if name == "close":
                    real(*args)
                raise self.error
            return real(*args)

        return act

    @property
    def names(self):
        return [name for name, _ in self.acts]


@pytest.fixture
def counted(monkeypatch):
    """Return a disk that only counts."""
    return Disk(monkeypatch)


@pytest.fixture
def refusing():
    """Return what makes the disk refuse one act while a function runs."""

    def run(failing, error, act):
        with pytest.MonkeyPatch.context() as patch:
            watched = Disk(patch, failing, error)
            try:
                act()
            except BaseException as caught:  # noqa: BLE001  # whatever it was is handed on
                return watched, caught
            return watched, None

    return run
