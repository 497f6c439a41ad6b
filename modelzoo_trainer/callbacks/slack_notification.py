"""Slack messages about a run."""

from __future__ import annotations

import json
from typing import Final

from typing_extensions import override

from modelzoo_trainer.callbacks.notification import Notification, names_of, post_json
from modelzoo_trainer.devices import SLACK_BOT_TOKEN, from_environment

# https://docs.slack.dev/reference/methods/chat.postMessage
API: Final = "https://slack.com/api/chat.postMessage"


class SlackNotification(Notification):
    """Writes to Slack when a fit ends, and when an error ends training or a validation.

    It writes as the bot whose token is in the environment variable CEREBRAS_SLACK_BOT_TOKEN; the
    bot has to be in the channels and have the scope `chat:write`. Nothing is sent before there is
    something to tell. What goes wrong is logged and never touches the run; its end waits at most
    half a minute for a message.

    Args:
        channels: A channel's name or identifier, or several: a list, or a text with commas.

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
            raise ConnectionRefusedError(f"Slack refuses it ({'; '.join(refused)}).")
