"""Messages about a run to people: when they are sent, and how a run is kept safe from them."""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from modelzoo_trainer.callback import Callback, Loader
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.notification")

TIMEOUT_S: Final = 10.0  # of each answer of a server
_PATIENCE_S: Final = 30.0  # that the end of a run waits for messages under way
_MOST_CHARS: Final = 2000  # of an error, in a message


class Notification(Callback, ABC):
    """Base of callbacks that send messages: when a fit ends, and when an error ends a run.

    A message is sent by a thread of its own. What goes wrong is logged as a warning and never
    touches the run; the run's end waits for messages under way, but not longer than half a minute.
    Of several processes the first one sends.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._told: int | None = None

    @abstractmethod
    def problem(self) -> str | None:
        """Return why messages cannot be sent; None if they can. Asked once, at set-up."""

    @abstractmethod
    def send(self, title: str, text: str) -> None:
        """Send a message; called in a thread, may raise anything.

        Args:
            title: What has happened, in a few words.
            text: All about it.
        """

    # ---- when

    @override
    def setup(self, trainer: Trainer) -> None:
        problem = self.problem() if trainer.backend.is_main else None
        if problem is not None:
            log.warning("%s: no messages will be sent: %s", type(self).__name__, problem)

    @override
    def on_enter_fit(
        self,
        trainer: Trainer,
        stack: ExitStack,
        train_dataloader: Loader,
        val_dataloader: Loader,
        loop: Any,
    ) -> None:
        self._told = None

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        self._told = None  # another error may come to have the same id

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        ending = "ended" if trainer.interrupted is None else f"was stopped ({trainer.interrupted})"
        self._notify(trainer, f"Training {ending} at step {trainer.global_step}", "")

    @override
    def on_fit_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._tell(trainer, "Training", exception)

    @override
    def on_train_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._tell(trainer, "Training", exception)

    @override
    def on_validate_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._tell(trainer, "Validation", exception)

    @override
    def finalize(self) -> None:
        until = time.monotonic() + _PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                log.warning("%s: a message is given up.", type(self).__name__)
        self._threads.clear()

    def _tell(self, trainer: Trainer, what: str, exception: BaseException) -> None:
        """Tell of an error, once: on its way out it passes through several hooks."""
        if self._told != id(exception):
            self._told = id(exception)
            text = f"{type(exception).__name__}: {exception}"
            title = f"{what} failed at step {trainer.global_step}"
            self._notify(trainer, title, text[:_MOST_CHARS])

    # ---- how

    def _notify(self, trainer: Trainer, title: str, text: str) -> None:
        if not trainer.backend.is_main or self.problem() is not None:
            return
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        body = f"{title}.\n{text}\nmodel_dir: {trainer.model_dir}\n".replace("\n\n", "\n")
        thread = threading.Thread(target=self._try_send, args=(title, body), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _try_send(self, title: str, text: str) -> None:
        try:
            self.send(title, text)
        except Exception as error:  # noqa: BLE001  # whatever a server does, the run goes on
            kind = type(error).__name__
            log.warning("%s: a message was not sent: %s: %s", type(self).__name__, kind, error)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """What is secret goes to the server that it is for, and to no other."""

    @override
    def redirect_request(self, *args: Any) -> None:
        return None


def post_json(url: str, content: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
    """Send a JSON document to a server and return its answer.

    Args:
        url: Of the server; redirections are not followed.
        content: The document.
        headers: On top of that of the content.

    Raises:
        OSError: If the server cannot be reached in time, or refuses it.
    """
    request = urllib.request.Request(
        url,
        data=json.dumps(content).encode(),
        headers={"Content-Type": "application/json; charset=utf-8", **headers},
        method="POST",
    )
    opener = urllib.request.build_opener(_NoRedirects)
    with opener.open(request, timeout=TIMEOUT_S) as answer:
        found: bytes = answer.read(1_000_000)
    return found


def names_of(name: str, value: Any) -> list[str]:
    """Return one name or several as a list.

    Args:
        name: Of the argument, for messages.
        value: A text, commas between names, or a list of texts.

    Raises:
        ConfigError: If it is something else, or empty.
    """
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise ConfigError(f"{name} is {value!r}; it must be a text, or a list of texts.")
    found = [one.strip() for one in given]
    if not found or not all(found) or any(set(one) & set("\r\n") for one in found):
        raise ConfigError(f"{name} is {value!r}; it must name at least one, and none empty.")
    return found
