"""The processor of extractive summarization."""

from types import SimpleNamespace

import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.dataset_info import check_model
from modelzoo_trainer.zoo.data.csv.summarization import BertSumCSVDataProcessor
from modelzoo_trainer.zoo.models.bert.token_heads import BertSummarizer
from tests.zoo.data.csv.written import write_folder
from tests.zoo.models.bert_cases import SIZES

ROW = {"a": [2, 7, 3, 2, 8, 3], "b": [1, 0], "c": [0, 0, 0, 1, 1, 1], "d": [0, 3]}


@pytest.fixture
def loader(tmp_path):
    def make(*rows, **arguments):
        defaults = {"batch_size": len(rows), "max_sequence_length": 8, "max_cls_tokens": 3}
        folder = write_folder(tmp_path, list(rows))
        return BertSumCSVDataProcessor(
            data_dir=folder, shuffle=False, **{**defaults, **arguments}
        ).create_dataloader()

    return make


def test_every_sentence_counts_the_first_one_too(loader):
    (batch,) = loader(ROW)
    assert {key: one[0].tolist() for key, one in batch.items()} == {
        "input_ids": [2, 7, 3, 2, 8, 3, 0, 0],
        "attention_mask": [1, 1, 1, 1, 1, 1, 0, 0],
        "token_type_ids": [0, 0, 0, 1, 1, 1, 0, 0],
        "labels": [1, 0, 0],
        "cls_indices": [0, 3, 0],
        "cls_weights": [1.0, 1.0, 0.0],
    }
    assert batch["cls_weights"].dtype == torch.float32
    BertSummarizer(**SIZES)(batch)["loss"].backward()


def test_what_decides_a_batch_is_in_the_fingerprint(loader):
    before = loader(ROW).dataset.fingerprint
    for changes in ({"max_sequence_length": 7}, {"max_cls_tokens": 2}, {"pad_id": 1}):
        assert loader(ROW, **changes).dataset.fingerprint != before


def test_long_documents_lose_the_sentences_that_are_cut(loader):
    (batch,) = loader(ROW, max_sequence_length=3)
    assert batch["input_ids"].tolist() == [[2, 7, 3]]
    assert batch["cls_weights"].tolist() == [[1.0, 0.0, 0.0]]
    (batch,) = loader(ROW, max_cls_tokens=1)
    assert batch["labels"].tolist() == [[1]]


def test_what_does_not_fit_is_refused(loader):
    for change, facts in (
        ({"b": [1]}, "row 2: there are 1 labels, but 2 cls_indices"),
        ({"a": [-1] * 6}, "row 2: input_ids must be integers"),
        ({"a": [60] * 6}, "row 2: input_ids has 60 at 0, .* below 51"),
        ({"b": [0, 2]}, "row 2: labels has 2 at 1, .* below 2"),
        ({"c": [0, 0, 0, 2, 2, 2]}, "row 2: token_type_ids has 2 at 3, .* below 2"),
        ({"c": [0]}, "row 2: there are 1 token_type_ids, but 6 tokens"),
        ({"d": [0, 6]}, "row 2: cls_indices has 6 at 1, .* below 6"),
    ):
        rows = loader(ROW, {**ROW, **change})
        check_model(rows, SimpleNamespace(vocab_size=51, num_labels=2))
        with pytest.raises(ConfigError, match=facts):
            next(iter(rows))
    with pytest.raises(ConfigError, match=r"pad_id is 51, .* vocab_size of the model"):
        check_model(loader(ROW, pad_id=51), SimpleNamespace(vocab_size=51))
    with pytest.raises(ConfigError, match="there are 3 cells"):
        next(iter(loader({key: ROW[key] for key in "abc"})))
    with pytest.raises(ConfigError, match="max_position_embeddings is 7"):
        check_model(loader(ROW), SimpleNamespace(max_position_embeddings=7))
