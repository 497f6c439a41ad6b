"""The ranks of a run, and their communication on the host."""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup

from ..errors import BackendError
from ..parallel.config import TIMEOUT_S
from .coordinator import Coordinator
from .failures import Failure
from .launch import Launch, read_launch
from .messages import pack, unpack
from .orphans import watch_launcher
from .own_device import has_own_device, own_index
from .rendezvous import loopback_interface, open_store, own_connection

STARTUP_TIMEOUT_S: Final = 1800.0
"""Timeout for what takes long once: startup, the first step, compilation."""
_MEETING_S: Final = 20.0
_NCCL_SETTINGS: Final = {
    # Log the cause before a process that waited in vain is ended.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
}


_TIMED_OUT: Final = re.compile(r"[Tt]imed out|[Tt]imeout")
_LOST: Final = re.compile(r"[Cc]onnection|NCCL|[Bb]roken pipe|connectFullMesh|gloo|remote process")
_GLOO_EXTRAS: Final = re.compile(r"\[/\S*\] |\. This is typically caused .*")
"""The place in gloo's source, and its advice."""


def _set_timeout(limit: timedelta, group: ProcessGroup) -> None:
    """Set the timeout of a process group."""
    c10d = dist.distributed_c10d
    # public from torch 2.14 on, which deprecates the other one
    set_timeout = getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout
    set_timeout(limit, group)


