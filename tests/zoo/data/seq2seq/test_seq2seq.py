"""Inputs and outputs of encoder-decoder models from text files."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from modelzoo_trainer import Callback, register_global_callback
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data import stream_processor
from modelzoo_trainer.zoo.data.seq2seq import text_lines
from modelzoo_trainer.zoo.data.seq2seq.processors import (
    T5DynamicDataProcessor,
    TransformerDynamicDataProcessor,
)
from modelzoo_trainer.zoo.data.seq2seq.spans import SHORTEST, corrupt, counts_of, longest_text

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
PAD, START, END, UNKNOWN = range(4)
WORDS = [f"w{number}" for number in range(60)]
EXTRA = 6
SIZE = len(SPECIAL) + len(WORDS) + EXTRA
INPUT, OUTPUT = 30, 8  # made of 32 tokens, 5 of them replaced, in 2 spans


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    monkeypatch.setattr(stream_processor, "_SAID", set())


@pytest.fixture
def vocabulary(tmp_path: Path) -> str:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(SPECIAL + WORDS) + "\n")
    return str(path)


def words(*numbers: int) -> str:
    return " ".join(f"w{number % 60}" for number in numbers)


@pytest.fixture
def documents(tmp_path: Path) -> str:
    """Documents of 70, 1, 32, 0 and 33 tokens, in two files."""
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / "a.txt").write_text(f"{words(*range(70))}\nw1\n{words(*range(32))}\n")
    (folder / "b.txt").write_text(f"\n{words(*range(20, 53))}\n")
    (folder / "meta.dat").write_text("a.txt 3\nb.txt 2\n")
    return str(folder)


def spans(vocabulary: str, documents: str, **changes: Any) -> T5DynamicDataProcessor:
    given: dict[str, Any] = {
        "src_vocab_file": vocabulary,
        "src_data_dir": documents,
        "batch_size": 2,
        "src_max_sequence_length": INPUT,
        "tgt_max_sequence_length": OUTPUT,
        "extra_ids": EXTRA,
        "shuffle": False,
    }
    return T5DynamicDataProcessor(**{**given, **changes})


def rows_of(dataset: Any, epoch: int = 0) -> list[tuple[list[int], list[int]]]:
    """Return inputs and labels of all samples, without padding."""
    dataset.set_epoch(epoch)
    batch = dataset.__getitems__(list(range(len(dataset))))
    return [
        (source[seen != 0].tolist(), labels[counted != 0].tolist())
        for source, seen, labels, counted in zip(
            batch["input_ids"],
            batch["attention_mask"],
            batch["labels"],
            batch["decoder_attention_mask"],
            strict=True,
        )
    ]


def restored(source: list[int], labels: list[int]) -> list[int]:
    """Put the spans of the labels back into the input."""
    found: dict[int, list[int]] = {}
    for one in labels[:-1]:
        if one >= SIZE - EXTRA:
            found[one] = []
        else:
            found[list(found)[-1]].append(one)
    text = []
    for one in source:
        text += found.get(one, [one])
    return text


# ---- spans


@pytest.mark.parametrize(
    ("input_length", "length", "outputs"),
    [(128, 141, 29), (256, 283, 57), (512, 568, 114), (1024, 1136, 228), (2048, 2274, 456)],
)
def test_the_lengths_are_those_of_t5(input_length: int, length: int, outputs: int) -> None:
    assert longest_text(input_length) == length
    assert sum(counts_of(length)) + 1 == outputs


@pytest.mark.parametrize("input_length", [3, 4, 5, 100, 10**12])
def test_the_longest_text_is_the_shortest_that_fills_an_input(input_length: int) -> None:
    def filled(length: int) -> int:
        replaced, spans = counts_of(length)
        return length - replaced + spans + 1

    length = longest_text(input_length)
    assert filled(length) >= input_length
    assert length == SHORTEST or filled(length - 1) < input_length


@pytest.mark.parametrize("length", [2, 3, 5, 7, 20, 141, 568])
def test_spans_and_text_alternate_and_make_up_the_whole(length: int) -> None:
    tokens = np.arange(length, dtype=np.int32)
    source, target = corrupt(tokens, 9999, torch.Generator().manual_seed(length))
    replaced, num = counts_of(length)
    sentinels = list(range(9999, 9999 - num, -1))
    assert [one for one in source if one > 9000] == sentinels
    assert [one for one in target if one > 9000] == sentinels
    assert (len(source), len(target)) == (length - replaced + num, replaced + num)
    assert source[0] == 0
    assert source[-1] == sentinels[-1]
    assert target[0] == 9999
    assert not set(np.diff(np.flatnonzero(source > 9000))) & {1}  # text between two spans
    assert sorted([*source[source < 9000], *target[target < 9000]]) == list(range(length))


def test_every_division_into_spans_is_equally_likely() -> None:
    found = Counter()
    for seed in range(600):
        source, _ = corrupt(np.arange(34, dtype=np.int32), 99, torch.Generator().manual_seed(seed))
        found[int(np.flatnonzero(source > 90)[0])] += 1
    assert counts_of(34) == (5, 2)
    assert sorted(found) == list(range(1, 29))
    assert max(found.values()) < 50


# ---- documents


def test_samples_are_the_pieces_of_the_documents(vocabulary: str, documents: str) -> None:
    dataset = spans(vocabulary, documents).dataset
    assert len(dataset) == 3 + 0 + 1 + 0 + 1  # a piece of one token has no span
    texts = [restored(*row) for row in rows_of(dataset)]
    ids = [number % 60 + 4 for number in range(70)]
    assert texts == [ids[:32], ids[32:64], ids[64:], ids[:32], ids[20:52]]
    for source, labels in rows_of(dataset):
        assert labels[-1] == END
        assert source[-1] >= SIZE - EXTRA


def test_a_batch_is_padded_and_moved_right(vocabulary: str, documents: str) -> None:
    loader = spans(vocabulary, documents, dynamic_loss_weight=True).create_dataloader()
    assert loader.is_global_batch
    batch = next(iter(loader))
    shapes = {key: (tuple(one.shape), one.dtype) for key, one in batch.items()}
    assert shapes == {
        "input_ids": ((2, INPUT), torch.int32),
        "attention_mask": ((2, INPUT), torch.int32),
        "decoder_input_ids": ((2, OUTPUT), torch.int32),
        "decoder_attention_mask": ((2, OUTPUT), torch.int32),
        "labels": ((2, OUTPUT), torch.int32),
        "decoder_input_length": ((2, 1), torch.int64),
        "loss_weight": ((2, 1), torch.float32),
    }
    num = batch["decoder_attention_mask"].sum(1, keepdim=True)
    assert torch.equal(batch["decoder_input_length"], num)
    torch.testing.assert_close(batch["loss_weight"], 1 / num)
    assert (batch["decoder_input_ids"][:, 0] == START).all()
    for row in range(2):
        length = int(num[row])
        assert torch.equal(
            batch["decoder_input_ids"][row, 1:length], batch["labels"][row, : length - 1]
        )
        assert batch["labels"][row, length - 1] == END
        assert (batch["labels"][row, length:] == PAD).all()
        assert (batch["decoder_input_ids"][row, length:] == PAD).all()


def test_spans_depend_on_seed_epoch_and_sample_alone(vocabulary: str, documents: str) -> None:
    dataset = spans(vocabulary, documents, shuffle_seed=3).dataset
    first = rows_of(dataset)
    assert rows_of(dataset, epoch=1) != first
    assert rows_of(pickle.loads(pickle.dumps(dataset))) == first
    dataset.set_epoch(0)
    alone = dataset.__getitems__([2])["input_ids"][0]
    whole = dataset.__getitems__([0, 1, 2])["input_ids"][2]
    assert torch.equal(alone, whole)
    assert torch.equal(dataset[2]["input_ids"], whole)
    assert rows_of(spans(vocabulary, documents, shuffle_seed=4).dataset) != first
    with pytest.raises(IndexError):
        dataset[5]


def test_packed_documents_are_joined_and_none_is_lost(vocabulary: str, documents: str) -> None:
    dataset = spans(
        vocabulary, documents, pack_sequences=True, num_documents_to_concatenate=2
    ).dataset
    texts = [restored(*row) for row in rows_of(dataset)]
    ids = [number % 60 + 4 for number in range(70)]
    joined = [*ids, 5]  # the documents 1 and 2; then 3 and 4; then 5 alone
    assert texts == [joined[:32], joined[32:64], joined[64:], ids[:32], ids[20:52]]


@pytest.mark.parametrize("mark", [1, 3, 32, 33, 70])
def test_of_a_long_document_only_a_part_is_read(
    vocabulary: str, documents: str, mark: int, monkeypatch
) -> None:
    text = "\u2003w1\u00a0 w\u00e9 w2 " + words(*range(67)).replace(" w5", "\x1c\u3000w5") + " W3\n"
    (Path(documents) / "a.txt").write_text(f"{text}w1\n{words(*range(32))}\n")
    packed = {"pack_sequences": True, "num_documents_to_concatenate": 2}
    for changes in ({}, {"do_lower": True}, packed):
        monkeypatch.setattr(text_lines, "_INDEXED", {})
        monkeypatch.setattr(text_lines, "_MARK", 10**6)
        expected = rows_of(spans(vocabulary, documents, **changes).dataset)
        monkeypatch.setattr(text_lines, "_INDEXED", {})
        monkeypatch.setattr(text_lines, "_MARK", mark)
        dataset = spans(vocabulary, documents, **changes).dataset
        assert rows_of(dataset) == expected
    lines = dataset.lines[0]
    for first, last in ((0, 1), (35, 40), (70, 71)):
        part, skipped = lines.read_pieces(0, first, last)
        assert part.split()[skipped : skipped + last - first] == text.split()[first:last]
        assert len(part.split()) < last - first + 2 * mark


def test_other_pieces_are_unknown_and_case_counts_unless_lowered(
    vocabulary: str, tmp_path: Path
) -> None:
    folder = tmp_path / "few"
    folder.mkdir()
    (folder / "a.txt").write_text("W1 w2 nothing w3\n")
    (folder / "meta.dat").write_text("a.txt 1\n")
    rows = rows_of(spans(vocabulary, str(folder)).dataset)
    assert restored(*rows[0]) == [UNKNOWN, 6, UNKNOWN, 7]
    rows = rows_of(spans(vocabulary, str(folder), do_lower=True, sos_token="<S>").dataset)
    assert restored(*rows[0]) == [5, 6, UNKNOWN, 7]


def test_padding_ids_are_numbers_digits_or_tokens(vocabulary: str, documents: str) -> None:
    given = {"labels_pad_id": -100, "input_pad_id": "w0"}
    batch = spans(vocabulary, documents, **given).dataset.__getitems__([2])
    assert batch["labels"][0, -1] == -100
    assert batch["input_ids"][0, -1] == batch["decoder_input_ids"][0, -1] == 4
    batch = spans(vocabulary, documents, input_pad_id="7").dataset.__getitems__([2])
    assert batch["input_ids"][0, -1] == 7
    with pytest.raises(ConfigError, match=f"input_pad_id is 99.*0 to {SIZE - 1}"):
        spans(vocabulary, documents, input_pad_id=99)


# ---- pairs


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    folder = tmp_path / "pairs"
    folder.mkdir()
    sources = [words(1, 2), "", words(*range(30)), words(*range(29)), words(3)]
    targets = [words(5), words(6), words(7), words(8, 9), words(*range(8))]
    (folder / "a.src").write_text("".join(f"{one}\n" for one in sources))
    (folder / "a.tgt").write_text("".join(f"{one}\n" for one in targets))
    (folder / "meta.dat").write_text("a.src a.tgt 5\n")
    return str(folder)


def translation(vocabulary: str, pairs: str, **changes: Any) -> TransformerDynamicDataProcessor:
    given: dict[str, Any] = {
        "src_vocab_file": vocabulary,
        "src_data_dir": pairs,
        "batch_size": 2,
        "src_max_sequence_length": INPUT,
        "tgt_max_sequence_length": OUTPUT,
        "shuffle": False,
    }
    return TransformerDynamicDataProcessor(**{**given, **changes})


def test_pairs_that_are_empty_or_too_long_are_left_out(vocabulary, pairs, caplog) -> None:
    caplog.set_level(logging.INFO, "modelzoo_trainer.data")
    dataset = translation(vocabulary, pairs).dataset
    long = [number + 4 for number in range(29)]
    assert rows_of(dataset) == [([5, 6], [9, END]), (long, [12, 13, END])]
    (message,) = caplog.messages
    assert "3 of 5 pairs" in message


def test_files_of_pairs_have_as_many_lines(vocabulary: str, pairs: str) -> None:
    (Path(pairs) / "a.tgt").write_text("w1\n")
    with pytest.raises(ConfigError, match=r"meta.dat:1: .*a\.src has 5 lines, but .*a\.tgt has 1"):
        translation(vocabulary, pairs)


def test_no_pair_that_fits_is_an_error(vocabulary: str, pairs: str) -> None:
    with pytest.raises(ConfigError, match=r"all 5 pairs .*src_max_sequence_length \(2\)"):
        translation(vocabulary, pairs, src_max_sequence_length=2)


# ---- what is said and refused


@pytest.mark.parametrize(
    "given",
    [
        {"shuffle_buffer": 9},
        {"buckets": [4]},
        {"vocab_size": 9},
        {"tgt_vocab_file": "f"},
        {"num_documents_to_concatenate": 9},
    ],
)
def test_an_argument_without_effect_is_said_once(vocabulary, documents, given, caplog) -> None:
    caplog.set_level(logging.INFO, "modelzoo_trainer.data")
    for _ in range(2):
        spans(vocabulary, documents, **given)
    (message,) = caplog.messages
    assert f"T5DynamicDataProcessor.{next(iter(given))} has no effect" in message


def test_packing_of_pairs_has_no_effect(vocabulary: str, pairs: str, caplog) -> None:
    caplog.set_level(logging.INFO, "modelzoo_trainer.data")
    translation(vocabulary, pairs, pack_sequences=True)
    assert any("pack_sequences has no effect" in one for one in caplog.messages)


def test_another_number_of_lines_than_stated_is_reported(vocabulary, documents, caplog) -> None:
    (Path(documents) / "meta.dat").write_text("a.txt 3\nb.txt 7\n")
    for _ in range(2):
        spans(vocabulary, documents)
    (message,) = caplog.messages
    assert "meta.dat:2" in message
    assert "2 lines, not 7" in message


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"tgt_max_sequence_length": 7}, ["tgt_max_sequence_length is 7", "8"]),
        ({"extra_ids": 0}, ["extra_ids is 0", "2 spans"]),
        ({"src_max_sequence_length": 2}, ["src_max_sequence_length is 2", "3"]),
        ({"sos_token": "<bos>"}, ["sos_token", "'<bos>'"]),
        ({"src_vocab_file": "none.txt"}, ["src_vocab_file", "none.txt"]),
        ({"src_data_dir": "none"}, ["src_data_dir", "meta.dat"]),
        ({"src_data_dir": []}, ["src_data_dir"]),
        ({"batch_size": 0}, ["batch_size"]),
    ],
)
def test_arguments_that_do_not_fit_are_refused(vocabulary, documents, changes, facts) -> None:
    with pytest.raises(ConfigError) as caught:
        spans(vocabulary, documents, **changes)
    assert all(fact in str(caught.value) for fact in facts)


@pytest.mark.parametrize(
    ("text", "fact"), [("a.txt\n", "meta.dat:1"), ("a.txt many\n", "meta.dat:1"), ("\n", "no file")]
)
def test_a_list_of_files_in_another_form_is_refused(vocabulary, documents, text, fact) -> None:
    (Path(documents) / "meta.dat").write_text(text)
    with pytest.raises(ConfigError, match=fact):
        spans(vocabulary, documents)


def test_text_that_is_not_utf8_is_refused_with_its_line(vocabulary: str, documents: str) -> None:
    (Path(documents) / "a.txt").write_bytes(b"w1 w2\n\xff\n")
    with pytest.raises(ConfigError, match=r"a\.txt:2: not UTF-8"):
        spans(vocabulary, documents)


def test_a_vocabulary_with_a_piece_twice_is_refused(vocabulary: str, documents: str) -> None:
    Path(vocabulary).write_text("\n".join([*SPECIAL, "w1", "w2", "w1"]))
    with pytest.raises(ConfigError, match="lines 5 and 7 are both 'w1'"):
        spans(vocabulary, documents)


@pytest.mark.parametrize("text", ["w1\n", "\n", ""])
def test_documents_without_two_tokens_are_an_error(vocabulary, documents, text) -> None:
    (Path(documents) / "a.txt").write_text(text)
    (Path(documents) / "meta.dat").write_text("a.txt 1\n")
    with pytest.raises(ConfigError, match="no document"):
        spans(vocabulary, documents)


def test_a_file_that_changes_in_a_run_is_an_error(vocabulary: str, documents: str) -> None:
    dataset = spans(vocabulary, documents).dataset
    before = dataset.fingerprint
    (Path(documents) / "b.txt").write_text("w1 w2 w3 w4\n")
    with pytest.raises(ConfigError, match=r"b\.txt has changed"):
        dataset.set_epoch(1)
    (Path(documents) / "meta.dat").write_text("a.txt 3\nb.txt 1\n")
    assert spans(vocabulary, documents).dataset.fingerprint != before


def test_a_file_that_changes_in_an_epoch_is_an_error(vocabulary: str, documents: str) -> None:
    dataset = spans(vocabulary, documents).dataset
    (Path(documents) / "a.txt").write_text("w1 w2 w3 w4\n")
    with pytest.raises(ConfigError, match=r"a\.txt has changed"):
        dataset.__getitems__([0])


def test_another_order_of_the_vocabulary_is_other_data(vocabulary: str, documents: str) -> None:
    before = spans(vocabulary, documents).dataset.fingerprint
    assert spans(vocabulary, documents).dataset.fingerprint == before
    Path(vocabulary).write_text("\n".join(SPECIAL + WORDS[::-1]) + "\n")
    assert spans(vocabulary, documents).dataset.fingerprint != before


def test_what_decides_the_samples_is_in_the_fingerprint(vocabulary: str, documents: str) -> None:
    before = spans(vocabulary, documents).dataset.fingerprint
    for changes in ({"do_lower": True}, {"oov_token": "w1"}, {"pack_sequences": True}):
        assert spans(vocabulary, documents, **changes).dataset.fingerprint != before


def test_another_split_of_a_text_is_other_data(vocabulary: str, documents: str) -> None:
    before = spans(vocabulary, documents).dataset.fingerprint
    (Path(documents) / "b.txt").write_text(f"{words(*range(20, 53))}\n\n")  # as many bytes, lines
    assert spans(vocabulary, documents).dataset.fingerprint != before


@pytest.mark.parametrize("number", [0, 1])
def test_text_that_the_vocabulary_lacks_is_reported(vocabulary, pairs, number, caplog) -> None:
    path = Path(pairs) / ("a.src", "a.tgt")[number]
    path.write_text("The quick w1\n" * 5)
    for _ in range(2):
        translation(vocabulary, pairs)
    (message,) = [one for one in caplog.messages if "not in the vocabulary" in one]
    facts = [str(path), "10 of its first 15", vocabulary, "'The'"]
    assert all(fact in message for fact in facts)


def test_text_of_which_half_is_unknown_is_not_reported(vocabulary, pairs, caplog) -> None:
    (Path(pairs) / "a.src").write_text("The w1\n" * 5)
    translation(vocabulary, pairs)
    assert not any("not in the vocabulary" in one for one in caplog.messages)


def test_a_byte_order_mark_is_no_part_of_the_vocabulary(vocabulary: str, documents: str) -> None:
    expected = rows_of(spans(vocabulary, documents).dataset)
    Path(vocabulary).write_bytes(b"\xef\xbb\xbf" + Path(vocabulary).read_bytes())
    assert rows_of(spans(vocabulary, documents).dataset) == expected


def test_two_files_that_a_name_may_mean_are_reported(
    vocabulary, pairs, tmp_path, caplog, monkeypatch
) -> None:
    monkeypatch.chdir(pairs)
    translation(vocabulary, pairs)
    assert not any("working directory" in one for one in caplog.messages)
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.src").write_text("w1 w2\n" * 5)
    monkeypatch.chdir(other)
    translation(vocabulary, pairs)
    found = translation(vocabulary, pairs)
    (message,) = [one for one in caplog.messages if "working directory" in one]
    assert message.startswith("a.src ")
    assert pairs in message
    assert rows_of(found.dataset)[0][0] == [5, 6]


def test_a_vocabulary_that_the_model_lacks_is_refused(vocabulary: str, documents: str) -> None:
    dataset = spans(vocabulary, documents).dataset
    dataset.check_model(SIZE, None)
    with pytest.raises(ConfigError, match=f"{SIZE} token ids, but the model has {SIZE - 1}"):
        dataset.check_model(SIZE - 1, None)


@pytest.mark.parametrize("side", ["src", "tgt"])
def test_sequences_longer_than_those_of_the_model_are_refused(
    vocabulary: str, documents: str, side: str
) -> None:
    dataset = spans(vocabulary, documents).dataset
    length = {"src": dataset.layout.input_length, "tgt": dataset.layout.target_length}[side]
    key = f"{side}_max_position_embeddings"
    dataset.follow_model(SimpleNamespace(**{key: length}))
    dataset.follow_model(SimpleNamespace(**{key: None}))
    with pytest.raises(ConfigError, match=f"{side}_max_sequence_length is {length}.* {key} is"):
        dataset.follow_model(SimpleNamespace(**{key: length - 1}))


def test_arguments_are_checked_without_opening_files() -> None:
    given = {
        "src_vocab_file": "none",
        "src_data_dir": ["no", "folder"],
        "src_max_sequence_length": 512,
        "tgt_max_sequence_length": 114,
    }
    lacks = T5DynamicDataProcessor.check_arguments(**given, extra_ids=28)
    assert [one.split()[0] for one in lacks] == ["src_vocab_file", "src_data_dir", "src_data_dir"]
    with pytest.raises(ConfigError, match="extra_ids is 27"):
        T5DynamicDataProcessor.check_arguments(**given, extra_ids=27)
    assert len(TransformerDynamicDataProcessor.check_arguments(**given)) == 3


# ---- a run

RUN = """\
trainer:
  init:
    device: cpu
    seed: 1
    model_dir: {folder}/{place}
    model: {{name: t5, src_vocab_size: 64, extra_ids: 6, d_model: 16, d_kv: 8, d_ff: 16,
            num_heads: 2, encoder_num_hidden_layers: 1, dropout_rate: 0.0}}
    optimizer: {{AdamW: {{lr: 0.01}}}}
    loop: {{max_steps: {steps}, eval_frequency: 4}}
    checkpoint: {{steps: 2}}
    callbacks: [ModelEvalMetrics: {{}}]
  fit:
    train_dataloader: &data
      data_processor: T5DynamicDataProcessor
      src_vocab_file: {folder}/vocab.txt
      src_data_dir: {folder}/documents
      batch_size: 3
      src_max_sequence_length: 30
      tgt_max_sequence_length: 8
      extra_ids: 6
      shuffle_seed: 5
      num_workers: {workers}
    val_dataloader: {{<<: *data, shuffle: false, drop_last: false}}
