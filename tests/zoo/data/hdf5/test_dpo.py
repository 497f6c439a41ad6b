"""The processor of pairs of answers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.hdf5.dpo import DPO_FEATURES, DpoHDF5DataProcessor
from modelzoo_trainer.zoo.data.registry import processor_class
from tests.zoo.data.hdf5.written import LENGTH


def pairs(num):
    """Return rows whose values tell their sample and feature."""
    return (np.arange(num)[:, None, None] * 10 + np.arange(6)[None, :, None]) * np.ones(
        (1, 1, LENGTH), np.int32
    )


def processor(data_dir, **arguments):
    return DpoHDF5DataProcessor(data_dir=data_dir, batch_size=2, **arguments)


def test_a_batch_has_both_answers(folder):
    first, second = processor(folder(pairs(4))).create_dataloader()
    assert tuple(first) == DPO_FEATURES
    assert all(rows.shape == (2, LENGTH) and rows.dtype == torch.int32 for rows in first.values())
    assert [rows[1, 0].item() for rows in first.values()] == [10, 11, 12, 13, 14, 15]
    assert second["rejected_labels"][0, 0] == 25


def test_it_is_found_by_its_published_name():
    assert processor_class("DpoHDF5DataProcessor") is DpoHDF5DataProcessor


def test_the_order_of_features_is_that_of_the_folder(folder):
    path = folder(pairs(2))
    (Path(path) / "data_params.json").write_text(json.dumps({"features": DPO_FEATURES[::-1]}))
    (batch,) = processor(path).create_dataloader()
    assert batch["rejected_labels"][0, 0] == 0
    (Path(path) / "data_params.json").write_text(json.dumps({"features": list("abcdef")}))
    with pytest.raises(ConfigError, match=r"a, b, c, d, e, f; expected chosen_input_ids"):
        processor(path)


def test_other_data_are_refused(folder):
    with pytest.raises(ConfigError, match=r"has 3 features per sample, but 6 are expected"):
        processor(folder(pairs(2)[:, :3]))
    with pytest.raises(ConfigError, match="use_vsl: true cannot be used"):
        processor(folder(pairs(2), name="b"), use_vsl=True)
    with pytest.raises(ConfigError, match=r"features_list are input_ids; expected"):
        DpoHDF5DataProcessor.check_arguments(data_dir="x", features_list=["input_ids"])


def test_a_missing_folder_is_known_before_a_run():
    lacks = DpoHDF5DataProcessor.check_arguments(data_dir="no_such_folder", batch_size=2)
    assert "no_such_folder" in " ".join(lacks)


def test_a_token_that_the_model_lacks_is_named_with_its_row(folder):
    rows = pairs(4)
    rows[3, 3, 5] = 500
    loaded = processor(folder(rows))
    with pytest.raises(ConfigError, match=r"rejected_input_ids has token id 500 in column 5"):
        loaded.dataset.check_model(100, LENGTH)
