"""The job files in the docs fit the schemas of their launchers, where a package has one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelzoo_trainer.tools.launch.jobs import FILES

JOBS = Path(__file__).resolve().parents[3] / "docs" / "jobs"
pytestmark = pytest.mark.slow


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((JOBS / name).read_text(encoding="utf-8")))


def test_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    found = documents("kubernetes.yaml")
    assert [each["kind"] for each in found] == ["Service", "Job"]
    for each in found:
        validate(each, "1.34", strict=True)
    with pytest.raises(Exception, match="completion"):
        validate({**found[1], "spec": {**found[1]["spec"], "completion": 1}}, "1.34", strict=True)


def test_kubeflow_trainer() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (found,) = documents("trainjob.yaml")
    job = models.TrainerV1alpha1TrainJob.from_dict(found)
    # What the models do not know, they leave out.
    assert job.to_dict() == found
    found["spec"]["trainer"]["numNodes"] = "four"
    with pytest.raises(ValueError, match="numNodes"):
        models.TrainerV1alpha1TrainJob.from_dict(found)


SKY = """
import sys
import sky
task = sky.Task.from_yaml(sys.argv[1])
assert task.num_nodes == 1
"""


def run_sky(path: Path) -> subprocess.CompletedProcess[str]:
    # It does not go together with other packages: in an environment of its own.
    python = os.environ.get("SKYPILOT_PYTHON", sys.executable)
    process = subprocess.run(
        [python, "-c", SKY, str(path)], capture_output=True, text=True, check=False
    )
    if "No module named 'sky'" in process.stderr:
        pytest.skip("needs skypilot, here or in the environment that SKYPILOT_PYTHON names")
    return process


def test_skypilot(tmp_path: Path, maker: Any) -> None:
    process = run_sky(JOBS / "skypilot.yaml")
    assert process.returncode == 0, process.stderr
    mounted = replace(maker.OTHERS["skypilot.yaml"], mounts=[("runs", "/runs"), ("./a", "/a")])
    path = tmp_path / "mounted.yaml"
    path.write_text(FILES["skypilot", ""][1](mounted), encoding="utf-8")
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["volumes"] == {"/runs": "runs"}
    assert run_sky(path).returncode == 0
    wrong = tmp_path / "wrong.yaml"
    text = (JOBS / "skypilot.yaml").read_text(encoding="utf-8")
    wrong.write_text(text.replace("num_nodes:", "nodes:"), encoding="utf-8")
    assert "nodes" in run_sky(wrong).stderr
