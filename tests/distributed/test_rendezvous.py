"""The store of a run."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistError, HashStore, PrefixStore, Store, TCPStore

from backends.coordination import rendezvous as store_module
from backends.coordination.launch import read_launch
from backends.coordination.rendezvous import open_store, own_connection
from backends.coordination.world import join
from backends.errors import BackendError
from tests.distributed.ranks import free_port, run_ranks, try_ranks

_PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
from backends.coordination.coordinator import Coordinator
from backends.coordination.launch import read_launch
from backends.coordination.rendezvous import open_store

launch = read_launch()
store = open_store(launch, timeout_s=30)
control = Coordinator(dist.PrefixStore("control", store), launch.rank, launch.world_size)
control.start()
dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.world_size)
total = torch.ones(1)
dist.all_reduce(total)
if launch.restart_count < 2:
    if launch.rank == launch.restart_count:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
dist.barrier()
control.stop()
print(f"process {launch.rank} of {int(total)}, attempt {launch.restart_count}", flush=True)
os._exit(0)
"""


def _meet(rank: int) -> bytes:
    store = open_store(read_launch(), timeout_s=60)
    if rank == 0:
        store.set("word", "hello")
    found = store.get("word")
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < 3:
        time.sleep(0.01)
    return found


def test_all_processes_find_the_store_of_the_first() -> None:
    assert run_ranks(3, _meet) == [b"hello"] * 3


def _meet_after(rank: int, stale: str) -> bytes:
    launch = read_launch()
    agent = TCPStore(launch.host, launch.port, is_master=False)
    if rank == 1:
        agent.set(f"modelzoo_trainer/{launch.run_id}/store", stale)
        store_module._guest = _telling(store_module._guest, agent)
    else:
        agent.wait(["has looked"])
    return _meet(rank)


def _telling(find: Any, agent: TCPStore) -> Any:
    """Return a function that does the same, and tells that it has."""

    def find_and_tell(*args: Any) -> Any:
        found = find(*args)
        agent.set("has looked", "yes")
        return found

    return find_and_tell


def test_an_address_where_nobody_is_any_more_is_read_again() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

        assert run_ranks(3, _meet_after, f'["127.0.0.1", {port}]') == [b"hello"] * 3


@pytest.mark.slow
def test_a_store_whose_seats_are_taken_is_not_that_of_this_attempt() -> None:
    old = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    old.multi_set(["seats/0", "seats/1", "seats/2", "seats/all"], ["a", "b", "c", "here"])
    old.set("word", "goodbye")

    assert run_ranks(3, _meet_after, f'["127.0.0.1", {old.port}]') == [b"hello"] * 3


def _meet_without_agent(rank: int, port: int) -> bytes:
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    time.sleep(0.3 * (rank == 0))
    return _meet(rank)


@pytest.mark.slow
def test_without_an_agent_the_first_process_hosts_the_port_that_is_given() -> None:
    assert run_ranks(3, _meet_without_agent, free_port()) == [b"hello"] * 3


def _meet_soon_without_agent(rank: int, port: int) -> bytes:
    store_module._SHAKE_HANDS_S = 1.0
    return _meet_without_agent(rank, port)


@pytest.mark.slow
def test_a_port_in_use_is_named_and_every_process_ends() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]

        found = try_ranks(2, _meet_soon_without_agent, port)

    assert f"{port} (MASTER_PORT) is in use" in found[0][1]
    assert f"{port} of 127.0.0.1 is in use by another program" in found[1][1]


def test_where_no_name_server_answers_a_store_is_waited_for(monkeypatch, caplog) -> None:
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    host.set("word", "hello")
    is_asked = threading.Event()

    class Slow(TCPStore):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            assert is_asked.wait(60)
            super().__init__(*args, **kwargs)

    def ask(*_: Any) -> None:
        time.sleep(0.1)
        is_asked.set()

    monkeypatch.setattr(store_module, "TCPStore", Slow)
    monkeypatch.setattr(store_module, "_SHAKE_HANDS_S", 0.05)
    monkeypatch.setattr(store_module, "_SLOW_S", 0.05)
    monkeypatch.setattr(store_module.socket, "getnameinfo", ask)
    deadline = time.monotonic() + 60

    found = store_module._connect("127.0.0.1", host.port, deadline, deadline)

    assert found is not None
    assert found.get("word") == b"hello"
    [line] = caplog.messages
    assert re.match(r"A DNS lookup of 127\.0\.0\.1 takes \d+ s, ", line)


def _connect_to_one_that_ends(rank: int) -> bool:
    host = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    port, is_listening = host[0].port, store_module._is_listening

    def look_and_end(*address: Any) -> bool:
        found = is_listening(*address)
        host.clear()
        return found

    store_module._is_listening, store_module._SHAKE_HANDS_S = look_and_end, 0.5
    return store_module._connect("127.0.0.1", port, 0.0, time.monotonic() + 60) is None


