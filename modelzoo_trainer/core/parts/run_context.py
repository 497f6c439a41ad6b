"""Context of a run: exception hooks, graceful stops, and cleanup."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

from modelzoo_trainer.core.parts.model_length import lengths_of
from modelzoo_trainer.core.parts.requested_outputs import note_missing_output
from modelzoo_trainer.errors import StopTraining, not_an_end
from modelzoo_trainer.hooks.spec import note_origin

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

_OPEN: weakref.WeakSet[Trainer] = weakref.WeakSet()


@contextmanager
def run_context(trainer: Trainer, kind: Literal["fit", "train", "validate"]) -> Iterator[ExitStack]:
    """Yield the stack of a run, and handle however the run ends.

    * An exception calls `on_{kind}_exception` of every callback and propagates.
    * `StopTraining` ends a validation here; it propagates from a train stage, whose fit proceeds to
      its end hooks.
    * The stack is closed in any case.
    * Data processors that are created inside take lengths that are left out from the model.
    * A signal that was received during a fit is raised last.
    """
    with (
        trainer.interruptions.ending(trainer) if kind == "fit" else nullcontext(),
        lengths_of(trainer.model),
        ExitStack() as stack,
        stop_scope(trainer) if kind == "validate" else nullcontext(),
    ):
        try:
            yield stack
        except StopTraining:
            raise  # not a failure
        except StopIteration as end:
            error = not_an_end(end, "code that the run calls").with_traceback(end.__traceback__)
            _report(trainer, kind, error)
            raise error  # noqa: B904  # with `end` as its cause, contextlib raises `end` again
        except BaseException as error:
            _report(trainer, kind, error)
            raise


@contextmanager
def stop_scope(trainer: Trainer) -> Iterator[None]:
    """Turn a `StopTraining` that leaves the block into a graceful stop after it."""
    try:
        yield
    except StopTraining as stop:
        end_run(trainer, stop)


def end_run(trainer: Trainer, stop: StopTraining) -> None:
    """Stop the run for a `StopTraining` that was raised outside a callback."""
    trainer.early_exit.end(stop)


def _report(trainer: Trainer, kind: str, error: BaseException) -> None:
    """Call the exception hooks, after all pending values have been delivered."""
    trainer.backend.explain(error)  # first: this notifies the other processes, too
    try:
        trainer.drain()
    except Exception as late:  # noqa: BLE001  # the first error must win
        error.add_note(f"while reading pending values: {type(late).__name__}: {late}")
    note_origin(error, trainer.all_callbacks, trainer.global_step)
    note_missing_output(error, trainer)
    getattr(trainer.hooks, f"on_{kind}_exception")(trainer, error)


def close_at_exit(trainer: Trainer) -> None:
    """Close the trainer when the process ends, if it still exists."""
    if not _OPEN:
        atexit.register(_close_all)
    _OPEN.add(trainer)


def _close_all() -> None:
    for trainer in tuple(_OPEN):
        trainer.close()