"""


class Watch(Callback):
    """Keeps the inputs of each step, the loss and the metrics of validations."""

    def __init__(self) -> None:
        self.inputs: dict[int, list[Any]] = {}
        self.metrics: dict[str, float] = {}

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.inputs[trainer.global_step] = batch["input_ids"].tolist()

    def on_metrics(self, trainer, metrics, step):
        self.metrics |= {f"{key} {step}": float(value) for key, value in metrics.items()}


def run(folder: Path, place: str, steps: int, workers: int = 0) -> Watch:
    """Train up to a step, from the last checkpoint in the place if there is one."""
    path, watch = folder / "run.yaml", Watch()
    text = RUN.format(folder=folder, place=place, steps=steps, workers=workers)
    path.write_text(text)
    handle = register_global_callback(watch)
    try:
        assert main(["fit", str(path)]) == 0
    finally:
        handle.remove()
    return watch


@pytest.mark.slow
def test_a_run_resumes_with_the_same_samples_and_numbers(vocabulary, documents, tmp_path) -> None:
    whole = run(tmp_path, "whole", 8)
    run(tmp_path, "parts", 4)
    rest = run(tmp_path, "parts", 8)

    assert sorted(rest.inputs) == sorted(whole.inputs)[4:]
    assert rest.inputs == {step: whole.inputs[step] for step in rest.inputs}
    losses = {key for key in whole.metrics if key.startswith("loss ")}
    assert {key: whole.metrics[key] for key in losses & rest.metrics.keys()} == {
        key: rest.metrics[key] for key in losses & rest.metrics.keys()
    }
    found = {key.partition(" ")[0] for key in whole.metrics}
    assert {"validate_0/accuracy_lm", "validate_0/perplexity_lm"} <= found
    assert len({str(rows) for rows in whole.inputs.values()}) > 1


@pytest.mark.slow
def test_workers_change_nothing(vocabulary, documents, tmp_path) -> None:
    assert run(tmp_path, "two", 8, workers=2).inputs == run(tmp_path, "none", 8).inputs
