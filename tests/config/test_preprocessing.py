"""The settings of a preprocessing file."""

from __future__ import annotations

import pytest

from modelzoo_trainer.config.preprocessing import parse_settings
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.sections import PreprocessingSettings

SMALLEST = "setup: {mode: pretraining}\n"


def parse(text: str) -> tuple[PreprocessingSettings, list[str]]:
    return parse_settings(text, "data.yaml")


def test_defaults_hold_where_nothing_is_given() -> None:
    settings, notes = parse(SMALLEST)
    assert settings.processing.max_seq_length == 2048
    assert settings.processing.use_ftfy
    assert settings.dataset.pack_sequences
    assert notes == []


def test_a_null_value_is_not_set() -> None:
    settings, _ = parse(SMALLEST + "processing: {max_seq_length: null}\n")
    assert settings.processing.max_seq_length == 2048


def test_an_unknown_key_is_reported_as_unused() -> None:
    _, notes = parse(SMALLEST + "processing: {tokenizer_type: x, max_seq_len: 8}\n")
    assert [("unused" in note, "data.yaml:2" in note) for note in notes] == [(True, True)] * 2
    assert "'max_seq_length'" in notes[1]


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("setup: {mode: pretraining, max_seq_length: 8}", ("max_seq_length", "processing")),
        ("setup: {mode: pretraining}\nprocessing: {use_vsl: true}", ("use_vsl", "dataset")),
        ("processing: {seed: 1}", ("setup", "missing")),
        ("setup: {processes: 2}", ("setup.mode", "missing")),
        ("setup: {mode: pretrain}", ("setup.mode", "'pretraining'")),
        ("setup: {mode: embedding_training}", ("setup.mode", "embedding_training")),
        ("setup: {mode: pretraining, slurm: {nodes: 2}}", ("setup.slurm", "processes")),
        ("setup: {mode: pretraining, num_nodes: 4}", ("num_nodes", "4")),
        ("setup: {mode: pretraining, image_dir: x}", ("image_dir", "images")),
        ("setup: {mode: pretraining}\ndataset: {is_multimodal: true}", ("is_multimodal", "images")),
        ("setup: {mode: pretraining}\nprocessing: {max_seq_length: 0}", ("max_seq_length", "0")),
        ("setup: {mode: pretraining}\nprocesing: {}", ("procesing", "'processing'")),
        ("setup: 3", ("setup", "mapping")),
        ("[1, 2]", ("setup", "processing")),
    ],
)
def test_an_invalid_file_is_refused(text: str, facts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert [fact for fact in facts if fact not in str(refused.value)] == []


def test_keys_that_a_mode_does_not_read_are_listed() -> None:
    text = "processing: {seed: 1, max_seq_length: 8}\ndataset: {fim_rate: 0.5, use_vsl: true}\n"
    settings, _ = parse(SMALLEST + text)
    unused = [*settings.not_used(frozenset({"use_vsl"}))]
    assert unused == ["dataset.fim_rate", "processing.seed"]


def test_keys_that_are_off_are_not_listed() -> None:
    text = "dataset: {use_vsl: false, fim_rate: null, pack_sequences: false, mlm_fraction: 0.15}\n"
    settings, _ = parse(SMALLEST + text)
    unused = [*settings.not_used(frozenset())]
    assert unused == ["dataset.pack_sequences", "dataset.mlm_fraction"]
