"""Around a run: how it ends, whether it is finished, asked to stop, or failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

from modelzoo_trainer.errors import StopTraining
from modelzoo_trainer.hooks.spec import note_origin

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


@contextmanager
def run_context(trainer: Trainer, kind: Literal["fit", "train", "validate"]) -> Iterator[ExitStack]:
    """Yield the stack of what a run has to undo, and deal with whatever ends the run.

    * A failure calls `on_{kind}_exception` of every callback and is raised.
    * A `StopTraining` ends a validation here, and is raised by a train stage: its fit goes on to
      its end hooks.
    * However the run ends, the stack is unwound then.
    * A signal that has come during a fit is raised last.
    """
    with (
        trainer.interruptions.ending(trainer) if kind == "fit" else nullcontext(),
        ExitStack() as stack,
        stop_scope(trainer) if kind == "validate" else nullcontext(),
    ):
        try:
            yield stack
        except StopTraining:
            raise  # no failure
        except BaseException as error:
            _report(trainer, kind, error)
            raise


@contextmanager
def stop_scope(trainer: Trainer) -> Iterator[None]:
    """Turn a `StopTraining` that leaves the block into the end of the run, behind the block."""
    try:
        yield
    except StopTraining as stop:
        end_run(trainer, stop)


def end_run(trainer: Trainer, stop: StopTraining) -> None:
    """End the run where a `StopTraining` was raised by something that is no callback."""
    trainer.early_exit.end(stop)


def _report(trainer: Trainer, kind: str, error: BaseException) -> None:
    """Call the exception hooks, once all values under way have been delivered."""
    trainer.backend.explain(error)  # first: other processes are told, too
    try:
        trainer.drain()
    except Exception as late:  # noqa: BLE001  # the first error must win
        error.add_note(f"values that were under way: {type(late).__name__}: {late}")
    note_origin(error, trainer.all_callbacks, trainer.global_step)
    getattr(trainer.hooks, f"on_{kind}_exception")(trainer, error)
