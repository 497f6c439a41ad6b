"""Rows of `HuggingFaceDataProcessor`: those that preprocessing writes for the same texts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelzoo_trainer.config.preprocessing import parse_settings
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data import processor_class
from modelzoo_trainer.zoo.rows.preprocessing.pipeline import preprocess
from tests.zoo.rows.preprocessing.runs import rows_of
from tests.zoo.rows.toys import byte_tokenizer

pytestmark = pytest.mark.slow
pytest.importorskip("datasets", reason="needs datasets")

HOOKS = "modelzoo_trainer.zoo.rows.preprocessing.hooks:"
LENGTH = 120


def entries(count: int = 60) -> list[dict[str, Any]]:
    made = []
    for number in range(count):
        answer, prompt = f"text {number} " + "of a word " * (number % 9), f"prompt {number}"
        roles = [("system", "be brief"), ("user", prompt), ("assistant", answer)] * (number % 2 + 1)
        made.append(
            {
                "text": answer * (1 + number % 3),
                "prompt": prompt,
                "response": answer,
                "rejected": answer[::-1],
                "messages": [
                    {"role": role, "content": content}
                    for turn, (role, content) in enumerate(roles)
                    if turn != 3
                ],
            }
        )
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rows")
    (made / "in").mkdir()
    lines = [json.dumps(entry) + "\n" for entry in entries()]
    (made / "in/data.jsonl").write_text("".join(lines))
    bare = [re.sub(r'(": ") +| +(?=")', r"\1", line) for line in lines]
    (made / "stripped.jsonl").write_text("".join(bare))
    byte_tokenizer(made / "bytes")
    return made


def make(folder: Path, **arguments: Any) -> Any:
    return processor_class("HuggingFaceDataProcessor")(
        **{
            "path": str(folder / "in/data.jsonl"),
            "tokenizer": str(folder / "bytes"),
            "max_sequence_length": LENGTH,
            "batch_size": 4,
            "cache_dir": str(folder / "cache"),
            "shuffle": False,
            "drop_last": False,
            **arguments,
        }
    )


def batches_of(processor: Any) -> dict[str, torch.Tensor]:
    batches = list(processor.create_dataloader())
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def preprocessed(folder: Path, name: str, mode: str, hook: str, dataset: str) -> Any:
    settings, _ = parse_settings(
        f"setup: {{mode: {mode}, data: {{type: local, source: {folder / 'in'}}}, "
        f"output_dir: {folder / name}, processes: 1}}\n"
        f"processing: {{huggingface_tokenizer: {folder / 'bytes'}, max_seq_length: {LENGTH}, "
        f"min_sequence_len: 0, use_ftfy: false, {hook}}}\n"
        f"dataset: {{{dataset}}}\n"
    )
    preprocess(settings, save_s=0)
    return rows_of(folder / name)


def hook(name: str, **keys: str) -> str:
    pairs = ", ".join(f"{key}: {value}" for key, value in keys.items())
    return f"read_hook: '{HOOKS}{name}', read_hook_kwargs: {{{pairs}}}"


TEXT = hook("text_read_hook", text_key="text")
PAIR = hook("prompt_completion_text_read_hook", prompt_key="prompt", completion_key="response")
CHAT = hook(
    "chat_read_hook",
    multi_turn_key="messages",
    multi_turn_role_key="role",
    multi_turn_content_key="content",
)
DPO = hook("dpo_read_hook", prompt_key="prompt", chosen_key="response", rejected_key="rejected")
CHATML = {"task": "chat", "chat_template": "chatml"}
CASES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "text": ({}, "pretraining", TEXT, "pack_sequences: false"),
    "text, packed": ({"packing": True}, "pretraining", TEXT, "use_vsl: true"),
    "chat": (CHATML, "finetuning", CHAT, ""),
    "chat, packed": ({**CHATML, "packing": True}, "finetuning", CHAT, "use_vsl: true"),
    "instruction": (
        {"task": "instruction", "separator": " => "},
        "finetuning",
        PAIR,
        "sep_token: ' => '",
    ),
    "preference": (
        {
            "task": "preference",
            "chosen_column": "response",
            "chat_template": "chatml",
            "max_prompt_length": 20,
        },
        "dpo",
        DPO,
        "max_prompt_length: 20",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_preprocessing(folder: Path, name: str) -> None:
    arguments, mode, read_hook, dataset = CASES[name]
    expected = preprocessed(folder, f"out{list(CASES).index(name)}", mode, read_hook, dataset)

    if mode in ("dpo", "finetuning") and read_hook != PAIR:  # these hooks strip
        arguments = {**arguments, "path": str(folder / "stripped.jsonl")}
    found = batches_of(make(folder, **arguments))

    rows = np.stack([values.numpy() for values in found.values()], axis=1)
    assert len(rows) > 10
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(rows, expected)


def test_only_answers_of_a_chat_count(folder: Path) -> None:
    found = batches_of(make(folder, **CHATML))
    tokenizer = make(folder).tokenizer

    counted = found["labels"][1][found["attention_mask"][1] == 1]

    assert tokenizer.decode(counted.tolist()) == "text 1 of a word <|im_end|>" * 2
    assert torch.equal(found["input_ids"][:, 1:20], found["labels"][:, :19])


GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ':' }}{% if m.role == 'assistant' %}"
    "{%- generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


def test_tokens_and_those_that_count_are_those_of_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder / "bytes")
    theirs.chat_template = GENERATION
    chats = [entry["messages"] for entry in entries(20)]
    given = [
        theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        for chat in chats
    ]

    made = make(folder, task="chat", chat_template=GENERATION, max_sequence_length=512)
    found = batches_of(made)

    assert sum(map(sum, (one["assistant_masks"] for one in given))) > 500
    for number, one in enumerate(given):
        size = len(one["input_ids"]) - 1
        assert found["input_ids"][number, :size].tolist() == one["input_ids"][:-1]
        assert found["labels"][number, :size].tolist() == one["input_ids"][1:]
        assert found["attention_mask"][number, :size].tolist() == one["assistant_masks"][1:]


def test_cached_rows_are_used_again_and_rebuilt_if_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"cache_dir": str(folder / "again"), "separator": "::", "task": "instruction"}
    first = batches_of(make(folder, **given))
    [path] = [one for one in (folder / "again").glob("*.npy") if "ends" not in one.name]
    with path.open("r+b") as file:
        file.seek(500)
        file.write(b"\xff" * 7)
    assert torch.equal(batches_of(make(folder, **given))["labels"], first["labels"])
    assert "is damaged" in caplog.text

    from modelzoo_trainer.zoo.data.hugging_face.encoding import TurnsEncoding

    monkeypatch.delattr(TurnsEncoding, "rows")  # nothing is tokenized
    assert torch.equal(batches_of(make(folder, **given))["labels"], first["labels"])
    with pytest.raises(AttributeError, match="rows"):
        make(folder, **given, min_sequence_length=7)


@pytest.mark.parametrize("truncation", ["keep_start", "keep_end"])
def test_answers_that_are_cut_keep_the_token_that_ends_them(
    folder: Path, truncation: str, caplog: pytest.LogCaptureFixture
) -> None:
    long = [
        {"messages": [{"role": "user", "content": f"{number} " + "ab" * 90}, answer]}
        for number in range(9)
        for answer in [{"role": "assistant", "content": "c" * 10 * number + "d"}]
    ]
    path = folder / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in long))

    made = make(folder, **CHATML, path=str(path), truncation=truncation)
    found = batches_of(made)

    pairs = zip(found["labels"], found["attention_mask"], strict=True)
    texts = [made.tokenizer.decode(labels[mask == 1].tolist()) for labels, mask in pairs]
    assert texts[:8] == ["c" * 10 * number + "d<|im_end|>" for number in range(8)]
    inputs = [made.tokenizer.decode(row.tolist()) for row in found["input_ids"]]
    assert all("<|im_start|>user\n" in text for text in inputs)
    assert ["0 ab" in text for text in inputs[:1]] == [truncation == "keep_start"]
    assert "9 examples cut to max_sequence_length" in caplog.text


@pytest.mark.parametrize(
    "answer", ["{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>"]
)
def test_a_template_without_an_end_is_warned_of(
    folder: Path, answer: str, caplog: pytest.LogCaptureFixture
) -> None:
    template = f"{{% for m in messages %}}[{{{{ m.role }}}}]{answer}{{% endfor %}}"

    make(folder, task="chat", chat_template=template)

    assert "writes nothing after an answer" in caplog.text


def test_what_is_skipped_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(folder, **CHATML, max_sequence_length=100)

    assert "skipped: too long, the first" in caplog.text
    assert "To cut them, set truncation" in caplog.text


def test_a_saved_folder_has_the_rows_of_its_file(folder: Path) -> None:
    import datasets

    data = datasets.DatasetDict({"valid": datasets.Dataset.from_list(entries())})
    data.save_to_disk(str(folder / "saved"))

    found = batches_of(make(folder, path=str(folder / "saved"), split="valid"))

    assert torch.equal(found["labels"], batches_of(make(folder))["labels"])
    with pytest.raises(ConfigError, match=r"has no split 'train'.*valid"):
        make(folder, path=str(folder / "saved"))


def test_workers_load_the_same_batches(folder: Path) -> None:
    found = batches_of(make(folder, **CHATML, packing=True, num_workers=2))
    expected = batches_of(make(folder, **CHATML, packing=True))

    assert all(torch.equal(found[key], expected[key]) for key in expected)
