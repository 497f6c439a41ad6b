"""The files of configs/fine_tuning run on what their script makes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from modelzoo_trainer.cli.command import main

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("datasets", reason="needs datasets")

# A classifier has a new layer on top, in place of that of the language model.
NEW_LAYER = "ignore:pretrained_model_name_or_path.*(initial values|are not loaded)"
FOLDER = Path(__file__).resolve().parents[3] / "configs" / "fine_tuning"
METRICS = {
    "sft": ("validate_0/accuracy", 0.7),
    "lora": ("validate_0/accuracy", 0.5),
    "dpo": ("validate_0/rewards_accuracies", 0.95),
    "classification": ("validate_0/accuracy", 0.7),
}
RECIPES = sorted(METRICS)


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_inputs", FOLDER / "make_inputs.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def make_inputs(folder: Path, **constants: int) -> Path:
    """Run the script in a folder, and return the folder."""
    script = load_script()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["make_inputs.py"])
        for name, value in constants.items():
            patch.setattr(script, name, value)
        script.main()
    return folder


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"), NUM_STEPS=20)


@pytest.fixture(scope="module")
def whole_inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def last_metric(folder: Path, key: str) -> float:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return float([line[key] for line in lines if key in line][-1])


@pytest.mark.slow
def test_each_file_has_a_metric() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == RECIPES


@pytest.mark.slow
@pytest.mark.filterwarnings(NEW_LAYER)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains(name: str, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(inputs)
    options = ["--max_steps", "4", "--set", "init.loop.eval_steps=2"]
    assert main(["--params", str(FOLDER / f"{name}.yaml"), *options]) == 0
    assert last_metric(inputs / "runs" / "fine_tuning" / name, METRICS[name][0]) >= 0


@pytest.mark.soak
@pytest.mark.filterwarnings(NEW_LAYER)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_reaches_its_metric(
    name: str, whole_inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(whole_inputs)
    assert main(["--params", str(FOLDER / f"{name}.yaml")]) == 0
    key, least = METRICS[name]
    assert last_metric(whole_inputs / "runs" / "fine_tuning" / name, key) > least


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_how_to_run_it(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    assert f"--params configs/fine_tuning/{name}.yaml" in text
    _, least = METRICS[name]
    assert f"above {least}" in text
