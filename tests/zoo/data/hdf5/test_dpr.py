"""The processor of questions with contexts."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.dataset_info import check_model
from modelzoo_trainer.zoo.data.hdf5.dpr import (
    CONTEXT_FEATURES,
    QUESTION_FEATURES,
    DPRHDF5DataProcessor,
)
from modelzoo_trainer.zoo.models.bert.dpr import Dpr
from tests.zoo.models.bert_cases import SIZES

LENGTH, CONTEXTS = 4, 2


@pytest.fixture
def written(tmp_path):
    """Write rows: question i begins with token i, its contexts with 10 + i and 20 + i."""

    def make(num=5, *, change=None, dtype=np.int32, name="a", first=0, **options):
        numbers = np.arange(first, first + num)
        questions = np.zeros((num, 3, LENGTH), dtype)
        questions[:, 0, 0], questions[:, 1, :3], questions[:, 2, 1] = numbers, 1, 1
        contexts = np.zeros((num, 3, CONTEXTS, LENGTH + 1), dtype)
        contexts[:, 0, 0, 0], contexts[:, 0, 1, 0], contexts[:, 1] = 10 + numbers, 20 + numbers, 1
        data = {"data_0": questions, "data_1": contexts}
        if change is not None:
            change(data)
        path = tmp_path / name / f"{first}.h5"
        path.parent.mkdir(exist_ok=True)
        with h5py.File(path, "w") as file:
            for key, one in data.items():
                chunks = (1, *one.shape[1:]) if options else None
                file.create_dataset(key, data=one, chunks=chunks, **options)
        return str(path.parent)

    return make


def loader(data_dir, **arguments):
    arguments = {"batch_size": 2, "drop_last": False, **arguments}
    return DPRHDF5DataProcessor(data_dir=data_dir, **arguments).create_dataloader()


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, {"shuffle": True}])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_questions_come_with_their_contexts(written, dtype, options):
    written(3, dtype=dtype, **options)
    first, *others = loader(written(2, dtype=dtype, first=3, **options))
    assert {key: (tuple(one.shape), one.dtype) for key, one in first.items()} == {
        **dict.fromkeys(QUESTION_FEATURES, ((2, LENGTH), torch.int32)),
        **dict.fromkeys(CONTEXT_FEATURES, ((2, CONTEXTS, LENGTH + 1), torch.int32)),
    }
    assert first["questions_attention_mask"].tolist() == [[1, 1, 1, 0]] * 2
    assert first["questions_token_type_ids"].tolist() == [[0, 1, 0, 0]] * 2
    batches = [first, *others]
    assert [one["questions_input_ids"][:, 0].tolist() for one in batches] == [[0, 1], [2, 3], [4]]
    assert others[0]["ctx_input_ids"][:, :, 0].tolist() == [[12, 22], [13, 23]]
    assert others[0]["ctx_attention_mask"].eq(1).all()


def test_each_epoch_has_its_order_and_rows_stay_together(written):
    rows = loader(written(6), shuffle=True, batch_size=3)
    epochs = []
    for epoch in (0, 1, 0):
        rows.sampler.set_epoch(epoch)
        batches = list(rows)
        for one in batches:
            numbers = one["questions_input_ids"][:, :1]
            assert torch.equal(one["ctx_input_ids"][:, :, 0], numbers + torch.tensor([10, 20]))
        epochs.append([one["questions_input_ids"][:, 0].tolist() for one in batches])
    assert epochs[0] == epochs[2] != epochs[1]


def test_the_folder_may_name_the_rows(written, tmp_path):
    folder = written(2)
    path = tmp_path / "a" / "data_params.json"
    mixed = [CONTEXT_FEATURES[place] for place in (1, 0, 2)]
    path.write_text(json.dumps({"data_1_features": mixed}))
    (batch,) = loader(folder)
    assert batch["ctx_attention_mask"][:, 0, 0].tolist() == [10, 11]
    path.write_text(json.dumps({"data_0_features": ["input_ids"]}))
    with pytest.raises(ConfigError, match=r"data_params\.json: data_0_features is \['input_ids'\]"):
        loader(folder)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"data_params\.json cannot be read"):
        loader(folder)


def few_contexts(data):
    data["data_1"] = data["data_1"][:-1]


def flat_contexts(data):
    data["data_1"] = data["data_1"][:, :, 0]


def corpus(data):
    data["data_0"] = data["data_0"].reshape(-1)


def negative_mask(data):
    data["data_1"][3, 1, 1, 2] = -1


def negative_segment(data):
    data["data_0"][4, 2, 1] = -1


def third_segment(data):
    data["data_1"][3, 2, 1, 2] = 2


def no_contexts(data):
    del data["data_1"]


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (few_contexts, r"0\.h5: dataset 'data_1' has 4 rows, but 'data_0' has 5"),
        (flat_contexts, r"'data_1' has rows of shape \(3, 5\), expected \(3, contexts, tokens\)"),
        (corpus, "'data_0' is 1-D, .* questions with contexts require samples"),
        (negative_mask, r"'data_1', row 3: ctx_attention_mask has -1"),
        (negative_segment, r"'data_0', row 4: questions_token_type_ids has segment -1"),
        (no_contexts, "no dataset 'data_1'"),
    ],
)
def test_files_that_do_not_fit_are_refused(written, change, facts):
    with pytest.raises(ConfigError, match=facts):
        list(loader(written(change=change)))


def test_a_segment_that_the_model_lacks_is_refused(written):
    rows = loader(written(change=third_segment))
    settings = {**SIZES, "num_hidden_layers": 1}
    for num in (0, 3):
        check_model(rows, Dpr(encoder=settings | {"num_segments": num}))
    facts = r"'data_1', row 3: ctx_token_type_ids has segment 2 in column 7.*num_segments is 2"
    with pytest.raises(ConfigError, match=facts):
        check_model(rows, Dpr(encoder=settings))


def test_what_the_model_lacks_is_refused(written):
    settings = {**SIZES, "num_hidden_layers": 1}
    rows = loader(written())
    check_model(rows, Dpr(q_encoder=settings, ctx_encoder=settings))
    with pytest.raises(ConfigError, match=r"ctx_input_ids has token id 20.*vocab_size is 20"):
        check_model(rows, Dpr(q_encoder=settings, ctx_encoder={**settings, "vocab_size": 20}))
    short = {**settings, "max_position_embeddings": 4}
    with pytest.raises(ConfigError, match=r"need 5 positions.*max_position_embeddings is 4"):
        check_model(rows, Dpr(q_encoder=short, ctx_encoder=short))
    with pytest.raises(ConfigError, match="use_vsl"):
        loader(written(), use_vsl=True)
    assert ["nowhere" in one for one in DPRHDF5DataProcessor.check_arguments(data_dir="nowhere")]
