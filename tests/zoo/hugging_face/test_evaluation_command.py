"""Scores of a run are those of the command `lm_eval` on the exported checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelzoo_trainer.cli.command import main
from tests.zoo.hugging_face.harness import (
    CHOICE,
    LIMIT,
    TEXT,
    VOCAB,
    WRITE,
    make_tasks,
    make_tokenizer,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
pytest.importorskip("lm_eval", reason="needs lm_eval")
pytest.importorskip("datasets", reason="needs datasets")

STEPS = 60
FIRST_WORD = {
    "name": "first_word",
    "filter": [
        {"function": "regex", "regex_pattern": r"(\w+)", "group_select": 0},
        {"function": "take_first"},
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, tasks, texts and a file that trains on them."""
    made = tmp_path_factory.mktemp("command")
    make_tokenizer(made / "tokenizer")
    path = make_tasks(made / "tasks") / f"{WRITE}.yaml"
    task = yaml.safe_load(path.read_text()) | {"filter_list": [FIRST_WORD]}
    path.write_text(yaml.safe_dump(task))
    (made / "texts.txt").write_text(TEXT * 40)
    data = {
        "data_processor": "HuggingFaceDataProcessor",
        "path": str(made / "texts.txt"),
        "tokenizer": str(made / "tokenizer"),
        "max_sequence_length": 32,
        "cache_dir": str(made / "cache"),
        "batch_size": 8,
    }
    harness = {
        "eeh_args": {"tasks": [CHOICE, WRITE], "include_path": str(made / "tasks")},
        "pretrained_model_name_or_path": str(made / "tokenizer"),
        "batch_size": 3,
    }
    model = {
        "name": "gpt2",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_heads": 2,
        "num_hidden_layers": 1,
        "filter_size": 64,
        "max_position_embeddings": LIMIT,
    }
    init = {
        "device": "cpu",
        "seed": 1,
        "model_dir": str(made / "run"),
        "model": model,
        "optimizer": {"AdamW": {"lr": 0.01}},
        "loop": {"max_steps": STEPS, "eval_frequency": STEPS // 2},
        "checkpoint": {"steps": STEPS // 2},
        "callbacks": [{"EleutherEvalHarness": harness}],
    }
    (made / "run.yaml").write_text(
        yaml.safe_dump({"trainer": {"init": init, "fit": {"train_dataloader": data}}})
    )
    return made


def metrics_of(folder: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of the evaluations, by step."""
    found: dict[int, dict[str, float]] = {}
    for row in map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines()):
        own = {key: value for key, value in row.items() if key.startswith("eleuther_0/")}
        found.setdefault(row["step"], {}).update(own)
    return {step: own for step, own in found.items() if own}


def results_of_lm_eval(model: Path, folder: Path) -> dict[str, float]:
    """Return the scores that the command prints into its file, by our names of metrics."""
    command = Path(sys.executable).with_name("lm_eval")
    words = f"--model hf --model_args pretrained={model} --tasks {CHOICE},{WRITE} --device cpu"
    words += f" --include_path {folder / 'tasks'} --batch_size 4 --output_path {folder / 'theirs'}"
    subprocess.run(
        [str(command), *words.split()],
        check=True,
        capture_output=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    (path,) = (folder / "theirs").rglob("results_*.json")
    found: dict[str, float] = {}
    for task, values in json.loads(path.read_text())["results"].items():
        for key, value in values.items():
            if isinstance(value, float):
                name = key.removesuffix(",none").replace(",", "_")
                found[f"eleuther_0/{task}/{name}"] = value
    return found


def test_scores_of_a_run_are_those_of_the_command_on_the_export(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["fit", "run.yaml"]) == 0
    words: list[Any] = ["checkpoint", "convert", f"run/checkpoint_{STEPS}", "export", "--to", "hf"]
    assert main([*words, "--tokenizer", "tokenizer"]) == 0

    expected = results_of_lm_eval(folder / "export", folder)
    found = metrics_of(folder)

    assert sorted(found) == [STEPS // 2, STEPS]
    assert found[STEPS] == pytest.approx(expected, rel=1e-6)
    assert 0 < expected[f"eleuther_0/{WRITE}/exact_match_first_word"] < 1
    assert 0 < expected[f"eleuther_0/{CHOICE}/acc"] < 1

    words = ["lm_eval", "run.yaml", "--checkpoint_path", "run/checkpoint_*"]
    assert main([*words, "--output_path", "again"]) == 0
    for step, values in found.items():
        again = json.loads((folder / f"again/results_{step}.json").read_text())["results"]
        assert again[CHOICE]["acc,none"] == values[f"eleuther_0/{CHOICE}/acc"]

    assert main(["report", "run", "--output", "report.html"]) == 0
    assert f"eleuther_0/{WRITE}/exact_match_first_word" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num_fewshot", "14"], f"no prompt of the task '{CHOICE}' can be made with 14 examples"),
        (["--check_integrity"], "check_integrity: lm_eval would run tests of its own source"),
    ],
)
def test_what_cannot_be_evaluated_is_one_message(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    never_trained = ["--set", "validate_all.ckpt_paths=null"]

    assert main(["lm_eval", str(folder / "run.yaml"), *words, *never_trained]) == 2

    assert message in capsys.readouterr().err
