"""Datasets of torchtune, as arguments of `HuggingFaceDataProcessor`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from modelzoo_trainer.tools.foreign_configs.findings import FindingKind
from modelzoo_trainer.tools.foreign_configs.section import Section

_DEFAULT_LENGTH: Final = 2048
_MESSAGE_KEYS: Final = {
    "openai": {},
    "sharegpt": {"message_role_key": "from", "message_content_key": "value"},
}
_QUESTION: Final = "the words Question: and Answer: are not around prompts; put them there."
_ALPACA: Final = (
    "the column input and the text of the Alpaca template are not in prompts. Save the dataset "
    "with a column that has the whole prompt, and name it in prompt_column."
)


@dataclass(frozen=True, slots=True)
class _Dataset:
    """A dataset builder of torchtune.

    Attributes:
        task: Of the data processor.
        source: Its dataset of the Hub; None = the file names it.
        columns: Names of columns, by the key of the data processor.
        note: A difference; "" = none.
        trains_on_input: Whether prompts count by default.
    """

    task: str
    source: str | None = None
    columns: dict[str, str] = field(default_factory=dict)
    note: str = ""
    trains_on_input: bool = False


def _instruction(source: str | None, prompt: str, response: str, **more: Any) -> _Dataset:
    columns = {"prompt_column": prompt, "response_column": response}
    return _Dataset("instruction", source, columns, **more)


def _alpaca(source: str) -> _Dataset:
    return _instruction(source, "instruction", "output", note=_ALPACA, trains_on_input=True)


_DATASETS: Final = {
    "alpaca_dataset": _alpaca("tatsu-lab/alpaca"),
    "alpaca_cleaned_dataset": _alpaca("yahma/alpaca-cleaned"),
    "grammar_dataset": _instruction(
        "liweili/c4_200m", "input", "output", note="the words around prompts are not added."
    ),
    "samsum_dataset": _instruction(
        "Samsung/samsum", "dialogue", "summary", note="the words around prompts are not added."
    ),
    "instruct_dataset": _instruction(None, "input", "output"),
    "chat_dataset": _Dataset("chat", None, {"messages_column": "conversations"}),
    "slimorca_dataset": _Dataset(
        "chat", "Open-Orca/SlimOrca-Dedup", {"messages_column": "conversations"}
    ),
    "text_completion_dataset": _Dataset("text", None, {"text_column": "text"}),
    "cnn_dailymail_articles_dataset": _Dataset(
        "text", "ccdv/cnn_dailymail", {"text_column": "article"}
    ),
    "wikitext_dataset": _Dataset(
        "text", "EleutherAI/wikitext_document_level", {"text_column": "page"}
    ),
    "preference_dataset": _Dataset("preference"),
    "hh_rlhf_helpful_dataset": _Dataset("preference", "RLHFlow/HH-RLHF-Helpful-standard"),
    "stack_exchange_paired_dataset": _Dataset(
        "preference",
        "lvwerra/stack-exchange-paired",
        {
            "prompt_column": "question",
            "chosen_column": "response_j",
            "rejected_column": "response_k",
        },
        note=_QUESTION,
    ),
}
_COLUMN_KEYS: Final = {
    "instruction": {"input": "prompt_column", "output": "response_column"},
    "preference": {
        "prompt": "prompt_column",
        "chosen": "chosen_column",
        "rejected": "rejected_column",
    },
}


def convert_dataset(root: Section, key: str, folder: str) -> dict[str, Any]:
    """Return the arguments of a dataloader, without the batch size.

    Args:
        root: The file.
        key: Of the dataset in the file.
        folder: Of the tokenizer.
    """
    sections = root.each(key, "data")
    if len(sections) > 1:
        why = "several datasets are not mixed; the first is used. Save them as one."
        root.note(FindingKind.ABSENT, key, why)
        for other in sections[1:]:
            other.rest()
    section = sections[0]
    builder = str(section.text("_component_")).rpartition(".")[2]
    known = _DATASETS.get(builder)
    if known is None:
        root.findings.mistake(
            f"{section.where('_component_')}: {builder!r} has no counterpart; "
            f"{', '.join(_DATASETS)} have. Save the dataset, and use one of them."
        )
        return {}
    loader: dict[str, Any] = {"data_processor": "HuggingFaceDataProcessor", "task": known.task}
    loader |= _source(section, known)
    loader |= _columns(section, known)
    if known.task == "instruction":
        loader["chat_template"] = "tokenizer"
    loader["tokenizer"] = folder
    loader["max_sequence_length"] = _length(root, section)
    if section.flag("packed", False):
        loader["packing"] = True
    _note_differences(section, known)
    return loader


def _source(section: Section, known: _Dataset) -> dict[str, Any]:
    path = section.text("source", known.source)
    if path is None:
        section.findings.mistake(f"{section.where('source')}: is missing; the dataset to load.")
    source: dict[str, Any] = {"path": path}
    for key in ("name", "data_dir", "data_files", "split", "revision"):
        value = section.take(key)
        if value is not None:
            source[key] = value
    subset = section.text("subset")
    return source | ({"name": subset} if subset else {})


def _columns(section: Section, known: _Dataset) -> dict[str, str]:
    columns = dict(known.columns)
    if known.task == "text":
        column = section.text("column")
        return columns | ({"text_column": column} if column else {})
    if known.task == "chat":
        column = section.text("conversation_column")
        style = str(section.text("conversation_style", "sharegpt"))
        if style not in _MESSAGE_KEYS:
            section.findings.mistake(
                f"{section.where('conversation_style')}: {style!r} is unknown; it is one of "
                f"{', '.join(_MESSAGE_KEYS)}."
            )
        keys = _MESSAGE_KEYS.get(style, {})
        return columns | ({"messages_column": column} if column else {}) | keys
    names = _COLUMN_KEYS[known.task]
    for theirs, column in (section.take("column_map", {}) or {}).items():
        if theirs in names:
            columns[names[theirs]] = column
        elif known.note != _ALPACA or theirs not in ("instruction", "input"):
            why = f"no column of the data processor is named {theirs}."
            section.note(FindingKind.ABSENT, "column_map", why)
        elif theirs == "instruction":
            columns["prompt_column"] = column
    return columns


def _length(root: Section, section: Section) -> int:
    given = section.integer("max_seq_len") or root.inside("tokenizer").integer("max_seq_len")
    if given is None:
        why = f"rows have a maximum length here: {_DEFAULT_LENGTH}. Set max_sequence_length."
        root.inside("tokenizer").note(FindingKind.DIFFERENT, "max_seq_len", why)
    return int(given or _DEFAULT_LENGTH)


def _note_differences(section: Section, known: _Dataset) -> None:
    if known.note:
        section.differs("_component_", known.note)
    if known.task in ("chat", "instruction"):
        why = "longer rows are skipped; there their ends are cut. Set truncation."
        section.findings.add(FindingKind.DIFFERENT, section.path, ..., why)
    if known.trains_on_input and section.take("train_on_input", True):
        why = "only answers count; there prompts count too. To train on all, use task: text."
        section.differs("train_on_input", why)
