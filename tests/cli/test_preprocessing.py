"""The command `data_preprocess`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from modelzoo_trainer.base.exit_codes import DONE, FAILED, INTERRUPTED, WRONG_USE
from modelzoo_trainer.cli import preprocessing
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.zoo.rows.preprocessing import pipeline
from modelzoo_trainer.zoo.rows.preprocessing.pool import WorkerError
from tests.zoo.rows.preprocessing.runs import HOOK, write_lines
from tests.zoo.rows.toys import byte_tokenizer


@pytest.fixture
def file(tmp_path):
    (tmp_path / "in").mkdir()
    write_lines(tmp_path / "in" / "a.jsonl", ["some text", "more text"])
    path = tmp_path / "data.yaml"
    path.write_text(
        f"setup: {{mode: pretraining, data: {{type: local, source: {tmp_path / 'in'}}}, "
        f"output_dir: {tmp_path / 'out'}, processes: 1}}\n"
        f"processing: {{huggingface_tokenizer: {byte_tokenizer(tmp_path / 'bytes')}, "
        f"max_seq_length: 8, read_hook: '{HOOK}', read_hook_kwargs: {{text_key: text}}, "
        "min_sequence_len: 1, tokenizer_type: BPE}\n",
        encoding="utf-8",
    )
    return path


def test_a_file_is_preprocessed_and_reported(file, capfd) -> None:
    assert main(["data_preprocess", str(file)]) == DONE
    printed = capfd.readouterr().err
    for fact in ("tokenizer_type: unused", "3 rows of 8 tokens in 1 files", "documents  2"):
        assert fact in printed
    assert main(["data_preprocess", str(file)]) == WRONG_USE
    assert "already has rows" in capfd.readouterr().err


def test_the_words_of_cszoo_work(file) -> None:
    assert main(["data_preprocess", "run", "--config", str(file)]) == DONE


@pytest.mark.parametrize(
    ("error", "code", "fact"),
    [
        (WorkerError("has died"), FAILED, "has died"),
        (OSError(28, "No space left on device"), FAILED, "No space"),
        (KeyboardInterrupt(), INTERRUPTED, "continue"),
    ],
)
def test_a_failure_is_one_line(file, capfd, monkeypatch, error, code, fact) -> None:
    def fail(settings):
        raise error

    monkeypatch.setattr(preprocessing, "preprocess", fail)
    assert main(["data_preprocess", str(file)]) == code
    printed = capfd.readouterr().err
    assert fact in printed
    assert "Traceback" not in printed


def test_without_a_file_the_usage_is_printed(capfd) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["data_preprocess"])
    assert ended.value.code == WRONG_USE
    assert "file" in capfd.readouterr().err


def test_nothing_of_it_imports_torch() -> None:
    program = f"import sys, {pipeline.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
