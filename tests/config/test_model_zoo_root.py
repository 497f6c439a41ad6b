"""Paths that begin with `$MODELZOO_ROOT`: under the user's folder, or said to be missing."""

from __future__ import annotations

import json

import pytest

from modelzoo_trainer.cli.command import main
from modelzoo_trainer.config.model_zoo_root import with_root
from tests.zoo.data.csv.written import write_folder, write_vocabulary

FILE = """\
trainer:
  init:
    device: cpu
    model: {name: bert, disable_nsp: true, vocab_size: 20, hidden_size: 8, num_heads: 2,
            num_hidden_layers: 1, filter_size: 8, max_position_embeddings: 8}
    optimizer: {SGD: {lr: 0.1}}
    loop: {max_steps: 1}
    model_dir: FOLDER/run
  fit:
    train_dataloader:
      data_processor: BertCSVDynamicMaskDataProcessor
      data_dir: FOLDER/data
      vocab_file: $MODELZOO_ROOT/models/vocab.txt
      max_sequence_length: 8
      max_predictions_per_seq: 2
      batch_size: 1
"""


@pytest.fixture
def params(tmp_path, monkeypatch):
    monkeypatch.delenv("MODELZOO_ROOT", raising=False)
    write_folder(tmp_path / "data", [{"tokens": "['[CLS]', 'a', '[SEP]']"}])
    (tmp_path / "zoo" / "models").mkdir(parents=True)
    write_vocabulary(tmp_path / "zoo" / "models" / "vocab.txt")
    path = tmp_path / "params.yaml"
    path.write_text(FILE.replace("FOLDER", str(tmp_path)))
    return path


def test_the_variable_of_the_environment_is_the_folder(params, monkeypatch):
    monkeypatch.setenv("MODELZOO_ROOT", str(params.parent / "zoo"))
    assert main(["fit", str(params)]) == 0
    lines = (params.parent / "run" / "metrics.jsonl").read_text().splitlines()
    assert any("loss" in json.loads(line) for line in lines)


def test_without_it_a_check_and_a_run_say_what_to_set(params, capsys):
    assert main(["check", str(params)]) == 2
    output = capsys.readouterr().out
    assert "vocab_file '$MODELZOO_ROOT/models/vocab.txt' does not exist" in output
    assert "environment variable MODELZOO_ROOT" in output
    assert output.splitlines()[-1].startswith("Verdict: needs data: vocab_file '$MODELZOO_ROOT/")
    assert main(["fit", str(params)]) == 2
    assert "environment variable MODELZOO_ROOT" in capsys.readouterr().err


def test_nothing_else_is_a_variable(monkeypatch):
    monkeypatch.setenv("MODELZOO_ROOT", "/zoo")
    assert with_root("$MODELZOO_ROOT/a") == "/zoo/a"
    for value in ("$HOME/a", "a/$MODELZOO_ROOT/b", "$MODELZOO_ROOTS/a", 3, None, ["$x"]):
        assert with_root(value) == value


def test_paths_in_lists_and_mappings_and_both_forms_of_the_variable(monkeypatch):
    given = {"mixture": [{"data_dir": ["${MODELZOO_ROOT}/a", "b"]}, "$MODELZOO_ROOT"]}
    assert with_root(given) == given
    monkeypatch.setenv("MODELZOO_ROOT", "/zoo")
    assert with_root(given) == {"mixture": [{"data_dir": ["/zoo/a", "b"]}, "/zoo"]}


@pytest.mark.parametrize("value", ["$MODELZOO_ROOT/data", "['${MODELZOO_ROOT}/data']"])
def test_any_missing_path_under_it_names_the_variable(params, capsys, value):
    written = f"{params.parent}/data"
    params.write_text(params.read_text().replace(f"data_dir: {written}", f"data_dir: {value}"))
    assert main(["check", str(params)]) == 2
    lines = capsys.readouterr().out.splitlines()
    line, *_ = [one for one in lines if "data_dir '$" in one and "does not exist" in one]
    assert "environment variable MODELZOO_ROOT" in line
    assert main(["fit", str(params)]) == 2
    assert "environment variable MODELZOO_ROOT" in capsys.readouterr().err


def test_a_checkpoint_may_lie_under_it(params, monkeypatch, capsys):
    params.write_text(f"{params.read_text()}    ckpt_path: $MODELZOO_ROOT/checkpoint_9\n")
    assert main(["check", str(params)]) == 2
    assert "environment variable MODELZOO_ROOT, which" in capsys.readouterr().out
    monkeypatch.setenv("MODELZOO_ROOT", str(params.parent / "zoo"))
    main(["check", str(params)])
    output = capsys.readouterr().out
    assert f"checkpoint '{params.parent}/zoo/checkpoint_9' does not exist" in output