class World:
    """All ranks of a run; created by `join`.

    `is_own`: torch.distributed was started here, and must be shut down here. `has_own_device`:
    each rank has an accelerator for itself.

    Collective methods are marked: all ranks call them, in the same order.
    """

    def __init__(
        self, launch: Launch, store: Store, *, is_own: bool, has_own_device: bool = True
    ) -> None:
        self.launch = launch
        self.has_own_device = has_own_device
        self.rank = launch.rank
        self.local_rank = launch.local_rank
        self.world_size = launch.world_size
        self._is_own = is_own
        self._has_short_timeouts = self._is_closed = False
        self._num_meetings = 0
        self._groups: list[ProcessGroup] = []
        self.timeout_s = TIMEOUT_S
        self.describe: Callable[[BaseException], tuple[str, int]] = _describe
        """Returns the message and the exit code for an error."""
        self.coordinator = Coordinator(PrefixStore("control", store), self.rank, self.world_size)
        self._store = PrefixStore("meetings", own_connection(store))
        self.control_group = self.new_group()
        """For messages between hosts: decisions, names, plans."""
        self.checkpoint_group = self.new_group()
        """For checkpoints written while training continues."""

    # ---- groups

    def new_group(self, ranks: Sequence[int] | None = None) -> ProcessGroup:
        """Create a group for host memory. Collective.

        `ranks` None = all.
        """
        timeout = timedelta(seconds=STARTUP_TIMEOUT_S)
        group: ProcessGroup = dist.new_group(
            None if ranks is None else list(ranks), backend="gloo", timeout=timeout
        )
        self._groups.append(group)
        return group

    def shorten_timeouts(self, groups: Sequence[ProcessGroup] = ()) -> None:
        """Use `timeout_s` for collectives from now on. Idempotent.

        Also applies to further `groups`.
        """
        if self._has_short_timeouts:
            return
        self._has_short_timeouts = True
        limit = timedelta(seconds=self.timeout_s)
        for group in (dist.group.WORLD, *self._groups, *groups):
            if group is not None and group is not self.checkpoint_group:
                with suppress(Exception):  # not supported by every kind of group
                    _set_timeout(limit, group)

    # ---- messages

    def any_true(self, flag: bool) -> bool:
        """Return whether the flag is true on any rank. Collective."""
        found = torch.tensor(int(flag))
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.control_group)
        return bool(found.item())

    def barrier(self) -> None:
        """Wait until every rank is here. Collective."""
        dist.barrier(group=self.control_group)

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's value. Collective.

        Raises:
            BackendError: If its type is not supported, see `messages.pack`.
        """
        content = pack(value) if self.rank == 0 else b""
        length = torch.tensor(len(content), device="cpu")
        dist.broadcast(length, src=0, group=self.control_group)
        sent = _as_tensor(content, int(length))
        dist.broadcast(sent, src=0, group=self.control_group)
        return value if self.rank == 0 else unpack(sent.numpy().tobytes())

    def gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order. Collective.

        Raises:
            BackendError: If a type is not supported, see `messages.pack`.
        """
        content = pack(value)
        length = torch.tensor(len(content), device="cpu")
        lengths = [torch.zeros_like(length) for _ in range(self.world_size)]
        dist.all_gather(lengths, length, group=self.control_group)
        own = _as_tensor(content, int(max(lengths)))
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(parts, own, group=self.control_group)
        return [
            unpack(part[:length].numpy().tobytes())
            for part, length in zip(parts, map(int, lengths), strict=True)
        ]

    def require_same(self, what: str, value: str, *, hint: str) -> None:
        """Check that all ranks have the same text. Collective.

        Error messages start with `what` and end with the `hint`.

        Raises:
            BackendError: On every rank, if it differs, with the first line that differs.
        """
        texts = self.gather_object(value)
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise BackendError(
                    f"All processes need the same {what}, but process {rank} has "
                    f"{_first_difference(text, texts[0])}. {hint}"
                )

    def try_barrier(self, name: str) -> bool:
        """Return whether all ranks reach the barrier within a short time.

        Unlike `barrier`, does not wait for ranks that are doing something else.
        """
        self._num_meetings += 1
        key = f"{name}/{self._num_meetings}"
        if self._store.add(key, 1) == self.world_size:
            self._store.set(f"{key}/all", "here")
        try:
            self._store.wait([f"{key}/all"], timedelta(seconds=_MEETING_S))
        except Exception:  # noqa: BLE001  # a timeout, or a lost store
            return False
        return True

    # ---- shutdown

    def fail(self, message: str, *, code: int = 1, kind: str = "error") -> Failure:
        """Announce that this process ends, and why; the others end as well.

        Returns:
            The first failure of the run, perhaps of another rank.
        """
        return self.coordinator.fail(message, code=code, kind=kind)

    def fail_by(self, error: BaseException) -> Failure:
        """Announce that this process ends with an error; return the run's first failure.

        A lost connection is attributed to another rank's end, and a timeout to a rank that hangs.
        """
        message, code = self.describe(error)
        if isinstance(error, KeyboardInterrupt):
            return self.fail("stopped by Ctrl-C", code=130, kind="stop")
        if isinstance(error, SystemExit):
            return self.fail(
                "stopped", code=error.code if type(error.code) is int else 1, kind="stop"
            )
        if isinstance(error, RuntimeError) and _TIMED_OUT.search(str(error)):
            limit_s = self.timeout_s if self._has_short_timeouts else STARTUP_TIMEOUT_S
            return self.fail(
                f"timed out after {limit_s:g} s of waiting for another process ({message}). All "
                f"stacks are shown: look for the one that does not wait for a message.",
                kind="hang",
            )
        is_lost = isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
        return self.fail(message, code=code, kind="lost" if is_lost else "error")

    def leave(self, code: int) -> None:
        """Exit this process without waiting for anything after a failure; does not return.

        A normal exit may be aborted by gloo's threads.
        """
        if self.coordinator.failure is None:
            with suppress(Exception):  # the run is over: wait only shortly for others
                limit = timedelta(seconds=_MEETING_S)
                _set_timeout(limit, self.control_group)
            with suppress(Exception):
                self.barrier()
            self.close()
            if self._is_own:
                with suppress(Exception):
                    dist.destroy_process_group()
            with suppress(Exception):
                atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)

    def close(self) -> None:
        """Announce the exit of a process that ends by itself. Idempotent.

        Rank 0 waits for the others as long as they live: it hosts the store.
        """
        if self._is_closed:
            return
        self._is_closed = True
        error = getattr(sys, "last_value", None)  # an uncaught exception
        if error is not None:
            self.fail_by(error)
        if self.coordinator.failure is None:
            self.coordinator.stop(None if self.rank else self.timeout_s)


