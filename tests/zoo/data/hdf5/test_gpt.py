"""The processors of published GPT configurations: what their arguments do."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch

from modelzoo_trainer.core.parts.model_length import lengths_of
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data import stream_processor
from modelzoo_trainer.zoo.data.hdf5.gpt import GptHDF5DataProcessor, GptHDF5MapDataProcessor
from tests.zoo.data.hdf5.written import LENGTH, firsts, flat, samples, write


def mapped(data_dir, **arguments):
    return GptHDF5MapDataProcessor(**{"data_dir": data_dir, "batch_size": 4, **arguments})


def batches(data_dir, **arguments):
    return firsts(mapped(data_dir, **arguments).create_dataloader())


@pytest.fixture
def logged(caplog, monkeypatch):
    monkeypatch.setattr(stream_processor, "_SAID", set())
    caplog.set_level(logging.INFO, "modelzoo_trainer.data")
    return caplog


# ---- what a batch is


def test_a_batch_has_the_rows_of_the_file(folder):
    rows = samples(4)
    rows[1, 1, 3:] = 0

    (batch,) = mapped(folder(rows)).create_dataloader()

    assert list(batch) == ["input_ids", "attention_mask", "labels"]
    assert all(one.dtype == torch.int32 and one.is_contiguous() for one in batch.values())
    assert np.array_equal(torch.stack(list(batch.values()), 1).numpy(), rows)


@pytest.mark.parametrize("dtype", ["uint8", ">i4", "uint32", "int64", "uint16"])
@pytest.mark.parametrize("chunks", [None, (1, 3, LENGTH), (5, 3, LENGTH)])
def test_any_integers_and_any_chunks_are_read(folder, dtype, chunks):
    options = {"chunks": chunks, "compression": None if chunks is None else "gzip"}
    path = folder(samples(8).astype(dtype), **options)

    loaded = list(mapped(path).create_dataloader())

    assert firsts(loaded) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert loaded[0]["labels"].dtype == torch.int32


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_a_corpus_is_read_in_windows_over_all_files(folder, dtype):
    tokens = np.arange(8 * LENGTH + 3).astype(dtype)  # the last two make no window

    found = list(
        mapped(
            folder(tokens, [5, 1, 40, 21]), max_sequence_length=LENGTH, batch_size=8
        ).create_dataloader()
    )

    assert len(found) == 1
    expected = np.arange(8 * LENGTH).reshape(8, LENGTH)
    assert np.array_equal(found[0]["input_ids"].numpy(), expected)
    assert np.array_equal(found[0]["labels"].numpy(), expected + 1)
    assert found[0]["attention_mask"].sum() == 8 * LENGTH
    assert all(one.dtype == torch.int32 for one in found[0].values())


def test_the_windows_of_a_corpus_without_a_length_are_those_of_the_model(folder, logged):
    path = folder(np.arange(8 * LENGTH + 3).astype("uint16"))

    with lengths_of(SimpleNamespace(max_position_embeddings=4)):
        loaded = list(mapped(path).create_dataloader())

    assert loaded[0]["input_ids"].shape == (4, 4)
    assert "max_sequence_length is 4, max_position_embeddings of the model" in logged.text


def test_samples_of_packed_documents_have_spans_and_positions(folder):
    (batch,) = mapped(folder(samples(4, features=5)), use_vsl=True).create_dataloader()

    assert list(batch)[3:] == ["attention_span", "position_ids"]
    assert batch["attention_span"][0].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    assert batch["position_ids"][0].tolist() == list(range(LENGTH))


def test_a_function_makes_samples_of_the_arrays(folder):
    seen = []

    def halves(rows):
        seen.append((rows.shape, rows.dtype))
        return {"left": rows[0, :2], "first": int(rows[0, 0])}

    loaded = list(mapped(folder(samples(4)), dataset_map_fn=halves).create_dataloader())

    assert set(seen) == {((3, LENGTH), np.dtype(np.int32))}
    assert loaded[0]["first"].tolist() == [0, 1, 2, 3]
    assert loaded[0]["left"].shape == (4, 2)


# ---- the order


@pytest.mark.parametrize("sizes", [[23], [1, 2, 3, 4, 5, 1, 7], [1] * 23])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.slow_cases(every=4)
def test_the_order_does_not_depend_on_the_files(folder, sizes, shuffle):
    whole = batches(folder(samples(23), name="whole"), shuffle=shuffle, shuffle_seed=3)

    assert batches(folder(samples(23), sizes), shuffle=shuffle, shuffle_seed=3) == whole


@pytest.mark.parametrize("sizes", [[161], [7, 100, 54], [1] * 161])
@pytest.mark.slow_cases(every=4)
def test_the_order_of_windows_does_not_depend_on_the_files(folder, sizes):
    options = {"shuffle": True, "max_sequence_length": LENGTH}
    tokens = np.arange(161, dtype=np.uint16)

    whole = batches(folder(tokens, name="whole"), **options)

    assert batches(folder(tokens, sizes), **options) == whole


def test_files_of_all_folders_are_sorted_by_their_paths(folder):
    second, first = folder(samples(8)[4:], name="b"), folder(samples(8)[:4], name="a")

    assert batches([second, first]) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_rest_of_an_epoch_begins_the_next_one(folder):
    loader = mapped(folder(samples(10))).create_dataloader()

    assert len(loader) == 2
    loaded = [flat(firsts(loader)) for _ in range(3)]
    assert flat(loaded) == [*range(10), *range(10), *range(4)]


def test_the_last_batch_may_be_smaller_or_filled_with_rows_that_do_not_count(folder):
    path = folder(samples(6) + 1)
    smaller = list(mapped(path, drop_last=False).create_dataloader())
    filled = list(mapped(path, drop_last=False, pad_last=True).create_dataloader())

    assert firsts(smaller) == [[1, 2, 3, 4], [5, 6]]
    assert firsts(filled) == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert filled[1]["attention_mask"].sum(1).tolist() == [2 * LENGTH, 2 * LENGTH, 0, 0]


@pytest.mark.parametrize("num", [3, 10, 25])
def test_an_epoch_may_have_another_number_of_samples(folder, num):
    loader = mapped(folder(samples(10)), num_samples=num, drop_last=False).create_dataloader()

    loaded = flat(firsts(loader))

    assert loaded == [number % 10 for number in range(num)]


def test_a_subset_has_exactly_its_samples(folder):
    path = folder(samples(100), [30, 70])

    loaded = flat(batches(path, data_subset="0-0.29,0.7-1.0", drop_last=False))

    assert loaded == [*range(29), *range(70, 100)]  # 100 * 0.29 is 28.999999999999996 as floats


def test_a_subset_of_a_corpus_has_its_windows(folder):
    tokens = np.arange(10 * LENGTH + 1, dtype=np.uint8)
    options = {"data_subset": "0.2-0.5", "max_sequence_length": LENGTH, "drop_last": False}

    assert batches(folder(tokens), **options) == [[16, 24, 32]]


# ---- mixtures


def mixed(folder, *members, **arguments):
    """Return the first tokens of a mixture: those of member m are from 1000 * m on."""
    listed = [
        {
            "data_dir": folder(samples(num) + 1000 * number, name=f"m{number}"),
            "weight": weight,
            **(more[0] if more else {}),
        }
        for number, (num, weight, *more) in enumerate(members)
    ]
    options = {"batch_size": 5, "drop_last": False, **arguments}
    made = GptHDF5MapDataProcessor(mixture=listed, **options).create_dataloader()
    return flat(firsts(made))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_mixture_has_exactly_its_proportions_and_repeats_small_members(folder, shuffle):
    found = mixed(folder, (60, 0.6), (10, 0.3), (50, 0.1), shuffle=shuffle)

    by_member = [[one for one in found if one // 1000 == number] for number in range(3)]
    assert [len(one) for one in by_member] == [300, 150, 50]  # until the last one is used up
    if not shuffle:
        assert by_member[1] == [1000 + number % 10 for number in range(150)]
    assert sorted(by_member[2]) == list(range(2000, 2050))


def test_a_small_weight_does_not_decide_the_length_of_an_epoch(folder):
    found = mixed(folder, (95, 0.96), (1000, 0.04))

    assert len(found) == 98  # 95 / 0.96
    assert sum(one >= 1000 for one in found) == 4


def test_a_member_without_weight_is_left_out_with_its_length(folder):
    assert mixed(folder, (1000, 0.0), (6, 2)) == [1000, 1001, 1002, 1003, 1004, 1005]


def test_members_have_subsets(folder):
    found = mixed(folder, (10, 0.5, {"data_subset": "0.5-1"}), (10, 0.5, {"data_subset": "0-0.5"}))

    assert sorted(found) == [*range(5, 10), *range(1000, 1005)]


def test_members_may_have_other_integers(folder):
    a = folder(np.arange(17, dtype=np.uint8), name="a")
    b = folder(np.arange(70000, 70017, dtype=np.uint32), name="b")
    members = [{"data_dir": a, "weight": 1}, {"data_dir": b, "weight": 1}]
    made = mapped(None, mixture=members, max_sequence_length=LENGTH)

    assert sorted(flat(firsts(made.create_dataloader()))) == [0, 8, 70000, 70008]


# ---- the iterable processor


def iterable(data_dir, **arguments):
    return GptHDF5DataProcessor(
        **{"data_dir": data_dir, "batch_size": 4, "shuffle": False, **arguments}
    )


def test_the_iterable_processor_reads_all_samples_in_order(folder):
    loader = iterable(folder(samples(10), [3, 7])).create_dataloader()

    assert flat(firsts(loader) + firsts(loader)) == [*range(10), *range(6)]


def test_features_are_those_of_the_folder_or_as_given(folder):
    path = folder(samples(4, features=2))
    given = iterable(path, features_list=["input_ids", "weights"])
    (batch,) = given.create_dataloader()
    Path(path, "data_params.json").write_text(json.dumps({"features": ["input_ids", "mask"]}))
    (from_folder,) = iterable(path).create_dataloader()

    assert list(batch) == ["input_ids", "weights"]
    assert list(from_folder) == ["input_ids", "mask"]


@pytest.mark.parametrize(
    ("text", "fact"),
    [("{", "cannot be read"), ('{"features": 3}', "3"), ('{"data_0_features": []}', "data_0")],
)
def test_features_that_cannot_be_read_are_refused(folder, text, fact):
    path = folder(samples(4))
    Path(path, "data_params.json").write_text(text)

    with pytest.raises(ConfigError, match=rf"data_params\.json.*{fact}"):
        iterable(path)


def test_the_iterable_processor_reads_packed_documents(folder):
    (batch,) = iterable(folder(samples(4, features=5)), use_vsl=True).create_dataloader()

    assert list(batch)[3:] == ["attention_span", "position_ids"]


# ---- arguments without effect


def test_each_argument_without_effect_is_said_once(folder, logged):
    path = folder(samples(8))
    for _ in range(2):
        mapped(path, vocab_size=7, repeat=True, use_worker_cache=True, sort_files=False)
        iterable(
            path,
            shuffle_buffer=3,
            max_sequence_length=9,
            vocab_size=3,
            repeat=True,
            use_multiple_workers=True,
        )

    for owner, names in {
        "GptHDF5MapDataProcessor": "vocab_size repeat use_worker_cache sort_files",
        "GptHDF5DataProcessor": (
            "shuffle_buffer max_sequence_length vocab_size repeat use_multiple_workers"
        ),
    }.items():
        for name in names.split():
            assert sum(f"{owner}.{name}" in one for one in logged.messages) == 1, name
    assert len(logged.messages) == 9


def test_defaults_are_not_said(folder, logged):
    mapped(folder(samples(8)), use_worker_cache=False, vocab_size=None, sort_files=True)

    assert logged.messages == []


def test_samples_that_begin_the_next_epoch_are_said(folder, logged):
    mapped(folder(samples(10))).create_dataloader()

    (message,) = logged.messages
    assert "2 batches of 4 samples, 8 of 10" in message


def test_padding_has_no_effect_where_batches_are_full(folder, logged):
    mapped(folder(samples(8)), pad_last=True)

    assert "pad_last has no effect" in logged.text


# ---- wrong arguments


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        ({"data_dir": None}, "data_dir and mixture.*neither"),
        ({"mixture": [{"data_dir": "a", "weight": 1}]}, "data_dir and mixture.*both"),
        ({"data_dir": []}, "data_dir"),
        ({"use_vsl": True, "data_transforms": [{"name": "add_sink_tokens"}]}, "use_vsl.*data_tr"),
        ({"use_vsl": True, "dataset_map_fn": dict}, "use_vsl.*dataset_map_fn"),
        ({"dataset_map_fn": "f"}, "dataset_map_fn.*'f'"),
        ({"dataset_map_fn": dict, "drop_last": False, "pad_last": True}, "pad_last.*map_fn"),
        ({"data_subset": "0.5"}, "data_subset.*'0.5'"),
        ({"data_subset": "0.5-0.2"}, "data_subset.*ascending"),
        ({"data_subset": "0-0.5,0.4-1"}, "data_subset.*overlap"),
        ({"data_subset": "0-1.5"}, "data_subset.*between 0 and 1"),
        ({"batch_size": 0}, "batch_size"),
        ({"num_samples": 0}, "num_samples"),
    ],
)
def test_arguments_that_are_wrong_or_exclude_each_other_are_refused(arguments, facts):
    given = {"data_dir": "nowhere", "batch_size": 4, **arguments}

    with pytest.raises(ConfigError, match=facts):
        GptHDF5MapDataProcessor(**given)


@pytest.mark.parametrize(
    ("weights", "facts"),
    [
        ([1, float("nan")], r"mixture\[1\]\.weight.*nan"),
        ([1, -0.5], r"mixture\[1\]\.weight.*-0\.5"),
        ([1, float("inf")], r"mixture\[1\]\.weight.*inf"),
        ([True], r"mixture\[0\]\.weight.*True"),
        ([0, 0.0], "mixture.*none of the 2"),
        ([], "mixture.*none of the 0"),
    ],
)
def test_weights_that_are_no_proportions_are_refused_with_their_element(weights, facts):
    mixture = [{"data_dir": "nowhere", "weight": weight} for weight in weights]

    with pytest.raises(ConfigError, match=facts):
        mapped(None, mixture=mixture)


def test_a_weight_may_be_an_integer_of_any_size(folder):
    path = folder(samples(6))
    mixture = [{"data_dir": path, "weight": 10**400}, {"data_dir": path, "weight": 10**400}]
    assert len(mapped(None, mixture=mixture).dataset) == 12


@pytest.mark.parametrize(
    ("member", "facts"),
    [
        ("a", r"mixture\[0\].*'a'"),
        ({"weight": 1}, r"mixture\[0\].*data_dir is missing"),
        ({"data_dir": "a"}, r"mixture\[0\].*weight is missing"),
        ({"data_dir": "a", "wieght": 1}, r"mixture\[0\].*'wieght'.*'weight'"),
        ({"data_dir": "a", "weight": 1, "data_subset": "x"}, r"mixture\[0\]\.data_subset.*'x'"),
    ],
)
def test_an_element_of_a_mixture_is_checked(member, facts):
    with pytest.raises(ConfigError, match=facts):
        mapped(None, mixture=[member])


def test_a_subset_beside_a_mixture_is_refused():
    member = {"data_dir": "a", "weight": 1}
    with pytest.raises(ConfigError, match=r"data_subset.*mixture"):
        mapped(None, mixture=[member], data_subset="0-1")


def test_a_member_of_less_than_a_sample_is_refused(folder):
    path = folder(samples(8))
    members = [{"data_dir": path, "weight": weight} for weight in (1, 1e-9)]

    with pytest.raises(ConfigError, match=r"mixture\[1\].*1e-09"):
        mapped(None, mixture=members)


# ---- wrong data


def refused(path, **arguments):
    with pytest.raises(ConfigError) as caught:
        mapped(path, **arguments)
    return str(caught.value)


def test_a_missing_dataset_is_named(folder):
    message = refused(folder(samples(4), dataset="rows"))

    assert "f000.h5" in message
    assert "'data'" in message
    assert "'rows'" in message


@pytest.mark.parametrize(
    ("rows", "facts"),
    [
        (samples(4).astype("int64"), ["int64", "int32"]),
        (samples(4, length=9), ["(rows, 3, 9)", "(rows, 3, 8)"]),
        (np.arange(40), ["int64", "(rows)"]),
        (samples(4).astype("float32"), ["float32", "(4, 3, 8)"]),
    ],
)
def test_a_file_that_differs_from_the_others_is_named_with_both_forms(folder, rows, facts):
    path = folder(samples(4))
    write(Path(path, "g.h5"), rows)

    message = refused(path)

    assert [fact for fact in ["g.h5", *facts] if fact not in message] == []


def test_a_truncated_file_is_named(folder):
    path = folder(samples(400))
    file = Path(path, "f000.h5")
    file.write_bytes(file.read_bytes()[:9000])

    message = refused(path)

    assert "f000.h5" in message
    assert "truncated" in message


def test_a_folder_without_files_is_named(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "a.hdf5").touch()
    (tmp_path / "x" / "inner.h5").mkdir()

    assert "data_dir" in refused(str(tmp_path / "x"))
    assert "x" in refused(str(tmp_path / "x"))


def test_a_folder_of_a_preprocessing_that_was_stopped_is_refused(folder):
    path = folder(samples(4))
    Path(path, "INCOMPLETE.json").write_text("{}")

    assert "INCOMPLETE.json" in refused(path)
    (lack,) = GptHDF5MapDataProcessor.check_arguments(data_dir=path, batch_size=4)
    assert "INCOMPLETE.json" in lack


@pytest.mark.parametrize(
    ("rows", "arguments", "facts"),
    [
        (np.arange(40), {}, "f000.h5 max_sequence_length"),
        (np.arange(5), {"max_sequence_length": 5}, "max_sequence_length 5"),
        (np.arange(40), {"max_sequence_length": 8, "use_vsl": True}, "f000.h5 use_vsl"),
        (samples(4), {"max_sequence_length": 3}, "f000.h5 max_sequence_length 3 8"),
        (samples(4), {"use_vsl": True}, "f000.h5 3 5 use_vsl"),
        (samples(4, features=5), {}, "f000.h5 5 3 use_vsl"),
        (samples(4)[:, 0], {}, "f000.h5 (8,)"),
        (np.arange(0), {"max_sequence_length": 8}, "f000.h5 no rows"),
        (samples(9), {"data_subset": "0-0.1"}, "data_subset 0-0.1 9"),
    ],
)
def test_data_that_does_not_fit_the_arguments_is_refused(folder, rows, arguments, facts):
    message = refused(folder(rows), **arguments)

    assert [fact for fact in facts.split() if fact not in message] == []


def test_the_length_of_samples_may_be_given(folder):
    assert batches(folder(samples(4)), max_sequence_length=LENGTH) == [[0, 1, 2, 3]]


def test_another_number_of_rows_than_the_file_says_is_logged(folder, caplog):
    path = folder(samples(4))
    with h5py.File(Path(path, "f000.h5"), "r+") as file:
        file.attrs["n_examples"] = 7

    assert batches(path) == [[0, 1, 2, 3]]
    assert "f000.h5" in caplog.text
    assert "n_examples is 7" in caplog.text


def test_a_check_names_missing_folders_and_opens_no_file(folder, monkeypatch):
    monkeypatch.setattr("modelzoo_trainer.zoo.data.hdf5.files.h5py_module", None)
    path = folder(samples(4))
    mixture = [{"data_dir": [path, "nowhere"], "weight": 1}]

    (lack,) = GptHDF5MapDataProcessor.check_arguments(mixture=mixture, batch_size=4)
    (other,) = GptHDF5DataProcessor.check_arguments(data_dir="nothing", batch_size=4, shuffle=False)

    assert lack.startswith("mixture[0].data_dir 'nowhere' does not exist")
    assert other.startswith("data_dir 'nothing' does not exist")


def test_a_check_names_folders_without_files(tmp_path):
    (tmp_path / "sub.h5").mkdir()  # a split without rows has only settings
    (tmp_path / "data_params.json").write_text("{}")
    data_dir = str(tmp_path)

    (lack,) = GptHDF5DataProcessor.check_arguments(data_dir=data_dir, batch_size=4, shuffle=False)

    assert f"data_dir {data_dir!r} has no .h5 file" in lack
