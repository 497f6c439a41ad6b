"""What `HuggingFaceDataProcessor` refuses, with one message each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer.cli.command import main
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data import processor_class
from tests.zoo.rows.toys import byte_tokenizer

pytestmark = pytest.mark.slow
pytest.importorskip("datasets", reason="needs datasets")

ROWS = [
    {
        "text": f"text {number}",
        "prompt": "a",
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        "odd": [{"role": "critic", "content": "a"}],
        "pairs": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
    }
    for number in range(8)
]
CHAT = {"task": "chat", "chat_template": "chatml"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("errors")
    (made / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (made / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (made / "list.jsonl").write_text('{"text": "a"}\n[1]\n')
    (made / "empty.jsonl").write_text("")
    (made / "empty.csv").write_text("")
    (made / "latin.jsonl").write_bytes(b'{"text": "h\xe9"}\n')
    (made / "notes").mkdir()
    (made / "notes/a.md").write_text("a")
    (made / "empty.txt").write_text("")
    (made / "empty.json").write_text("[]")
    (made / "header.csv").write_text("text\n")
    (made / "empty.parquet").write_bytes(b"")
    (made / "broken.parquet").write_bytes(b"PAR1 and no more")
    byte_tokenizer(made / "bytes")
    return made


def make(folder: Path, **arguments: Any) -> Any:
    given = {
        "path": "data.jsonl",
        "tokenizer": "bytes",
        "max_sequence_length": 16,
        "batch_size": 2,
        "cache_dir": str(folder / "cache"),
    }
    given.update(arguments)
    for key in ("path", "tokenizer"):
        if (folder / given[key]).exists():
            given[key] = str(folder / given[key])
    return processor_class("HuggingFaceDataProcessor")(**given)


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "no chat template": ({"task": "chat"}, "has no chat template.*set chat_template"),
    "no column": ({"text_column": "txt"}, "no column 'txt'.*text, prompt, messages.*text_column"),
    "no split": ({"split": "test"}, "no split 'test'.*train.*Set split"),
    "not JSON": ({"path": "bad.jsonl"}, r"bad.jsonl:2 is not JSON.*must be a JSON object"),
    "no object": ({"path": "list.jsonl"}, r"list.jsonl:2 is not an object but '\[1\]'"),
    "empty": ({"path": "empty.jsonl"}, "'train' of .*empty.jsonl' has no rows. Give files"),
    "latin": ({"path": "latin.jsonl"}, "latin.jsonl, rows 0 to 0' cannot be read: Unicode"),
    "notes": ({"path": "notes"}, "folder .*notes' cannot be read: .* no files with the suffixes"),
    "slice": ({"split": "train[:"}, r"no split 'train\[:'.*a slice such as"),
    "slice of a stream": (
        {"split": "train[:2]", "streaming": True},
        "no split .*It has: train. A stream of files has no slices",
    ),
    "empty csv": ({"path": "empty.csv"}, "'train' of .*empty.csv' has no rows. Give files"),
    "empty txt": ({"path": "empty.txt"}, "'train' of .*empty.txt' has no rows. Give files"),
    "empty array": ({"path": "empty.json"}, "'train' of .*empty.json' has no rows. Give files"),
    "no lines": ({"path": "header.csv"}, "'train' of .*header.csv' has no rows. Give files"),
    "empty parquet": ({"path": "empty.parquet"}, "'train' of .*empty.parquet' has no rows"),
    "broken parquet": ({"path": "broken.parquet"}, "broken.parquet' cannot be read: .*again"),
    "empty stream": ({"path": "empty.txt", "streaming": True}, "empty.txt' has no rows. Give"),
    "empty array stream": ({"path": "empty.json", "streaming": True}, "empty.json' has no rows"),
    "role": ({**CHAT, "messages_column": "odd"}, "role 'critic'; known roles: system.*row 0"),
    "keys": ({**CHAT, "messages_column": "pairs"}, "no 'role'; it has: from, value"),
    "no file": ({"path": "nothing.jsonl"}, "'nothing.jsonl' does not exist"),
    "no data_files": ({"path": "json"}, "no files are given. Set data_files"),
    "missing data_files": ({"path": "json", "data_files": "a*.json"}, r"'a\*.json' does not exist"),
    "vocabulary": ({"vocab_size": 100}, "has 266 tokens, but the model's vocab_size is 100"),
    "no tokenizer": ({"tokenizer": "./none"}, "there is no folder './none'"),
    "no eos": ({"tokenizer": "bytes/tokenizer.json"}, "which token ends a document. Set eos_token"),
    "other task": ({"chosen_column": "a"}, "chosen_column has no effect with task text"),
    "template of text": ({"chat_template": "chatml"}, "no effect with task text"),
    "no template file": ({"task": "chat", "chat_template": "a.jinja"}, "'a.jinja' does not exist"),
    "name of a file": ({"name": "a"}, "name: 'a' has no effect, because path .* is a file"),
    "two sizes": ({"global_batch_size": 2}, "both are set"),
    "nothing usable": ({"min_sequence_length": 99}, "no row of .* can be used .48 tokens"),
    "few rows": ({"batch_size": 50}, "there are only 8 samples"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_message(folder: Path, name: str) -> None:
    arguments, message = CASES[name]

    with pytest.raises(ConfigError, match=message):
        make(folder, **arguments).create_dataloader()


def test_a_model_that_does_not_fit_is_refused(folder: Path) -> None:
    dataset = make(folder).dataset

    dataset.check_model(266, 16)
    with pytest.raises(ConfigError, match="has 266 tokens, but the model's vocab_size is 265"):
        dataset.check_model(265, 16)
    with pytest.raises(ConfigError, match="max_position_embeddings is 15"):
        dataset.check_model(None, 15)


def test_keys_of_other_messages_can_be_set(folder: Path) -> None:
    keys = {"message_role_key": "from", "message_content_key": "value"}

    assert len(
        make(folder, **CHAT, messages_column="pairs", max_sequence_length=64, **keys).dataset
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("task: chat", "has no chat template"),
        ("text_column: txt", "no column 'txt'"),
        ("path: missing.jsonl", "'missing.jsonl' does not exist"),
        ("task: chatt", "task"),
    ],
)
def test_a_run_ends_with_code_2_before_it_begins(
    folder: Path,
    line: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    path = "" if line.startswith("path") else f"      path: {folder / 'data.jsonl'}\n"
    (tmp_path / "run.yaml").write_text(
        "trainer:\n  init:\n    device: cpu\n    model_dir: ./out\n"
        "    model: {name: gpt2, vocab_size: 266, hidden_size: 8, num_heads: 1, "
        "num_hidden_layers: 1, filter_size: 8, max_position_embeddings: 16}\n"
        "    optimizer: {AdamW: {lr: 0.001}}\n    loop: {max_steps: 1}\n"
        "  fit:\n    train_dataloader:\n      data_processor: HuggingFaceDataProcessor\n"
        f"{path}      tokenizer: {folder / 'bytes'}\n      max_sequence_length: 16\n"
        f"      batch_size: 2\n      cache_dir: {folder / 'cache'}\n      {line}\n"
    )
    monkeypatch.chdir(tmp_path)

    code = main(["fit", "run.yaml"])

    assert code == 2
    assert message in capfd.readouterr().err
