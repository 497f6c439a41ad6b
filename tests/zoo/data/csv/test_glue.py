"""The processors of GLUE's tasks: SST-2 and MNLI."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch

from modelzoo_trainer import Callback
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.dataset_info import check_model
from modelzoo_trainer.zoo.data.csv import word_pieces
from modelzoo_trainer.zoo.data.csv.glue import MNLIDataProcessor, SST2DataProcessor
from modelzoo_trainer.zoo.data.csv.word_pieces import WordPieces
from modelzoo_trainer.zoo.data.vocabulary import Vocabulary
from modelzoo_trainer.zoo.models.bert.classifier import BertClassifier
from tests.doubles import make_trainer
from tests.zoo.data.csv.written import write_vocabulary
from tests.zoo.models.bert_cases import SIZES

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "##m", *"abcd'\"", "good", "bad", "!"]
NAMES = ("entailment", "neutral", "contradiction")


def write_tsv(path, columns, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(one) + "\n" for one in [columns, *rows]]
    path.write_text("".join(lines), encoding="utf-8", newline="")


@pytest.fixture
def vocabulary(tmp_path):
    return write_vocabulary(tmp_path / "vocab.txt", PIECES)


@pytest.fixture
def sst2(tmp_path, vocabulary):
    """Return a function that makes a loader of sentences."""

    def make(rows, **arguments):
        write_tsv(tmp_path / "sst2" / "train.tsv", ("sentence", "label"), rows)
        write_tsv(tmp_path / "sst2" / "dev.tsv", ("sentence", "label"), rows[::-1])
        defaults = {"is_training": True, "batch_size": len(rows), "max_sequence_length": 8}
        return SST2DataProcessor(
            data_dir=str(tmp_path / "sst2"),
            vocab_file=vocabulary,
            **{**defaults, "shuffle": False, **arguments},
        ).create_dataloader()

    return make


@pytest.fixture
def mnli(tmp_path, vocabulary):
    columns = ("index", "gold_label", "sentence1", "sentence2")
    for name, first, num in (
        ("train", "a", 4),
        ("dev_matched", "b", 2),
        ("dev_mismatched", "c", 1),
    ):
        rows = [(str(one), NAMES[one % 3], f"{first} {first}", "d") for one in range(num)]
        write_tsv(tmp_path / "mnli" / f"{name}.tsv", columns, rows)

    def make(**arguments):
        defaults = {"is_training": True, "batch_size": 4, "max_sequence_length": 8}
        return MNLIDataProcessor(
            data_dir=str(tmp_path / "mnli"),
            vocab_file=vocabulary,
            **{**defaults, "shuffle": False, "drop_last": False, **arguments},
        ).create_dataloader()

    return make


def test_a_sentence_becomes_pieces(sst2):
    (batch,) = sst2([('the "themm" good', "1"), ("zebra", "0")])
    assert {key: one.tolist() for key, one in batch.items()} == {
        "input_ids": [[2, 4, 11, 4, 5, 5, 11, 3], [2, 1, 3, 0, 0, 0, 0, 0]],
        "attention_mask": [[1] * 8, [1, 1, 1, 0, 0, 0, 0, 0]],
        "token_type_ids": [[0] * 8] * 2,
        "labels": [1, 0],
    }
    assert {one.dtype for one in batch.values()} == {torch.int32}
    (batch,) = sst2([("The GOOD b\xe4d!", "1")], do_lower=True, input_pad_id=9, attn_mask_pad_id=1)
    assert batch["input_ids"].tolist() == [[2, 4, 12, 13, 14, 3, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1] * 8]
    (batch,) = sst2([("a", "0"), ("b", "1")], is_training=False)
    assert batch["labels"].tolist() == [1, 0]


def test_what_decides_a_batch_is_in_the_fingerprint(sst2):
    rows = [("a", "1")]
    before = sst2(rows).dataset.fingerprint
    assert sst2(rows).dataset.fingerprint == before
    for changes in ({"do_lower": True}, {"max_sequence_length": 9}, {"input_pad_id": 1}):
        assert sst2(rows, **changes).dataset.fingerprint != before


def test_pairs_have_segments_and_a_validation_says_of_which_file(mnli):
    (batch,) = mnli()
    assert batch["input_ids"][0].tolist() == [2, 6, 6, 3, 9, 3, 0, 0]
    assert batch["token_type_ids"][0].tolist() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert batch["labels"].tolist() == [0, 1, 2, 0]
    assert "is_matched" not in batch
    (batch,) = mnli(is_training=False)
    assert batch["input_ids"][:, 1].tolist() == [7, 7, 8]
    assert batch["is_matched"].tolist() == [1, 1, 0]
    assert batch["is_mismatched"].tolist() == [0, 0, 1]


@pytest.mark.parametrize("sizes", [(5, 2), (2, 5), (4, 4), (5, 4), (1, 1), (9, 0)])
def test_of_a_long_pair_the_longer_text_is_cut(vocabulary, sizes):
    pieces = WordPieces(Vocabulary(vocabulary), lowercase=False)
    for length in range(5, 12):
        kept = list(sizes)
        while sum(kept) > length - 3:  # one by one, of the second text if both are as long
            kept[kept[0] <= kept[1]] -= 1
        ids, num_first = pieces.encode(["a " * sizes[0], "b " * sizes[1]], length)
        assert ids == [2, *[6] * kept[0], 3, *[7] * kept[1], 3]
        assert num_first == kept[0] + 2


def test_it_can_be_sent_to_a_worker(vocabulary):
    pieces = WordPieces(Vocabulary(vocabulary), lowercase=True)
    assert pickle.loads(pickle.dumps(pieces)).encode(["THE"], 5) == ([2, 4, 3], 3)


def test_what_does_not_fit_is_refused(sst2, mnli, tmp_path, vocabulary):
    with pytest.raises(ConfigError, match=r"train\.tsv: row 1: the label is '2', expected 0, 1"):
        next(iter(sst2([("a", "2")])))
    with pytest.raises(ConfigError, match=r"max_sequence_length is 4, .* at least 5"):
        sst2([("a", "1")], max_sequence_length=4)
    write_tsv(tmp_path / "sst2" / "dev.tsv", ("sentence", "label"), [])
    with pytest.raises(ConfigError, match=r"train\.tsv: the file has no rows"):
        sst2([], batch_size=1)
    (tmp_path / "mnli" / "dev_matched.tsv").unlink()
    with pytest.raises(ConfigError, match=r"has no file dev_matched\.tsv"):
        mnli(is_training=False)
    model = SimpleNamespace(num_labels=2, problem_type="single_label_classification")
    with pytest.raises(ConfigError, match=r"3 labels \(entailment.*num_labels of the model is 2"):
        check_model(mnli(), model)
    with pytest.raises(ConfigError, match=r"has 15 tokens, but the model's vocab_size is 9"):
        check_model(mnli(), SimpleNamespace(num_labels=3, vocab_size=9))
    with pytest.raises(ConfigError, match="max_position_embeddings is 7"):
        check_model(mnli(), SimpleNamespace(num_labels=3, max_position_embeddings=7))
    with pytest.raises(ConfigError, match=r"input_pad_id is 15, .* vocab_size of the model"):
        check_model(mnli(input_pad_id=15), SimpleNamespace(num_labels=3, vocab_size=15))
    write_vocabulary(tmp_path / "vocab.txt", ["[UNK]", "[CLS]"])
    with pytest.raises(ConfigError, match=r"'\[SEP\]' is not in vocab_file"):
        mnli()


def test_what_a_machine_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(word_pieces, "_LIBRARY", "no_such_library")
    lacks = MNLIDataProcessor.check_arguments(
        data_dir=[str(tmp_path), "nowhere"], is_training=False, vocab_file="none.txt"
    )
    facts = ("dev_matched.tsv, dev_mismatched.tsv", "nowhere", "none.txt", "tokenizers")
    assert [fact in one for fact, one in zip(facts, lacks, strict=True)] == [True] * 4
    with pytest.raises(ConfigError, match="tokenizers, which is not installed"):
        word_pieces._library()


class Seen(Callback):
    def __init__(self):
        self.batches, self.losses = [], []

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.batches.append(batch["input_ids"].tolist())
        self.losses.append(outputs["loss"].item())


@pytest.mark.slow
def test_a_resumed_run_has_the_same_batches_and_losses(sst2, tmp_path):
    rows = [
        (f"{first} {second}", "01"[first == "good"])
        for first in ("good", "bad")
        for second in "abc"
    ]

    def run(name, steps):
        seen = Seen()
        trainer = make_trainer(
            tmp_path / name,
            seen,
            model=lambda: BertClassifier(
                **SIZES, num_labels=2, problem_type="single_label_classification", task_dropout=0.1
            ),
            max_steps=steps,
        )
        trainer.fit(sst2(rows, batch_size=4, shuffle=True, max_sequence_length=6))
        trainer.save_checkpoint()
        trainer.close()
        return seen

    whole, first, second = run("whole", 6), run("parts", 2), run("parts", 6)
    assert first.batches + second.batches == whole.batches
    assert first.losses + second.losses == whole.losses
    assert len({str(one) for one in whole.batches}) > 3  # each epoch has its own order


@pytest.mark.slow
def test_tokens_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    letters = [chr(one) for one in range(97, 123)]
    extra = [f"##{one}" for one in letters if one != "m"]  # ##m is one of the pieces
    path = write_vocabulary(tmp_path / "v.txt", [*PIECES[:6], *letters, *extra, ",", ".", "\u4e2d"])
    texts = [
        "The \u00c4rger, n\u00e1ive... \u4e2dx\u4e2d",
        "A\tb\u200d c\u00a0d\ufffd e",
        "x" * 120,
    ]
    for lowercase in (True, False):
        theirs = transformers.BertTokenizer(vocab=path, do_lower_case=lowercase)
        ours = WordPieces(Vocabulary(path), lowercase=lowercase)
        for first in texts:
            for second in texts:
                expected = theirs(first, second)
                ids, num_first = ours.encode([first, second], 1000)
                assert ids == expected["input_ids"]
                assert expected["token_type_ids"].index(1) == num_first
