"""The rendezvous store, in which ranks find each other."""

from __future__ import annotations

import errno
import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError, DistNetworkError

from ..errors import BackendError
from .launch import Agent, Launch

log = logging.getLogger("modelzoo_trainer.backends.store")

_REACH_S: Final = 8.0
_SHAKE_HANDS_S: Final = 20.0  # allows for some lost DNS answers
_SLOW_S: Final = 1.0
_LOOK_S: Final = 5.0
_PAUSE_S: Final = 0.05
LOOPBACK: Final = "127.0.0.1"


def open_store(launch: Launch, *, timeout_s: float) -> Store:
    """Return the run's store, once all ranks have joined.

    Rank 0 hosts it. Under an agent it does so at a new port, which it announces in the agent's
    store, so that it has no entries of an earlier attempt. The announcement of an earlier attempt
    may be read until the new one is written: then its store is gone, or its ranks are taken, and
    the announcement is read again. (The restart count does not identify an attempt: the agent of
    another host may have a lower count.)

    Raises:
        BackendError: If the port is in use, or not all ranks join in time.
    """
    deadline = time.monotonic() + timeout_s
    name = uuid.uuid4().hex
    notice = agent_store(launch, deadline) if launch.uses_agent_store else None
    if launch.rank == 0:
        store = _host(launch, notice)
        _take_seat(store, launch, name)
        if not _is_full(store, launch, deadline):
            raise BackendError(_who_is_missing(store, launch, timeout_s))
        return store
    while time.monotonic() < deadline:
        found = _guest(launch, notice, name, deadline)
        if found is not None:
            return found
        time.sleep(_PAUSE_S)
    raise BackendError(
        f"Process {launch.rank} has waited {timeout_s:g} s for process 0 at "
        f"{launch.host}:{launch.port}. Check the output of process 0: it may have failed, or a "
        f"firewall may block the connection."
    )


def own_connection(store: Store) -> Store:
    """Return a store with the same content, whose calls do not wait for calls of others.

    Raises:
        DistError: If the rank that hosts the store has ended.
    """
    # torch tries for minutes to reach a host that has ended.
    thread, found = _call_in_thread(lambda: store.clone())  # type: ignore[attr-defined]
    thread.join(_LOOK_S)
    while not found and _is_hosted(store):
        thread.join(_LOOK_S)
    if not found:
        raise DistNetworkError("process 0, which hosts the store, has ended")
    if isinstance(found[0], DistError):
        raise found[0]
    return found[0] if isinstance(found[0], Store) else store  # one without connections


def _is_hosted(store: Store) -> bool:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return not isinstance(store, TCPStore) or _is_listening(store.host, store.port)


def _key(launch: Launch) -> str:
    return f"modelzoo_trainer/{launch.run_id}/store"


def agent_store(launch: Launch | Agent, deadline: float) -> Store:
    """Return the launcher's store."""
    store = _connect(launch.host, launch.port, deadline, deadline)
    if store is None:
        raise BackendError(
            f"Process {launch.rank} cannot reach the launcher's store at "
            f"{launch.host}:{launch.port}. Check MASTER_ADDR, MASTER_PORT and the firewall."
        )
    return store


def _host(launch: Launch, notice: Store | None) -> TCPStore:
    """Host the store and announce it."""
    port = launch.port if notice is None else 0
    if launch.is_one_host:
        address = LOOPBACK
    else:
        address = launch.host if notice is None else _own_address(launch)
    own = address if launch.is_one_host else _only_address(address)
    try:
        store = _store_at(address, port) if own is None else _store_bound_to(own, address, port)
    except (RuntimeError, OSError) as error:
        is_taken = getattr(error, "errno", None) == errno.EADDRINUSE
        if not (is_taken or "EADDRINUSE" in str(error) or "in use" in str(error)):
            raise
        raise BackendError(
            f"Port {port} (MASTER_PORT) is in use on this host, perhaps by another run. Use "
            f"another one: `torchrun --master-port=P`, or let `torchrun --standalone` choose."
        ) from None
    if notice is not None:
        notice.set(_key(launch), json.dumps([address, store.port]))
    return store


def _store_at(address: str, port: int) -> TCPStore:
    return TCPStore(address, port, is_master=True, wait_for_workers=False)


