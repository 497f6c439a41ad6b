"""Both job files of Slurm in a real Slurm: stopped, preempted, killed, and queued again."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final, TypeAlias

import pytest

from modelzoo_trainer.cli.command import main
from modelzoo_trainer.tools.launch.jobs import FILES, Job, active_environment
from tests.distributed.launching import ROOT, Launched, command, set_limit, told
from tests.tools.launching.cluster import Slurm, SlurmJob, missing_programs, wait_until

MISSING: Final = missing_programs()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"needs Slurm (slurm-wlm, munge): no {', '.join(MISSING)}"
    ),
]
KINDS: Final = ("torchrun", "srun")
GRACE_S: Final = 60
Finish: TypeAlias = "Callable[[list[Submitted], int], None]"
HELD_AT: Final = 9  # where `Tell` lets no process continue, until something happens


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of the files of the last checkpoint of a run under torchrun."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with Launched(folder, command(folder / "run")) as launched:
        assert launched.code() == 0, launched.said
    return shards(folder / "run")


def shards(folder: Path) -> dict[str, str]:
    """Return digests of what the last checkpoint has of each process."""
    files = sorted((folder / "checkpoint_24").glob("*.safetensors"))
    assert files
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class Submitted:
    """A job file with a small run of two processes.

    Args:
        cluster: Where it is submitted.
        kind: What starts its processes.
        folder: Of its files.
        words: Further options of the run.
        is_held: Whether the run waits at a step.
        activate: Lines that activate the environment.
    """

    def __init__(
        self,
        cluster: Slurm,
        kind: str,
        folder: Path,
        *words: str,
        is_held: bool = True,
        activate: tuple[str, ...] | None = None,
    ) -> None:
        self.kind = kind
        self.folder = folder / kind
        self.limit = folder / f"{kind}.limit"
        if is_held:
            set_limit(self.limit, HELD_AT)
        _, params, *rest = command(self.folder, f"init.callbacks[Tell].limit={self.limit}", *words)
        text = FILES["slurm", kind][1](
            Job(
                words=(params, *rest),
                processes=2,
                cpus=2,
                time="10",
                grace=GRACE_S,
                activate=active_environment() if activate is None else activate,
            )
        )
        self.job: SlurmJob = cluster.submit(text, f"{folder.name}_{kind}", ROOT)

    def wait_for_step(self) -> None:
        """Wait until all processes are held."""

        def is_there() -> bool:
            last = [told(self.folder, rank)[-1:] for rank in range(2)]
            return all(line and line[0][:2] == ["step", str(HELD_AT)] for line in last)

        wait_until(is_there, what=lambda: self.job.said)

    def free(self) -> None:
        """Let the run continue."""
        self.limit.unlink(missing_ok=True)

    def begins(self) -> list[int]:
        """Return the step at which each attempt began."""
        return [int(line[1]) for line in told(self.folder) if line[0] == "begin"]


@pytest.fixture
def held(slurm: Slurm, tmp_path: Path) -> Iterator[list[Submitted]]:
    """Both job files, with runs that wait at a step."""
    both = [Submitted(slurm, kind, tmp_path) for kind in KINDS]
    for one in both:
        one.wait_for_step()
    yield both
    slurm.empty()


@pytest.fixture
def finish(undisturbed: dict[str, str], record_property: Callable[[str, object], None]) -> Finish:
    """A function that lets runs that were queued again continue to their end, and compares it."""

    def wait(runs: list[Submitted], began_at: int) -> None:
        _finish(runs, undisturbed, began_at)
        record_property("requeued", len(runs))
        record_property("unequal", 0)

    return wait


def _finish(runs: list[Submitted], undisturbed: dict[str, str], began_at: int) -> None:
    for one in runs:
        one.job.wait_until_queued()
        one.free()
        one.job.release()
    for one in runs:
        assert one.job.wait() == "COMPLETED 0:0", one.job.said
        assert one.begins() == [0, began_at], one.job.said
        assert shards(one.folder) == undisturbed


def test_a_job_resumes_after_its_time_limit(
    slurm: Slurm, held: list[Submitted], finish: Finish
) -> None:
    for one in held:
        slurm.ask("scontrol", "update", f"JobId={one.job.number}", "TimeLimit=1")
    finish(held, HELD_AT)


def test_a_job_resumes_after_scontrol_requeue(
    slurm: Slurm, held: list[Submitted], finish: Finish
) -> None:
    for one in held:
        slurm.ask("scontrol", "requeue", one.job.number)
    finish(held, HELD_AT)


def test_a_job_resumes_after_a_preemption(
    slurm: Slurm, held: list[Submitted], finish: Finish, tmp_path: Path
) -> None:
    script = "#!/bin/bash\nsleep 3\n"
    urgent = slurm.submit(script, "urgent", tmp_path, "--partition=high", "--exclusive")
    assert urgent.wait() == "COMPLETED 0:0"
    finish(held, HELD_AT)


def test_a_job_resumes_after_a_node_failed(
    slurm: Slurm, held: list[Submitted], finish: Finish
) -> None:
    slurm.fail_node()
    for one in held:
        one.job.wait_until_queued()
    slurm.start_node()
    finish(held, 6)  # its last checkpoint


def test_a_run_of_which_a_process_was_killed_ends_the_same_whatever_starts_it(
    held: list[Submitted],
    undisturbed: dict[str, str],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    for one in held:
        os.kill(process_of(one, rank=1), signal.SIGKILL)
        one.free()
    for one in held:
        assert one.job.wait() == "COMPLETED 0:0", one.job.said
        assert one.job["Restarts"] == "0"
    words = _killed_once(tmp_path / "alone")
    with Launched(tmp_path / "launched", words, options=["--max-restarts=1"]) as launched:
        assert launched.code() == 0, launched.said
    folders = {
        "torchrun": tmp_path / "alone",
        **{f"Slurm by {one.kind}": one.folder for one in held},
    }
    if find_spec("ray") is not None:
        folders["Ray"] = tmp_path / "ray"
        _, params, *words = _killed_once(folders["Ray"])
        driver = [sys.executable, "-c", RAY, str(tmp_path / "storage"), params, *words]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
        done = subprocess.run(driver, cwd=ROOT, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-5000:]

    for folder in folders.values():
        begins = [line[1] for line in told(folder) if line[0] == "begin"]
        assert begins[0] == "0"
        assert len(begins) == 2
    table = {"torchrun, none killed": undisturbed}
    table |= {f"{name}, one killed": shards(folder) for name, folder in folders.items()}
    for name, found in table.items():  # shown by pytest -rP
        digests = " ".join(digest[:16] for digest in found.values())
        sys.stdout.write(f"{name:32} {digests}\n")
    assert all(found == undisturbed for found in table.values())
    record_property("kills", len(folders))
    record_property("unequal", 0)


def _killed_once(folder: Path) -> list[str]:
    """Return the words of that run, of which process 1 is killed once, when 9 steps are done."""
    disturb = {"how": "SIGKILL", "rank": 1, "step": HELD_AT, "mark": f"{folder}.mark"}
    return command(folder, *(f"init.callbacks[Disturb].{key}={disturb[key]}" for key in disturb))


RAY: Final = """
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from modelzoo_trainer.cli.ray_worker import worker

