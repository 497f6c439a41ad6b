"""Flipped bits, zeroed pages, truncations; files deleted, exchanged, swapped in, added, linked."""

from __future__ import annotations

import logging
import random
import shutil
from pathlib import Path

import pytest

from modelzoo_trainer import Checkpoint, checkpointing
from modelzoo_trainer.errors import CheckpointError
from tests.doubles import make_trainer, tiny_batches, weights_of
from tests.reliability.damage import KINDS, flip_a_bit
from tests.reliability.states import make

NUMBERS = 3000
SHORT = {"bit_flips": 500, "zeroed_pages": 200, "truncations": 200}
LONG = {"bit_flips": 5_000, "zeroed_pages": 1_000, "truncations": 1_000}
TRIALS = [(kind, SHORT.get(kind, 25)) for kind in KINDS]
TRIALS += [pytest.param(kind, LONG.get(kind, 200), marks=pytest.mark.soak) for kind in KINDS]


def refusal(path: Path) -> str | None:
    """Return why a checkpoint is refused, or None; any other error is one of the test."""
    try:
        checkpointing.load(path)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.slow_cases("bit_flips-500", every=4)
@pytest.mark.parametrize(("kind", "trials"), TRIALS)
def test_damage_is_found_and_never_loaded(tmp_path, count, kind, trials) -> None:
    good = make(tmp_path / "good", 1, numbers=NUMBERS)[0]
    before = {file.name: file.read_bytes() for file in good.iterdir()}
    generator = random.Random(5)
    undetected = unverified = harmless = 0
    path = tmp_path / "run" / good.name
    for _ in range(trials):
        shutil.rmtree(path.parent, ignore_errors=True)
        path.parent.mkdir()
        shutil.copytree(good, path)
        where = KINDS[kind](path, generator)
        after = {f.name: f.read_bytes() for f in path.iterdir() if f.is_file()}
        if before == after and not any(file.is_symlink() for file in path.iterdir()):
            harmless += 1  # a page that was zero already
            continue
        said = refusal(path)
        undetected += said is None
        unverified += checkpointing.verify(path) == []
        assert said is None or path.name in said, f"{where}: {said}"
    count(trials=trials, harmless=harmless, undetected=undetected, unverified=unverified)
    assert (undetected, unverified) == (0, 0)
    assert harmless < trials / 2


@pytest.mark.parametrize("how", ["renamed", "a link"])
def test_a_checkpoint_under_another_name_is_refused(tmp_path, count, how) -> None:
    good = make(tmp_path / "run", 1)[0]
    other = good.with_name("checkpoint_7")
    if how == "renamed":
        good.rename(other)
    else:
        other.symlink_to(good)
    said = refusal(other)
    assert said is not None
    assert "checkpoint_1" in said if how == "renamed" else "link" in said
    assert other not in [info.path for info in checkpointing.list_checkpoints(other.parent)]
    count(trials=1, undetected=0)


def test_a_checkpoint_that_was_never_committed_is_none(tmp_path, count) -> None:
    good = make(tmp_path / "run", 1, 2)[1]
    (good / "manifest.json").unlink()
    said = refusal(good)
    assert said is not None
    assert "manifest.json" in said
    assert len(checkpointing.list_checkpoints(good.parent)) == 1
    count(trials=1, undetected=0)


def trained(folder: Path, *, steps: int):
    trainer = make_trainer(folder, checkpoint=Checkpoint(steps=1), max_steps=steps)
    trainer.fit(tiny_batches(8))
    trainer.close()
    return trainer


@pytest.mark.parametrize("num_damaged", [1, 2, 3])
@pytest.mark.slow_cases(every=4)
def test_a_run_goes_on_from_the_newest_intact_checkpoint_and_says_what_it_skips(
    tmp_path, count, caplog, num_damaged
) -> None:
    expected = weights_of(trained(tmp_path / "unbroken", steps=8))
    folder = tmp_path / "run"
    trained(folder, steps=4)
    generator = random.Random(num_damaged)
    damaged = [folder / f"checkpoint_{4 - number}" for number in range(num_damaged)]
    for path in damaged:
        flip_a_bit(path, generator)
    with caplog.at_level(logging.WARNING, logger="modelzoo_trainer"):
        trainer = trained(folder, steps=8)
    said = " ".join(record.getMessage() for record in caplog.records)
    assert all(path.name in said for path in damaged)
    assert trainer.global_step == 8
    assert all((weights_of(trainer)[name] == value).all() for name, value in expected.items())
    count(fallbacks=1)


def test_a_run_does_not_begin_anew_if_no_checkpoint_is_intact(tmp_path, count) -> None:
    folder = tmp_path / "run"
    trained(folder, steps=2)
    for step in (1, 2):
        flip_a_bit(folder / f"checkpoint_{step}", random.Random(step))
    with pytest.raises(CheckpointError, match="checkpoint_"):
        trained(folder, steps=4)
    count(refusals=1)


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error(tmp_path, count) -> None:
    folder = tmp_path / "run"
    trained(folder, steps=3)
    flip_a_bit(folder / "checkpoint_2", random.Random(1))
    trainer = make_trainer(folder, max_steps=8)
    with pytest.raises(CheckpointError, match="checkpoint_2"):
        trainer.fit(tiny_batches(8), ckpt_path=folder / "checkpoint_2")
    trainer.close()
    count(refusals=1)
