"""The command lm_eval, as far as it needs no lm_eval."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelzoo_trainer.cli.command import main
from modelzoo_trainer.cli.parser import parse
from modelzoo_trainer.cli.plans import load_plans, shipped_names

FILE = """\
trainer:
  init:
    model_dir: ./out
    device: cpu
    model: {name: gpt2, vocab_size: 320, hidden_size: 8, num_heads: 2, num_hidden_layers: 1,
            filter_size: 8, max_position_embeddings: 48}
    callbacks:
      - EleutherEvalHarness: {eeh_args: {tasks: a}, pretrained_model_name_or_path: ./tokenizer}
"""


@pytest.fixture(autouse=True)
def _params(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(FILE)


def plan_of(*words: str):
    options = parse(["lm_eval", "params.yaml", *words])
    (plan,) = load_plans(options, shipped_names)
    return plan


def test_options_override_the_arguments_in_the_file() -> None:
    text = ["--system_instruction", "be: brief", "--seed", "1,2,3,4", "--apply_chat_template"]
    words = ["-t", "b,c", "-f", "2", "-L", "0.5", "-s", "--keep_data_dir"]

    plan = plan_of(*words, *text)

    arguments = plan.init["callbacks"][0].arguments
    assert arguments["keep_data_dir"] is True
    assert arguments["eeh_args"] == {
        "tasks": "b,c",
        "num_fewshot": 2,
        "limit": 0.5,
        "log_samples": True,
        "system_instruction": "be: brief",
        "seed": "1,2,3,4",
        "apply_chat_template": True,
    }
    assert plan.method == "validate_all"


def test_it_evaluates_the_newest_checkpoint_and_validates_nothing_else() -> None:
    assert plan_of().call == {"ckpt_paths": "last"}
    assert plan_of("--checkpoint_path", "a").call["ckpt_paths"] in ("a", ["a"])
    assert plan_of("--set", "validate_all.ckpt_paths=null").call == {"ckpt_paths": None}
    sections = "  validate_all:\n    ckpt_paths: [b]\n"
    Path("params.yaml").write_text(FILE + sections)
    assert plan_of().call == {"ckpt_paths": ["b"]}


def test_a_file_without_the_callback_and_an_invalid_option_are_refused(capsys) -> None:
    assert main(["lm_eval", "params.yaml", "--num_fewshot", "some"]) == 2
    assert "num_fewshot" in capsys.readouterr().err
    Path("params.yaml").write_text(FILE[: FILE.index("    callbacks")])
    assert main(["lm_eval", "params.yaml"]) == 2
    assert "requires the callback EleutherEvalHarness" in capsys.readouterr().err
