"""Log steps, log messages, deferred reads, and metrics on their way to the loggers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

from annotated_types import Predicate
from torch import Tensor
from torch.nn import Module
from typing_extensions import override

from modelzoo_trainer.base.constraints import NonNegativeInt, checked
from modelzoo_trainer.base.devices import BackendError, host_value
from modelzoo_trainer.callback import CoreCallback, Loader, Metrics
from modelzoo_trainer.core.parts.closures import active
from modelzoo_trainer.core.parts.run_log import open_handlers
from modelzoo_trainer.core.parts.start_times import StartTimes
from modelzoo_trainer.core.summary import loaded_step_of
from modelzoo_trainer.errors import ModelZooError, StopTraining

if TYPE_CHECKING:
    from pathlib import Path

    from modelzoo_trainer.hooks.logger import Logger
    from modelzoo_trainer.hooks.table import HookTable
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.logging")

LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
Level = Annotated[
    str, Predicate(lambda level: level.upper() in LEVELS), f"one of {', '.join(LEVELS)}"
]
# Steps at the start of a fit. The first and the third are traced as log steps: the state before the
# first step may differ, and the second is the first one off log steps. If that one is logged, the
# third is not rehearsed, or the first one off log steps would be late.
_REHEARSED: Final = 3
_MOST_ROUNDS: Final = 100  # of deliveries that log metrics: more is an endless loop


class Logging(CoreCallback):
    """Choose the steps to log, and deliver their metrics to the loggers.

    The metrics of a step are collected until its boundary, read from the device together, and
    delivered as one mapping: to each logger's `log_metrics`, then to the hook `on_metrics`. Metrics
    logged at other steps are dropped.

    If a logger fails, a warning is logged once per fit, and training continues; the logger still
    gets later metrics. Exceptions of this package, such as `StopTraining` or `BackendError`, are
    raised.

    During a run, the messages of `modelzoo_trainer` go to `run.log` in the run's folder, and to
    standard error if the program has not configured logging. If `run.log` cannot be written, a
    warning is logged once, and the run continues. A level that the program has set for
    `modelzoo_trainer` is kept.

    Args:
        log_steps: Log on every n-th step, and on the last one of the run; 0 = only the last one.
        log_level: Minimum level of messages.
        wsc_log_level: Accepted for compatibility; no effect on this hardware.
        enable_act_frequency: Accepted for compatibility; no effect on this hardware.

    Raises:
        ConfigError: If `log_steps` is negative, or the level is unknown.
    """

    @checked("logging")
    def __init__(
        self,
        log_steps: NonNegativeInt = 1,
        log_level: Level = "INFO",
        wsc_log_level: dict[str, Any] | None = None,
        enable_act_frequency: bool = False,
    ) -> None:
        self.log_steps = log_steps
        self.log_level = log_level.upper()
        self.step = 0
        self.in_batch = False
        self.of_batch = False
        """Whether what is logged or delivered now is of a training batch: of the weights before its
        update, which no checkpoint has. In `on_metrics`, the batch of the metrics."""
        self.collects = False
        """Whether metrics that are logged now, in a batch, belong to its log step."""
        self.is_log_window = True
        self.is_delivering = False
        """Whether deferred reads or metrics are being delivered."""
        self.removed_destinations: set[str] = set()
        self._name_scopes: list[str] = []
        self.collected: Metrics = {}
        self._collected_step = 0
        self._collected_late = False  # by deliveries of a batch, after it
        self._num_to_rehearse = 0
        self._failed: set[int] = set()
        self.start_times: StartTimes | None = StartTimes()
        """The phases until the first step; None after it."""

    @contextmanager
    def disabled(self, trainer: Trainer) -> Iterator[None]:
        """Drop the metrics logged inside, for steps that are not part of the run."""
        before = trainer.is_log_step, self.collects
        trainer.is_log_step = self.collects = False
        try:
            yield
        finally:
            trainer.is_log_step, self.collects = before

    # ---- messages

    @override
    def post_setup(self, trainer: Trainer) -> None:
        if self.start_times is not None:
            self.start_times.end_phase("set-up")

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        if self.start_times is not None:
            self.start_times.end_phase("checkpoint")

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        if self.start_times is not None:
            self.start_times.skip()
        stack.enter_context(active(trainer))
        self.open_handlers(trainer, stack)
        self._failed.clear()
        self._num_to_rehearse = _REHEARSED if trainer.backend.caps.lazy else 0
        stack.callback(self._leave, trainer)

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        stack.enter_context(active(trainer))
        self.open_handlers(trainer, stack)
        self._open_gate(trainer)
        stack.callback(self._open_gate, trainer)

    def _open_gate(self, trainer: Trainer) -> None:
        self.in_batch = self.of_batch = self.collects = False
        self.is_log_window = trainer.is_log_step = True
        trainer.rehearses = False

    def _leave(self, trainer: Trainer) -> None:
        self._open_gate(trainer)
        self.collected = {}
        for logger in trainer.loggers:
            self._guarded(logger, logger.flush)

    def open_handlers(self, trainer: Trainer, stack: ExitStack) -> None:
        """Write messages to `run.log` and the console until the stack is closed."""
        open_handlers(trainer, self.log_level, stack)

    # ---- which steps

    def begin_batch(self, trainer: Trainer) -> HookTable:
        """Begin a training batch; return its hook table, of a log step, a rehearsal or neither.

        Only the batch that ends a log step is logged.
        """
        if self.collected:
            try:
                self.deliver_all(trainer)
            except StopTraining as stop:  # of a logger
                trainer.early_exit.request_stop(stop)
        if self.start_times is not None:
            self.start_times.end_phase("first batch")
        self.in_batch = self.of_batch = True
        self.step = self._collected_step = step = trainer.global_step + 1
        every = self.log_steps
        schedule, data = trainer.schedule, trainer.data
        self.is_log_window = (
            (every != 0 and step % every == 0)
            or step >= schedule.likely_end
            or (data.is_last and data.epoch + 1 >= schedule.end_epoch)
        )
        ends_step = trainer.grad_accum.should_run_optimizer_step
        trainer.is_log_step = self.collects = self.is_log_window and ends_step
        if self.collects:
            return trainer.callbacks.log_hooks
        if self._num_to_rehearse:
            trainer.rehearses = self._num_to_rehearse % 2 == 1
            if trainer.rehearses and ends_step:
                return trainer.callbacks.rehearsal_hooks
        return trainer.callbacks.quiet_hooks

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        if self.collected:
            self.deliver(trainer)
        self.of_batch = False
        if self.start_times is not None:
            self.start_times.report(trainer)
            self.start_times = None
        if self._num_to_rehearse:
            is_second = self._num_to_rehearse == _REHEARSED - 1
            self._num_to_rehearse -= 1 + (is_second and self.is_log_window)
            trainer.rehearses = False

    @override
    def on_train_end(self, trainer: Trainer, model: Module, loop: Any, loop_idx: int) -> None:
        self._open_gate(trainer)

    def logs_batch(self, batch_idx: int, *, is_last: bool) -> bool:
        """Return whether the metrics of a validation batch are logged."""
        every = self.log_steps
        return is_last or (every != 0 and (batch_idx + 1) % every == 0)

    # ---- deferred reads

    def read(
        self,
        trainer: Trainer,
        tensors: Sequence[Tensor],
        deliver: Callable[[list[Any]], None],
        step: int | None = None,
    ) -> None:
        """Read values on the host as soon as they are available; see `Trainer.read`."""
        made_at = self._step_of_now(trainer) if step is None else step
        of_batch = self.of_batch

        def at_its_step(values: list[Any]) -> None:
            now = trainer.loop.show_step(trainer, made_at)
            before = self.is_delivering, self.of_batch
            self.is_delivering, self.of_batch = True, of_batch
            try:
                deliver(values)
            except StopTraining as stop:
                trainer.early_exit.request_stop(stop)
            except BaseException as error:
                error.add_note(f"raised while reading the values of global_step {made_at}")
                raise
            finally:
                trainer.loop.show_step(trainer, now)
                self.is_delivering, self.of_batch = before

        backend = trainer.backend
        if backend.reads_at_once:
            at_its_step([host_value(tensor) for tensor in tensors])
        else:
            backend.read(tensors, at_its_step)

    def drain(self, trainer: Trainer) -> None:
        """Deliver all pending values, and what deliveries log. Waits for the device."""
        self.deliver_all(trainer, trainer.backend.flush)

    def _step_of_now(self, trainer: Trainer) -> int:
        """Return the step of a metric that is logged now."""
        if self.in_batch and not self.is_delivering:
            return self.step
        best = None if trainer.is_fitting else loaded_step_of(trainer)
        return trainer.global_step if best is None else best

    # ---- metrics

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

    def log(
        self,
        trainer: Trainer,
        metrics: Metrics,
        step: int | None = None,
        dest: str | Sequence[str] | None = None,
    ) -> None:
        """Log metrics; see `Trainer.log_metrics_dict`."""
        if (
            self.collects
            and step is None
            and dest is None
            and not self.is_delivering
            and not self._name_scopes
            and self.collected.keys().isdisjoint(metrics)
        ):
            self.collected.update(metrics)  # the common case
        else:
            self._log(trainer, metrics, step, dest)

    def _log(
        self,
        trainer: Trainer,
        metrics: Metrics,
        step: int | None,
        dest: str | Sequence[str] | None,
    ) -> None:
        is_late = self.is_delivering and not (self.in_batch and trainer.global_step == self.step)
        if not is_late and not trainer.is_log_step:
            if trainer.rehearses and trainer.should_run_optimizer_step:
                trainer.backend.hold(metrics.values())
            return
        if self._name_scopes:
            prefix = self.name_scope_path
            metrics = {prefix + name: value for name, value in metrics.items()}
        made_at = self._step_of_now(trainer) if step is None else step
        if dest is not None:
            self._send(trainer, metrics, made_at, [dest] if isinstance(dest, str) else dest)
        elif not is_late:
            self.collect(trainer, metrics, made_at)
        elif any(isinstance(value, Tensor) for value in metrics.values()):
            self._read_and_hand_over(trainer, dict(metrics), made_at)
        else:
            self.hand_over(trainer, dict(metrics), made_at)

    def collect(self, trainer: Trainer, metrics: Metrics, step: int) -> None:
        """Add to the metrics of a step; in a batch, send metrics of another step separately."""
        if self.in_batch:
            if step != self.step:
                self._read_and_hand_over(trainer, dict(metrics), step)
                return
            self._refuse_twice(metrics)
        elif self.collected and step != self._collected_step:
            self.deliver(trainer)
        self._collected_step = step
        self._collected_late = self._collected_late or self.of_batch
        self.collected.update(metrics)

    def _refuse_twice(self, metrics: Metrics) -> None:
        """Raise a `ValueError` if one of these has already been logged in this batch."""
        twice = [name for name in metrics if name in self.collected]
        if twice:
            raise ValueError(
                f"the metric {twice[0]!r} was logged twice in one batch (step "
                f"{self._collected_step}): one value would be lost. Give it another name, or "
                f"log one of them inside trainer.name_scope(...)."
            )

    @override
    def on_rollback(self, trainer: Trainer, ckpt_path: Path) -> None:
        self.collected = {}
        self._open_gate(trainer)

    def deliver(self, trainer: Trainer) -> None:
        """Read the collected metrics together, and deliver them when they are available.

        Metrics of a step that a stop has interrupted are dropped: it will be repeated.
        """
        metrics, self.collected = self.collected, {}
        if not metrics:
            return
        step, late = self._collected_step, self._collected_late
        self._collected_late = False
        before, self.of_batch = self.of_batch, self.of_batch or late
        try:
            self._deliver(trainer, metrics, step)
        finally:
            self.of_batch = before

    def _deliver(self, trainer: Trainer, metrics: Metrics, step: int) -> None:
        if step == trainer.global_step and trainer.backend.reads_at_once:
            for name, value in metrics.items():
                if type(value) is not float and isinstance(value, Tensor):
                    metrics[name] = host_value(value)
            self.hand_over(trainer, metrics, step)
        elif step <= trainer.global_step or not trainer.early_exit.should_exit:
            self._read_and_hand_over(trainer, metrics, step)
            trainer.backend.reads.expedite()

    def deliver_all(self, trainer: Trainer, wait: Callable[[], None] | None = None) -> None:
        """Deliver the collected metrics, and those that deliveries log.

        Args:
            trainer: The trainer.
            wait: Called after each delivery, to wait for deferred reads.

        Raises:
            RuntimeError: If deliveries keep logging without end.
        """
        for _ in range(_MOST_ROUNDS):
            self.deliver(trainer)
            if wait is not None:
                wait()
            if not self.collected:
                return
        raise RuntimeError(
            f"Infinite loop: on_metrics logged new metrics {_MOST_ROUNDS} times in a row "
            f"({', '.join(self.collected)}). Do not call log_metrics unconditionally in "
            f"on_metrics."
        )

    def _send(self, trainer: Trainer, metrics: Metrics, step: int, dest: Sequence[str]) -> None:
        """Send metrics only to the loggers with these names.

        Raises:
            ValueError: If no logger has a name.
        """
        known = {logger.name: logger for logger in trainer.loggers}
        for name in dest:
            if name not in known:
                raise ValueError(
                    f"dest: there is no logger {name!r}. Known: {', '.join(known) or 'none'}."
                )
        chosen = [known[name] for name in dest]
        sent = dict(metrics)

        def hand_over() -> None:
            for logger in chosen:
                self._guarded(logger, logger.log_metrics, sent, step)

        self._read(trainer, sent, step, hand_over)

    def _read(
        self, trainer: Trainer, metrics: Metrics, step: int, then: Callable[[], None]
    ) -> None:
        """Replace the tensors of `metrics` by host values, then call `then`."""
        names = [name for name, value in metrics.items() if isinstance(value, Tensor)]

        def arrive(values: list[Any]) -> None:
            metrics.update(zip(names, values, strict=True))
            then()

        self.read(trainer, [metrics[name].detach() for name in names], arrive, step)

    def _read_and_hand_over(self, trainer: Trainer, metrics: Metrics, step: int) -> None:
        self._read(trainer, metrics, step, partial(self.hand_over, trainer, metrics, step))

    def hand_over(self, trainer: Trainer, metrics: Metrics, step: int) -> None:
        """Pass host values to the loggers, then to `on_metrics`."""
        before, self.is_delivering = self.is_delivering, True
        try:
            if trainer.backend.comm.is_main:
                removed = self.removed_destinations
                for logger in trainer.loggers:
                    if not removed or logger.name not in removed:
                        self._guarded(logger, logger.log_metrics, metrics, step)
            trainer.hooks.on_metrics(trainer, metrics, step)
        finally:
            self.is_delivering = before

    def _guarded(self, logger: Logger, act: Callable[..., None], *args: Any) -> None:
        """Call a method of a logger; log its first failure."""
        try:
            act(*args)
        except (ModelZooError, BackendError):
            raise  # intended, or not caused by the logger
        except Exception as error:  # such as a service that is down
            if id(logger) not in self._failed:
                log.warning(
                    "%s failed to log metrics (some are lost): %s: %s. Training continues; further "
                    "failures are not reported.",
                    logger.name,
                    type(error).__name__,
                    error,
                    exc_info=error,
                )
            self._failed.add(id(logger))
