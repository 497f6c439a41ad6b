"""A Slurm of one node on the loopback address, for tests."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, Self

from backends.coordination.liveness import parent_of
from tests.distributed.ranks import free_port

PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
PATIENCE_S: Final = 600.0
_NUM_CPUS: Final = 6  # more than there may be, so that jobs run beside each other
_SYSTEM: Final = "/usr/sbin"
_CONFIGURATION: Final = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
CommunicationParameters=NoInAddrAny
MessageTimeout=60
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=30
MinJobAge=36000
ReturnToService=2
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=3600
SuspendExcNodes={host}
NodeName={host} NodeAddr=127.0.0.1 Port={node_port} CPUs={cpus} State=UNKNOWN
NodeName=big[1-4] CPUs=64 Gres=gpu:8 State=CLOUD
PartitionName=low Nodes={host} Default=YES State=UP PriorityTier=1 GraceTime=30
PartitionName=high Nodes={host} State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=big Nodes=big[1-4] State=UP
"""


def missing_programs() -> list[str]:
    """Return the programs that are needed and not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


def _path() -> str:
    return f"{os.environ.get('PATH', '')}{os.pathsep}{_SYSTEM}"


def _free_ports(num: int) -> list[int]:
    """Return different ports that nobody has."""
    found: list[int] = []
    with ExitStack() as held:
        while len(found) < num:
            found.append(free_port())
            held.enter_context(socket.socket()).bind(("", found[-1]))
    return found


class Slurm:
    """A cluster of one node, which is this machine, with partitions `low` (default) and `high`.

    Jobs of `high` preempt those of `low`. The nodes of the partition `big`, with GPUs, never run.

    Args:
        folder: Where it keeps its files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = socket.gethostname().partition(".")[0]
        self._environ = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}
        self._environ["OMP_NUM_THREADS"] = "1"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        port, node_port = _free_ports(2)
        (self.folder / "slurm.conf").write_text(
            _CONFIGURATION.format(
                folder=self.folder,
                host=self.host,
                user=getpass.getuser(),
                cpus=_NUM_CPUS,
                port=port,
                node_port=node_port,
            )
        )
        (self.folder / "gres.conf").write_text("NodeName=big[1-4] Name=gpu Count=8\n")
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(bytes(range(128)))
        self._start(
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munge.pid",
            f"--log-file={self.folder}/munge.log",
            f"--seed-file={self.folder}/munge.seed",
        )
        try:
            wait_until((self.folder / "munge.socket").exists, what="munged")
            self._start("slurmctld", "-D")
            self.start_node()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        if "slurmctld" in self._daemons:
            with suppress(Exception):
                self.empty()
        for name in ("slurmd", "slurmctld", "munged"):
            daemon = self._daemons.pop(name, None)
            if daemon is not None:
                daemon.terminate()
                with suppress(subprocess.TimeoutExpired):
                    daemon.wait(10)
                daemon.kill()
                daemon.wait()
        self._kill_jobs()

    def _kill_jobs(self) -> None:
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def empty(self) -> None:
        """Cancel all jobs, and wait for their end."""

        def is_empty() -> bool:
            with suppress(subprocess.SubprocessError):  # a busy Slurm answers late
                self.ask("scancel", f"--user={getpass.getuser()}")
                return not self.ask("squeue", "--noheader")
            return False

        wait_until(is_empty, what=self._logs)

    def start_node(self) -> None:
        """Start the daemon of the node, and wait until it takes jobs."""
        self._start("slurmd", "-D")

        def is_idle() -> bool:
            with suppress(subprocess.SubprocessError):
                state = self.ask("sinfo", "--noheader", f"--nodes={self.host}", "--format=%T")
                if state.startswith("down"):
                    self.ask("scontrol", "update", f"NodeName={self.host}", "State=RESUME")
                return set(state.split()) == {"idle"}
            return False

        wait_until(is_idle, what=self._logs)

    def _logs(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("slurm*d.log"))

    def fail_node(self) -> None:
        """Kill the node's daemon and all of its jobs, and have Slurm find it down."""
        daemon = self._daemons.pop("slurmd")
        daemon.kill()
        daemon.wait()
        self._kill_jobs()
        self.ask("scontrol", "update", f"NodeName={self.host}", "State=DOWN", "Reason=test")

    def _start(self, *words: str) -> None:
        with (self.folder / f"{words[0]}.out").open("ab") as output:
            self._daemons[words[0]] = subprocess.Popen(
                words, env=self._environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def _processes(self) -> list[int]:
        """Return the processes of jobs: they have this cluster in their environment."""
        mark, found = f"SLURM_CONF={self.folder}/slurm.conf\0".encode(), set()
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):
                environ = Path(f"/proc/{name}/environ").read_bytes()
                if mark in environ and b"SLURM_JOB_ID=" in environ:
                    parent = parent_of(int(name)) or 0
                    is_step = Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd")
                    found |= {int(name), parent} if is_step else {int(name)}
        return sorted(found)

    # ---- commands

    def ask(self, *words: str) -> str:
        """Run one of its commands, and return what it prints.

        Raises:
            CalledProcessError: If it fails.
        """
        done = subprocess.run(
            words, env=self._environ, capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
        return f"{done.stdout}{done.stderr}".strip()

    def submit(self, script: str, name: str, folder: Path, *options: str) -> SlurmJob:
        """Submit a job that runs in a folder."""
        path = self.folder / f"{name}.sbatch"
        path.write_text(script)
        output = self.folder / f"{name}.out"
        found = self.ask(
            *("sbatch", "--parsable", f"--output={output}", f"--chdir={folder}", *options),
            str(path),
        )
        return SlurmJob(self, found.partition("\n")[0], output)


class SlurmJob:
    """A job that was submitted."""

    def __init__(self, slurm: Slurm, number: str, output: Path) -> None:
        self.slurm = slurm
        self.number = number
        self._output = output

    def __getitem__(self, name: str) -> str:
        """Return one of its properties, such as JobState."""
        text = self.slurm.ask("scontrol", "--oneliner", "show", "job", self.number)
        return re.search(rf" {name}=(\S*)", text)[1]  # type: ignore[index]  # it always has it

    @property
    def said(self) -> str:
        """What it has printed."""
        path = self._output
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def wait_until_queued(self, restarts: int = 1) -> None:
        """Wait until it was queued again."""
        wait_until(
            lambda: (self["JobState"], self["Restarts"]) == ("PENDING", str(restarts)),
            what=self._describe,
        )

    def release(self) -> None:
        """Have it start soon: a job that was queued again waits for two minutes.

        In the first second the node would take it for the one that has just ended.
        """
        time.sleep(2)
        new = ("StartTime=now", "TimeLimit=10")
        self.slurm.ask("scontrol", "update", f"JobId={self.number}", *new)

    def wait(self) -> str:
        """Wait until it has ended for good, and return its state and exit code."""
        is_over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        wait_until(lambda: self["JobState"] in is_over, what=self._describe)
        return f"{self['JobState']} {self['ExitCode']}"

    def _describe(self) -> str:
        return f"{self['JobState']} {self['Reason']}\n{self.said}"


def wait_until(
    is_true: Callable[[], Any],
    timeout_s: float = PATIENCE_S,
    what: str | Callable[[], str] = "",
) -> None:
    """Wait until something is true.

    Raises:
        AssertionError: If it does not become so in time.
    """
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() >= deadline:
            text = what if isinstance(what, str) else what()
            raise AssertionError(f"waited {timeout_s:g} s in vain: {text}")
        time.sleep(0.2)
