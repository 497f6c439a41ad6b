"""Messages and columns as data sets have them: parts, missing values, other roles and orders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data import processor_class
from tests.zoo.rows.toys import byte_tokenizer

pytestmark = pytest.mark.slow
datasets = pytest.importorskip("datasets", reason="needs datasets")

BOTH = pytest.mark.parametrize("streaming", [False, True])
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return byte_tokenizer(tmp_path_factory.mktemp("messages") / "bytes")


def make(folder: Path, tokenizer: str, rows: list[dict[str, Any]], **arguments: Any) -> Any:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return processor_class("HuggingFaceDataProcessor")(
        **{
            "path": str(path),
            "tokenizer": tokenizer,
            "max_sequence_length": 80,
            "batch_size": 1,
            "cache_dir": str(folder / "cache"),
            "shuffle": False,
            "drop_last": False,
            "chat_template": TEMPLATE,
            **arguments,
        }
    )


def texts_of(processor: Any, key: str = "input_ids") -> list[str]:
    """Return the text of each row, without its last token, which is only a label."""
    rows = [row for batch in processor.create_dataloader() for row in batch[key].tolist()]
    return [processor.tokenizer.decode(row).replace("<pad>", "") for row in rows]


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def chat(*messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": list(messages)}


USER, ANSWER = message("user", "a"), message("assistant", "b")


@BOTH
def test_texts_may_be_lists_of_parts(tmp_path: Path, tokenizer: str, streaming: bool) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    rows = [chat(message("user", parts), message("assistant", parts[:1]))]

    made = make(tmp_path, tokenizer, rows, task="chat", streaming=streaming)

    assert texts_of(made) == ["[user]xy<eos>[assistant]x"]


def test_messages_may_be_an_object_of_lists(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"messages": {"role": ["user", "assistant"], "content": ["a", "b"]}}]

    made = make(tmp_path, tokenizer, rows, task="chat")

    assert texts_of(made) == ["[user]a<eos>[assistant]b"]


@BOTH
def test_chats_are_used_in_any_order_and_those_without_text_are_skipped(
    tmp_path: Path, tokenizer: str, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        chat(USER, ANSWER),
        chat(USER, message("assistant", None)),
        chat(USER, USER, ANSWER),
        chat(ANSWER, USER, ANSWER),
        chat(USER, ANSWER, USER),
        chat(message("system", "s")),
        chat(),
        {"messages": None},
        chat(message("system", ""), USER, ANSWER),
        chat(USER),
    ]

    made = make(tmp_path, tokenizer, rows, task="chat", streaming=streaming)

    assert texts_of(made) == [
        "[user]a<eos>[assistant]b",
        "[user]a<eos>[user]a<eos>[assistant]b",
        "[assistant]b<eos>[user]a<eos>[assistant]b",
        "[user]a<eos>[assistant]b<eos>[user]a",
        "[user]a<eos>[assistant]b",
    ]
    assert learned(made)[2:4] == ["b<eos>b<eos>", "b<eos>"]
    assert "2 skipped: there are no messages" in caplog.text
    assert "2 skipped: no token counts in the loss" in caplog.text
    assert "1 skipped: empty, the first" in caplog.text


def learned(processor: Any) -> list[str]:
    """Return the text of each row that counts in the loss."""
    return [
        processor.tokenizer.decode(row[mask == 1].tolist())
        for batch in processor.create_dataloader()
        for row, mask in zip(batch["labels"], batch["attention_mask"], strict=True)
    ]


ALTERNATING = (
    "{% for m in messages %}{% if loop.index0 % 2 != (m.role == 'assistant') %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
)


@BOTH
def test_what_the_template_refuses_is_skipped(
    tmp_path: Path, tokenizer: str, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [chat(ANSWER, USER, ANSWER), chat(USER, ANSWER, USER), chat(USER, USER), *[CALLS] * 2]
    given = {"task": "chat", "chat_template": ALTERNATING, "streaming": streaming}

    made = make(tmp_path, tokenizer, rows, **given)

    assert texts_of(made) == ["[user]a<eos>[assistant]b<eos>[user]a"]
    assert "skipped: the chat template refuses the messages (Roles must alternate)" in caplog.text
    with pytest.raises(ConfigError, match=r"no row .* \(Roles must alternate\), the first"):
        [*make(tmp_path, tokenizer, rows[:1], **given).dataset]


TOOLS = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls %}({{ c.name }} {{ c.arguments | tojson }}){% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"name": "f", "arguments": {"x": 1}}],
}
CALLS = chat(USER, CALL, message("tool", "t"), ANSWER)


@BOTH
def test_calls_of_tools_and_reasoning_are_learned(
    tmp_path: Path, tokenizer: str, streaming: bool
) -> None:
    thinking = {**ANSWER, "reasoning_content": "so"}
    rows = [CALLS, chat(USER, thinking), chat(USER, ANSWER)]
    given = {"task": "chat", "chat_template": TOOLS, "streaming": streaming}

    made = make(tmp_path, tokenizer, rows, **given)

    assert texts_of(made) == [
        '[user]a<eos>[assistant](f {"x": 1})<eos>[tool]t<eos>[assistant]b',
        "[user]a<eos>[assistant]<so>b",
        "[user]a<eos>[assistant]b",
    ]
    assert learned(made) == ['(f {"x": 1})<eos>b<eos>', "<so>b<eos>", "b<eos>"]


def test_a_template_that_drops_earlier_reasoning_skips_the_chat(
    tmp_path: Path, tokenizer: str, caplog: pytest.LogCaptureFixture
) -> None:
    template = TOOLS.replace("m.reasoning_content %}", "m.reasoning_content and loop.last %}")
    thinking = {**ANSWER, "reasoning_content": "so"}
    rows = [chat(USER, thinking, USER, ANSWER), chat(USER, ANSWER, USER, thinking)]

    made = make(tmp_path, tokenizer, rows, task="chat", chat_template=template)

    assert learned(made) == ["b<eos><so>b<eos>"]
    assert "1 skipped: the chat template omits or changes a message" in caplog.text


@pytest.mark.parametrize("truncation", ["keep_start", "keep_end"])
def test_of_calls_of_tools_only_content_is_cut(
    tmp_path: Path, tokenizer: str, truncation: str
) -> None:
    long = chat(message("user", "u" * 90), CALL, message("tool", "t"), ANSWER)
    given = {"task": "chat", "chat_template": TOOLS, "truncation": truncation}

    made = make(tmp_path, tokenizer, [long], **given, max_sequence_length=60)

    [text] = texts_of(made)
    assert text.startswith("[user]uu")
    assert text.endswith('u<eos>[assistant](f {"x": 1})')
    assert learned(made) == ['(f {"x": 1})<eos>']


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "role": (chat(USER, ANSWER, message("critic", "x")), "the role 'critic'; known roles: system"),
    "image": (chat(message("user", [{"type": "image"}]), ANSWER), "part of the type 'image'"),
    "parts": (chat(message("user", ["a"]), ANSWER), "must be objects with 'type' and 'text'"),
    "content": (chat({"role": "user"}), "no 'content'; it has: role. Set .*message_content_key"),
    "call": (chat(USER, CALL | {"tool_calls": [{"function": "f"}]}), "omits or changes a message"),
    "calls": (chat(USER, CALL | {"tool_calls": '[{"name": "f"}]'}), "omits or changes a message"),
    "object": ({"messages": USER | {"name": None}}, "must have a list of messages, got dict"),
    "text": ({"messages": "a"}, "must have a list of messages, got str. Choose another column"),
}


@BOTH
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_row_can_be_made_of_is_skipped(
    tmp_path: Path, tokenizer: str, name: str, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    row, what = REFUSED[name]
    given = {"task": "chat", "streaming": streaming}
    with pytest.raises(ConfigError, match=f"no row .*{what}.*row 0"):
        [*make(tmp_path, tokenizer, [row], **given).dataset]
    if name not in ("object", "text"):  # a column of a table has one type
        made = make(tmp_path, tokenizer, [chat(USER, ANSWER), row], **given)
        assert texts_of(made) == ["[user]a<eos>[assistant]b"]
        assert "1 skipped: " in caplog.text


def test_other_keys_do_not_replace_the_named_ones(tmp_path: Path, tokenizer: str) -> None:
    names = {"message_role_key": "from", "message_content_key": "value"}
    call = {**CALL, "from": "gpt", "value": "b", "role": "model", "content": "c"}
    rows = [chat({"from": "human", "value": "a", "role": "x", "content": "y"}, call)]

    made = make(tmp_path, tokenizer, rows, task="chat", chat_template=TOOLS, **names)

    assert texts_of(made) == ['[user]a<eos>[assistant]b(f {"x": 1})']
    assert learned(made) == ['b(f {"x": 1})<eos>']


@BOTH
def test_missing_values_are_skipped(
    tmp_path: Path, tokenizer: str, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    data = {"text": ["ab", None, "", " ", "cd"], "number": [1.5, None, float("nan"), 2.5, 3.5]}
    datasets.Dataset.from_dict(data).to_parquet(str(tmp_path / "data.parquet"))
    given = {
        "path": str(tmp_path / "data.parquet"),
        "streaming": streaming,
        "chat_template": None,
    }

    assert texts_of(make(tmp_path, tokenizer, [], **given)) == ["ab", "cd"]
    assert "3 skipped: empty, the first" in caplog.text
    numbers = texts_of(make(tmp_path, tokenizer, [], **given, text_column="number"))
    assert numbers == ["1.5", "2.5", "3.5"]


def test_a_table_with_gaps_has_the_rows_that_are_whole(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "data.csv").write_text("prompt,response\na,b\n,c\nd,\n1,2\n")
    given = {"task": "instruction", "separator": ":", "chat_template": None}

    made = make(tmp_path, tokenizer, [], path=str(tmp_path / "data.csv"), **given)

    assert texts_of(made) == ["a:b", "1:2"]


PREFERENCES: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "messages": {"chosen": [USER, ANSWER], "rejected": [USER, message("assistant", "c")]},
    "a prompt of messages": {
        "prompt": [USER],
        "chosen": [ANSWER],
        "rejected": [message("assistant", "c")],
    },
    "messages before the answers replace the prompt": {
        "prompt": "other",
        "chosen": [USER, ANSWER],
        "rejected": [USER, message("assistant", "c")],
    },
    "parts": {
        "chosen": [USER, message("assistant", [{"type": "text", "text": "b"}])],
        "rejected": [USER, message("assistant", [{"type": "text", "text": "c"}])],
    },
}


@pytest.mark.parametrize("name", PREFERENCES)
def test_preferences_are_texts_or_messages(tmp_path: Path, tokenizer: str, name: str) -> None:
    made = make(tmp_path, tokenizer, [PREFERENCES[name]], task="preference")

    assert texts_of(made, "chosen_input_ids") == ["[user]a<eos>[assistant]b<eos>"]
    assert texts_of(made, "rejected_input_ids") == ["[user]a<eos>[assistant]c<eos>"]


def test_a_preference_may_end_a_long_chat(tmp_path: Path, tokenizer: str) -> None:
    before = [message("system", "s"), USER, ANSWER, message("user", "d")]
    row = {side: [*before, message("assistant", side)] for side in ("chosen", "rejected")}

    made = make(tmp_path, tokenizer, [row], task="preference")

    start = "[system]s<eos>[user]a<eos>[assistant]b<eos>[user]d<eos>[assistant]"
    assert texts_of(made, "chosen_input_ids") == [f"{start}chosen<eos>"]
    assert texts_of(made, "rejected_labels") == ["rejected<eos>"]


def test_preferences_without_text_are_skipped(tmp_path: Path, tokenizer: str) -> None:
    silent = {"prompt": "a", "chosen": [message("assistant", None)], "rejected": [ANSWER]}
    whole = {"prompt": "a", "chosen": [message("assistant", "x")], "rejected": [ANSWER]}

    made = make(tmp_path, tokenizer, [silent, whole], task="preference")

    assert texts_of(made, "chosen_input_ids") == ["[user]a<eos>[assistant]x<eos>"]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"chosen": [USER, ANSWER], "rejected": [ANSWER]}, "begin with different messages"),
        ({"chosen": [USER], "rejected": [USER]}, "end with a message of the assistant, got user"),
        ({"chosen": [], "rejected": [ANSWER]}, "end with a message .* got no message"),
        ({"chosen": [ANSWER], "rejected": [ANSWER]}, "there is no prompt.*Set prompt_column"),
        ({"chosen": 1, "rejected": 2}, "'chosen' must have a list of messages, got int"),
    ],
)
def test_a_preference_without_its_parts_is_refused(
    tmp_path: Path, tokenizer: str, row: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"no row .*{words}.*row 0"):
        make(tmp_path, tokenizer, [row], task="preference")