_JOINED: list[World] = []


def join() -> World | None:
    """Join the run; return None for a single process.

    The first call initializes torch.distributed, if necessary; later calls return the same
    object.

    Raises:
        BackendError: If the launcher's environment is invalid, or the other ranks cannot be
            reached.
    """
    watch_launcher()
    if _JOINED:
        return _JOINED[0]
    if dist.is_available() and dist.is_initialized():
        return _install(_adopted())
    launch = read_launch()
    if launch is None:
        return None
    try:
        return _install(_started(launch))
    except dist.DistError as error:  # the launcher, or the process that hosts a store, has ended
        raise _cannot_connect(launch, error) from None


def joined() -> World | None:
    """Return the result of `join`; None before it is called, or for a single process."""
    return _JOINED[0] if _JOINED else None


_HOST_GROUPS: list[ProcessGroup] = []


def host_group() -> ProcessGroup:
    """Return the group of all ranks for tensors in host memory. The first call is collective.

    A program may have initialized torch.distributed for its devices only.
    """
    if _JOINED:
        return _JOINED[0].control_group
    if not _HOST_GROUPS:
        _HOST_GROUPS.append(dist.new_group(backend="gloo"))
    return _HOST_GROUPS[0]


def _install(world: World | None) -> World | None:
    if world is not None:
        world.coordinator.start()
        atexit.register(world.close)
        _JOINED.append(world)
    return world


def _adopted() -> World | None:
    """Return the ranks of a program that has initialized torch.distributed itself."""
    num = dist.get_world_size()
    if num == 1:
        return None
    rank = dist.get_rank()
    launch = read_launch()
    if launch is None or (launch.rank, launch.world_size) != (rank, num):
        launch = Launch(
            rank=rank,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            world_size=num,
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", str(num))),
        )
    store = dist.distributed_c10d._get_default_store()
    return World(launch, PrefixStore("modelzoo_trainer", store), is_own=False)


def _started(launch: Launch) -> World:
    for name, value in _NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)
    interface = loopback_interface() if launch.is_one_host else None
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    store = open_store(launch, timeout_s=STARTUP_TIMEOUT_S)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    timeout = timedelta(seconds=STARTUP_TIMEOUT_S)
    options: dict[str, Any] = {"backend": "gloo"}
    has_own = False
    try:
        if accelerator is not None:
            engine = dist.Backend.default_device_backend_map.get(accelerator.type)
            has_own = has_own_device(launch, PrefixStore("devices", store), timeout)
            if engine is not None and has_own:  # else the device is the host
                index = own_index(launch.local_rank)
                torch.accelerator.set_device_index(index)
                options["backend"] = f"cpu:gloo,{accelerator.type}:{engine}"
                options["device_id"] = torch.device(accelerator.type, index)
        dist.init_process_group(
            **options,
            store=PrefixStore("groups", store),
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
        )
        return World(launch, store, is_own=True, has_own_device=has_own)
    except (RuntimeError, ValueError) as error:
        raise _cannot_connect(launch, error) from None


def _cannot_connect(launch: Launch, error: Exception) -> BackendError:
    reason = _GLOO_EXTRAS.sub("", str(error)).partition("\n")[0]
    return BackendError(
        f"Process {launch.rank} of {launch.world_size} cannot connect to the others: {reason}. "
        f"Check whether one of them has ended, MASTER_ADDR, MASTER_PORT and the firewall."
    )


def _describe(error: BaseException) -> tuple[str, int]:
    return f"{type(error).__name__}: {error}", 1


def _as_tensor(content: bytes, length: int) -> torch.Tensor:
    """Return bytes as a tensor in host memory, padded with zeros."""
    return torch.from_numpy(np.frombuffer(content.ljust(length, b"\0"), np.uint8).copy())


def _first_difference(text: str, other: str) -> str:
    for line, expected in zip(text.splitlines(), other.splitlines(), strict=False):
        if line != expected:
            return f"{line.strip()!r} where process 0 has {expected.strip()!r}"
    return "more or fewer lines than process 0"
