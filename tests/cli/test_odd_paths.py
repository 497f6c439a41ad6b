"""Paths of a run that the file system cannot take, and what is in the place of its folder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from modelzoo_trainer.cli.command import main
from modelzoo_trainer.errors import folder_reason

LONG = "y" * 256
FILE = """\
trainer:
  init:
    device: cpu
    model: {name: fc_mnist, hidden_sizes: [4], input_size: 64}
    optimizer: {SGD: {lr: 0.1}}
    loop: {max_steps: 2}
    checkpoint: {steps: 1}
  fit:
    train_dataloader: {data_processor: DigitsProcessor, batch_size: 2}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text(FILE)
    Path("a.txt").write_text("text")


TEXT = "{data_processor: TextFileProcessor, batch_size: 1, max_sequence_length: 3, "


@pytest.mark.parametrize(
    "change",
    [
        f"init.model_dir={LONG}",
        f"init.model_dir={LONG}/below",
        f"init.checkpoint.checkpoint_root={LONG}",
        f"init.callbacks=[{{DumpActivations: {{outdir: {LONG}}}}}]",
        f"fit.ckpt_path={LONG}",
        f"fit.train_dataloader={TEXT}data_dir: {LONG}}}",
        f"fit.train_dataloader={TEXT}data_dir: ., cache_dir: {LONG}}}",
    ],
)
def test_a_name_that_is_too_long_is_one_message(capsys, change):
    assert main(["fit", "params.yaml", "--set", change]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert "256 bytes; the most is 255" in line or "does not exist" in line


@pytest.mark.parametrize(
    "words",
    [
        ["check", LONG],
        ["report", LONG],
        ["checkpoint", "list", LONG],
        ["checkpoint", "export", LONG, "out"],
        ["checkpoint", "convert", LONG, "out", "--from", "hf"],
        ["data_preprocess", LONG],
        ["config", "convert", "--from", "llm-foundry", LONG],
    ],
)
def test_a_command_refuses_a_name_that_is_too_long(capsys, words):
    assert main(words) == (1 if words[1] in ("list", "export") else 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert "too long" in line


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Path.touch, " is a file, not a folder"),
        (os.mkfifo, " is a named pipe, a socket or a device, not a folder"),
        (lambda path: path.symlink_to("gone"), " is a symbolic link, and its target does not"),
    ],
)
def test_what_is_in_the_place_of_the_folder_is_named(capsys, make, said):
    make(Path("taken"))
    for name in ("taken", "taken/below"):
        assert main(["fit", "params.yaml", "--model_dir", name]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert f"model_dir '{Path(name).absolute()}' cannot be used: " in line
        assert f"'{Path('taken').absolute()}'{said}" in line


def test_a_full_disk_is_named_with_what_is_free(tmp_path):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    said = folder_reason(tmp_path / "missing", error)
    assert said.startswith("No space left on device (")
    assert said.endswith(f"B free in {tmp_path})")
    assert "None" not in folder_reason(tmp_path, OSError(errno.EIO, "Input/output error"))
