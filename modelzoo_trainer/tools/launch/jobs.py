"""A job: what to run on how many nodes, and its file for each launcher."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from modelzoo_trainer.checkpointing.stores.urls import is_url
from modelzoo_trainer.tools.launch.render import Value, read_template, render

_PLAIN: Final = re.compile(r"[A-Za-z0-9_./-][\w./:=+@%-]*")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the job files have in common."""

    words: Sequence[str]
    """The command line of `modelzoo-trainer fit`, after `fit`."""
    name: str = "train"
    nodes: int = 1
    processes: int = 1
    """Per node."""
    gpus: int = 0
    """Per node."""
    gpu_type: str = ""
    cpus: int = 8
    """Per node."""
    restarts: int = 3
    grace: int = 300
    """Seconds that a step and a checkpoint take at most."""
    activate: Sequence[str] = ()
    """Lines of bash that activate the environment."""
    setup: str = "pip install -e ."
    """Line of bash that installs what is needed."""
    time: str = "24:00:00"
    partition: str = ""
    account: str = ""
    image: str = ""
    mounts: Sequence[tuple[str, str]] = ()
    """Volume claim or bucket, and the path where it is mounted."""
    model_dir: str = "model_dir"

    @property
    def command(self) -> list[str]:
        """What torchrun and Python start."""
        return ["-m", "modelzoo_trainer", "fit", *self.words]


