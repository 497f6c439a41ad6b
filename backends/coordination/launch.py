"""What a launcher says of this process: its place among those of the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ..errors import BackendError

_NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
_VERBOSITY: Final = "TORCH_CPP_LOG_LEVEL"
_START: Final = "Start it with `torchrun --nproc-per-node=N run.py ...`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The place of this process in a run of several."""

    rank: int  # among all, from 0
    local_rank: int  # among those of this host, from 0
    world_size: int  # > 1
    local_world_size: int  # those of this host
    run_id: str = ""  # tells this run from others that the same launcher has started
    restart_count: int = 0  # how often the launcher has started the processes again
    max_restarts: int = 0  # how often it would
    host: str = ""  # of the launcher's store, or where that of the first process must be
    port: int = 0  # likewise
    uses_agent_store: bool = False  # the launcher has a store of its own, which outlives processes
    is_one_host: bool = False  # all processes are known to be on this host


def read_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """Return what the launcher has set in the environment; None if this process is alone.

    Raises:
        BackendError: If only a part is set, or it contradicts itself.
    """
    env = os.environ if environ is None else environ
    given = [name for name in ("RANK", "WORLD_SIZE") if env.get(name)]
    if not given or (env.get("WORLD_SIZE") == "1" and env.get("RANK", "0") == "0"):
        return None
    missing = [name for name in _NEEDED if not env.get(name)]
    if missing:
        raise BackendError(
            f"{' and '.join(given)} set in the environment, but not {', '.join(missing)}: one "
            f"process of several needs all of {', '.join(_NEEDED)}. {_START} To run one process "
            f"alone, unset {' and '.join(given)}."
        )
    num = _number(env, "WORLD_SIZE", 1)
    rank = _number(env, "RANK", 0, num)
    if num == 1:
        return None
    if not env.get("LOCAL_RANK"):
        raise BackendError(
            f"LOCAL_RANK is not set, but WORLD_SIZE is {num}: which device of its host process "
            f"{rank} has is not known. {_START} Other launchers have to set LOCAL_RANK as well "
            f"(with srun: LOCAL_RANK=$SLURM_LOCALID)."
        )
    local_rank = _number(env, "LOCAL_RANK", 0)
    num_local = _number(env, "LOCAL_WORLD_SIZE", 1) if env.get("LOCAL_WORLD_SIZE") else num
    if local_rank >= num_local or num_local > num:
        raise BackendError(
            f"LOCAL_RANK is {local_rank}, LOCAL_WORLD_SIZE {num_local} and WORLD_SIZE {num}: each "
            f"must be less than the next, the last two may be equal. {_START}"
        )
    host, port = env["MASTER_ADDR"], _number(env, "MASTER_PORT", 1, 65536)
    return Launch(
        rank=rank,
        local_rank=local_rank,
        world_size=num,
        local_world_size=num_local,
        run_id=env.get("TORCHELASTIC_RUN_ID") or f"{host}:{port}",
        restart_count=_number(env, "TORCHELASTIC_RESTART_COUNT", 0, default=0),
        max_restarts=_number(env, "TORCHELASTIC_MAX_RESTARTS", 0, default=0),
        host=host,
        port=port,
        uses_agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        is_one_host=num_local == num if env.get("LOCAL_WORLD_SIZE") else host in _LOOPBACK,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """The agent of torchrun that has started this process."""

    rank: int
    run_id: str  # as in `Launch`
    restart_count: int  # after a failure
    max_restarts: int  # how often it would start them again
    host: str  # of the agents' store
    port: int  # likewise
    has_store: bool  # processes may use that store


def read_agent(environ: Mapping[str, str] | None = None) -> Agent | None:
    """Return what torchrun has set in the environment; None if it has not started this process.

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
    """Have torch not warn, with a stack each, of connections that end with another process.

    Why that one has ended is reported once. To be called before torch is imported; whoever has set
    TORCH_CPP_LOG_LEVEL is obeyed.
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
    fits = f"{least} or more" if above is None else f"from {least} to {above - 1}"
    try:
        found = int(text)
    except ValueError:
        raise BackendError(
            f"{name} is {text!r} in the environment, which is not an integer; it must be {fits}. "
            f"{_START}"
        ) from None
    if found < least or (above is not None and found >= above):
        raise BackendError(f"{name} is {found} in the environment; it must be {fits}. {_START}")
    return found
