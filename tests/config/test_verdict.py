"""The closing line of a check: trains here, needs data, or what is missing."""

from __future__ import annotations

import pytest

from modelzoo_trainer.cli.command import main

FILE = """\
trainer:
  init:
    device: cpu
    model: MODEL
    optimizer: {SGD: {lr: 0.1}}
    loop: {max_steps: 4}
    callbacks: CALLBACKS
  fit:
    train_dataloader: TRAIN
    val_dataloader: VAL
"""
DIGITS = "{data_processor: DigitsProcessor, batch_size: 2}"
RIGHT = {
    "MODEL": "{name: fc_mnist, hidden_sizes: [4], input_size: 64}",
    "CALLBACKS": "[]",
    "TRAIN": DIGITS,
    "VAL": DIGITS,
}


def text_of(name: str) -> str:
    return (
        f"{{data_processor: TextFileProcessor, data_dir: {name}, batch_size: 1, "
        f"max_sequence_length: 3}}"
    )


def closing_line(tmp_path, capsys, text: str, *options: str) -> str:
    """Return the last line; the exit code is 0 exactly if it says that the file runs."""
    path = tmp_path / "params.yaml"
    path.write_text(text)
    code = main(["--params", str(path), "--check", *options])
    shown, said = capsys.readouterr()
    assert shown.startswith(f"{path} is valid (nothing was built).\n")  # the plan is shown anyway
    line = shown.splitlines()[-1]
    assert (code, said) == (0 if line.endswith("s here.") else 2, "")
    return line


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "trains here."),
        (
            {"TRAIN": text_of("./a/train"), "VAL": text_of("./a/val")},
            "needs data: data_dir './a/train' does not exist; data_dir './a/val' does not exist.",
        ),
        ({"TRAIN": text_of("./a"), "VAL": text_of("./a")}, "needs data: data_dir './a' does not"),
        (
            {"TRAIN": text_of("[./a, ./b, ./c, ./d, ./e]")},
            "data_dir './c' does not exist; and 2 more.",
        ),
        (
            {"MODEL": "{name: dpr/embedding_generation}"},
            "cannot run here; missing: model 'dpr/embedding_generation'.",
        ),
        (
            {"MODEL": "{name: dpr/embedding_generation}", "TRAIN": text_of("./a")},
            "cannot run here; missing: model 'dpr/embedding_generation'; "
            "needs data: data_dir './a' does not exist.",
        ),
        (
            {"CALLBACKS": "[{BigCodeEvalHarness: {bigcode_args: {tasks: a}}}]"},
            "cannot run here; missing: callback 'BigCodeEvalHarness'.",
        ),
        (
            {
                "VAL": "{data_processor: HuggingFaceDataProcessorEli5, batch_size: 2, split: a}"
                "\n    ckpt_path: ./none.mdl"
            },
            "data processor 'HuggingFaceDataProcessorEli5', checkpoint './none.mdl'.",
        ),
    ],
)
def test_the_last_line_names_what_is_missing(tmp_path, capsys, changes, expected) -> None:
    text = FILE
    for key, value in (RIGHT | changes).items():
        text = text.replace(key, value)
    line = closing_line(tmp_path, capsys, text)
    assert line.startswith("Verdict: ")
    assert expected in line


def test_a_setting_that_is_not_supported_and_a_file_without_anything_to_run(
    tmp_path, capsys
) -> None:
    model = "{name: gpt2, memory_tokens_config: {attn_memory_chunk_size: 4}}"
    text = FILE.replace("MODEL", model).replace("CALLBACKS", "[]")
    text = text.replace("TRAIN", DIGITS).replace("VAL", DIGITS)
    line = closing_line(tmp_path, capsys, text)
    assert "missing: setting 'memory_tokens_config of gpt2'" in line
    section = text.partition("  fit:")[0]
    assert "nothing to run" in closing_line(tmp_path, capsys, section)
    only = text.replace("fit:", "validate:").replace(
        "    train_dataloader", "    val_dataloader", 1
    )
    validates = "\n".join(only.splitlines()[:-1]).replace(model, RIGHT["MODEL"])
    new = ("--mode", "eval", "--set", "validate.ckpt_path=null")
    assert closing_line(tmp_path, capsys, validates, *new) == "Verdict: runs here."


@pytest.mark.parametrize(
    ("mode", "key", "ckpt"),
    [
        ("eval", "validate.val_dataloader", "validate.ckpt_path"),
        ("eval_all", "validate_all.val_dataloaders", "validate_all.ckpt_paths"),
        ("predict", "predict.dataloader", "predict.ckpt_path"),
    ],
)
def test_an_evaluation_without_weights_cannot_run(tmp_path, capsys, monkeypatch, mode, key, ckpt):
    monkeypatch.chdir(tmp_path)
    section, _, loader = key.partition(".")
    text = f"{FILE.partition('  fit:')[0]}  {section}: {{{loader}: {DIGITS}}}\n"
    text = text.replace("MODEL", RIGHT["MODEL"]).replace("CALLBACKS", "[]")
    assert f"missing: setting '{ckpt}'" in closing_line(tmp_path, capsys, text, "--mode", mode)
    assert main(["--params", "params.yaml", "--mode", mode]) == 2
    capsys.readouterr()
    if mode != "eval_all":
        new = ("--mode", mode, "--set", f"{ckpt}=null")
        assert closing_line(tmp_path, capsys, text, *new) == "Verdict: runs here."


def test_a_job_is_not_started_elsewhere_with_what_this_package_lacks(tmp_path, capsys) -> None:
    path = tmp_path / "params.yaml"
    words = ["launch", "--on", "slurm", "--dry-run", str(path)]
    text = FILE.replace("CALLBACKS", "[]").replace("VAL", DIGITS)
    elsewhere = text.replace("MODEL", RIGHT["MODEL"]).replace("TRAIN", text_of("/of/the/cluster"))
    path.write_text(elsewhere)
    assert main(words) == 0
    path.write_text(elsewhere.replace(RIGHT["MODEL"], "{name: dpr/embedding_generation}"))
    capsys.readouterr()
    assert main(words) == 2
    assert "dpr/embedding_generation" in capsys.readouterr().err
