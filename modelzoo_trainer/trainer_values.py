"""The way of values and metrics from the device to whoever wants them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from modelzoo_trainer.callback import Loader, Metrics
from modelzoo_trainer.core import EarlyExit, Logging
from modelzoo_trainer.devices import Backend, host_value
from modelzoo_trainer.errors import StopTraining

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class TrainerValues:
    """What a trainer reads and logs, and under which names."""

    backend: Backend
    global_step: int
    logging: Logging
    early_exit: EarlyExit
    is_log_step: bool = True
    """Whether metrics that are logged now reach the loggers. Set by Logging."""
    rehearses: bool = False
    """Whether the batch at hand records what one of a log step would, though nothing is logged,
    so that the graph of log steps is compiled in the beginning. Set by Logging."""

    def __init__(self) -> None:
        self.is_delivering = False
        self._name_scopes: list[str] = []
        self._val_loaders: list[Callable[[], Loader]] = []  # as long as somebody has them

    def read(
        self,
        tensors: Sequence[Tensor],
        deliver: Callable[[list[Any]], None],
        step: int | None = None,
    ) -> None:
        """Have values read on the host as soon as that costs nothing.

        Args:
            tensors: What to read, as it is now.
            deliver: Called with the values: numbers, or CPU tensors if they have dimensions.
            step: The `global_step` during the delivery; None = that of the batch at hand.
        """
        made_at = self._metric_step() if step is None else step

        def at_its_step(values: list[Any]) -> None:
            now, delivering = self.global_step, self.is_delivering
            self.global_step, self.is_delivering = made_at, True
            try:
                deliver(values)
            except StopTraining as stop:
                self.early_exit.grant(stop)
            except BaseException as error:
                error.add_note(f"found when the values of global_step {made_at} arrived")
                raise
            finally:
                self.global_step, self.is_delivering = now, delivering

        if self.backend.reads_at_once:
            at_its_step([host_value(tensor) for tensor in tensors])
        else:
            self.backend.read(tensors, at_its_step)

    def drain(self) -> None:
        """Deliver all values that are under way, and what deliveries log. Waits for the device.

        Raises:
            RuntimeError: If deliveries log without an end.
        """
        self.logging.deliver_all(cast("Trainer", self), self.backend.flush)

    def _metric_step(self) -> int:
        if self.logging.in_batch and not self.is_delivering:
            return self.logging.step
        return self.global_step

    def log_metrics(self, **metrics: Any) -> None:
        """Log metrics by name: off log steps nothing is logged; see `log_metrics_dict`."""
        self.log_metrics_dict(metrics)

    def remove_logger_destination(self, name: str) -> None:
        """Send no more metrics to the loggers of a name, unless `dest` asks for them."""
        self.logging.removed_destinations.add(name)

    def log_metrics_dict(
        self,
        metrics: Metrics,
        step: int | None = None,
        dest: str | Sequence[str] | None = None,
    ) -> None:
        """Log metrics: to all loggers, and to `on_metrics`.

        While training only log steps are logged, every `log_steps` of `Logging` and the last one:
        what is given at another step, or in `on_train_epoch_end` after one, is dropped.
        `trainer.is_log_step` says whether it will be. In `on_train_end` and `on_fit_end` all is
        logged; in a validation every `log_steps` batches and the last one count. Names get the
        prefix of the name scopes that are open.

        Args:
            metrics: Names and values; tensors are read later, without waiting.
            step: None = the step at hand.
            dest: Names of loggers; these alone get them, and `on_metrics` does not. None = all.

        Raises:
            ValueError: If there is no logger of a name, or a metric of this batch has the name of
                one already.
        """
        log, trainer = self.logging, cast("Trainer", self)
        is_late = self.is_delivering and not (log.in_batch and self.global_step == log.step)
        if not is_late:
            if not self.is_log_step:
                if self.rehearses and trainer.should_run_optimizer_step:
                    self.backend.hold(metrics.values())
                return
            is_plain = not self._name_scopes and step is None and dest is None
            if is_plain and log.in_batch and log.collected.keys().isdisjoint(metrics):
                log.collected.update(metrics)
                return
        if self._name_scopes:
            prefix = self.name_scope_path
            metrics = {prefix + name: value for name, value in metrics.items()}
        made_at = self._metric_step() if step is None else step
        if dest is not None:
            self.logging.send(trainer, metrics, made_at, [dest] if isinstance(dest, str) else dest)
        elif is_late:
            self.logging.hand_over_late(trainer, dict(metrics), made_at)
        else:
            self.logging.collect(trainer, metrics, made_at)

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Put a prefix before the names of all metrics logged inside.

        Args:
            name: One part of the path.
        """
        self._name_scopes.append(name)
        try:
            yield
        finally:
            self._name_scopes.pop()

    @property
    def name_scope_path(self) -> str:
        """The open name scopes, joined and closed by "/"; "" if there is none."""
        return "".join(f"{name}/" for name in self._name_scopes)

    def number_val_dataloaders(self, val_dataloaders: list[Loader]) -> list[Loader]:
        """Fix the name scopes of dataloaders by their order, and return them."""
        self._val_loaders = [_reference(loader) for loader in val_dataloaders]
        return val_dataloaders

    def get_val_dataloader_scope(self, val_dataloader: Loader) -> str:
        """Return the name scope of a validation dataloader: numbered as they are first seen.

        The number of one that is gone is free again.
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
    """Return a weak reference, or what stands for one to something that allows none."""
    try:
        return weakref.ref(loader)
    except TypeError:
        return lambda: loader
