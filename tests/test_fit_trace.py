"""Every hook of a whole run, in order, as a text that docs/how_it_works.md shows."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from torch.optim.lr_scheduler import ConstantLR

from modelzoo_trainer import Checkpoint, register_global_callback
from modelzoo_trainer.hooks.spec import HOOKS
from tests.doubles import Recorder, make_trainer, tiny_batches

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
# Never called in a run that ends well; and automatic restarts are not part of this version.
_SILENT: Final = {
    "on_fit_exception",
    "on_interrupt",
    "on_step_discarded",
    "on_rollback",
    "on_load_checkpoint",
    "on_load_trainer_state",
    "on_predict_batch_end",
    "on_predict_batch_start",
    "on_predict_end",
    "on_predict_start",
    "on_predict_step_end",
    "on_predict_step_start",
    "on_save_trainer_state",
    "on_after_save_trainer_state",
    "on_train_exception",
    "on_validate_exception",
    "preprocess_checkpoint",
}


def names_of_a_run(folder: Path) -> list[str]:
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


def test_the_trace_has_every_hook_of_a_run_that_ends_well(tmp_path: Path) -> None:
    declared = {
        name for name, spec in HOOKS.items() if spec.default.__module__.endswith("callback")
    }
    assert declared - set(names_of_a_run(tmp_path)) == _SILENT


def test_a_second_run_has_the_same_trace(tmp_path: Path) -> None:
    first: list[Any] = names_of_a_run(tmp_path / "first")
    assert names_of_a_run(tmp_path / "second") == first
