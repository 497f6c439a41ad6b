"""A power loss after every call, simulated: what is not synchronised is lost or reordered."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from modelzoo_trainer import checkpointing
from tests.reliability import power
from tests.reliability.disk_calls import Call, Tap
from tests.reliability.power import Disk
from tests.reliability.states import loads, newest_intact, state_of

KEPT = 2


class Story:
    """Saves and deletes checkpoints, and looks at what every loss of power would have left.

    Args:
        place: An empty folder.
        images: How many possibilities are looked at after each call.
        ignored: See `Disk`.
    """

    def __init__(self, place: Path, images: int, ignored: str | None = None) -> None:
        self.root = place / "disk"
        self.root.mkdir()
        self.image = place / "image"
        self.folder = self.root / "runs" / "first"
        self.disk = Disk(self.root, ignored)
        self.images = images
        self.generator = random.Random(4)
        self.promised: list[int] = []
        self.num_calls = self.num_images = 0
        self.lost: list[str] = []
        self._seen: set[str] = set()

    def run(self, steps: int) -> None:
        """Save every step, every other one in the background, and keep the newest ones."""
        saver = checkpointing.BackgroundSaver()
        with Tap(self.root, self.perform):
            for step in range(1, steps + 1):
                path = self.folder / f"checkpoint_{step}"
                if step % 2:
                    checkpointing.save(path, state_of(step), step=step)
                else:
                    saver.save(path, state_of(step), step=step)
                    saver.wait()
                self.promised.append(step)
                checkpointing.point_latest(self.folder, path.name)
                if len(self.promised) > KEPT:
                    checkpointing.delete(self.folder / f"checkpoint_{self.promised.pop(0)}")
            self.look("the end")

    def perform(self, call: Call, perform):
        result = perform()
        self.disk.tell(call, result)
        self.num_calls += 1
        self.look(f"call {self.num_calls}: {call.name} of {call.path.name}")
        return result

    def look(self, when: str) -> None:
        for _ in range(self.images):
            tree = self.disk.tree.left(self.generator)
            self.num_images += 1
            key = repr((tree, self.promised))
            if key not in self._seen:
                self._seen.add(key)
                self.check(tree, when)

    def check(self, tree: power.Tree, when: str) -> None:
        power.write(tree, self.image)
        folder = self.image / "runs" / "first"
        for step in self.promised:
            if not loads(folder / f"checkpoint_{step}"):
                self.lost.append(f"checkpoint_{step} after {when}")
        newest = newest_intact(folder)
        if self.promised and (newest is None or int(newest.name[11:]) < self.promised[-1]):
            self.lost.append(f"the newest after {when}")
        shutil.rmtree(self.image)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "images"), [(5, 4), pytest.param(25, 25, marks=pytest.mark.soak)]
)
def test_no_acknowledged_checkpoint_is_lost_with_the_power(tmp_path, count, steps, images) -> None:
    story = Story(tmp_path, images)
    story.run(steps)
    count(calls=story.num_calls, possibilities=story.num_images, lost=len(story.lost))
    assert story.lost == []


def test_the_simulated_disk_holds_what_the_real_one_does(tmp_path) -> None:
    story = Story(tmp_path, images=0)
    story.run(5)
    assert story.disk.now() == power.read(story.root)


@pytest.mark.parametrize("ignored", ["file", "folder"])
def test_the_simulation_notices_when_something_is_not_synchronised(tmp_path, ignored) -> None:
    story = Story(tmp_path, 8, ignored)
    story.run(2)
    assert story.lost
