from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import obstore
import pytest
from obstore.store import MemoryStore

from backends.coordination.liveness import Identity, own_identity
from modelzoo_trainer.checkpointing.stores import lease as lease_module
from modelzoo_trainer.checkpointing.stores.lease import LOCK_NAME, Lease, open_lease
from modelzoo_trainer.checkpointing.stores.urls import StoreUrl
from modelzoo_trainer.errors import ConfigError, StoreError
from tests.checkpointing.stores.faulty import BUSY, Faulty, faulty_store

SECONDS = 0.3
ELSEWHERE = Identity("another host", 7, "1")


class Machine:
    """Opens the lock of one prefix, by this process or as if on another host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client = MemoryStore()
        self.leases: list[Lease] = []
        self._monkeypatch = monkeypatch

    def lease(self, *, seconds: float = SECONDS) -> tuple[Lease, Faulty]:
        store, api = faulty_store(client=self.client)
        self.leases.append(Lease(store, seconds=seconds))
        return self.leases[-1], api

    def be(self, identity: Identity) -> None:
        self._monkeypatch.setattr(lease_module, "own_identity", lambda: identity)

    def content(self) -> bytes:
        return bytes(obstore.get(self.client, f"run/{LOCK_NAME}").bytes())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(monkeypatch)
    yield machine
    for lease in machine.leases:
        lease._stop.set()


def wait_until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_second_run_is_refused_and_told_who_holds_the_lock(machine: Machine) -> None:
    first, _ = machine.lease()
    first.take()
    second, _ = machine.lease()
    with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} on "):
        second.take()
    assert first.is_held
    assert not second.is_held
    first.check()


def test_the_lock_is_free_after_its_release(machine: Machine) -> None:
    first, _ = machine.lease(seconds=600)
    first.take()
    first.release()
    first.release()
    second, _ = machine.lease(seconds=600)
    second.take()
    assert second.is_held
    assert not first.is_held


def test_each_holder_knows_its_number_and_the_one_before(machine: Machine) -> None:
    first, _ = machine.lease(seconds=600)
    assert (first.token, first.epoch) == ("", 0)
    first.take()
    token = first.token
    assert (first.previous, first.epoch) == (None, 1)
    first._renew()
    assert (first.token, first.epoch) == (token, 1)
    first.release()
    second, _ = machine.lease(seconds=600)
    second.take()
    assert (second.previous, second.epoch) == (token, 2)
    other = second.token
    second.release()
    first.take()
    assert (first.previous, first.epoch) == (other, 3)
    assert first.token not in ("", token, other)


def test_trainers_of_a_process_share_the_lock(machine: Machine) -> None:
    lease, _ = machine.lease()
    lease.take()
    lease.take()
    lease.release()
    assert lease.is_held
    other, _ = machine.lease()
    with pytest.raises(ConfigError):
        other.take()
    lease.release()
    other.take()


def test_the_lock_is_renewed(machine: Machine) -> None:
    lease, _ = machine.lease()
    lease.take()
    contents = {machine.content()}
    wait_until(lambda: contents.add(machine.content()) or len(contents) > 3)
    assert lease.is_held


def test_a_live_holder_on_another_host_keeps_the_lock(machine: Machine) -> None:
    machine.be(ELSEWHERE)
    far, _ = machine.lease(seconds=4)
    far.take()
    machine.be(own_identity())
    near, _ = machine.lease(seconds=4)
    with pytest.raises(ConfigError, match="in use by process 7"):
        near.take()
    far.check()


def test_a_dead_holder_on_another_host_is_waited_for(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.be(ELSEWHERE)
    dead, _ = machine.lease()
    dead.take()
    dead._stop.set()
    machine.be(own_identity())
    next_one, _ = machine.lease()
    begun = time.monotonic()
    next_one.take()
    assert time.monotonic() - begun > SECONDS * 0.9
    assert "which may have died: waiting up to 0 s" in caplog.text
    next_one.check()


def test_a_dead_process_of_this_host_is_not_waited_for(machine: Machine) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = own_identity()
    from backends.coordination.liveness import identity_of

    machine.be(identity_of(child.pid))
    dead, _ = machine.lease(seconds=600)
    dead.take()
    dead._stop.set()
    child.kill()
    child.communicate()
    machine.be(identity)
    next_one, _ = machine.lease(seconds=600)
    next_one.take()
    assert next_one.is_held


def test_a_holder_that_slept_notices_that_its_lock_was_taken(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.be(ELSEWHERE)
    slept, _ = machine.lease()
    slept.take()
    slept._stop.set()
    machine.be(own_identity())
    winner, _ = machine.lease()
    winner.take()
    slept._renewed_at -= 10
    with pytest.raises(ConfigError, match=rf"was taken by process {os.getpid()}"):
        slept.check()
    with pytest.raises(ConfigError, match="was taken by"):
        slept.require()
    assert not slept.is_held
    assert "no more checkpoints are uploaded" in caplog.text
    before = machine.content()
    slept.release()
    winner._stop.set()
    assert b'is_released": true' not in machine.content()
    assert before
    winner.check()


def test_the_thread_notices_it_too(machine: Machine) -> None:
    lease, api = machine.lease()
    lease.take()
    thief, _ = machine.lease()
    thief._names.add(lease._holder.holder)  # type: ignore[union-attr] # takes it by force
    thief.take()
    wait_until(lambda: not lease.is_held)
    assert api.calls["put"] > 1


def test_an_outage_shorter_than_the_patience_of_others_loses_nothing(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    lease, api = machine.lease(seconds=0.1)
    lease.take()
    api.plan += [("put", BUSY)] * 12
    wait_until(lambda: not api.plan)
    contents = {machine.content()}
    wait_until(lambda: contents.add(machine.content()) or len(contents) > 1)
    lease.check()
    assert lease.is_held
    assert "cannot be renewed" in caplog.text


def test_a_check_during_an_outage_is_an_error_of_the_store(machine: Machine) -> None:
    lease, api = machine.lease(seconds=600)
    lease.take()
    lease._renewed_at -= 601
    api.plan += [("put", BUSY)] * 4
    with pytest.raises(StoreError):
        lease.check()
    lease.require()
    lease.check()
    assert lease.is_held


@pytest.mark.parametrize("fault", [BUSY, "lost", "twice"])
@pytest.mark.parametrize("call", ["put", "get"])
def test_requests_that_fail_once_change_nothing(machine: Machine, call: str, fault: str) -> None:
    first, api = machine.lease(seconds=600)
    api.plan += [(call, fault)]
    first.take()
    api.plan += [(call, fault)]
    first._renew()
    first._renew()
    assert first.is_held
    api.plan += [(call, fault)]
    first.release()
    second, api = machine.lease(seconds=600)
    api.plan += [(call, fault)]
    second.take()
    assert second.is_held


def test_a_failed_take_does_not_lock_out_its_own_process(machine: Machine) -> None:
    lease, api = machine.lease(seconds=600)
    api.plan += [("put", "lost"), *[("put", BUSY)] * 3]
    with pytest.raises(StoreError):
        lease.take()
    assert not lease.is_held
    assert machine.content()
    lease.take()
    assert lease.is_held


def test_a_renewal_whose_answer_never_came_is_recognised(machine: Machine) -> None:
    lease, api = machine.lease(seconds=600)
    lease.take()
    api.plan += [("put", "lost"), *[("put", BUSY)] * 3]
    with pytest.raises(StoreError):
        lease._renew()
    lease._renew()
    assert lease.is_held


def test_a_deleted_lock_is_locked_again(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    lease, _ = machine.lease(seconds=600)
    lease.take()
    obstore.delete(machine.client, f"run/{LOCK_NAME}")
    lease._renew()
    assert lease.is_held
    assert machine.content()
    assert "was deleted; it is locked again" in caplog.text


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"lock": {}, "xxh3_128": ""}'])
def test_a_damaged_lock_is_waited_for(machine: Machine, content: bytes) -> None:
    obstore.put(machine.client, f"run/{LOCK_NAME}", content)
    lease, _ = machine.lease()
    lease.take()
    assert lease.is_held


def test_a_damaged_lock_is_not_taken_for_that_of_another(machine: Machine) -> None:
    lease, _ = machine.lease(seconds=600)
    lease.take()
    content = machine.content()
    obstore.put(machine.client, f"run/{LOCK_NAME}", content[:-20] + b"x" + content[-19:])
    with pytest.raises(StoreError, match="is damaged"):
        lease._renew()
    assert lease.is_held


def test_a_forked_child_does_not_hold_or_release_the_lock(machine: Machine) -> None:
    lease, _ = machine.lease(seconds=600)
    lease.take()
    before = machine.content()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            held = lease.is_held
            lease.check()
            lease.release()
            os.write(writer, b"held" if held else b"free")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 9) == b"free"
    os.close(reader)
    os.close(writer)
    assert machine.content() == before
    assert lease.is_held


@pytest.mark.parametrize("seconds", [0, -1, 601, float("nan")])
def test_a_lease_has_a_sensible_length(seconds: float) -> None:
    with pytest.raises(ConfigError, match="lease_seconds"):
        open_lease(StoreUrl("memory", "a"), seconds=seconds)


def test_a_lease_is_opened_by_its_url() -> None:
    lease = open_lease(StoreUrl("memory", "lease", "run"), seconds=60)
    lease.take()
    assert lease.is_held
    lease.release()


def test_a_failed_release_is_logged(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    lease, api = machine.lease(seconds=600)
    lease.take()
    api.plan += [("put", BUSY)] * 4
    with caplog.at_level(logging.WARNING):
        lease.release()
    assert "was not released" in caplog.text
    another, _ = machine.lease(seconds=600)  # of the next run of this process
    another.take()
    assert another.is_held