@pytest.mark.slow
def test_a_store_that_ends_before_it_is_connected_with_is_not_taken_for_another_program() -> None:
    assert run_ranks(1, _connect_to_one_that_ends) == [True]


# ---- where it listens


def _listen_where(rank: int) -> list[str]:
    """Join the others, and return the addresses that this process listens at."""
    join().barrier()
    return _listening()


def _listening() -> list[str]:
    folder = Path("/proc/self/fd")
    own = {os.readlink(path) for path in folder.iterdir() if path.is_symlink()}
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].partition(":")[0])
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="asks Linux")
def test_processes_of_one_host_listen_at_its_loopback_address_alone() -> None:
    for rank, found in enumerate(run_ranks(2, _listen_where)):
        assert set(found) == {"0100007F"}
        assert len(found) >= 2 - rank  # the store, and gloo


def _listen_without_agent(rank: int, port: int) -> list[str]:
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return _listen_where(rank)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="asks Linux")
def test_without_an_agent_they_do_so_too() -> None:
    assert set(run_ranks(2, _listen_without_agent, free_port())[0]) == {"0100007F"}


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="asks Linux")
def test_a_store_for_other_hosts_listens_at_the_address_that_they_know() -> None:
    before = _listening()
    store = store_module._store_bound_to("127.0.0.3", "127.0.0.3", 0)

    listening = _listening()
    guest = TCPStore("127.0.0.3", store.port, is_master=False)

    guest.set("word", "hello")
    assert sorted(listening) == sorted([*before, "0300007F"])
    assert store.get("word") == b"hello"


def test_an_address_that_this_host_has_not_is_left_to_a_gateway(monkeypatch) -> None:
    monkeypatch.setattr(store_module, "_store_at", lambda *args: args)
    assert store_module._store_bound_to("203.0.113.7", "far", 5) == ("far", 5)


@pytest.mark.parametrize(
    ("addresses", "own"),
    [
        (["10.0.0.5"], "10.0.0.5"),
        (["10.0.0.5", "fd00::5"], None),  # others may take either
        (["127.0.1.1"], None),  # its own name, which others know by another address
        (["::1"], None),
        (["fe80::1%eth0"], None),
        ([], None),
    ],
)
def test_a_store_for_other_hosts_is_bound_where_only_one_address_can_be_meant(
    monkeypatch, addresses, own
) -> None:
    def look_up(host, port):
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [(None, kind, 0, "", (address, 0)) for address in addresses for kind in (1, 2)]

    monkeypatch.setattr(store_module.socket, "getaddrinfo", look_up)
    assert store_module._only_address("first_node") == own


_HOST = """
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
input()
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_prefixed", [False, True])
def test_a_second_connection_to_a_store_whose_host_is_gone_fails_soon(
    monkeypatch, is_prefixed
) -> None:
    monkeypatch.setattr(store_module, "_LOOK_S", 0.1)
    command = [sys.executable, "-c", _HOST]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as host:
        assert host.stdout is not None
        store: Store = TCPStore("127.0.0.1", int(host.stdout.readline()), is_master=False)
        if is_prefixed:
            store = PrefixStore("one", PrefixStore("two", store))
        own_connection(store).set("word", "hello")
        assert store.get("word") == b"hello"
        host.kill()
        host.wait()
        with pytest.raises(DistError, match="process 0, which hosts the store, has ended"):
            own_connection(store)


def test_a_store_that_has_no_connections_is_shared() -> None:
    store = HashStore()
    own_connection(store).set("word", "hello")
    assert store.get("word") == b"hello"


def _wait_in_vain(rank: int) -> str:
    if rank == 1:
        return ""
    with pytest.raises(BackendError) as caught:
        open_store(read_launch(), timeout_s=0.5)
    return str(caught.value)


@pytest.mark.slow
def test_who_has_not_come_is_named() -> None:
    assert "1 of 2 processes have not joined within 0.5 s: 1." in run_ranks(2, _wait_in_vain)[0]


def test_a_guest_says_whom_it_has_waited_for() -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launch = run_ranks(2, _launch_of)[1]

    with pytest.raises(BackendError, match=r"[Pp]rocess 1 has waited 0.2 s for process 0"):
        open_store(replace(launch, port=agent.port), timeout_s=0.2)


def _launch_of(rank: int) -> object:
    return read_launch()


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, pytest.param(10, marks=pytest.mark.soak)])
def test_killed_processes_come_up_again_each_time(tmp_path: Path, times: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    outputs = [_torchrun(program) for _ in range(times)]

    ends = [f"process {rank} of 2, attempt 2" for rank in range(2)]
    assert [[end in output for end in ends] for output in outputs] == [[True, True]] * times


def _torchrun(program: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=2"]
    command += ["--nproc-per-node=2", "--monitor-interval=0.1", str(program)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    return done.stdout + done.stderr
