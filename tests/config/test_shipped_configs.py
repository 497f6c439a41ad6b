"""The shipped configurations: every file loads, and one is trained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from modelzoo_trainer.cli.command import main
from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_file, read_text, to_yaml
from modelzoo_trainer.config.positions import to_plain
from modelzoo_trainer.config.shipped import shipped_names

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
SECTIONS = {"fit": "train_and_eval", "validate": "eval", "validate_all": "eval_all"}


@pytest.fixture(scope="module")
def names():
    return shipped_names()


@pytest.fixture(autouse=True)
def in_a_folder_with_rows(tmp_path, monkeypatch):
    """Run in a folder with those that preprocessing writes."""
    for part in ("train", "val"):
        (tmp_path / "rows" / part).mkdir(parents=True)
        (tmp_path / "rows" / part / "data-00000.h5").touch()
    monkeypatch.chdir(tmp_path)


def test_there_are_configurations():
    assert "digits_mlp.yaml" in [path.name for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_shipped_configuration_is_right_in_every_mode_it_has(path, names):
    root = read_file(path)
    sections = to_plain(root)["trainer"]
    plans = [check_config(root, names, mode) for key, mode in SECTIONS.items() if key in sections]
    assert plans


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_shipped_configuration_stays_right_when_it_is_written_again(path, names):
    text = to_yaml(to_plain(read_file(path)))
    assert check_config(read_text(text, "again.yaml"), names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_shipped_configuration_says_what_it_does_and_how_to_run_it(path):
    modeline, *header = path.read_text().splitlines()[:4]
    assert modeline == "# yaml-language-server: $schema=schema.json"
    assert all(line.startswith("# ") for line in header)
    assert f"--params configs/{path.name}" in header[1]


@pytest.mark.slow
def test_the_digits_are_learnt(tmp_path, caplog):
    path = CONFIGS / "digits_mlp.yaml"
    with caplog.at_level("INFO", "modelzoo_trainer"):
        assert main(["--params", str(path), "--model_dir", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run/logs/latest/params.yaml").is_file()
    accuracies = [float(found) for found in re.findall(r"accuracy ([0-9.]+)", caplog.text)]
    assert accuracies[-1] > 0.95
