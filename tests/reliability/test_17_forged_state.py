"""A state whose entries are missing or of another kind, with matching checksums."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo_trainer import Callback, Checkpoint, CheckpointError
from modelzoo_trainer.callbacks import CheckLoss, KeepNCheckpoints, ModelEma
from modelzoo_trainer.loggers import JsonlLogger
from tests.doubles import make_trainer, tiny_batches
from tests.reliability.sealing import STATE, seal

DROPPED = object()
VALUES = [DROPPED, None, "x", [], [1], -1, 10**30, {}, {"a": 1}]
NUM_SHARES = 8  # of the forged states; each share has every value
NUM_IN_CI = 3


def run(folder: Path, steps: int, *callbacks: Callback, **fit: Any) -> None:
    trainer = make_trainer(
        folder,
        *(CheckLoss(), ModelEma(decay=0.9), KeepNCheckpoints(n=5), JsonlLogger(), *callbacks),
        checkpoint=Checkpoint(steps=1),
        max_steps=steps,
        eval_frequency=1,
        grad_accum_steps=2,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
        schedulers=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
    )
    try:
        trainer.fit(tiny_batches(8), tiny_batches(2), **fit)
    finally:
        trainer.close()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    run(folder, 2)
    return folder / "checkpoint_2"


def places(value: Any, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield where each entry of a state is; of the 624 numbers of a generator the first ones."""
    if place and "__type__" not in place:
        yield place
    if isinstance(value, (dict, list)):
        keys: Any = value if isinstance(value, dict) else range(min(len(value), 3))
        for key in keys:
            yield from places(value[key], (*place, key))


def forge(good: Path, folder: Path, place: tuple[str | int, ...], value: Any) -> Path:
    path = folder / good.name
    shutil.copytree(good, path)
    state = json.loads((path / STATE).read_text(encoding="ascii"))
    *outer, last = place
    holder = state
    for key in outer:
        holder = holder[key]
    if value is DROPPED:
        del holder[last]
    else:
        holder[last] = value
    (path / STATE).write_text(json.dumps(state))
    seal(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "share",
    [*range(NUM_IN_CI)]
    + [pytest.param(share, marks=pytest.mark.soak) for share in range(NUM_IN_CI, NUM_SHARES)],
)
def test_an_entry_of_another_kind_is_a_checkpoint_error_or_the_run_goes_on(
    good: Path, tmp_path: Path, count: Callable[..., None], share: int
) -> None:
    state = json.loads((good / STATE).read_text(encoding="ascii"))
    forged = [(place, value) for place in places(state) for value in VALUES][share::NUM_SHARES]
    refused = 0
    for place, value in forged:
        folder = tmp_path / "run"
        path = forge(good, folder, place, value)
        try:
            run(folder, 3, ckpt_path=path)
        except CheckpointError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{place} as {value!r}: {error!r}") from error
        shutil.rmtree(folder)
    count(trials=len(forged), refused=refused)
    assert len(forged) / 2 < refused < len(forged)


@pytest.mark.parametrize(
    ("place", "value", "part"),
    [
        (("global_step",), "x", "loop"),
        (("schedule", "origin_step"), DROPPED, "run_schedule"),
        (("dataloader", "epoch"), -1, "dataloader"),
        (("optimizer", "param_groups", 0, "lr"), None, "optimizer"),
        (("schedulers", 0, "last_epoch"), [], "schedulers"),
        (("rng", "host", "python"), None, "reproducibility"),
        (("callbacks",), None, "checkpoint"),
        (("callbacks", "CheckLoss", "num_skips"), DROPPED, "callbacks.CheckLoss"),
        (("callbacks", "ModelEma", "average"), DROPPED, "callbacks.ModelEma"),
    ],
)
@pytest.mark.slow_cases(every=4)
def test_the_error_names_the_checkpoint_and_its_part_and_has_a_cause(
    good: Path, tmp_path: Path, place: tuple[str | int, ...], value: Any, part: str
) -> None:
    path = forge(good, tmp_path, place, value)
    with pytest.raises(CheckpointError) as caught:
        run(tmp_path, 3, ckpt_path=path)
    assert str(path) in str(caught.value)
    assert f"its data for {part!r}" in str(caught.value)
    assert "partly restored" in str(caught.value)
    assert isinstance(caught.value.__cause__, (LookupError, TypeError, ValueError, AttributeError))


class Users(Callback):
    def state_dict(self) -> dict[str, int]:
        return {"num": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num = state["name"]


class UsersHook(Callback):
    def on_load_checkpoint(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        torch.tensor(state_dict["nothing"])


@pytest.mark.parametrize(
    ("callback", "noted"),
    [(Users, "raised in Users.load_state_dict"), (UsersHook, "raised in UsersHook.on_load_ch")],
)
def test_an_error_in_code_of_the_users_keeps_its_type_and_gets_a_note(
    tmp_path: Path, callback: type[Callback], noted: str
) -> None:
    run(tmp_path, 1, callback())
    with pytest.raises(KeyError) as caught:
        run(tmp_path, 2, callback())
    assert any(note.startswith(noted) for note in caught.value.__notes__)
