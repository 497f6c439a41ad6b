"""Read this process's rank from the launcher's environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ..errors import BackendError

_RESTARTS: Final = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
_VERBOSITY: Final = "TORCH_CPP_LOG_LEVEL"
_START: Final = "Start the program with torchrun: `torchrun --nproc-per-node=N PROGRAM ...`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The rank of this process in a run of several processes."""

    rank: int  # global, from 0
    local_rank: int  # on this host, from 0
    world_size: int  # > 1
    local_world_size: int  # processes on this host
    run_id: str = ""  # distinguishes runs of the same launcher
    restart_count: int = 0  # restarts by the launcher so far
    max_restarts: int = 0  # restarts allowed
    host: str = ""  # of the launcher's store, or where rank 0 must host one
    port: int = 0  # likewise
    uses_agent_store: bool = False  # the launcher has its own store, which outlives processes
    is_one_host: bool = False  # all processes are on this host


def read_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Read the launcher's environment variables; None if this process is alone.

    Raises:
        BackendError: If variables are missing or contradict each other.
    """
    env = os.environ if environ is None else environ
    given = [name for name in ("RANK", "WORLD_SIZE") if env.get(name)]
    if not given and _is_in_step(env):
        return _read_step(env)
    if not given or (env.get("WORLD_SIZE") == "1" and env.get("RANK", "0") == "0"):
        return None
    missing = [name for name in _NEEDED if not env.get(name)]
    if missing:
        are = "is" if len(given) == 1 else "are"
        raise BackendError(
            f"{' and '.join(given)} {are} set in the environment, but not {', '.join(missing)}. A "
            f"distributed run requires all of {', '.join(_NEEDED)}. {_START} To run a single "
            f"process, unset {' and '.join(given)}."
        )
    num = _number(env, "WORLD_SIZE", 1)
    rank = _number(env, "RANK", 0, num)
    if num == 1:
        return None
    if not env.get("LOCAL_RANK"):
        raise BackendError(
            f"WORLD_SIZE is {num}, but LOCAL_RANK is not set, so it is unknown which device "
            f"process {rank} uses. {_START} Other launchers must also set LOCAL_RANK; with srun, "
            f"set only MASTER_ADDR and MASTER_PORT."
        )
    local_rank = _number(env, "LOCAL_RANK", 0)
    num_local = _number(env, "LOCAL_WORLD_SIZE", 1) if env.get("LOCAL_WORLD_SIZE") else num
    if local_rank >= num_local or num_local > num:
        raise BackendError(
            f"LOCAL_RANK is {local_rank}, LOCAL_WORLD_SIZE {num_local} and WORLD_SIZE {num}; "
            f"required: LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE. {_START}"
        )
    host, port = env["MASTER_ADDR"], _number(env, "MASTER_PORT", 1, 65536)
    return Launch(
        rank=rank,
        local_rank=local_rank,
        world_size=num,
        local_world_size=num_local,
        run_id=env.get("TORCHELASTIC_RUN_ID") or f"{host}:{port}",
        restart_count=num_restarts(env),
        max_restarts=_number(env, "TORCHELASTIC_MAX_RESTARTS", 0, default=0),
        host=host,
        port=port,
        uses_agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        is_one_host=num_local == num if env.get("LOCAL_WORLD_SIZE") else host in _LOOPBACK,
    )


def num_restarts(environ: Mapping[str, str] | None = None) -> int:
    """Return how often torchrun has restarted this process, and Slurm its job.

    Raises:
        BackendError: If a number is not valid.
    """
    env = os.environ if environ is None else environ
    return sum(_number(env, name, 0, default=0) for name in _RESTARTS)


def num_requeues(environ: Mapping[str, str] | None = None) -> int:
    """Return how often Slurm has queued the job of this process again.

    Raises:
        BackendError: If the number is not valid.
    """
    env = os.environ if environ is None else environ
    return _number(env, "SLURM_RESTART_COUNT", 0, default=0)


def local_rank(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the rank of this process on its host; None if its launcher does not tell.

    Raises:
        BackendError: If it is not valid.
    """
    env = os.environ if environ is None else environ
    if env.get("LOCAL_RANK"):
        return _number(env, "LOCAL_RANK", 0)
    has_rank = env.get("RANK") or env.get("WORLD_SIZE")
    return _read_step(env).local_rank if not has_rank and _is_in_step(env) else None


# ---- the tasks of a step of Slurm, started by srun


