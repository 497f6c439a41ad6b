"""Writes docs/jobs/, the templates of `modelzoo_trainer.launch` with example values.

python docs/make_jobs.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from modelzoo_trainer.launch.render import Value, read_template, render

EXAMPLE: Final = {"NAME": "train", "NODES": "4", "PROCESSES": "8"}
JOBS: Final[dict[str, dict[str, Value]]] = {
    "slurm.sbatch": {
        **EXAMPLE,
        "CPUS": "64",
        "TIME": "24:00:00",
        "COMMAND": "run.py --params params.yaml --device gpu",
    },
    "kubernetes.yaml": {
        **EXAMPLE,
        "IMAGE": "registry.example.com/modelzoo-trainer:latest",
        "COMMAND": [
            *("- run.py", "- --params=params.yaml", "- --device=gpu"),
            "- --model_dir=/runs/train",
        ],
    },
}
"""The values of each template."""


def job(name: str) -> str:
    """Return a job file."""
    return render(read_template(name), JOBS[name])


def main() -> None:
    folder = Path(__file__).parent / "jobs"
    folder.mkdir(exist_ok=True)
    for name in JOBS:
        (folder / name).write_text(job(name), encoding="utf-8")


if __name__ == "__main__":
    main()
