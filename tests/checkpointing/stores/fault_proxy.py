"""A proxy in front of an S3 server, on the loopback address, whose requests fail as planned."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final

ANSWERS: Final = {
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
    "expired": (403, "ExpiredToken"),
}
"""Faults in which the server is not asked: status and error code."""
FAULTS: Final = (
    "500",
    "503",
    "cut request",
    "lost reply",
    "truncated answer",
    "corrupted answer",
    "corrupted request",
    "corrupted signature",
    "stall",
    "duplicate",
)
KINDS: Final = ("put", "part", "start", "complete", "create", "replace", "get", "list", "delete")
_STALL_S: Final = 3600


def kind_of(method: str, target: str, headers: dict[str, str]) -> str:
    """Return the kind of a request of S3."""
    query = target.partition("?")[2]
    if method == "PUT":
        if "partNumber=" in query:
            return "part"
        if "if-none-match" in headers:
            return "create"
        return "replace" if "if-match" in headers else "put"
    if method == "POST":
        if "uploadId=" in query:
            return "complete"
        return "delete" if "delete" in query else "start"
    if method == "GET":
        return "list" if "list-type=" in query else "get"
    return method.lower()


@dataclass
class Request:
    """A request: its kind, the name of the object, and the fault that it met."""

    kind: str
    target: str
    fault: str | None


@dataclass
class FaultProxy:
    """Passes requests on to a server and its answers back.

    Args:
        upstream: Port of the server.
        choose: Called with the kind and target of each request; returns a fault or None.
        answered: Called when the server has answered, before the client knows.
    """

    upstream: int
    choose: Callable[[str, str], str | None] = lambda kind, target: None
    answered: Callable[[], None] = lambda: None
    requests: list[Request] = field(default_factory=list)
    port: int = 0
    _serving: dict[asyncio.Task[None], asyncio.StreamWriter] = field(default_factory=dict)

    def __enter__(self) -> FaultProxy:
        self._loop = asyncio.new_event_loop()
        started = threading.Event()

        async def serve() -> None:
            server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=1 << 20)
            self.port = server.sockets[0].getsockname()[1]
            self._server = server
            started.set()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._loop.create_task(serve())
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, name="fault proxy", daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        async def stop() -> None:
            for socket in self._server.sockets:
                self._loop.remove_reader(socket)
            await asyncio.sleep(0)  # a closed server would lose a connection it has just accepted
            self._server.close()
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in self._serving:
                    task.cancel()  # not those that accept a connection, which soon end
                await asyncio.wait(tasks)
            await asyncio.sleep(0)  # connections close one step after they were told to
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(stop(), self._loop)
        self._thread.join(10)
        self._loop.close()

    def fail_once(self, kind: str, fault: str, *, in_name: str = "") -> None:
        """Let the next request of a kind fail."""
        self.requests.clear()
        is_used = False

        def choose(found: str, target: str) -> str | None:
            nonlocal is_used
            if is_used or found != kind or in_name not in target:
                return None
            is_used = True
            return fault

        self.choose = choose

    def pass_all(self) -> None:
        """Let no request fail."""
        self.choose = lambda kind, target: None
        self.answered = lambda: None

    @property
    def faults(self) -> list[Request]:
        """Requests that met a fault."""
        return [request for request in self.requests if request.fault is not None]

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._serving[task] = writer  # the loop itself does not keep one whose client was killed
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        """Close a connection, even one whose task was cancelled before it began."""
        writer = self._serving.pop(task)  # a name: Python 3.13 warns of a writer freed while open
        writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while await self._answer(reader, writer):
                pass
            writer.close()
            await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; return whether the connection stays open."""
        head = await reader.readuntil(b"\r\n\r\n")
        method, target, headers = _parsed(head)
        kind = kind_of(method, target, headers)
        fault = self.choose(kind, target)
        self.requests.append(Request(kind, target, fault))
        length = int(headers.get("content-length", 0))
        if fault == "cut request":
            await reader.readexactly(length // 2)
            return False
        body = await reader.readexactly(length)
        if fault in ANSWERS:
            writer.write(_error(*ANSWERS[fault]))
            await writer.drain()
            return True
        if fault == "duplicate":
            await self._ask(head, body)
        if fault == "corrupted signature":
            head = _with_other_signature(head)
        answer = await self._ask(head, _corrupted(body) if fault == "corrupted request" else body)
        self.answered()
        if fault == "stall":
            await asyncio.sleep(_STALL_S)
        if fault != "lost reply":
            writer.write(_passed_on(*answer, fault))
            await writer.drain()
        return False  # the server was asked to close its connection, too

    async def _ask(self, head: bytes, body: bytes) -> tuple[bytes, bytes]:
        """Return the head and body of the server's answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream, limit=1 << 20)
        lines = [
            line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")
        ]
        try:
            writer.write(b"\r\n".join([lines[0], b"Connection: close", *lines[1:]]) + body)
            await writer.drain()
            return await reader.readuntil(b"\r\n\r\n"), await reader.read(-1)
        finally:
            writer.transport.abort()


def _parsed(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    return method, target, {name.strip().lower(): value.strip() for name, value in pairs}


def _error(status: int, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>planned</Message></Error>".encode()
    head = (
        f"HTTP/1.1 {status} Planned\r\nContent-Type: application/xml\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _passed_on(head: bytes, body: bytes, fault: str | None) -> bytes:
    """Return what reaches the client of an answer."""
    if fault == "truncated answer":
        return head + body[: len(body) // 2] if body else head[: len(head) // 2]
    return head + (_corrupted(body) if fault == "corrupted answer" else body)


def _with_other_signature(head: bytes) -> bytes:
    """Return the head of a request with one changed bit in its signature."""
    before, name, after = head.partition(b"Signature=")
    assert name
    return before + name + bytes([after[0] ^ 1]) + after[1:]


def _corrupted(data: bytes) -> bytes:
    """Return data with one changed bit."""
    changed = bytearray(data)
    if changed:
        changed[len(changed) // 2] ^= 1
    return bytes(changed)
