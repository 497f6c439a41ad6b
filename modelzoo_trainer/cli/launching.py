"""The command `launch`: print or submit a job that runs a file in many processes."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from modelzoo_trainer.base.exit_codes import DONE
from modelzoo_trainer.base.stderr import say
from modelzoo_trainer.cli.parser import command_parser, parse_run
from modelzoo_trainer.cli.plans import check_run
from modelzoo_trainer.cli.runner import answered
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.launch.jobs import FILES, Job, active_environment, local_command

LAUNCHERS: Final = ("local", "slurm", "ray", "kubernetes", "skypilot")
VARIANTS: Final = {"slurm": ("torchrun", "srun"), "kubernetes": ("job", "trainjob")}
_TOOLS: Final = {"slurm": "sbatch", "kubernetes": "kubectl", "skypilot": "sky"}
_CLUSTER: Final = ("slurm", "ray", "kubernetes", "skypilot")
_USED_BY: Final = {
    "through": ("slurm", "kubernetes"),
    "name": _CLUSTER,
    "gpus": _CLUSTER,
    "cpus": _CLUSTER,
    "grace": ("slurm", "kubernetes"),
    "activate": ("slurm", "skypilot"),
    "setup": ("skypilot",),
    "time": ("slurm",),
    "partition": ("slurm",),
    "account": ("slurm",),
    "image": ("kubernetes", "skypilot"),
    "mount": ("kubernetes", "skypilot"),
}
"""Launchers that have a use for an option."""
_LABEL: Final = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")  # a name of Kubernetes
_WORD: Final = re.compile(r"[\w.,:@%+/=-]+")
_CPUS: Final = {"local": 1, "slurm": 8, "ray": 1, "kubernetes": 8, "skypilot": 8}  # per process


def main(words: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    options, rest = make_parser().parse_known_args(words)
    return answered(lambda: _launch(options, rest))


def _launch(options: argparse.Namespace, words: Sequence[str]) -> int:
    job = make_job(options, words)
    if options.on == "local":
        command = local_command(job)
        return _print(shlex.join(command)) if options.dry_run else _become(command)
    name, make = FILES[options.on, options.through or _variant(options.on)]
    text = make(job)
    return _print(text) if options.dry_run else _submit(options.on, name, text)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options that `fit` does not have."""
    parser = command_parser("launch")
    parser.add_argument(
        "--on", required=True, metavar="LAUNCHER", choices=LAUNCHERS, help=", ".join(LAUNCHERS)
    )
    parser.add_argument("--nodes", metavar="N", default="1", help="default: 1")
    parser.add_argument(
        *("--processes-per-node", "--processes_per_node"),
        metavar="M",
        default="1",
        help="one for each device (default: 1)",
    )
    parser.add_argument(
        *("--dry-run", "--dry_run"),
        action="store_true",
        help="print the job file, or the command, and start nothing",
    )
    job = parser.add_argument_group("the job, on other launchers than local")
    job.add_argument("--name", help="default: the name of the file")
    job.add_argument(
        "--gpus",
        metavar="[TYPE:]N",
        help="per node (default: one for each process, 0 with device cpu); SkyPilot needs the type",
    )
    job.add_argument("--cpus", metavar="N", help="per node (default: 8 for each process, Ray 1)")
    job.add_argument(
        "--grace",
        metavar="SECONDS",
        help="what a step and a checkpoint take at most; Slurm, Kubernetes (default: 300)",
    )
    job.add_argument(
        "--activate",
        metavar="LINE",
        help="line of bash that activates the environment; Slurm (default: this Python's), "
        "SkyPilot",
    )
    job.add_argument(
        "--setup",
        metavar="LINE",
        help="line of bash that installs this package and yours in the working directory; SkyPilot "
        "(default: pip install -e .)",
    )
    job.add_argument(
        "--through",
        metavar="WHAT",
        help="what starts the processes; Slurm: torchrun (default), srun; Kubernetes: job "
        "(default), trainjob, of Kubeflow Trainer",
    )
    job.add_argument("--time", help="time limit of a job of Slurm (default: 24:00:00)")
    job.add_argument("--partition", help="of Slurm")
    job.add_argument("--account", help="of Slurm")
    job.add_argument("--image", help="image of the container; Kubernetes, SkyPilot")
    job.add_argument(
        "--mount",
        metavar="SOURCE:PATH",
        action="append",
        help="volume claim of Kubernetes; volume, bucket or folder for SkyPilot; and where it is "
        "mounted; may be repeated",
    )
    return parser


def make_job(options: argparse.Namespace, words: Sequence[str]) -> Job:
    """Return the job, after checks of the options and the file.

    Raises:
        ConfigError: If anything is invalid.
    """
    _refuse_unused(options)
    nodes = _number("--nodes", options.nodes)
    processes = _number("--processes-per-node", options.processes_per_node)
    if options.on == "local" and nodes > 1:
        raise ConfigError(
            f"--nodes: {nodes} nodes, but --on local starts processes on this machine only. Use "
            f"another launcher, or start torchrun on each node."
        )
    if options.on != "local":
        _refuse_line_breaks([*words, options.activate or "", options.setup or ""])
    run = parse_run(["fit", *words])
    plan = check_run(run)[0]
    gpu_type, gpus = _gpus(options.gpus, 0 if plan.init.get("device") == "cpu" else processes)
    return Job(
        words=_file_first(words, run.params),
        name=_name(options, run.params),
        nodes=nodes,
        processes=processes,
        gpus=gpus,
        gpu_type=gpu_type,
        cpus=_number("--cpus", options.cpus or str(processes * _CPUS[options.on])),
        grace=_number("--grace", options.grace or "300"),
        activate=_activate(options),
        time=_word("--time", options.time or "24:00:00"),
        partition=_word("--partition", options.partition or ""),
        account=_word("--account", options.account or ""),
        image=_image(options),
        setup=options.setup or "pip install -e .",
        mounts=[_mount(text) for text in options.mount or ()],
        model_dir=str(plan.init.get("model_dir") or "model_dir"),
    )


