"""The processor of tokens with labels."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.dataset_info import check_model
from modelzoo_trainer.zoo.data.csv.token_labels import BertTokenClassifierDataProcessor
from modelzoo_trainer.zoo.models.bert.token_heads import BertTokenClassifier
from tests.zoo.data.csv.written import TOKENS, write_folder, write_vocabulary
from tests.zoo.models.bert_cases import SIZES

ROW = {"tokens": "[CLS] the ##m zebra [SEP]", "labels": "O B I O O"}


@pytest.fixture
def labels(tmp_path):
    path = tmp_path / "labels.json"
    path.write_text(json.dumps({"O": 0, "B": 1, "I": 2}))
    return str(path)


@pytest.fixture
def loader(tmp_path, labels):
    def make(*rows, **arguments):
        defaults = {"max_sequence_length": 6, "label_vocab_file": labels}
        return BertTokenClassifierDataProcessor(
            data_dir=write_folder(tmp_path / "data", list(rows)),
            vocab_file=write_vocabulary(tmp_path / "vocab.txt"),
            batch_size=len(rows),
            **{**defaults, **arguments},
        ).create_dataloader()

    return make


def test_tokens_and_labels_become_numbers(loader):
    (batch,) = loader(ROW)
    assert {key: one[0].tolist() for key, one in batch.items()} == {
        "input_ids": [2, 7, 8, 1, 3, 0],
        "attention_mask": [1, 1, 1, 1, 1, 0],
        "loss_mask": [1, 1, 1, 1, 1, 0],
        "token_type_ids": [0] * 6,
        "labels": [0, 1, 2, 0, 0, 0],
    }
    assert {one.dtype for one in batch.values()} == {torch.int32}
    pads = {"input_pad_id": 5, "attn_mask_pad_id": 1, "labels_pad_id": 2}
    (batch,) = loader(ROW, **pads)
    keys = ("input_ids", "attention_mask", "labels", "loss_mask")
    assert [batch[key][0, -1].item() for key in keys] == [5, 1, 2, 0]


def test_settings_follow_the_model(loader, labels, tmp_path):
    other = str(shutil.copy(labels, tmp_path / "other.json"))
    settings = {"num_classes": 3, "encoder_output_dropout_rate": 0.1}
    model = BertTokenClassifier(
        **SIZES, **settings, label_vocab_file=labels, include_padding_in_loss=True
    )
    rows = loader(ROW, label_vocab_file=None)
    with pytest.raises(ConfigError, match="label_vocab_file is missing"):
        next(iter(rows))
    check_model(rows, model)
    (batch,) = rows
    assert batch["loss_mask"].tolist() == [[1] * 6]
    model(batch)["loss"].backward()
    with pytest.raises(ConfigError, match=r"include_padding_in_loss is false.* is true"):
        check_model(loader(ROW, include_padding_in_loss=False), model)
    for pads, facts in (
        ({"labels_pad_id": 3}, r"labels_pad_id is 3, .* num_classes of the model \(3\), or -100"),
        ({"labels_pad_id": -1}, "labels_pad_id is -1"),
        ({"input_pad_id": 50}, r"input_pad_id is 50, .* vocab_size"),
    ):
        with pytest.raises(ConfigError, match=facts):
            check_model(loader(ROW, **pads), SimpleNamespace(num_classes=3, vocab_size=50))
    with pytest.raises(ConfigError, match=r"label_vocab_file is .*other.json.*labels.json"):
        check_model(loader(ROW, label_vocab_file=other), model)
    with pytest.raises(ConfigError, match="label number 2, but num_classes of the model is 2"):
        check_model(rows, SimpleNamespace(num_classes=2, label_vocab_file=labels))


def test_what_decides_a_batch_is_in_the_fingerprint(loader, tmp_path):
    before = loader(ROW).dataset.fingerprint
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"O": 0, "B": 2, "I": 1}))
    for changes in (
        {"label_vocab_file": str(other)},
        {"max_sequence_length": 7},
        {"do_lower": True},
    ):
        assert loader(ROW, **changes).dataset.fingerprint != before
    assert loader(ROW).dataset.fingerprint == before
    write_vocabulary(tmp_path / "vocab.txt", [*TOKENS[:-1], "z"])
    rows = BertTokenClassifierDataProcessor(
        data_dir=str(tmp_path / "data"),
        vocab_file=str(tmp_path / "vocab.txt"),
        batch_size=1,
        max_sequence_length=6,
        label_vocab_file=str(tmp_path / "labels.json"),
    )
    assert rows.dataset.fingerprint != before


def test_what_does_not_fit_is_refused(loader, tmp_path):
    for change, facts in (
        ({"labels": "O O"}, "row 1: there are 5 tokens, but 2 labels"),
        ({"labels": "O B X O O"}, "row 1: the label 'X' is not in label_vocab_file"),
        ({"tokens": "a " * 7, "labels": "O " * 7}, "7 tokens, but max_sequence_length is 6"),
    ):
        with pytest.raises(ConfigError, match=facts):
            next(iter(loader({**ROW, **change})))
    (tmp_path / "bad.json").write_text("[1]")
    with pytest.raises(ConfigError, match="expected a mapping from labels to numbers"):
        loader(ROW, label_vocab_file=str(tmp_path / "bad.json"))
    lacks = BertTokenClassifierDataProcessor.check_arguments(
        data_dir=str(tmp_path), vocab_file="none.txt", label_vocab_file="none.json"
    )
    assert ["none.json" in one for one in lacks] == [False, False, True]
