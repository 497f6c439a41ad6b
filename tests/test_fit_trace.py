"""Every hook of a whole run, in order, as a text that docs/how_it_works.md shows."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from torch.optim.lr_scheduler import ConstantLR

from modelzoo_trainer import Callback, Checkpoint, register_global_callback
from modelzoo_trainer.hooks.spec import HOOKS, Phase
from tests.doubles import Recorder, make_trainer, tiny_batches

HERE: Final = Path(__file__)
_PAIRS: Final = {
    "on_fit_start": "on_fit_end",
    "on_train_start": "on_train_end",
    "on_train_epoch_start": "on_train_epoch_end",
    "on_train_batch_start": "on_train_batch_end",
    "on_train_step_start": "on_train_step_end",
    "on_validate_start": "on_validate_end",
    "on_validate_batch_start": "on_validate_batch_end",
    "on_validate_step_start": "on_validate_step_end",
}


def names_of_a_run(folder: Path, *, predicts: bool = False) -> list[str]:
    recorder = Recorder()
    gc.collect()  # trainers that other tests have dropped end before
    handle = register_global_callback(recorder)
    try:
        trainer = make_trainer(
            folder,
            num_epochs=2,
            eval_frequency=2,
            grad_accum_steps=2,
            checkpoint=Checkpoint(steps=2),
            schedulers=lambda optimizer: ConstantLR(optimizer, 1.0),
        )
        trainer.fit(tiny_batches(3), tiny_batches(1))
        if predicts:
            trainer.predict(tiny_batches(1))
        trainer.close()
    finally:
        handle.remove()
    return list(recorder.names)


def indented(names: list[str]) -> Iterator[str]:
    depth = 0
    for name in names:
        depth -= name in _PAIRS.values()
        yield "  " * depth + name
        depth += name in _PAIRS


def test_a_run_calls_the_hooks_of_the_golden_trace(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    names = names_of_a_run(tmp_path)
    golden("fit_hooks.txt", "\n".join(indented(names)) + "\n")


def declared() -> set[str]:
    return {name for name in HOOKS if name in vars(Callback)}


def test_a_hook_that_the_trace_does_not_have_is_tested_elsewhere(tmp_path: Path) -> None:
    silent = declared() - set(names_of_a_run(tmp_path))
    others = [path for path in HERE.parent.rglob("*.py") if path != HERE]
    text = "\n".join(path.read_text(encoding="utf-8") for path in others)
    assert [name for name in silent if not re.search(rf"def {name}\b|\"{name}\"", text)] == []
    assert len(silent) < len(declared()) / 2


def test_the_phase_of_a_hook_is_where_it_is_called(tmp_path: Path) -> None:
    within: dict[bool, set[str]] = {False: set(), True: set()}
    depth = 0
    for name in names_of_a_run(tmp_path, predicts=True):
        depth += name.endswith("_step_start")
        within[depth > 0].add(name)
        depth -= name.endswith("_step_end")
    of_a_step = {name for name in declared() if HOOKS[name].phase is Phase.STEP}
    assert within[True] == of_a_step
    assert within[False].isdisjoint(of_a_step)


def test_a_second_run_has_the_same_trace(tmp_path: Path) -> None:
    first: list[Any] = names_of_a_run(tmp_path / "first")
    assert names_of_a_run(tmp_path / "second") == first
