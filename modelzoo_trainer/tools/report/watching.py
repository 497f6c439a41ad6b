"""Serve a report on localhost, and keep it current."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from typing_extensions import override

from modelzoo_trainer.base.stderr import say
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.report.output import check_target, write_report
from modelzoo_trainer.tools.report.page import page, plotly_js

HOST: Final = "127.0.0.1"
_LOCAL: Final = re.compile(
    r"(?:127\.0\.0\.1|localhost|\[::1\])(?::[0-9]{1,5})?", re.IGNORECASE | re.ASCII
)
"""The `Host` of a request by this host's own name; the port is another one behind a tunnel."""
_INTERVAL_S: Final = 2.0
_SHARE: Final = 5  # at most one fifth of the time is spent on building pages
_WATCHED: Final = ("metrics.jsonl", "logs/*/*.*", "checkpoint_*/manifest.json", "restarts/*/*.json")


class Watched:
    """The newest report of some runs, rewritten when their files have changed.

    Raises:
        ConfigError: If one of them is not a run.
    """

    def __init__(self, paths: Sequence[Path], output: Path | None = None) -> None:
        self._paths = list(paths)
        self._output = output
        self._lock = threading.Lock()
        self._seen = ""
        self._next = 0.0
        self._html = b""
        self._problem = ""
        self.version = ""
        """Identifies the current page."""
        self._make()

    def refresh(self) -> None:
        """Rewrite the page if a file has changed, at most once per interval."""
        with self._lock:
            if time.monotonic() < self._next or self._signature() == self._seen:
                return
            try:
                self._make()
            except ConfigError as error:  # removed in the meantime, or a disk error
                if str(error) != self._problem:
                    say(f"The report is not refreshed: {error}")
                self._problem = str(error)
                self._next = time.monotonic() + _INTERVAL_S

    def html(self) -> bytes:
        """Return the page."""
        self.refresh()
        return self._html

    def _make(self) -> None:
        from modelzoo_trainer.tools.report.command import read_runs

        began = time.monotonic()
        seen = self._signature()
        runs = read_runs(self._paths)
        version = f"{hash(seen) & 0xFFFFFFFFFFFF:x}"
        self._html = page(runs, version=version).encode(errors="replace")
        self._seen, self.version, self._problem = seen, version, ""
        if self._output is not None:
            write_report(self._output, page(runs))
        took = time.monotonic() - began
        self._next = time.monotonic() + max(_INTERVAL_S, _SHARE * took)

    def _signature(self) -> str:
        """Return a signature that changes when a file of the runs does."""
        found = []
        for path in self._paths:
            files = [path] if path.is_file() else [one for p in _WATCHED for one in path.glob(p)]
            for file in files:
                try:
                    facts = file.stat()
                except OSError:  # removed in the meantime
                    continue
                found.append(f"{file} {facts.st_mtime_ns} {facts.st_size}")
        return "\n".join(sorted(found))


class _Handler(BaseHTTPRequestHandler):
    watched: Watched

    @override
    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""

    def do_GET(self) -> None:
        """Respond with the page, or with its version."""
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not _LOCAL.fullmatch(hosts[0]):  # DNS rebinding by another site
            self.send_error(HTTPStatus.FORBIDDEN)
        elif self.path == "/":
            self._answer(self.watched.html(), "text/html; charset=utf-8")
        elif self.path == "/version":
            self.watched.refresh()
            self._answer(self.watched.version.encode(), "text/plain; charset=utf-8")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, content: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)


def make_server(
    paths: Sequence[Path], port: int, output: Path | None = None
) -> ThreadingHTTPServer:
    """Return a server of the report of some runs on localhost.

    Raises:
        ConfigError: If the port is in use, a path is not a run, or plotly is not installed.
    """
    if output is not None:
        check_target(output)
    plotly_js()
    handler = type("_Handler", (_Handler,), {"watched": Watched(paths, output)})
    try:
        server = ThreadingHTTPServer((HOST, port), handler)
    except OSError as error:
        raise ConfigError(
            f"--watch {port}: {HOST}:{port} cannot be used: {error.strerror or error}. Pass "
            f"another port, or 0 for any free one."
        ) from None
    server.daemon_threads = True
    return server


def serve(paths: Sequence[Path], port: int, output: Path | None = None) -> None:
    """Serve the report of some runs until Ctrl-C.

    Raises:
        ConfigError: As `make_server`.
    """
    with make_server(paths, port, output) as server:
        say(f"Serving the report on http://{HOST}:{server.server_port}/ (stop with Ctrl-C).")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
