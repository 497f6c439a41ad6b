"""A power loss under a real ext4: its device is copied at a random instant, and mounted again."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.reliability.states import loads, newest_intact

_MIB = 2**20
OPTIONS = {
    "commit_5": "loop,commit=5",
    "commit_30_writeback": "loop,commit=30,data=writeback,noauto_da_alloc",
    "commit_1": "loop,commit=1",
}


def command(*words: object) -> None:
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{words}: {done.stderr.strip()}")


@contextmanager
def mounted(image: Path, folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    command("mount", "-t", "ext4", "-o", options, image, folder)
    try:
        yield folder
    finally:
        command("umount", folder)


@pytest.fixture
def device(tmp_path):
    """Return an image with an empty file system."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("needs root and mkfs.ext4")
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(48 * _MIB)
    command("mkfs.ext4", "-q", "-F", image)
    try:
        with mounted(image, tmp_path / "probe", "loop"):
            pass
    except OSError as error:
        pytest.skip(f"cannot mount here: {error}")
    return image


def stands_still(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="latin-1")
    return stat.rpartition(")")[2].split()[0] == "T"


def acknowledged(path: Path) -> int:
    return max(map(int, path.read_text(encoding="ascii").split()), default=0)


@pytest.mark.soak
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_no_acknowledged_checkpoint_is_lost_with_the_power(
    nursery, tmp_path, count, device, options
) -> None:
    generator = random.Random(options)
    lost = 0
    trials = 12
    for trial in range(trials):
        image, copy = tmp_path / "trial.img", tmp_path / "copy.img"
        shutil.copyfile(device, image)
        told = tmp_path / f"told-{trial}"
        told.touch()
        with mounted(image, tmp_path / "disk", options) as disk:
            child = nursery.start("forkserver_tasks:save_for_ever", str(disk / "run"), str(told))
            while not acknowledged(told):
                assert not child.has_ended(0.01)
            child.has_ended(generator.uniform(0, 2.2))
            child.send(19)  # it stands still, and so does what it has acknowledged
            while not stands_still(child.pid):
                assert not child.has_ended(0.01)
            promised = acknowledged(told)
            shutil.copyfile(image, copy)  # without what only the page cache has
            child.send(9)
            child.wait()
        with mounted(copy, tmp_path / "after", "loop") as disk:
            newest = newest_intact(disk / "run")
            step = 0 if newest is None else int(newest.name.split("_")[1])
            lost += step < promised
            lost += promised > 0 and not loads(disk / "run" / f"checkpoint_{promised}")
        assert promised > 0
    count(power_losses=trials, lost=lost)
    assert lost == 0
