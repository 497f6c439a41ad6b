"""Writes docs/jobs/, the templates of `modelzoo_trainer.tools.launch` with example values.

python docs/make_jobs.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from modelzoo_trainer.tools.launch.jobs import FILES, Job

EXAMPLE: Final = Job(
    words=("params.yaml", "--device=gpu", "--model_dir=/runs/train"),
    nodes=4,
    processes=8,
    gpus=8,
    cpus=64,
    activate=("source /shared/venv/bin/activate",),
    image="registry.example.com/modelzoo-trainer:latest",
    mounts=(("runs", "/runs"),),
    model_dir="/runs/train",
)
OTHERS: Final = {
    "skypilot.yaml": replace(
        EXAMPLE,
        words=("params.yaml", "--device=gpu", "--model_dir=s3://bucket/runs/train"),
        nodes=1,
        activate=(),
        image="",
        mounts=(("s3://bucket/data", "/data"),),
    ),
}


def jobs() -> dict[str, str]:
    """Return the text of each job file."""
    return {name: make(OTHERS.get(name, EXAMPLE)) for name, make in FILES.values()}


def main() -> None:
    folder = Path(__file__).parent / "jobs"
    folder.mkdir(exist_ok=True)
    for name, text in jobs().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