def _refuse_line_breaks(words: Sequence[str]) -> None:
    broken = next((word for word in words if len(word.splitlines()) > 1), None)
    if broken is not None:
        raise ConfigError(
            f"an option of a job must be one line, got {broken!r}. Set long values in the file."
        )


def _file_first(words: Sequence[str], file: Path) -> list[str]:
    given = next(word for word in words if Path(word) == file)
    rest = list(words)
    rest.remove(given)
    return [given, *rest]


def _refuse_unused(options: argparse.Namespace) -> None:
    for name, launchers in _USED_BY.items():
        if getattr(options, name) is not None and options.on not in launchers:
            raise ConfigError(
                f"--{name}: no effect with --on {options.on}; it is for {', '.join(launchers)}. "
                f"Omit it."
            )
    through, variants = options.through, VARIANTS.get(options.on, ())
    if through is not None and through not in variants:
        raise ConfigError(
            f"--through: expected one of {', '.join(variants)} with --on {options.on}, got "
            f"{through!r}"
        )


def _variant(launcher: str) -> str:
    return VARIANTS.get(launcher, ("",))[0]


def _number(option: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{option}: expected an integer >= 1, got {text!r}")
    return int(text)


def _word(option: str, text: str) -> str:
    if text and not _WORD.fullmatch(text):
        raise ConfigError(f"{option}: expected one word, got {text!r}")
    return text


def _name(options: argparse.Namespace, file: Path) -> str:
    if options.name is None:
        made = re.sub(r"[^a-z0-9]+", "-", file.stem.lower())[:50].strip("-")
        return made if _LABEL.fullmatch(made) else "train"
    if not _LABEL.fullmatch(options.name):
        raise ConfigError(
            f"--name: expected a letter, then lower-case letters, digits and -, 52 in all at most, "
            f"got {options.name!r}"
        )
    return str(options.name)


def _gpus(text: str | None, default: int) -> tuple[str, int]:
    if text is None:
        return "", default
    kind, _, number = text.rpartition(":")
    if not number.isdecimal() or not re.fullmatch(r"[\w.-]*", kind):
        raise ConfigError(f"--gpus: expected N or TYPE:N, such as 8 or H100:8, got {text!r}")
    return kind, int(number)


def _activate(options: argparse.Namespace) -> list[str]:
    if options.activate is not None:
        return [options.activate] if options.activate else []
    return active_environment() if options.on == "slurm" else []


def _image(options: argparse.Namespace) -> str:
    if options.on == "kubernetes" and not options.image:
        raise ConfigError(
            "--image: required with --on kubernetes: the image of a container with this package "
            "and what the file names."
        )
    return _word("--image", options.image or "")


def _mount(text: str) -> tuple[str, str]:
    source, _, path = text.rpartition(":")
    if not source or not path.startswith("/"):
        raise ConfigError(
            f"--mount: expected SOURCE:PATH with an absolute path, such as runs:/runs, got {text!r}"
        )
    return source, path


# ---- print and submit


def _print(text: str) -> int:
    from modelzoo_trainer.cli.inspecting import output

    return output(text.rstrip("\n"))


def _become(command: list[str]) -> int:
    """Replace this process, so that signals and the exit code need nobody to hand them on."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def _submit(launcher: str, name: str, text: str) -> int:
    tool = _TOOLS.get(launcher)
    if tool is None:
        return _run_on_ray(text)
    program = shutil.which(tool)
    if program is None:
        raise ConfigError(
            f"--on {launcher}: {tool} is not installed here, or not in PATH. With --dry-run the "
            f"job file is printed, to submit it elsewhere."
        )
    return _SUBMIT[launcher](program, name, text)


def _run_on_ray(text: str) -> int:
    if find_spec("ray") is None:
        raise ConfigError(
            "--on ray: Ray is not installed: pip install 'ray[train]'. With --dry-run the program "
            "is printed, to start it elsewhere."
        )
    return _become([sys.executable, "-c", text])


def _sbatch(program: str, name: str, text: str) -> int:
    return _run([program], text)


def _kubectl(program: str, name: str, text: str) -> int:
    return _run([program, "apply", "-f", "-"], text)


def _sky(program: str, name: str, text: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8")
        return _run([program, "launch", str(path)])


_SUBMIT: Final[dict[str, Callable[[str, str, str], int]]] = {
    "slurm": _sbatch,
    "kubernetes": _kubectl,
    "skypilot": _sky,
}


def _run(command: Sequence[str], text: str | None = None) -> int:
    """Run a program, which prints what it has done, and return its exit code."""
    code = subprocess.run(command, input=text, text=True, check=False).returncode
    if code != DONE:
        say(f"{Path(command[0]).name} ended with exit code {code}: no job was submitted.")
    return code if code >= 0 else 128 - code
