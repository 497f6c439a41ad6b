"""The child's side: a process that a supervisor watches and restarts."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from modelzoo_trainer.core.parts.watchdog import RunPosition, Watchdog
from modelzoo_trainer.tools.supervisor.protocol import (
    ChildFailure,
    ChildReport,
    LaunchSpec,
    SharedStatus,
    known,
)

if TYPE_CHECKING:
    from modelzoo_trainer.core import AutoRestart
    from modelzoo_trainer.tools.supervisor.timekeeper import Timekeeper

STACKS_SIGNAL: Final = signal.SIGUSR2 if hasattr(signal, "SIGUSR2") else None
"""Makes a child write its stacks. Handled in native code: works while the GIL is held."""

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_ORPHANED: Final = 1


class Child:
    """Make this process the child of a supervisor: send heartbeats and report how it ends.

    The process is killed when its supervisor dies.

    Raises:
        OSError: If that supervisor is not running.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        self.spec = spec
        self._shared = SharedStatus.attach(spec.descriptor)
        os.set_inheritable(spec.descriptor, False)
        _die_with(spec.supervisor)
        if hasattr(signal, "SIGTTOU"):  # allow output from a background process group
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        self._write_stacks_on_request()
        self._report = ChildReport(pid=os.getpid())
        self._autorestart: AutoRestart | None = None
        self._timekeeper: Timekeeper | None = None
        self._watchdog = Watchdog(
            self._position, spec.stacks, on_hang=self._hang, on_look=self._beat
        )
        self._watchdog.start()

    def _write_stacks_on_request(self) -> None:
        with suppress(OSError):
            self._stacks = self.spec.stacks.open("ab")
            faulthandler.enable(self._stacks)
            if STACKS_SIGNAL is not None:
                faulthandler.register(STACKS_SIGNAL, self._stacks)

    # ---- while it lives

    def _beat(self) -> None:
        if os.getppid() != self.spec.supervisor:  # where the kernel does not kill orphans
            os._exit(_ORPHANED)
        self._shared.heartbeat += 1
        if self._timekeeper is not None:
            self._timekeeper.note_median()

    def _position(self) -> RunPosition:
        if self._autorestart is None:
            return RunPosition(-1)
        return self._autorestart.position()

    def begin_trainer(self, number: int, autorestart: AutoRestart) -> None:
        """Start measuring and watching a trainer; earlier ones are done."""
        from modelzoo_trainer.callback import register_global_callback
        from modelzoo_trainer.tools.supervisor.timekeeper import Timekeeper

        spec = self.spec
        is_known = spec.trainer == number
        checkpoint = spec.checkpoint if is_known else None
        autorestart.supervise(
            is_restart=is_known and spec.is_restart,
            last_checkpoint=None if checkpoint is None else Path(checkpoint),
            on_commit=self._committed,
            began=spec.began if is_known else None,
        )
        if number != int(self._shared.trainer):
            self._shared.begin_trainer(number)
        self._report = ChildReport(pid=os.getpid(), checkpoint=checkpoint)
        self._watchdog.set_limits(autorestart.hang_timeout, autorestart.startup_timeout)
        self._autorestart = autorestart
        if self._timekeeper is None:
            self._timekeeper = Timekeeper(self._shared)
            register_global_callback(self._timekeeper)

    def end_trainer(self, number: int, interrupted: str | None) -> None:
        """Note how a trainer ended.

        `interrupted`: what ended it early; None = it is done.
        """
        if interrupted is None:
            self._shared.num_done = number + 1
        else:
            self._update_report(interrupted=interrupted)

    def _committed(self, path: Path) -> None:
        if self._timekeeper is not None:
            self._timekeeper.note_commit(path)
        self._update_report(checkpoint=str(path.absolute()))

    def fail(self, error: BaseException) -> None:
        """Record the exception that ends this process."""
        step = known(self._shared.step)
        self._update_report(failure=ChildFailure.of(error, step))

    def _hang(self, found: str) -> None:
        self._shared.is_hung = 1
        self._update_report(hung=found)

    def _update_report(self, **news: Any) -> None:
        self._report = replace(self._report, **news)
        with suppress(OSError):  # full disk: the exit code and shared status remain
            self._report.write(self.spec.report)


def _die_with(supervisor: int) -> None:
    """Have the kernel kill this process when its supervisor dies, where supported."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:
        raise ChildProcessError(f"process {supervisor} is not the parent of this one")