def _store_bound_to(own: str, address: str, port: int) -> TCPStore:
    """Host a store that listens at one address of this host, not at all of them.

    `own`: the numeric address. `address`: the address for other ranks. Port 0 = any free port.
    """
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((own, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return _store_at(address, port)  # behind a gateway: not an address of this host
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        return TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def _only_address(host: str) -> str | None:
    """Return the one address that a name means to others; None if unknown.

    A name of this host may resolve to a loopback address here, and to another one elsewhere.
    """
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return None
    own = found.pop() if len(found) == 1 else "127.0.0.1"
    is_for_others = not (own.startswith("127.") or own == "::1" or "%" in own)
    return own if is_for_others else None


def loopback_interface() -> str | None:
    """Return the name of the loopback interface; None if unknown."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), None)


def _own_address(launch: Launch) -> str:
    """Return the address at which others reach this host."""
    with suppress(OSError):
        found = socket.getaddrinfo(launch.host, launch.port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing, only looks up the route
            own = str(probe.getsockname()[0])
        if not own.startswith("127.") and own != "::1":
            return own
    return launch.host  # the launcher's store is on this host


def _guest(launch: Launch, notice: Store | None, name: str, deadline: float) -> Store | None:
    """Connect to rank 0's store; return None if it does not exist, or is full."""
    address, port = LOOPBACK if launch.is_one_host else launch.host, launch.port
    if notice is not None:
        if not notice.check([_key(launch)]):
            return None
        address, port = json.loads(notice.get(_key(launch)))
    try:
        listening_by = deadline if notice is None else time.monotonic()
        store = _connect(address, port, listening_by, deadline)
        if store is None:
            return None
        if not _take_seat(store, launch, name):
            if notice is None:
                _refuse(launch, "another run")
            return None
        return store if _is_full(store, launch, deadline) else None
    except DistError:  # it has ended meanwhile
        return None


def _connect(address: str, port: int, listening_by: float, deadline: float) -> TCPStore | None:
    """Connect to a store; return None if nothing listens by then.

    torch looks up the name of each end of a connection, and a store does nothing else meanwhile.
    Without a name server's answer each lookup takes ten seconds or more.
    """
    while not _is_listening(address, port):
        if time.monotonic() >= listening_by:
            return None
        time.sleep(_PAUSE_S)
    # What listens and is not a store is waited for without end.
    thread, found = _call_in_thread(lambda: TCPStore(address, port, is_master=False))
    thread.join(_SHAKE_HANDS_S)
    if not found and (asked_s := _name_lookup_s(address, port)) > _SLOW_S:
        log.warning(
            "A DNS lookup of %s takes %.0f s, and torch does one for each connection, so startup "
            "will be slow. Add a line '::ffff:ADDRESS NAME' to /etc/hosts for each host, or "
            "'options timeout:1 attempts:1' to /etc/resolv.conf.",
            address,
            asked_s,
        )
        thread.join(max(deadline - time.monotonic(), 0.0))
    if not found and not _is_listening(address, port):
        return None  # it has ended meanwhile; torch keeps trying
    if not found:
        raise BackendError(
            f"Port {port} of {address} is in use by another program (not a TCPStore). Use another "
            f"port: `torchrun --master-port=P`, or `torchrun --standalone`."
        )
    return found[0] if isinstance(found[0], TCPStore) else None


def _call_in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Start a call that may never return; return its thread, and a list for its result or error."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:  # noqa: BLE001  # for the caller
            found.append(error)

    thread = threading.Thread(target=run, name="store", daemon=True)
    thread.start()
    return thread, found


def _name_lookup_s(address: str, port: int) -> float:
    """Return how long the reverse lookup of an address takes, as done by torch."""
    begin = time.monotonic()
    with suppress(OSError):
        found = socket.getaddrinfo(address, port, socket.AF_INET6, flags=socket.AI_V4MAPPED)
        socket.getnameinfo(found[0][4], socket.NI_NUMERICSERV)
    return time.monotonic() - begin


def _is_listening(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_REACH_S).close()
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise
        return False
    return True


def _take_seat(store: TCPStore, launch: Launch, name: str) -> bool:
    """Claim this rank; return False if it is taken. Announce when all ranks have joined."""
    if store.compare_set("run", "", launch.run_id) != launch.run_id.encode():
        return False
    seat = f"seats/{launch.rank}"
    if store.compare_set(seat, "", name) != name.encode():
        return False
    if store.add("seats", 1) == launch.world_size:
        store.set("seats/all", "here")
    return True


def _is_full(store: TCPStore, launch: Launch, deadline: float) -> bool:
    while not store.check(["seats/all"]):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE_S / 5 if launch.world_size <= 64 else _PAUSE_S)
    return True


def _who_is_missing(store: TCPStore, launch: Launch, timeout_s: float) -> str:
    ranks = [r for r in range(launch.world_size) if not store.check([f"seats/{r}"])]
    some = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
    return (
        f"{len(ranks)} of {launch.world_size} processes have not joined within {timeout_s:g} s: "
        f"{some}. Check their output; they may have failed, or a firewall may separate "
        f"the hosts."
    )


def _refuse(launch: Launch, owner: str) -> None:
    raise BackendError(
        f"The store at {launch.host}:{launch.port} (MASTER_ADDR, MASTER_PORT) belongs to {owner}, "
        f"or already has a process {launch.rank}. Use another port."
    )
