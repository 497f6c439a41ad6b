"""The proxy of these tests leaves nothing open, whatever its clients do while it ends."""

from __future__ import annotations

import gc
import socket
import time
from contextlib import ExitStack

import pytest

from tests.checkpointing.stores.fault_proxy import FaultProxy

REQUEST = b"PUT /bucket/x HTTP/1.1\r\nContent-Length: 400000\r\n\r\n" + b"x" * 400_000


@pytest.mark.parametrize(
    "sent", [b"", REQUEST[:1000], REQUEST], ids=["nothing", "a part", "a request"]
)
def test_a_request_at_the_end_leaves_nothing_open(sent: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, never answers
        proxy = FaultProxy(silent.getsockname()[1])
        with proxy, socket.create_connection(("127.0.0.1", proxy.port)) as client:
            client.sendall(sent)
            time.sleep(0.05)
        gc.collect()  # a warning of a connection that was not closed fails the test


def test_a_connection_that_was_just_accepted_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, ExitStack() as clients:
        for _ in range(30):
            with FaultProxy(silent.getsockname()[1]) as proxy:
                for _ in range(6):
                    address = ("127.0.0.1", proxy.port)
                    clients.enter_context(socket.create_connection(address))
        gc.collect()