storage, params, *words = sys.argv[1:]
ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=80_000_000)
TorchTrainer(
    worker(params, *words),
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(
        name="run", storage_path=storage, failure_config=FailureConfig(max_failures=1)
    ),
).fit()
"""


def process_of(run: Submitted, rank: int) -> int:
    """Return the process of a rank."""
    name = {"torchrun": "RANK", "srun": "SLURM_PROCID"}[run.kind]
    marks = [f"{name}={rank}", f"SLURM_JOB_ID={run.job.number}"]
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            environ = Path(f"/proc/{entry}/environ").read_bytes().decode(errors="replace")
            words = Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "modelzoo_trainer\0fit" in words and set(marks) <= set(environ.split("\0")):
            return int(entry)
    raise AssertionError(f"no process {rank} of job {run.job.number}:\n{run.job.said}")


def test_a_run_that_is_over_is_not_queued_again(slurm: Slurm, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("stopped", "cancelled", "failing", "lost", "bad")}
    for folder in folders.values():
        folder.mkdir()
    pause = "init.callbacks[Tell].pause=0.2"
    stopped = [Submitted(slurm, kind, folders["stopped"], pause) for kind in KINDS]
    lost = [
        Submitted(slurm, kind, folders["lost"], activate=("source /absent/bin/activate",))
        for kind in KINDS
    ]
    for one in lost:
        assert one.job.wait() == "FAILED 2:0"
        assert "/absent/bin/activate: No such file" in one.job.said
    for one in stopped:
        one.wait_for_step()
        (one.folder / "stop").touch()
        one.free()
    for one in stopped:
        assert one.job.wait().startswith("FAILED")
        assert "stopped by stop file" in one.job.said
    cancelled = [Submitted(slurm, kind, folders["cancelled"]) for kind in KINDS]
    for one in cancelled:
        one.wait_for_step()
        slurm.ask("scancel", one.job.number)
        assert one.job.wait().startswith("CANCELLED")
    slurm.empty()
    assert all((one.folder / f"checkpoint_{HELD_AT}").is_dir() for one in cancelled)
    bad = [Submitted(slurm, kind, folders["bad"], "init.seed=none of it") for kind in KINDS]
    fault = "init.callbacks[Disturb].how=raise"
    failing = [Submitted(slurm, kind, folders["failing"], fault, is_held=False) for kind in KINDS]
    assert [one.job.wait() for one in bad] == ["FAILED 1:0", "FAILED 2:0"]
    for one in failing:
        assert one.job.wait() == "FAILED 1:0"
        assert one.begins() == [0, 6, 6, 6]
    slurm.empty()
    every = [*stopped, *cancelled, *lost, *bad, *failing]
    assert [one.job["Restarts"] for one in every] == ["0"] * len(every)


@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm_srun.sbatch"])
def test_slurm_takes_the_files_of_the_docs(slurm: Slurm, name: str) -> None:
    path = ROOT / "docs" / "jobs" / name
    said = slurm.ask("sbatch", "--test-only", "--partition=big", str(path))
    assert "to start at" in said


@pytest.mark.parametrize("through", KINDS)
def test_slurm_takes_what_launch_prints(
    slurm: Slurm,
    through: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    words = ["launch", "--on", "slurm", "--through", through, "--nodes", "2", "--partition", "big"]
    words += ["--processes-per-node", "8", "--time", "1-00:00:00", "--dry-run"]
    assert main([*words, "configs/digits_mlp.yaml", "--device", "gpu"]) == 0
    path = tmp_path / "job.sbatch"
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    assert "to start at" in slurm.ask("sbatch", "--test-only", str(path))
    path.write_text(path.read_text(encoding="utf-8").replace("node=8", "node=9"), encoding="utf-8")
    with pytest.raises(subprocess.CalledProcessError):  # a node has 8
        slurm.ask("sbatch", "--test-only", str(path))
