"""Splits of the data and sequence lengths."""

from __future__ import annotations

from collections import Counter

import pytest

from modelzoo_trainer.config.preprocessing import parse_settings
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.interface import Document
from modelzoo_trainer.zoo.rows.preprocessing.streams import Streams

SPLITS = "data_splits: {train: {split_fraction: 0.7}, val: {split_fraction: 0.2}, test: {%s}}"


def streams_of(setup: str) -> Streams:
    return Streams(parse_settings(f"setup: {{mode: pretraining, {setup}}}")[0])


def test_without_splits_there_is_one_stream() -> None:
    streams = streams_of("")
    assert [(one.folder, one.length) for one in streams.all] == [("", 2048)]
    assert streams.index(Document("a", 0, [])) == 0


def test_documents_are_split_by_their_names_in_the_given_shares() -> None:
    streams = streams_of(SPLITS % "split_fraction: 0.1")
    counts = Counter(streams.index(Document("a.jsonl", number, [])) for number in range(4000))
    assert [round(counts[index] / 4000, 1) for index in range(3)] == [0.7, 0.2, 0.1]
    assert [one.folder for one in streams.all] == ["train", "val", "test"]


def test_lengths_have_their_own_shares_in_each_split() -> None:
    inner = "split_fraction: 0.1, context_splits: {MSL_List: [1K, 64], split_fractions: [0.5, 0.5]}"
    streams = streams_of(SPLITS % inner)
    last = [(one.folder, one.length) for one in streams.all][2:]
    assert last == [("test/msl_1K", 1024), ("test/msl_64", 64)]
    documents = [Document("a.jsonl", number, []) for number in range(8000)]
    counts = Counter(map(streams.index, documents))
    assert [round(counts[index] / 8000, 2) for index in (2, 3)] == [0.05, 0.05]


def test_lengths_may_be_parts_of_thousands_as_long_as_they_are_whole_tokens() -> None:
    contexts = "context_splits: {MSL_List: [0.5K, 1.25k, 2K, 3], split_fractions: [1, 0, 0, 0]}"
    found = [(one.folder, one.length) for one in streams_of(contexts).all]
    assert found == [("msl_0.5K", 512), ("msl_1.25k", 1280), ("msl_2K", 2048), ("msl_3", 3)]


def test_shares_are_exact_decimals() -> None:
    fractions = ", ".join(f"s{n}: {{split_fraction: 0.1}}" for n in range(10))
    assert len(streams_of(f"data_splits: {{{fractions}}}").all) == 10


@pytest.mark.parametrize(
    ("setup", "fact"),
    [
        ("data_splits: {a: {split_fraction: 0.5}}", "sum to 1, got 0.5"),
        ("data_splits: {a: {fraction: 1}}", "split_fraction: missing"),
        ("data_splits: {a: {split_fraction: 1, size: 2}}", "size"),
        ("data_splits: {../a: {split_fraction: 1}}", "'../a'"),
        ("data_splits: {a: {split_fraction: -1}}", "-1"),
        ("data_splits: {a: {split_fraction: all}}", "'all'"),
        ("data_splits: {a: {split_fraction: 1/0}}", "'1/0'"),
        ("context_splits: {MSL_List: 8, split_fractions: [1]}", "MSL_List: expected a list"),
        ("context_splits: {MSL_List: [8], split_fractions: 1}", "split_fractions: expected a list"),
        ("context_splits: {MSL_List: [8], split_fractions: [1], x: 1}", "MSL_List"),
        ("context_splits: {MSL_List: [8, 8], split_fractions: [0.5, 0.5]}", "different"),
        ("context_splits: {MSL_List: [8k, 4], split_fractions: [0.5]}", "one fraction"),
        ("context_splits: {MSL_List: [0], split_fractions: [1]}", "0"),
        ("context_splits: {MSL_List: [0.3K], split_fractions: [1]}", "0.3K"),
        ("context_splits: {MSL_List: [8.5], split_fractions: [1]}", "8.5"),
        ("context_splits: {MSL_List: [-1K], split_fractions: [1]}", "-1K"),
        ("context_splits: {MSL_List: [true], split_fractions: [1]}", "True"),
        ("context_splits: {MSL_List: [8], split_fractions: [0.9]}", "0.9"),
    ],
)
def test_invalid_splits_are_refused(setup: str, fact: str) -> None:
    with pytest.raises(ConfigError) as refused:
        streams_of(setup)
    assert fact in str(refused.value)
