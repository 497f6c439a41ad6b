"""Notifications about a run by e-mail or Slack."""

from __future__ import annotations

import json
import logging
import smtplib
import ssl
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from email.message import EmailMessage
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

from annotated_types import Ge, Le, Predicate
from typing_extensions import override

from modelzoo_trainer.base.constraints import Name, checked
from modelzoo_trainer.base.devices import (
    NOTIFICATION_ENDPOINT,
    NOTIFICATION_MAILFROM,
    NOTIFICATION_PASSWORD,
    SLACK_BOT_TOKEN,
    from_environment,
)
from modelzoo_trainer.callback import Callback, Loader
from modelzoo_trainer.errors import ConfigError

if TYPE_CHECKING:
    from modelzoo_trainer.trainer import Trainer

log = logging.getLogger("modelzoo_trainer.notification")

TIMEOUT_S: Final = 10.0  # for each response of a server
_PATIENCE_S: Final = 30.0  # maximum wait for unsent messages at the end of a run
_MOST_CHARS: Final = 2000  # of an exception, in a message


class Notification(Callback, ABC):
    """Base class of callbacks that send a message when a fit ends and when an exception ends a run.

    Messages are sent in a thread by the main process. Failures are logged as warnings and never
    affect the run, whose end waits at most half a minute for messages in progress.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._reported_id: int | None = None

    @abstractmethod
    def problem(self) -> str | None:
        """Return why messages cannot be sent; None if they can. Called once, at setup."""

    @abstractmethod
    def send(self, title: str, text: str) -> None:
        """Send a message; called in a thread, may raise any exception.

        Args:
            title: Summary of the event.
            text: The whole message.
        """

    # ---- when

    @override
    def setup(self, trainer: Trainer) -> None:
        problem = self.problem() if trainer.backend.comm.is_main else None
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
        self._reported_id = None

    @override
    def on_enter_validate(
        self, trainer: Trainer, stack: ExitStack, val_dataloader: Loader, loop: Any
    ) -> None:
        self._reported_id = None  # a later exception may have the same id

    @override
    def on_fit_end(self, trainer: Trainer, loop: Any) -> None:
        ending = "ended" if trainer.interrupted is None else f"was stopped ({trainer.interrupted})"
        self._notify(trainer, f"Training {ending} at step {trainer.global_step}", "")

    @override
    def on_fit_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._report(trainer, "Training", exception)

    @override
    def on_train_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._report(trainer, "Training", exception)

    @override
    def on_validate_exception(self, trainer: Trainer, exception: BaseException) -> None:
        self._report(trainer, "Validation", exception)

    @override
    def finalize(self) -> None:
        until = time.monotonic() + _PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                log.warning(
                    "%s: a message was not sent within %g s.", type(self).__name__, _PATIENCE_S
                )
        self._threads.clear()

    def _report(self, trainer: Trainer, what: str, exception: BaseException) -> None:
        """Report an exception once, though several hooks receive it."""
        if self._reported_id != id(exception):
            self._reported_id = id(exception)
            text = f"{type(exception).__name__}: {exception}"
            title = f"{what} failed at step {trainer.global_step}"
            self._notify(trainer, title, text[:_MOST_CHARS])

    # ---- how

    def _notify(self, trainer: Trainer, title: str, text: str) -> None:
        if not trainer.backend.comm.is_main or self.problem() is not None:
            return
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        body = f"{title}.\n{text}\nmodel_dir: {trainer.model_dir}\n".replace("\n\n", "\n")
        thread = threading.Thread(target=self._try_send, args=(title, body), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _try_send(self, title: str, text: str) -> None:
        try:
            self.send(title, text)
        except Exception as error:  # noqa: BLE001  # whatever a server does, the run continues
            kind = type(error).__name__
            log.warning("%s: failed to send a message: %s: %s", type(self).__name__, kind, error)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuse redirects, so that secrets are sent to no other server."""

    @override
    def redirect_request(self, *args: Any) -> None:
        return None


