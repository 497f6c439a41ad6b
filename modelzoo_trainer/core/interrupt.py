"""Ctrl-C and SIGTERM: end at a step boundary instead of anywhere."""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import ExitStack
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from modelzoo_trainer.callback import CoreCallback, Loader

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.interrupt")
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Interrupt(CoreCallback):
    """Turns the first signal of a fit into an orderly end, and the second into one at once.

    `trainer.early_exit` ends the run. Handlers are those of the fit only, and
    only in the main thread.
    """

    def __init__(self) -> None:
        self._received: str | None = None

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._received = None
        self._early_exit = trainer.early_exit
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            before = signal.signal(number, self._receive) or signal.SIG_DFL
            stack.callback(signal.signal, number, before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._received is not None:
            raise KeyboardInterrupt(f"{name} a second time")
        self._received = name
        self._early_exit.interrupt(name)
        log.warning("%s: the run ends after this step; once more ends it at once.", name)
