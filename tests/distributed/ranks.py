"""Runs a function in several processes that find each other as under torchrun."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from torch.distributed import TCPStore

from modelzoo_trainer.base.parent_process import end_with_parent

_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.distributed.imported"])
PATIENCE_S = 180.0
_FIRST_PORT, _NUM_PORTS = 18000, 12000  # below those that systems give by themselves
_PORTS_OF_ONE = 40


def run_ranks(
    num: int,
    function: Callable[..., Any],
    *args: Any,
    stay: bool = True,
    timeout_s: float = PATIENCE_S,
) -> list[Any]:
    """Call `function(rank, *args)` in each of `num` processes, and return what they return.

    The environment is torchrun's, with the store of an agent: the test itself. The processes are
    forked from a server that has imported torch, and end without their exit handlers.

    Args:
        num: The number of processes.
        function: At the top of a module; what it takes and returns can be pickled.
        args: Further arguments.
        stay: Whether one that has returned stays until all have: others may still be connecting
            with it.
        timeout_s: After which all of them are killed.

    Raises:
        AssertionError: If one raises, dies, or is not done in time; with its traceback.
    """
    results = try_ranks(num, function, *args, stay=stay, timeout_s=timeout_s)
    failed = [f"rank {rank}: {found}" for rank, (ok, found) in enumerate(results) if not ok]
    assert not failed, "\n".join(failed)
    return [found for _, found in results]


def try_ranks(
    num: int,
    function: Callable[..., Any],
    *args: Any,
    stay: bool = True,
    timeout_s: float = PATIENCE_S,
) -> list[tuple[bool, Any]]:
    """Return likewise, of each rank: whether it returned, and what, or how it ended."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(num):
        ours, theirs = _CONTEXT.Pipe()
        env = environment(rank, num, agent.port)
        process = _CONTEXT.Process(target=_child, args=(theirs, env, function, rank, args, stay))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [
            _result(pipe, process, timeout_s)
            for pipe, process in zip(pipes, processes, strict=True)
        ]
    finally:
        for process in processes:
            process.kill()
            process.join()


def free_port() -> int:
    """Return a port that nobody has, and that nobody is given who does not ask for it."""
    # Processes of pytest have numbers near each other, and each asks for more than one.
    port = _FIRST_PORT + os.getpid() * _PORTS_OF_ONE % _NUM_PORTS
    while True:
        port = _FIRST_PORT + (port + 1 - _FIRST_PORT) % _NUM_PORTS
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port


def environment(rank: int, num: int, port: int) -> dict[str, str]:
    """Return what torchrun sets for a process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num),
        "LOCAL_WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": "1",
    }


def _result(pipe: Connection, process: Any, timeout_s: float) -> tuple[bool, Any]:
    ready = wait([pipe, process.sentinel], timeout_s)
    if pipe.poll():
        try:
            return pipe.recv()  # type: ignore[no-any-return]  # what `_child` sends
        except EOFError:
            pass
    if not ready:
        return False, f"not done after {timeout_s} s"
    process.join(5)
    return False, f"ended with exit code {process.exitcode}"


def start_workers_as_a_program_does() -> None:
    """Have loaders start their workers in the default way, not through a server of their own.

    A process that a server has forked would start another one, which imports torch again.
    """
    mp.set_start_method(None, force=True)


def _child(
    pipe: Connection,
    env: dict[str, str],
    function: Callable[..., Any],
    rank: int,
    args: Any,
    stay: bool,
) -> None:
    os.environ.update(env)
    end_with_parent()
    import torch

    torch.set_num_threads(1)
    start_workers_as_a_program_does()
    try:
        found = True, function(rank, *args)
    except BaseException:  # noqa: BLE001  # told to the test
        found = False, traceback.format_exc()
    pipe.send(found)
    if stay and found[0]:
        with suppress(EOFError, ConnectionError):
            pipe.recv()  # until the test has all, or is gone itself
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if found[0] else 1)
