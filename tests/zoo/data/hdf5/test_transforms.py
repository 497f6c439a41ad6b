"""Transforms of batches, by hand-written examples."""

import numpy as np
import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.hdf5.gpt import GptHDF5MapDataProcessor
from modelzoo_trainer.zoo.data.hdf5.transforms import parse_transforms
from tests.zoo.data.hdf5.written import LENGTH, samples


def changed(*given, rows=None, epoch=0, samples_=(0, 1)):
    rows = samples(2) if rows is None else rows
    tensors = torch.from_numpy(rows)
    batch = {
        "input_ids": tensors[:, 0],
        "attention_mask": tensors[:, 1],
        "labels": tensors[:, 2],
    }
    for transform in parse_transforms(given):
        batch = transform(batch, np.array(samples_), (7, epoch))
    return batch


def test_sink_tokens_are_inserted_in_inputs_and_labels_and_do_not_count():
    batch = changed(
        {"name": "Add_Sink_Tokens", "sink_token_id": 9, "num_sink_tokens": 2,
         "sink_token_start_pos": 3}
    )  # fmt: skip

    assert batch["input_ids"][0].tolist() == [0, 1, 2, 9, 9, 3, 4, 5, 6, 7]
    assert batch["labels"][0].tolist() == [1, 2, 3, 9, 9, 4, 5, 6, 7, 8]
    assert batch["attention_mask"][0].tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 1, 1]
    assert all(rows.dtype == torch.int32 for rows in batch.values())


def test_sink_tokens_may_replace_the_end():
    batch = changed(
        {"name": "add_sink_tokens", "num_sink_tokens": 3, "truncate_to_original_length": True}
    )

    assert batch["input_ids"][1].tolist() == [0, 0, 0, 1, 2, 3, 4, 5]
    assert batch["attention_mask"].shape == (2, LENGTH)


def test_memory_tokens_follow_each_chunk_but_the_last_and_the_mask_is_kept():
    rows = samples(2)
    rows[:, 1, 5:] = 0
    name = {"name": "add_memory_tokens", "attn_memory_chunk_size": 3, "return_masks": True}

    batch = changed({**name, "num_memory_tokens_per_chunk": 2, "memory_token_id": 9}, rows=rows)

    assert batch["input_ids"][0].tolist() == [0, 1, 2, 9, 9, 3, 4, 5, 9, 9, 6, 7]
    assert batch["labels"][0].tolist() == [1, 2, 3, 9, 9, 4, 5, 6, 9, 9, 7, 8]
    assert batch["attention_mask"][0].tolist() == [1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0]
    mask = batch["special_token_meta"]["memory_token_mask"]
    assert mask.dtype == torch.bool
    assert torch.equal(mask, batch["input_ids"] == 9)


def test_chunks_that_end_with_the_sample_add_no_memory_tokens_behind_it():
    name = {"name": "add_memory_tokens", "num_memory_tokens_per_chunk": 1}

    assert changed({**name, "attn_memory_chunk_size": 4})["input_ids"].shape == (2, LENGTH + 1)
    assert changed({**name, "attn_memory_chunk_size": 8})["input_ids"].shape == (2, LENGTH)


POSE = {"name": "add_pose_shift", "segment_length": 3, "target_seq_len": 32}


def test_shifted_positions_increase_by_one_within_segments_and_stay_below_the_target():
    rows = samples(200)
    positions = changed(
        {**POSE, "ratio_shifted_samples": 1.0}, rows=rows, samples_=range(200)
    )["position_ids"]  # fmt: skip

    assert positions.dtype == torch.int64
    steps = positions.diff()
    assert steps.min() >= 1
    assert (positions[:, 0] == 0).all()
    within = [0, 1, 3, 4, 6]
    assert (steps[:, within] == 1).all()
    assert positions.max() == 31  # of 200 samples, one has the largest shift
    assert len(positions[:, -1].unique()) > 10


def test_about_so_many_samples_are_shifted():
    def num_shifted(ratio):
        given = {**POSE, "ratio_shifted_samples": ratio}
        found = changed(given, rows=samples(400), samples_=range(400))["position_ids"]
        return int((found != torch.arange(LENGTH)).any(dim=1).sum())

    assert num_shifted(0.0) == 0
    assert 60 < num_shifted(0.25) < 130


def test_shifts_depend_on_sample_and_epoch_and_not_on_the_batch():
    given = {**POSE, "ratio_shifted_samples": 1.0}
    one = changed(given, samples_=(4, 9))["position_ids"]
    other = changed(given, samples_=(9, 5))["position_ids"]

    assert torch.equal(one[1], other[0])
    assert not torch.equal(one, changed(given, samples_=(4, 9), epoch=1)["position_ids"])
    assert changed(given, samples_=(-1, -1))["position_ids"].tolist() == [[*range(LENGTH)]] * 2


# ---- in a processor


def mapped(path, *transforms):
    return GptHDF5MapDataProcessor(data_dir=path, batch_size=4, data_transforms=list(transforms))


def test_a_processor_applies_transforms_in_order(folder):
    memory = {"name": "add_memory_tokens", "attn_memory_chunk_size": 5}
    made = mapped(
        folder(samples(4)),
        {"name": "add_sink_tokens", "sink_token_id": 20},
        {**memory, "num_memory_tokens_per_chunk": 1, "memory_token_id": 30},
        POSE,
    )

    (batch,) = made.create_dataloader()

    assert batch["input_ids"][0].tolist() == [20, 0, 1, 2, 3, 30, 4, 5, 6, 7]
    assert batch["position_ids"].shape == (4, 10)


@pytest.mark.parametrize(
    ("transform", "limits", "facts"),
    [
        ({"name": "add_sink_tokens"}, (None, 8), "9 positions .*8 without data_transforms"),
        (POSE, (None, 31), "32 positions .*max_position_embeddings is 31"),
        ({"name": "add_sink_tokens", "sink_token_id": 12}, (12, 9), "sink_token_id is 12"),
    ],
)
def test_what_transforms_add_is_compared_with_the_model(folder, transform, limits, facts):
    made = mapped(folder(samples(4)), transform)

    with pytest.raises(ConfigError, match=facts):
        made.dataset.check_model(*limits)
    made.dataset.check_model(*(limit and limit + 1 for limit in limits))


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ("add_sink_tokens", r"data_transforms\[0\].*'add_sink_tokens'"),
        ({"name": "add_sink"}, r"data_transforms\[0\].*'add_sink'.*'add_sink_tokens'"),
        ({"name": "add_sink_tokens", "num_sinks": 1}, r"\[0\].*'num_sinks'.*'num_sink_tokens'"),
        ({"name": "add_sink_tokens", "num_sink_tokens": 0}, r"\[0\]\.num_sink_tokens.*0"),
        ({"name": "add_sink_tokens", "sink_token_start_pos": 9}, "sink_token_start_pos 9.* 8 "),
        ({"name": "add_memory_tokens"}, r"\[0\].*attn_memory_chunk_size"),
        ({**POSE, "target_seq_len": 8}, "target_seq_len 8.* 8 tokens"),
        ({**POSE, "ratio_shifted_samples": 1.5}, r"ratio_shifted_samples.*1\.5"),
    ],
)
def test_wrong_transforms_are_refused(folder, given, facts):
    with pytest.raises(ConfigError, match=facts):
        mapped(folder(samples(4)), given)


def test_shifted_positions_come_last():
    with pytest.raises(ConfigError, match=r"data_transforms\[0\].*last"):
        parse_transforms([POSE, {"name": "add_sink_tokens"}])
