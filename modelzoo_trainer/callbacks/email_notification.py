"""Mails about a run."""

from __future__ import annotations

import smtplib
import ssl
from email.message import EmailMessage
from typing import Any, Final
from urllib.parse import urlsplit

from typing_extensions import override

from modelzoo_trainer.callbacks.notification import TIMEOUT_S, Notification, names_of, post_json
from modelzoo_trainer.devices import (
    NOTIFICATION_ENDPOINT,
    NOTIFICATION_MAILFROM,
    NOTIFICATION_PASSWORD,
    from_environment,
)
from modelzoo_trainer.errors import ConfigError

_TLS_PORT: Final = 465  # RFC 8314: encrypted from the first byte


class EmailNotification(Notification):
    """Mails somebody when a fit ends, and when an error ends training or a validation.

    A mail goes to a mail server, encrypted if the server can; to log in, the password is taken
    from the environment variable CEREBRAS_NOTIFICATION_PASSWORD, and is sent encrypted or not at
    all. Or, if there is an endpoint, it is posted there as JSON with `mailto`, `mailfrom`,
    `subject` and `body`. Nothing is sent before there is something to tell. What goes wrong is
    logged and never touches the run; its end waits at most half a minute for a mail.

    Args:
        mailto: An address, or several: a list, or a text with commas.
        mailfrom: The address of the sender, with which it logs in too; None = the environment
            variable CEREBRAS_NOTIFICATION_MAILFROM.
        server_name: The mail server.
        port: Its port; on 465 the connection is encrypted from its beginning.
        notification_endpoint: An http(s) address; None = the environment variable
            CEREBRAS_NOTIFICATION_ENDPOINT, if it is set.
        subject: How the subjects of the mails begin.

    Raises:
        ConfigError: If an argument does not fit.
    """

    def __init__(
        self,
        mailto: str | list[str],
        mailfrom: str | None = None,
        server_name: str = "smtp.office365.com",
        port: int = 587,
        notification_endpoint: str | None = None,
        subject: str = "Training notification",
    ) -> None:
        super().__init__()
        self.mailto = names_of("EmailNotification.mailto", mailto)
        for address in (*self.mailto, *([] if mailfrom is None else [mailfrom])):
            if not isinstance(address, str) or "@" not in address:
                raise ConfigError(f"EmailNotification: {address!r} is not a mail address.")
        if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 2**16:
            raise ConfigError(
                f"EmailNotification.port is {port!r}; it must be a number from 1 to 65535."
            )
        if not isinstance(server_name, str) or not server_name:
            raise ConfigError(
                f"EmailNotification.server_name is {server_name!r}; it must name a mail server."
            )
        if not isinstance(subject, str) or set(subject) & set("\r\n"):
            raise ConfigError(f"EmailNotification.subject is {subject!r}; it must be one line.")
        if notification_endpoint is not None and not _is_http(notification_endpoint):
            raise ConfigError(
                f"EmailNotification.notification_endpoint is {notification_endpoint!r}; it must be "
                f"an http or https address."
            )
        self._mailfrom = mailfrom
        self.server_name = server_name
        self.port = port
        self._endpoint = notification_endpoint
        self.subject = subject

    @property
    def mailfrom(self) -> str | None:
        """The address of the sender."""
        return self._mailfrom or from_environment(NOTIFICATION_MAILFROM)

    @property
    def endpoint(self) -> str | None:
        """Where mails are posted to, in place of a mail server."""
        return self._endpoint or from_environment(NOTIFICATION_ENDPOINT)

    @override
    def problem(self) -> str | None:
        if self.endpoint is not None:
            if _is_http(self.endpoint):
                return None
            return f"{NOTIFICATION_ENDPOINT} is no http or https address."
        if self.mailfrom is None:
            return f"there is no sender. Give mailfrom, or set {NOTIFICATION_MAILFROM}."
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
                        f"{self.server_name} offers no encryption, and the password is not sent "
                        f"without. Unset {NOTIFICATION_PASSWORD} if it needs none."
                    )
                server.login(str(self.mailfrom), password)
            server.send_message(mail)


def _is_http(address: Any) -> bool:
    if not isinstance(address, str):
        return False
    try:
        parts = urlsplit(address)
    except ValueError:  # such as an unclosed bracket
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)