def local_command(job: Job) -> list[str]:
    """Return the command that runs a job on this machine."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={job.processes}", f"--max-restarts={job.restarts}"),
        *job.command,
    ]


def active_environment() -> list[str]:
    """Return the lines of bash that activate the environment of this interpreter; none if none."""
    prefix = Path(sys.prefix)
    if (prefix / "conda-meta").is_dir():
        return ['eval "$(conda shell.bash hook)"', f"conda activate {shlex.quote(str(prefix))}"]
    script = prefix / "bin" / "activate"
    return [f"source {shlex.quote(str(script))}"] if script.is_file() else []


def _slurm(job: Job) -> str:
    return render(read_template("slurm.sbatch"), _slurm_values(job, job.cpus))


def _slurm_srun(job: Job) -> str:
    cpus = max(1, job.cpus // job.processes)
    return render(read_template("slurm_srun.sbatch"), _slurm_values(job, cpus))


def _slurm_values(job: Job, cpus_per_task: int) -> dict[str, Value]:
    return {
        "NAME": job.name,
        "NODES": str(job.nodes),
        "PROCESSES": str(job.processes),
        "CPUS": str(cpus_per_task),
        "TIME": job.time,
        "GRACE": str(job.grace),
        "RESTARTS": str(job.restarts),
        "OPTIONS": _slurm_options(job),
        "ACTIVATE": [f"{line} || exit 2" for line in job.activate],
        "COMMAND": shlex.join(job.command),
    }


def _slurm_options(job: Job) -> list[str]:
    gpus = f"{job.gpu_type}:{job.gpus}" if job.gpu_type else str(job.gpus)
    given = {
        "gpus-per-node": gpus if job.gpus else "",
        "partition": job.partition,
        "account": job.account,
    }
    return [f"#SBATCH --{name}={value}" for name, value in given.items() if value]


def _kubernetes(job: Job) -> str:
    return render(read_template("kubernetes.yaml"), _pod_values(job))


def _trainjob(job: Job) -> str:
    return render(read_template("trainjob.yaml"), _pod_values(job))


def _pod_values(job: Job) -> dict[str, Value]:
    return {
        "NAME": job.name,
        "NODES": str(job.nodes),
        "PROCESSES": str(job.processes),
        "RESTARTS": str(job.restarts),
        "GRACE": str(job.grace),
        "IMAGE": _yaml(job.image),
        "COMMAND": [f"- {_yaml(word)}" for word in job.command],
        "RESOURCES": _pod_resources(job),
        "MOUNTS": _volume_mounts(job),
        "VOLUMES": _volumes(job),
    }


def _pod_resources(job: Job) -> list[str]:
    lines = [f"requests: {{cpu: {job.cpus}}}"]
    return [*lines, f"limits: {{nvidia.com/gpu: {job.gpus}}}"] if job.gpus else lines


def _volume_mounts(job: Job) -> list[str]:
    return [
        f"- {{name: volume-{number}, mountPath: {_yaml(path)}}}"
        for number, (_, path) in enumerate(job.mounts)
    ]


def _volumes(job: Job) -> list[str]:
    lines = []
    for number, (claim, _) in enumerate(job.mounts):
        lines += [
            f"- name: volume-{number} # the same for all pods: all of them write checkpoints",
            f"  persistentVolumeClaim: {{claimName: {_yaml(claim)}}}",
        ]
    return lines


def _skypilot(job: Job) -> str:
    resources = [f"cpus: {job.cpus}+"]
    if job.gpus:
        resources.append(f"accelerators: {job.gpu_type or 'H100'}:{job.gpus}")
    if job.image:
        resources.append(f"image_id: {_yaml(f'docker:{job.image}')}")
    volumes: list[str] = []
    copies: list[str] = []
    for source, path in job.mounts:
        is_volume = re.fullmatch(r"[\w.-]+", source) is not None
        (volumes if is_volume else copies).append(f"  {_yaml(path)}: {_yaml(source)}")
    return render(
        read_template("skypilot.yaml"),
        {
            "NAME": job.name,
            "NODES": str(job.nodes),
            "PROCESSES": str(job.processes),
            "RESTARTS": str(job.restarts),
            "RESOURCES": resources,
            "MOUNTS": [
                *(["file_mounts:", *copies] if copies else []),
                *(["volumes:", *volumes] if volumes else []),
            ],
            "SETUP": [job.setup],
            "ACTIVATE": list(job.activate),
            "COMMAND": shlex.join(job.command),
        },
    )


def _ray(job: Job) -> str:
    resources: dict[str, int] = {"CPU": max(1, job.cpus // job.processes)}
    if job.gpus:
        resources["GPU"] = max(1, job.gpus // job.processes)
    return render(
        read_template("ray_train.py.txt"),
        {
            "ARGUMENTS": [f"{_python(word)}," for word in job.words],
            "WORKERS": str(job.nodes * job.processes),
            # NCCL alone, Ray's default on GPUs, does not send tensors in host memory.
            "BACKEND": json.dumps("cpu:gloo,cuda:nccl" if job.gpus else "gloo"),
            "GPUS": str(bool(job.gpus)),
            "RESOURCES": json.dumps(resources),
            "NAME": _python(job.name),
            "STORAGE": _python(_storage(job.model_dir)),
            "RESTARTS": str(job.restarts),
        },
    )


def _storage(model_dir: str) -> str:
    """Return where Ray keeps what is reported to it."""
    return f"{model_dir}-ray" if is_url(model_dir) else os.path.abspath(f"{model_dir}-ray")


def _yaml(text: str) -> str:
    """Return a text as a YAML scalar, in quotes where it would be something else."""
    is_plain = _PLAIN.fullmatch(text) is not None and yaml.safe_load(text) == text
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def _python(text: str) -> str:
    """Return a text as a literal of Python, in double quotes."""
    return json.dumps(text, ensure_ascii=False)


FILES: Final[dict[tuple[str, str], tuple[str, Callable[[Job], str]]]] = {
    ("slurm", "torchrun"): ("slurm.sbatch", _slurm),
    ("slurm", "srun"): ("slurm_srun.sbatch", _slurm_srun),
    ("kubernetes", "job"): ("kubernetes.yaml", _kubernetes),
    ("kubernetes", "trainjob"): ("trainjob.yaml", _trainjob),
    ("skypilot", ""): ("skypilot.yaml", _skypilot),
    ("ray", ""): ("ray_train.py", _ray),
}
"""By launcher and variant: the name of the file, and what makes its text."""
