"""The processor of masked tokens in HDF5 files."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.hdf5.bert import BertHDF5DataProcessor
from modelzoo_trainer.zoo.models.bert.pretraining import Bert
from tests.zoo.data.hdf5.written import LENGTH, write
from tests.zoo.models.bert_cases import SIZES

MASKED = 3


@pytest.fixture
def masked(tmp_path):
    """Write rows with labels; row i begins with token i + 5."""

    def make(num=6, *, gathers=False, vsl=False, change=None, name="a"):
        rows = np.ones((num, 4 if vsl else 2, LENGTH), np.int32)
        rows[:, 0] = np.arange(num)[:, None] + np.arange(LENGTH) + 5
        rows[:, 1, 6:] = 0
        if vsl:
            rows[:, 2], rows[:, 3] = np.arange(LENGTH)[::-1], np.arange(LENGTH)
        labels = np.full((num, 1, LENGTH), -100, np.int32)
        labels[:, 0, 2] = 30
        if gathers:
            labels = np.tile(np.array([[30, -100, -100], [2, 0, 0], [1, 0, 0]], np.int32), (num, 1))
            labels = labels.reshape(num, 3, MASKED)
        if change is not None:
            labels = change(labels)
        path = tmp_path / name / "f.h5"
        write(path, rows)
        if labels is not None:
            with h5py.File(path, "a") as file:
                file["labels"] = labels
        return str(path.parent)

    return make


def processor(data_dir, **arguments):
    return BertHDF5DataProcessor(data_dir=data_dir, **{"batch_size": 2, **arguments})


def shapes(batch):
    assert all(one.dtype == torch.int32 for one in batch.values())
    return {key: tuple(one.shape) for key, one in batch.items()}


def test_labels_of_all_positions(masked):
    first, *_ = processor(masked()).create_dataloader()
    assert shapes(first) == dict.fromkeys(("input_ids", "attention_mask", "labels"), (2, LENGTH))
    assert first["labels"][1].tolist() == [-100, -100, 30, -100, -100, -100, -100, -100]
    assert first["attention_mask"][0].tolist() == [1] * 6 + [0] * 2


def test_labels_of_some_positions(masked):
    first, *_ = processor(masked(gathers=True)).create_dataloader()
    few = dict.fromkeys(("labels", "masked_lm_positions", "masked_lm_mask"), (2, MASKED))
    assert shapes(first) == dict.fromkeys(("input_ids", "attention_mask"), (2, LENGTH)) | few
    assert first["masked_lm_positions"][0].tolist() == [2, 0, 0]
    assert first["masked_lm_mask"][0].tolist() == [1, 0, 0]


def test_packed_documents(masked):
    first, *_ = processor(masked(vsl=True), use_vsl=True).create_dataloader()
    assert list(first) == [
        *("input_ids", "attention_mask", "attention_span", "position_ids", "labels")
    ]
    assert first["position_ids"][0].tolist() == list(range(LENGTH))
    with pytest.raises(ConfigError, match="use_vsl: true"):
        processor(masked(vsl=True, name="b"))


def test_subsets_and_lists_of_folders_work(masked):
    both = [masked(), masked(name="b")]
    batches = list(processor(both, batch_size=3, data_subset="0.5-1").create_dataloader())
    assert [batch["input_ids"][:, 0].tolist() for batch in batches] == [[5, 6, 7], [8, 9, 10]]
    assert batches[0]["labels"].shape == (3, LENGTH)


@pytest.mark.parametrize("gathers", [False, True])
def test_padding_rows_change_neither_the_loss_nor_its_gradients(masked, gathers):
    loader = processor(
        masked(3, gathers=gathers), batch_size=8, drop_last=False, pad_last=True
    ).create_dataloader()
    (padded,) = loader
    real = {key: one[:3] for key, one in padded.items()}
    assert padded["input_ids"].shape == (8, LENGTH)
    settings = {**SIZES, "disable_nsp": True, "dropout_rate": 0, "num_hidden_layers": 1}
    torch.manual_seed(1)
    model = Bert(**settings)
    found = []
    for batch in (padded, real):
        output = model(batch)
        assert output["num_items"] == 3
        model.zero_grad()
        output["loss"].backward()
        found.append([output["loss"], *(one.grad for one in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (lambda labels: None, "no dataset 'labels'"),
        (lambda labels: labels[1:], r"'labels' has 5 rows, but 'data' has 6"),
        (lambda labels: labels[:, :, 1:], r"rows of shape \(1, 7\), expected \(1, 8\)"),
    ],
)
def test_labels_that_do_not_fit_are_refused(masked, change, facts):
    with pytest.raises(ConfigError, match=facts):
        processor(masked(change=change))


def test_a_label_or_a_position_that_the_model_lacks_is_named(masked):
    loaded = processor(masked())
    loaded.dataset.check_model(31, LENGTH)
    with pytest.raises(ConfigError, match=r"'labels', row 0: labels has token id 30 in column 2"):
        loaded.dataset.check_model(30, LENGTH)

    def far(labels):
        labels[4, 1, 1] = LENGTH
        return labels

    loaded = processor(masked(gathers=True, change=far, name="b"))
    with pytest.raises(ConfigError, match="row 4: masked_lm_positions has 8 in column 1"):
        list(loaded.create_dataloader())


def test_a_negative_weight_of_a_label_is_named(masked):
    def negative(labels):
        labels[3, 2, 1] = -5
        return labels

    loaded = processor(masked(gathers=True, change=negative))
    with pytest.raises(ConfigError, match="row 3: masked_lm_mask has -5 in column 1"):
        list(loaded.create_dataloader())


def test_labels_of_the_parts_of_a_mixture_may_have_different_dtypes(masked):
    wide = masked(change=lambda labels: labels.astype(np.int64), name="b")
    parts = [{"data_dir": one, "weight": 1} for one in (masked(), wide)]
    batches = list(processor(mixture=parts, data_dir=None).create_dataloader())
    assert sum(int((one["labels"] == 30).sum()) for one in batches) == 12


def test_arguments_that_cannot_work_are_refused(masked):
    with pytest.raises(ConfigError, match="dataset_map_fn is not supported"):
        processor(masked(), dataset_map_fn=len)
    with pytest.raises(ConfigError, match="dataset_map_fn is not supported"):
        BertHDF5DataProcessor.check_arguments(data_dir="x", batch_size=2, dataset_map_fn="f")
    lacks = BertHDF5DataProcessor.check_arguments(data_dir="no_such_folder", batch_size=2)
    assert "no_such_folder" in " ".join(lacks)
    with pytest.raises(ConfigError, match="max_sequence_length is 5"):
        processor(masked(name="b"), max_sequence_length=5)