def post_json(url: str, content: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
    """Post a JSON document to a server and return its response.

    `url`: of the server; redirects are refused.

    Raises:
        OSError: If the server cannot be reached in time, or rejects the request.
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
    """Return one or several names as a list.

    Raises:
        ConfigError: If it is not a string or a list of strings, or empty.
    """
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise ConfigError(f"{name} is {value!r}; it must be a string or a list of strings.")
    found = [one.strip() for one in given]
    if not found or not all(found) or any(set(one) & set("\r\n") for one in found):
        raise ConfigError(
            f"{name} is {value!r}; it must be one or more non-empty strings without line breaks."
        )
    return found


def _is_http(address: str) -> bool:
    try:
        parts = urlsplit(address)
    except ValueError:  # such as an unclosed bracket
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)


HttpAddress = Annotated[str, Predicate(_is_http), "an http or https address"]
Line = Annotated[str, Predicate(lambda text: not set(text) & set("\r\n")), "one line of text"]
_TLS_PORT: Final = 465  # RFC 8314: encrypted from the first byte


class EmailNotification(Notification):
    """Send an e-mail when a fit ends and when an exception ends training or a validation.

    By default, mails are sent to a mail server, encrypted if the server supports it. The password
    is read from the environment variable CEREBRAS_NOTIFICATION_PASSWORD and never sent unencrypted.
    With an endpoint, they are posted there as JSON with `mailto`, `mailfrom`, `subject` and `body`
    instead. Nothing is sent before the first event. Failures are logged and never affect the run,
    whose end waits at most half a minute for a mail.

    Args:
        mailto: One or more addresses: a list or a comma-separated string.
        mailfrom: Sender address, also the login name; None = the environment variable
            CEREBRAS_NOTIFICATION_MAILFROM.
        server_name: Host name of the mail server.
        port: Port of the mail server; 465 = implicit TLS.
        notification_endpoint: An http(s) URL; None = the environment variable
            CEREBRAS_NOTIFICATION_ENDPOINT, if set.
        subject: Prefix of the subjects.

    Raises:
        ConfigError: If an argument is invalid.
    """

    @checked()
    def __init__(
        self,
        mailto: str | list[str],
        mailfrom: str | None = None,
        server_name: Annotated[Name, "the name of a mail server"] = "smtp.office365.com",
        port: Annotated[int, Ge(1), Le(65535)] = 587,
        notification_endpoint: HttpAddress | None = None,
        subject: Line = "Training notification",
    ) -> None:
        super().__init__()
        self.mailto = names_of("EmailNotification.mailto", mailto)
        for address in (*self.mailto, *([] if mailfrom is None else [mailfrom])):
            if not isinstance(address, str) or "@" not in address:
                raise ConfigError(f"EmailNotification: {address!r} is not an e-mail address.")
        self._mailfrom = mailfrom
        self.server_name = server_name
        self.port = port
        self._endpoint = notification_endpoint
        self.subject = subject

    @property
    def mailfrom(self) -> str | None:
        """The sender address."""
        return self._mailfrom or from_environment(NOTIFICATION_MAILFROM)

    @property
    def endpoint(self) -> str | None:
        """URL that mails are posted to, instead of the mail server."""
        return self._endpoint or from_environment(NOTIFICATION_ENDPOINT)

    @override
    def problem(self) -> str | None:
        if self.endpoint is not None:
            if _is_http(self.endpoint):
                return None
            return f"the environment variable {NOTIFICATION_ENDPOINT} is not an http or https URL."
        if self.mailfrom is None:
            return (
                f"there is no sender. Set mailfrom, or the environment variable "
                f"{NOTIFICATION_MAILFROM}."
            )
        return None

    @override
    def send(self, title: str, text: str) -> None:
        subject = f"{self.subject}: {title}"
        if self.endpoint is not None:
            content = {
                "mailto": self.mailto,
                "mailfrom": self.mailfrom,
                "subject": subject,
                "body": text,
            }
            post_json(self.endpoint, content, {})
            return
        mail = EmailMessage()
        mail["Subject"] = subject
        mail["From"] = self.mailfrom
        mail["To"] = ", ".join(self.mailto)
        mail.set_content(text)
        self._deliver(mail)

    def _deliver(self, mail: EmailMessage) -> None:
        context = ssl.create_default_context()
        if self.port == _TLS_PORT:
            server: smtplib.SMTP = smtplib.SMTP_SSL(
                self.server_name, self.port, timeout=TIMEOUT_S, context=context
            )
        else:
            server = smtplib.SMTP(self.server_name, self.port, timeout=TIMEOUT_S)
        with server:
            is_encrypted = self.port == _TLS_PORT
            server.ehlo()
            if not is_encrypted and server.has_extn("starttls"):
                server.starttls(context=context)
                server.ehlo()
                is_encrypted = True
            password = from_environment(NOTIFICATION_PASSWORD)
            if password is not None:
                if not is_encrypted:
                    raise smtplib.SMTPNotSupportedError(
                        f"{self.server_name} does not support encryption, so the password is not "
                        f"sent. Unset {NOTIFICATION_PASSWORD} if the server requires no password."
                    )
                server.login(str(self.mailfrom), password)
            server.send_message(mail)


# https://docs.slack.dev/reference/methods/chat.postMessage
API: Final = "https://slack.com/api/chat.postMessage"


class SlackNotification(Notification):
    """Post to Slack when a fit ends and when an exception ends training or a validation.

    It posts as the bot whose token is in the environment variable CEREBRAS_SLACK_BOT_TOKEN; the bot
    must be a member of the channels and have the scope `chat:write`. Nothing is sent before the
    first event. Failures are logged and never affect the run, whose end waits at most half a minute
    for a message.

    Args:
        channels: One or more channel names or ids: a list or a comma-separated string.

    Raises:
        ConfigError: If there is no channel.
    """

    def __init__(self, channels: str | list[str]) -> None:
        super().__init__()
        self.channels = names_of("SlackNotification.channels", channels)

    @override
    def problem(self) -> str | None:
        if from_environment(SLACK_BOT_TOKEN) is None:
            return f"the environment variable {SLACK_BOT_TOKEN} is not set."
        return None

    @override
    def send(self, title: str, text: str) -> None:
        headers = {"Authorization": f"Bearer {from_environment(SLACK_BOT_TOKEN)}"}
        refused = []
        for channel in self.channels:
            answer = json.loads(post_json(API, {"channel": channel, "text": text}, headers))
            if answer.get("ok") is not True:
                refused.append(f"{channel}: {answer.get('error', 'no reason given')}")
        if refused:
            raise ConnectionRefusedError(f"Slack rejected the message ({'; '.join(refused)}).")
