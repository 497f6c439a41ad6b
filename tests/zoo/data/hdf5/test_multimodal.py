"""The processors of text with images."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.dataset_info import check_model
from modelzoo_trainer.zoo.data.hdf5.multimodal import (
    LlavaHDF5MapDataProcessor,
    MultimodalSimpleHDF5MapDataProcessor,
)
from tests.zoo.data.hdf5.images_written import FEATURES, HOLDER, LENGTH, START, write


class Model:
    """What a dataset asks of a model."""

    vocab_size = 40
    max_position_embeddings = LENGTH
    image_positions = (START, START + FEATURES)


class SimpleModel:
    vocab_size = 40
    max_position_embeddings = LENGTH
    num_features_of_image = FEATURES


def loader(arguments, **more):
    return LlavaHDF5MapDataProcessor(**arguments | more).create_dataloader()


def simple_loader(arguments, **more):
    return MultimodalSimpleHDF5MapDataProcessor(**arguments | more).create_dataloader()


def shown(images):
    """Return the class and the number that the pixels tell."""
    return (images[..., :2, 0, 0] * 255 / 10).round().int().tolist()


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}])
def test_a_row_comes_with_its_image(tmp_path, options):
    batches = list(loader(write(tmp_path, **options)))
    assert {key: (tuple(one.shape), one.dtype) for key, one in batches[0].items()} == {
        "text_input_ids": ((2, LENGTH), torch.int32),
        "loss_mask": ((2, LENGTH), torch.int32),
        "labels": ((2, LENGTH), torch.int32),
        "key_padding_mask": ((2, LENGTH), torch.int32),
        "image_data": ((2, 3, 8, 8), torch.float32),
    }
    assert [one["text_input_ids"][:, 0].tolist() for one in batches] == [[0, 1], [2, 3], [4]]
    assert [shown(one["image_data"]) for one in batches] == [
        [[0, 0], [0, 1]],
        [[0, 2], [0, 3]],
        [[0, 4]],
    ]
    assert batches[0]["text_input_ids"][0, START : START + FEATURES].tolist() == [HOLDER] * FEATURES
    assert batches[0]["key_padding_mask"][:, -1].tolist() == [1, 1]


def test_numbers_are_normalized_and_none_is_a_black_image(tmp_path):
    def without(made):
        made["img_path"][1] = "None"

    normalize = {"name": "normalize", "mean": [0.5, 0.0, 0.0], "std": [0.5, 1.0, 1.0]}
    data = write(tmp_path, change=without)
    data["transforms"] = [*data["transforms"], normalize]
    images = next(iter(loader(data)))["image_data"]
    assert images[1].unique().tolist() == [-1.0, 0.0]
    assert images[1, 0].eq(-1).all()
    assert images[0, 2].max() > 0


def test_each_epoch_has_its_order_and_random_transforms_follow_the_row(tmp_path):
    crop = {"name": "center_crop", "size": 8}
    flip = [crop, {"name": "random_horizontal_flip"}, {"name": "to_tensor"}]
    data = write(tmp_path, 6) | {"transforms": flip, "shuffle": True, "batch_size": 3}

    def epochs(**more):
        rows = loader(data, **more)
        found = []
        for epoch in (0, 1, 0):
            rows.sampler.set_epoch(epoch)
            rows.dataset.set_epoch(epoch)
            found.append({})
            for one in rows:
                numbers = one["text_input_ids"][:, 0].tolist()
                assert [number for _, number in shown(one["image_data"])] == numbers
                found[-1] |= dict(zip(numbers, one["image_data"].unbind(), strict=True))
        return found

    first, second, again = epochs()
    other = epochs(batch_size=2, shuffle_seed=0)[0]
    assert list(first) == list(again) != list(second)
    assert all(torch.equal(first[number], again[number]) for number in range(6))
    assert all(torch.equal(first[number], other[number]) for number in range(6))
    left = [[one[number][2, 0, 0].item() for number in range(6)] for one in (first, second)]
    assert left[0] != left[1]


def test_padding_rows_count_nothing(tmp_path):
    *_, last = loader(write(tmp_path), pad_last=True)
    assert last["text_input_ids"][:, 0].tolist() == [4, 0]
    assert not last["loss_mask"][1].any()
    assert not last["image_data"][1].any()


def test_further_features_are_not_used(tmp_path):
    def add(made):
        rows = made["data"]
        made["data"] = np.concatenate((rows, np.full_like(rows[:, :1], 3)), axis=1)

    batch = next(iter(loader(write(tmp_path, change=add))))
    assert len(batch) == 5
    assert batch["key_padding_mask"].max() == 1


def test_several_images_come_with_the_places_of_their_features(tmp_path):
    def drop(made):
        made["img_path"][1, 1] = "None"
        made["img_data_loc"][1, 1] = LENGTH

    data = write(tmp_path, images=2, change=drop)
    rows = simple_loader(data)
    check_model(rows, SimpleModel())
    batch = next(iter(rows))
    assert batch["image_data"].shape == (2, 2, 3, 8, 8)
    assert shown(batch["image_data"]) == [[[0, 0], [1, 0]], [[0, 1], [0, 0]]]
    assert batch["image_data_loc"].tolist() == [[[1, 2], [3, 4]], [[1, 2], [8, 8]]]
    assert batch["image_data_loc"].dtype == torch.int32
    assert batch["token_modality_idx"].shape == (2, LENGTH)
    padded = list(simple_loader(data, pad_last=True))[-1]
    assert padded["image_data_loc"][1].unique().tolist() == [LENGTH]


def test_a_missing_or_damaged_image_is_named_with_its_row(tmp_path):
    data = write(tmp_path)
    rows = loader(data)
    path = tmp_path / "images/c0/3.png"
    path.write_bytes(path.read_bytes()[:50])
    where = r"b\.h5: dataset 'img_path', row 0: .*c0/3\.png"
    with pytest.raises(ConfigError, match=rf"{where}.*cannot be read.*damaged"):
        list(rows)
    path.unlink()
    with pytest.raises(ConfigError, match=rf"{where}' does not exist in img_data_dir"):
        list(rows)
    with pytest.raises(ConfigError, match=rf"{where}' does not exist"):
        check_model(rows, Model())
    path.mkdir()
    with pytest.raises(ConfigError, match=rf"{where}' is not a file"):
        list(rows)


def other_size(made):
    made["img_path"] = made["img_path"][:, :0]


def no_names(made):
    del made["img_path"]


def numbers_for_names(made):
    made["img_path"] = np.zeros((5, 1), np.int32)


def two_names(made):
    made["img_path"] = np.repeat(made["img_path"], 2, axis=1)


def flat_names(made):
    made["img_path"] = made["img_path"][:, 0]


def empty_name(made):
    made["img_path"][4] = ""


def few_features(made):
    made["data"] = made["data"][:, :3]


def corpus(made):
    made["data"] = made["data"].reshape(-1)


def padding_of_two(made):
    made["data"][4, 3, 2] = 2


def negative_weight(made):
    made["data"][2, 1, 3] = -1


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (no_names, r"a\.h5: there is no dataset 'img_path'"),
        (numbers_for_names, r"'img_path' has dtype int32.*expected texts"),
        (two_names, r"'img_path' names 2 images.*MultimodalSimple"),
        (flat_names, r"'img_path' has rows of shape \(\), expected \(images,\)"),
        (empty_name, r"b\.h5: dataset 'img_path', row 1: '' names no image.*'None'"),
        (few_features, "3 features per sample, but 4 are expected"),
        (corpus, "1-D, a corpus of tokens, but images require samples"),
        (padding_of_two, r"b\.h5: dataset 'data', row 1: key_padding_mask has 2 in column 2"),
        (negative_weight, r"a\.h5: dataset 'data', row 2: loss_mask has -1 in column 3"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, change, facts):
    with pytest.raises(ConfigError, match=facts):
        list(loader(write(tmp_path, change=change)))


def few_places(made):
    made["img_data_loc"] = made["img_data_loc"][:, :1]


def place_after_the_end(made):
    made["img_data_loc"][3, 1, 1] = LENGTH


def place_of_nothing(made):
    made["img_path"][2, 0] = "None"


def negative_place(made):
    made["img_data_loc"][0, 0, 0] = -1


def one_place_for_two(made):
    made["img_data_loc"][1, 1, 1] = made["img_data_loc"][1, 0, 0]


def place_of_text(made):
    made["img_data_loc"][4, 1, 1] = LENGTH - 1


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (one_place_for_two, r"a\.h5: .*'img_data_loc', row 1: two features have the position 1"),
        (
            place_of_text,
            r"b\.h5: .*row 1: feature 3 of 4 has the position 7.* has 27.*placeholder 7",
        ),
        (few_places, r"'img_data_loc' has rows of shape \(1, 2\), expected \(2, patches\)"),
        (
            place_after_the_end,
            r"b\.h5: .*'img_data_loc', row 0: image 1 has 8 in column 1.* 0 to 7",
        ),
        (
            place_of_nothing,
            r"a\.h5: .*'img_data_loc', row 2: image 0 has 1 in column 0, expected 8",
        ),
        (negative_place, r"row 0: image 0 has -1 in column 0"),
    ],
)
def test_places_that_do_not_fit_are_refused(tmp_path, change, facts):
    with pytest.raises(ConfigError, match=facts):
        list(simple_loader(write(tmp_path, images=2, change=change)))


def test_what_the_model_lacks_is_refused(tmp_path):
    rows = loader(write(tmp_path))
    check_model(rows, Model())
    list(rows)

    class Moved(Model):
        image_positions = (START + 1, START + 1 + FEATURES)

    facts = r"a\.h5: dataset 'data', row 0: .*columns 2 to 3.*column 2 has 7 and column 3 has 23"
    with pytest.raises(ConfigError, match=facts):
        check_model(rows, Moved())

    class Late(Model):
        image_positions = (LENGTH - 1, LENGTH - 1 + FEATURES)

    with pytest.raises(ConfigError, match=r"rows have 8 positions.* 2 features.*start_idx 7"):
        check_model(rows, Late())

    class Small(Model):
        vocab_size = 26

    with pytest.raises(ConfigError, match=r"text_input_ids has token id 26.*vocab_size is 26"):
        check_model(rows, Small())


def test_another_number_of_features_than_the_model_has_is_refused(tmp_path):
    class More(SimpleModel):
        num_features_of_image = 3

    rows = simple_loader(write(tmp_path, images=2))
    with pytest.raises(ConfigError, match=r"img_data_loc' has 2 positions.*3 features"):
        check_model(rows, More())


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"image_data_size": [1, 8, 8]}, r"image_data_size is \[1, 8, 8\].* 3 channels"),
        ({"image_data_size": [3, 8, 9]}, r"image_data_size is \[3, 8, 9\].*\[8, 8\]"),
        ({"image_data_size": [8, 8]}, "image_data_size.*3 integers"),
        ({"transforms": []}, "to_tensor"),
        ({"transforms": [{"name": "resise"}]}, r"transforms\[0\].*'resize'"),
        ({"use_vsl": True}, "use_vsl.*not packed"),
        ({"dataset_map_fn": print}, "dataset_map_fn"),
        ({"img_data_dir": ""}, "img_data_dir: expected a folder"),
        ({"img_data_dir": "nowhere"}, "img_data_dir 'nowhere' does not exist"),
        ({"data_dir": None}, "data_dir and mixture"),
        ({"max_sequence_length": 9}, "max_sequence_length is 9, but .* 8 tokens"),
    ],
)
def test_invalid_arguments_are_refused(tmp_path, change, facts):
    with pytest.raises(ConfigError, match=facts):
        loader(write(tmp_path), **change)


def test_a_check_says_what_is_missing(tmp_path):
    arguments = {**write(tmp_path), "data_dir": "there", "img_data_dir": "nowhere"}
    rows, images = LlavaHDF5MapDataProcessor.check_arguments(**arguments)
    assert "data_dir 'there' does not exist" in rows
    assert "img_data_dir 'nowhere' does not exist" in images
    assert MultimodalSimpleHDF5MapDataProcessor.check_arguments(**write(tmp_path / "b")) == []


def test_what_has_no_effect_is_said(tmp_path, caplog):
    caplog.set_level("INFO")
    loader(write(tmp_path), sort_files=False, fp16_type="float16", vocab_size=3)
    said = [one.getMessage() for one in caplog.records]
    for name in ("sort_files", "fp16_type", "vocab_size"):
        assert any(f"LlavaHDF5MapDataProcessor.{name} has no effect" in one for one in said)
