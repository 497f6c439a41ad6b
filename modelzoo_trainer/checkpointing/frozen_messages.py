"""Messages between a run and the process that writes its checkpoints: JSON, with descriptors."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from typing import Any, Final

BEGIN: Final = b"+"  # for the guard: memory is being protected
END: Final = b"-"  # all of it is released; from the guard: it has ended the process that writes

_LENGTH: Final = 8  # bytes


def send(channel: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send a message."""
    text = json.dumps(message).encode("ascii")
    text = len(text).to_bytes(_LENGTH, "little") + text
    sent = socket.send_fds(channel, [text], descriptors)  # a short one at once: in one call
    channel.sendall(text[sent:])


def receive(channel: socket.socket, most: int = 0) -> tuple[Any, list[int]]:
    """Return the next message and its descriptors.

    `most`: the highest number of descriptors.

    Raises:
        EOFError: If the other process has closed the channel, or is gone.
        TimeoutError: If the channel has a time limit and it is over.
    """
    head, descriptors, _, _ = socket.recv_fds(channel, _LENGTH, most)
    head += _exactly(channel, _LENGTH - len(head)) if head else b""
    if not head:
        raise EOFError
    return json.loads(_exactly(channel, int.from_bytes(head, "little"))), descriptors


def _exactly(channel: socket.socket, num_bytes: int) -> bytes:
    found = bytearray()
    while len(found) < num_bytes:
        piece = channel.recv(min(num_bytes - len(found), 1 << 20))
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)
