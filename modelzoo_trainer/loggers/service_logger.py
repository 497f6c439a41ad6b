"""Base class of loggers that send metrics to a service, as one run across restarts."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from modelzoo_trainer.base.regular_files import read_bytes, require_regular
from modelzoo_trainer.callback import Loader, Metrics, StateDict
from modelzoo_trainer.errors import ModelZooError
from modelzoo_trainer.hooks.logger import Logger

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer


class ReachedStep:
    """The last sent step, in a small file that outlives the process.

    It is written before the step is sent, so that a killed process may lose a step, but none is
    sent twice.

    `path`: the file; created with the first step.

    Raises:
        ConfigError: If it is a named pipe, a socket or a device.
    """

    def __init__(self, path: Path) -> None:
        require_regular(path)
        self.path = path
        self.step = self._read()
        self._fd: int | None = None

    def _read(self) -> int:
        try:
            return int(read_bytes(self.path))
        except (OSError, ValueError):
            return -1

    def note(self, step: int) -> None:
        """Record a step, if it is later than the last one; ignore disk errors."""
        if step <= self.step:
            return
        self.step = step
        with suppress(OSError):
            self._write(step)

    def _write(self, step: int) -> None:
        if self._fd is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o666)
        os.pwrite(self._fd, f"{step:<20d}\n".encode("ascii"), 0)

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


class ServiceLogger(Logger):
    """Base class of loggers that send metrics to a service.

    The service's run starts with the first metrics. Steps are not sent twice, even after a
    restart: a resumed run sends nothing until it is past them. If the service cannot be reached at
    the start, a warning is logged once, and the fit continues.

    The settings of a configuration file are shown with the run, without secrets.
    """

    state_is_of_run = True

    _sends_whole_steps = False
    """Whether a step is lost with the process until the next step is sent."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._folder = Path()
        self._id: str | None = None
        """The id of the service's run; set before the start to continue that run."""
        self._config: dict[str, Any] = {}
        self._reached: ReachedStep | None = None
        self._floor = 0
        self._latest = -1
        self._has_failed = False

    @property
    def _is_open(self) -> bool:
        """Whether the service's run has started."""
        return self._reached is not None

    # ---- for subclasses

    @abstractmethod
    def _begin(self) -> int:
        """Start a run, or continue `_id`; set `_id`, and return the first step to send."""

    @abstractmethod
    def _show(self, config: dict[str, Any]) -> None:
        """Show settings with the run; a continued one may have others already."""

    @abstractmethod
    def _send(self, metrics: Metrics, step: int) -> None:
        """Send metrics."""

    @abstractmethod
    def _end(self) -> None:
        """End the run, and send what is pending."""

    # ---- settings

    def take_config(self, config: Mapping[str, Any]) -> None:
        """Set the settings to show with the run.

        Values are plain, or mappings and lists of plain values.
        """
        self._config = dict(config)
        if self._is_open:
            self._show_config()

    def _show_config(self) -> None:
        if not self._config:
            return
        try:
            self._show(self._config)
        except Exception as error:  # noqa: BLE001  # any error of the library
            self._log.warning(
                "%s could not log the settings: %s: %s", self.name, type(error).__name__, error
            )

    # ---- metrics

    @override
    def setup(self, trainer: Trainer) -> None:
        self._folder = trainer.model_dir

    @override
    def log_metrics(self, metrics: Metrics, step: int) -> None:
        if self._has_failed:
            return
        if self._reached is None:
            self._open()
        if self._reached is None or step < self._floor:
            return
        if step > self._latest:
            self._reached.note(self._latest if self._sends_whole_steps else step)
            self._latest = step
        self._send(metrics, step)

    def _open(self) -> None:
        try:
            floor = self._begin()
        except ModelZooError:
            raise
        except Exception as error:  # noqa: BLE001  # any error of the library
            self._has_failed = True
            self._log.warning(
                "%s failed to start; metrics are not sent: %s: %s",
                self.name,
                type(error).__name__,
                error,
            )
            return
        name = f".{self.name}-{self._id}.step".replace("/", "_")
        self._reached = ReachedStep(self._folder / name)
        self._floor = max(floor, self._reached.step + 1)
        self._latest = self._floor - 1
        self._show_config()

    @override
    def on_fit_start(
        self, trainer: Trainer, train_dataloader: Loader, val_dataloader: Loader, loop: Any
    ) -> None:
        self._has_failed = False  # the service may be available again
        if self._is_open and trainer.global_step + 1 < self._floor:
            self._log.info(
                "%s already has metrics up to step %d; these are not sent again.",
                self.name,
                self._floor - 1,
            )

    @override
    def finalize(self) -> None:
        reached, self._reached = self._reached, None
        if reached is None:
            return
        reached.note(self._latest)
        reached.close()
        try:
            self._end()
        except Exception as error:  # noqa: BLE001  # the run has ended
            self._log.warning("%s failed to end its run: %s", self.name, error)

    # ---- after a restart

    @override
    def on_before_load_checkpoint(self, trainer: Trainer, ckpt_path: Path | None) -> None:
        begins = ckpt_path is None and trainer.is_resuming and trainer.global_step == 0
        if begins and not self._is_open:
            self._id = None

    @override
    def on_load_checkpoint(self, trainer: Trainer, state_dict: StateDict) -> None:
        if self._is_open and trainer.is_resuming:
            self._floor = self._latest + 1

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the service's run."""
        return {"run_id": self._id}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue the run of a checkpoint."""
        if not self._is_open:
            self._id = state_dict["run_id"] or self._id
