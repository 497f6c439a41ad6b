"""`HuggingFaceDataProcessor` with `streaming`, and with classes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data import processor_class
from modelzoo_trainer.zoo.data.hugging_face import stream
from tests.zoo.rows.toys import byte_tokenizer

pytestmark = pytest.mark.slow
pytest.importorskip("datasets", reason="needs datasets")

NUM = 90


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("stream")
    for part in range(2):
        rows = [
            {"text": f"<{number:03}>" * (1 + number % 4), "label": ["no", "yes"][number % 2]}
            for number in range(part * NUM // 2, (part + 1) * NUM // 2)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (made / f"part{part}.jsonl").write_text(lines)
    byte_tokenizer(made / "bytes")
    return made


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CHUNK", 11)


def make(folder: Path, **arguments: Any) -> Any:
    return processor_class("HuggingFaceDataProcessor")(
        **{
            "path": "json",
            "data_files": str(folder / "part*.jsonl"),
            "tokenizer": str(folder / "bytes"),
            "max_sequence_length": 48,
            "batch_size": 3,
            "cache_dir": str(folder / "cache"),
            "streaming": True,
            "packing": True,
            **arguments,
        }
    )


def rows_of(batches: Any) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in batches for row in batch["input_ids"].tolist()]


def test_a_stream_in_order_has_the_rows_of_the_cache(folder: Path) -> None:
    given = {"shuffle": False, "drop_last": False, "packing": False}

    found = rows_of(make(folder, **given).create_dataloader())

    assert found == rows_of(make(folder, **given, streaming=False).create_dataloader())
    assert len(found) == NUM


def test_epochs_have_all_rows_in_different_orders(folder: Path) -> None:
    loader = make(folder, drop_last=False).create_dataloader()
    loader.dataset.set_epoch(0)
    first = rows_of(loader)
    loader.dataset.set_epoch(1)
    second = rows_of(loader)

    assert first != second
    assert sorted(first) == sorted(second)


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_state_continues_with_the_next_batch(folder: Path, drop_last: bool) -> None:
    whole = [*make(folder, drop_last=drop_last).dataset]
    assert len(whole) > 6
    for number in range(1, len(whole) + 1):
        before, after = (make(folder, drop_last=drop_last).dataset for _ in range(2))
        batches = iter(before)
        for _ in range(number):
            next(batches)
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        expected = whole[number:] or whole  # after the last batch, a new epoch
        assert rows_of(after) == rows_of(expected)
        assert rows_of(after) == rows_of(whole)  # the state is used once


@pytest.mark.parametrize("files", ["part*.jsonl", "part0.jsonl"])
def test_processes_divide_a_stream(folder: Path, files: str) -> None:
    given = {"data_files": str(folder / files), "drop_last": False, "packing": False}
    whole = rows_of(make(folder, **given).dataset)
    parts = []
    for index in range(2):
        dataset = make(folder, **given, batch_size=None, global_batch_size=6).dataset
        dataset.take_shard(index, 2)
        batches = [*dataset]
        assert len(batches[0]["labels"]) == 3
        parts += rows_of(batches)

    assert sorted(parts) == sorted(whole)
    with pytest.raises(ConfigError, match="3 is not divisible by 2"):
        make(folder, batch_size=None, global_batch_size=3).dataset.take_shard(0, 2)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, batch: Any) -> Any:
        return self.weight * batch["input_ids"].float().mean()


class Seen(Callback):
    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []

    def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
        self.rows += rows_of([batch])


def fit(
    folder: Path, model_dir: Path, steps: int, every: int, **arguments: Any
) -> list[tuple[int, ...]]:
    seen = Seen()
    trainer = Trainer(
        model=Sum,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(max_steps=steps),
        checkpoint=Checkpoint(steps=every),
        model_dir=str(model_dir),
        callbacks=[seen],
        seed=1,
    )
    trainer.fit(make(folder, **arguments).create_dataloader())
    return seen.rows


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("steps", [3, 14])
def test_a_run_resumes_exactly(folder: Path, tmp_path: Path, num_workers: int, steps: int) -> None:
    given: dict[str, Any] = {"num_workers": num_workers}
    whole = fit(folder, tmp_path / "whole", 24, 24, **given)

    first = fit(folder, tmp_path / "cut", steps, steps, **given)
    rest = fit(folder, tmp_path / "cut", 24, steps, **given)

    assert first + rest == whole


def write_texts(folder: Path, *texts: str) -> Path:
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        lines = [json.dumps({"text": f"{text}{row:03}", "more": "a"}) + "\n" for row in range(20)]
        (folder / f"part{number}.jsonl").write_text("".join(lines))
    return folder


def fingerprint(tokenizers: Path, data: Path, **arguments: Any) -> int:
    given = {"data_files": str(data / "*.jsonl"), "tokenizer": str(tokenizers / "bytes")}
    return int(make(tokenizers, **{**given, **arguments}).dataset.fingerprint)


def test_the_fingerprint_of_a_stream_is_of_its_rows_and_their_order(
    folder: Path, tmp_path: Path
) -> None:
    first = fingerprint(folder, write_texts(tmp_path / "a", "ab", "cd"))
    byte_tokenizer(folder / "other")
    names = {"pad_token": "<pad>", "eos_token": "<bos>"}
    (folder / "other/tokenizer_config.json").write_text(json.dumps(names))

    moved = Path(shutil.move(tmp_path / "a", tmp_path / "b"))
    assert fingerprint(folder, moved) == first
    assert fingerprint(folder, moved, batch_size=4, num_workers=2) == first
    others = [
        fingerprint(folder, write_texts(tmp_path / "c", "ab", "ce")),
        fingerprint(folder, write_texts(tmp_path / "d", "ab", "cd", "ef")),
        fingerprint(folder, moved, data_files=str(moved / "part0.jsonl")),
        fingerprint(folder, moved, data_files={"train": str(moved / "*"), "x": str(moved / "*")}),
        fingerprint(folder, moved, data_files={"x": str(moved / "*")}, split="x"),
        fingerprint(folder, moved, text_column="more"),
        fingerprint(folder, moved, tokenizer=str(folder / "other")),
        fingerprint(folder, moved, max_sequence_length=40),
        fingerprint(folder, moved, packing=False),
        fingerprint(folder, moved, shuffle=False),
        fingerprint(folder, moved, shuffle_seed=3),
        fingerprint(folder, moved, path=str(moved), data_files=None, min_sequence_length=1),
        fingerprint(folder, moved, path=str(moved), data_files="part0.jsonl", packing=False),
        fingerprint(folder, moved, path=str(moved), data_files="part1.jsonl", packing=False),
    ]
    assert len({first, *others}) == 15


def test_a_template_is_part_of_the_fingerprint(folder: Path, tmp_path: Path) -> None:
    pair = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": pair}) + "\n")
    given = {"path": str(path), "data_files": None, "task": "chat", "packing": False}
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"

    first = make(folder, **given, chat_template="chatml").dataset.fingerprint

    assert first != make(folder, **given, chat_template=template).dataset.fingerprint


def test_a_run_that_resumes_with_other_data_is_warned_of(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_texts(tmp_path / "data", "ab", "cd")
    given = {"data_files": str(data / "*.jsonl")}
    fit(folder, tmp_path / "run", 2, 2, **given)
    fit(folder, tmp_path / "run", 4, 2, **given)
    assert "has changed" not in caplog.text

    write_texts(data, "ab", "ce")
    fit(folder, tmp_path / "run", 6, 2, **given)

    assert "the training data has changed. train_dataloader has data with checksum" in caplog.text


def test_what_a_stream_skips_is_logged_while_it_begins(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"text": ["abc", None][row % 2]} for row in range(30)]
    (tmp_path / "gaps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    given = {"path": str(tmp_path / "gaps.jsonl"), "data_files": None, "packing": False}

    batches = iter(make(folder, **given, batch_size=1).dataset)
    next(batches)

    assert "the first 11 examples: 5 skipped: empty" in caplog.text
    assert len(rows_of(batches)) == 14
    assert "gaps.jsonl: 15 skipped: empty" in caplog.text


def test_a_stream_of_a_saved_folder(folder: Path) -> None:
    import datasets

    rows = [{"text": f"<{number:03}>"} for number in range(30)]
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))

    given = {"path": str(folder / "saved"), "data_files": None, "packing": False}
    assert len(rows_of(make(folder, **given).dataset)) == 30


def test_a_file_that_ends_badly_is_one_message(folder: Path) -> None:
    (folder / "bad.jsonl").write_text('{"text": "a"}\n' * 5 + '{"text": \n')

    with pytest.raises(ConfigError, match=r"bad.jsonl' cannot be read"):
        [*make(folder, path=str(folder / "bad.jsonl"), data_files=None).dataset]


CLASSES = {"task": "classification", "packing": False, "shuffle": False, "drop_last": False}


@pytest.mark.parametrize("streaming", [False, True])
def test_classes_are_labels(folder: Path, streaming: bool) -> None:
    processor = make(folder, **CLASSES, label_names=["no", "yes"], streaming=streaming)

    batch = next(iter(processor.create_dataloader()))

    assert batch["labels"].tolist() == [0, 1, 0]
    assert batch["labels"].dtype == torch.int64
    assert batch["attention_mask"].sum(dim=1).tolist() == [5, 10, 15]
    assert processor.tokenizer.decode(batch["input_ids"][1][:10].tolist()) == "<001><001>"


def test_long_texts_of_classes_are_cut_and_pairs_have_segments(folder: Path) -> None:
    given = {**CLASSES, "label_names": ["no", "yes"], "max_sequence_length": 8}
    pair = make(folder, **given, streaming=False, text_pair_column="text")

    batch = next(iter(pair.create_dataloader()))

    assert batch["attention_mask"].sum(dim=1).tolist() == [8, 8, 8]
    assert set(batch) == {"input_ids", "attention_mask", "token_type_ids", "labels"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "row 0: .*the class 'no' as text. Set label_names"),
        ({"label_names": ["yes"]}, "row 0: .*'no', which label_names lacks"),
        ({"label_column": "text", "label_names": ["yes"]}, "'<000>', which label_names lacks"),
        ({"label_column": "lable"}, "no column 'lable'"),
        ({"packing": True}, "packing has no effect with task classification"),
    ],
)
def test_a_class_that_is_not_known_is_refused(folder: Path, arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(folder, **{**CLASSES, "streaming": False, **arguments})


def test_classes_need_no_token_that_ends_documents(folder: Path) -> None:
    config = {"cls_token": "<bos>", "sep_token": "<|sep|>", "pad_token": "<pad>"}
    byte_tokenizer(folder / "like_bert")
    (folder / "like_bert/tokenizer_config.json").write_text(json.dumps(config))
    given = {"label_names": ["no", "yes"], "tokenizer": str(folder / "like_bert")}

    assert make(folder, **CLASSES, **given, streaming=False).dataset[1]["labels"] == 1
    with pytest.raises(ConfigError, match=r"token ends a document. Set eos_token.$"):
        make(folder, tokenizer=given["tokenizer"])
