"""Deferred device reads and metric logging."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from modelzoo_trainer.base.devices import host_value
from modelzoo_trainer.callback import Loader, Metrics
from modelzoo_trainer.core.summary import loaded_step_of
from modelzoo_trainer.errors import StopTraining

if TYPE_CHECKING:
    from modelzoo_trainer.core import Logging
    from modelzoo_trainer.trainer import Trainer


class MetricLog:
    """The deferred reads, logged metrics and name scopes of a trainer.

    Args:
        trainer: The trainer that owns this object; held weakly.
        logging: The core callback that knows which steps are logged.
    """

    def __init__(self, trainer: Trainer, logging: Logging) -> None:
        self._owner = weakref.ref(trainer)
        self._logging = logging
        self.is_delivering = False
        self._name_scopes: list[str] = []
        self._val_loaders: list[Callable[[], Loader]] = []  # while they are referenced

    @property
    def _trainer(self) -> Trainer:
        trainer = self._owner()
        assert trainer is not None  # it calls this
        return trainer

    # ---- deferred reads

    def read(
        self,
        tensors: Sequence[Tensor],
        deliver: Callable[[list[Any]], None],
        step: int | None = None,
    ) -> None:
        """Read values on the host as soon as they are available; see `Trainer.read`."""
        trainer = self._trainer
        made_at = self._step(trainer) if step is None else step
        log = self._logging
        of_batch = log.of_batch

        def at_its_step(values: list[Any]) -> None:
            now, delivering = trainer.loop.show_step(trainer, made_at), self.is_delivering
            self.is_delivering = True
            was_of_batch, log.of_batch = log.of_batch, of_batch
            try:
                deliver(values)
            except StopTraining as stop:
                trainer.early_exit.request_stop(stop)
            except BaseException as error:
                error.add_note(f"raised while reading the values of global_step {made_at}")
                raise
            finally:
                trainer.loop.show_step(trainer, now)
                self.is_delivering, log.of_batch = delivering, was_of_batch

        backend = trainer.backend
        if backend.reads_at_once:
            at_its_step([host_value(tensor) for tensor in tensors])
        else:
            backend.read(tensors, at_its_step)

    def deliver_now(self, is_delivering: bool) -> bool:
        """Set whether what is logged now belongs to a delivery; return the previous value."""
        before, self.is_delivering = self.is_delivering, is_delivering
        return before

    def drain(self) -> None:
        """Deliver all pending values, and what deliveries log. Waits for the device."""
        trainer = self._trainer
        self._logging.deliver_all(trainer, trainer.backend.flush)

    def _step(self, trainer: Trainer) -> int:
        """Return the step of a metric that is logged now."""
        if self._logging.in_batch and not self.is_delivering:
            return self._logging.step
        best = None if trainer.is_fitting else loaded_step_of(trainer)
        return trainer.global_step if best is None else best

    # ---- metrics

    def log(
        self,
        metrics: Metrics,
        step: int | None = None,
        dest: str | Sequence[str] | None = None,
    ) -> None:
        """Log metrics; see `Trainer.log_metrics_dict`."""
        log = self._logging
        if (
            log.collects
            and step is None
            and dest is None
            and not self.is_delivering
            and not self._name_scopes
            and log.collected.keys().isdisjoint(metrics)
        ):
            log.collected.update(metrics)  # the common case
        else:
            self._log(metrics, step, dest)

    def _log(self, metrics: Metrics, step: int | None, dest: str | Sequence[str] | None) -> None:
        log, trainer = self._logging, self._trainer
        is_late = self.is_delivering and not (log.in_batch and trainer.global_step == log.step)
        if not is_late and not trainer.is_log_step:
            if trainer.rehearses and trainer.should_run_optimizer_step:
                trainer.backend.hold(metrics.values())
            return
        if self._name_scopes:
            prefix = self.name_scope_path
            metrics = {prefix + name: value for name, value in metrics.items()}
        made_at = self._step(trainer) if step is None else step
        if dest is not None:
            log.send(trainer, metrics, made_at, [dest] if isinstance(dest, str) else dest)
        elif is_late:
            log.hand_over_late(trainer, dict(metrics), made_at)
        else:
            log.collect(trainer, metrics, made_at)

    # ---- names

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Prefix the names of all metrics logged inside."""
        self._name_scopes.append(name)
        try:
            yield
        finally:
            self._name_scopes.pop()

    @property
    def name_scope_path(self) -> str:
        """The open name scopes, joined and terminated by "/"; "" if there is none."""
        return "".join(f"{name}/" for name in self._name_scopes)

    def number_val_dataloaders(self, val_dataloaders: list[Loader]) -> list[Loader]:
        """Assign name scopes to dataloaders in this order, and return them."""
        self._val_loaders = [_reference(loader) for loader in val_dataloaders]
        return val_dataloaders

    def val_dataloader_scope(self, val_dataloader: Loader) -> str:
        """Return the name scope of a validation dataloader, numbered when first seen.

        The number of a deleted one is reused.
        """
        found = [known() for known in self._val_loaders]
        for wanted in (val_dataloader, None):
            for number, known in enumerate(found):
                if known is wanted:
                    self._val_loaders[number] = _reference(val_dataloader)
                    return f"validate_{number}"
        self._val_loaders.append(_reference(val_dataloader))
        return f"validate_{len(found)}"


def _reference(loader: Loader) -> Callable[[], Loader]:
    """Return a weak reference, or a strong one if the type does not support it."""
    try:
        return weakref.ref(loader)
    except TypeError:
        return lambda: loader