def _is_in_step(env: Mapping[str, str]) -> bool:
    """Return whether this process is one of several tasks that shall train together.

    Tasks may as well be programs that have nothing to do with each other, so MASTER_ADDR and
    MASTER_PORT must be set. The script of a job, and a shell of `salloc`, have the tasks of the job
    in their environment, but none of a step; if they were submitted from within a step, they have
    what that had, but tasks of a node that are not its.
    """
    if not (env.get("MASTER_ADDR") and env.get("MASTER_PORT") and env.get("SLURM_PROCID")):
        return False
    if env.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return False
    tasks = env.get("SLURM_GTIDS")
    return tasks is None or len(tasks.split(",")) == _tasks_here(env)


def _read_step(env: Mapping[str, str]) -> Launch:
    num = _number(env, "SLURM_STEP_NUM_TASKS", 1)
    num_local = _tasks_here(env)
    if env.get("SLURM_PTY_PORT"):
        raise BackendError(
            f"srun --pty gives {num} tasks one terminal. Leave out --pty to train with {num} "
            f"processes; unset MASTER_ADDR to run a single one in this shell."
        )
    host, port = env["MASTER_ADDR"], _number(env, "MASTER_PORT", 1, 65536)
    return Launch(
        rank=_number(env, "SLURM_PROCID", 0, num),
        local_rank=_number(env, "SLURM_LOCALID", 0, num_local),
        world_size=num,
        local_world_size=num_local,
        run_id=f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}",
        restart_count=num_restarts(env),
        host=host,
        port=port,
        is_one_host=num_local == num,
    )


def _tasks_here(env: Mapping[str, str]) -> int:
    """Return the number of the step's tasks on this node, from a text like `2(x3),1`.

    Raises:
        BackendError: If it is not known.
    """
    text, node = env.get("SLURM_STEP_TASKS_PER_NODE", ""), env.get("SLURM_NODEID", "")
    parts = [re.fullmatch(r"([1-9]\d*)(?:\(x([1-9]\d*)\))?", part) for part in text.split(",")]
    index = int(node) if node.isdecimal() else -1
    for part in parts:
        if part is None or index < 0:
            break
        times = int(part[2] or 1)
        if index < times:
            return int(part[1])
        index -= times
    raise BackendError(
        f"SLURM_STEP_TASKS_PER_NODE is {text!r} and SLURM_NODEID {node!r}, so it is unknown how "
        f"many processes are on this node. Start the program with srun or torchrun, and leave the "
        f"variables of Slurm as they are."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """The torchrun agent that has started this process."""

    rank: int
    run_id: str  # as in `Launch`
    restart_count: int  # restarts after failures so far
    max_restarts: int  # restarts allowed
    host: str  # of the agents' store
    port: int  # likewise
    has_store: bool  # processes may use that store


def read_agent(environ: Mapping[str, str] | None = None) -> Agent | None:
    """Read torchrun's environment variables; None if it has not started this process.

    Raises:
        BackendError: If a number is not valid.
    """
    env = os.environ if environ is None else environ
    if not env.get("TORCHELASTIC_RUN_ID") or not env.get("MASTER_ADDR"):
        return None
    return Agent(
        rank=_number(env, "RANK", 0),
        run_id=env["TORCHELASTIC_RUN_ID"],
        restart_count=_number(env, "TORCHELASTIC_RESTART_COUNT", 0, default=0),
        max_restarts=_number(env, "TORCHELASTIC_MAX_RESTARTS", 0, default=0),
        host=env["MASTER_ADDR"],
        port=_number(env, "MASTER_PORT", 1, 65536),
        has_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def be_quiet() -> None:
    """Suppress torch's warnings, with stacks, about connections lost to an ended process.

    The cause is reported once. Call before torch is imported; TORCH_CPP_LOG_LEVEL takes precedence.
    """
    os.environ.setdefault(_VERBOSITY, "ERROR")


def _number(
    env: Mapping[str, str],
    name: str,
    least: int,
    above: int | None = None,
    *,
    default: int | None = None,
) -> int:
    text = env.get(name) or ("" if default is None else str(default))
    fits = f">= {least}" if above is None else f"from {least} to {above - 1}"
    try:
        found = int(text)
    except ValueError:
        raise BackendError(
            f"environment variable {name}: expected an integer {fits}, got {text!r}. {_START}"
        ) from None
    if found < least or (above is not None and found >= above):
        raise BackendError(
            f"environment variable {name}: expected an integer {fits}, got {found}. {_START}"
        )
    return found
