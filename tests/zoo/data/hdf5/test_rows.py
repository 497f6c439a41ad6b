"""Reading rows: open files, damage, changes, and what the model lacks."""

import multiprocessing
import os
import pickle
import random
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.hdf5.files import read_header
from modelzoo_trainer.zoo.data.hdf5.gpt import GptHDF5MapDataProcessor
from modelzoo_trainer.zoo.data.hdf5.open_files import OpenFiles
from tests.zoo.data.hdf5.written import LENGTH, firsts, flat, samples, write


def dataset(path, **arguments):
    return GptHDF5MapDataProcessor(data_dir=path, batch_size=4, **arguments).dataset


def ids(batch):
    return batch["input_ids"][:, 0].tolist()


LAYOUTS = [
    {"chunks": None, "compression": None},
    {"chunks": (1, 3, LENGTH), "compression": "gzip"},
    {"chunks": (1, 3, LENGTH), "compression": "gzip", "shuffle": True},
    {"chunks": (1, 3, LENGTH), "compression": "gzip", "fletcher32": True},
    {"chunks": (1, 3, LENGTH), "compression": None},
    {"chunks": (1, 1, LENGTH), "compression": "gzip"},
    {"chunks": (4, 3, LENGTH), "compression": "gzip"},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_is_in_the_order_of_its_indices(folder, layout):
    rows = dataset(folder(samples(40), [7, 20, 13], **layout))
    shuffled = random.Random(0).sample(range(40), 40)

    for indices in (shuffled, [5, 5, 6, 7, 8, 5], list(range(40)), [39, 0], [12]):
        assert ids(rows.__getitems__(indices)) == indices


@pytest.mark.parametrize("sizes", [[81], [3, 50, 1, 1, 26]])
def test_windows_are_in_the_order_of_their_indices(folder, sizes):
    rows = dataset(folder(np.arange(81), sizes), max_sequence_length=LENGTH)

    for indices in ([3, 4, 5, 1, 9, 9, 0], list(range(10)), [7]):
        batch = rows.__getitems__(indices)
        assert ids(batch) == [index * LENGTH for index in indices]
        assert batch["labels"][:, -1].tolist() == [(index + 1) * LENGTH for index in indices]


def test_padding_rows_are_zero_wherever_they_are(folder):
    rows = dataset(folder(samples(4) + 1))
    batch = rows.__getitems__([-1, 2, -1, 0])

    assert ids(batch) == [0, 3, 0, 1]
    assert batch["attention_mask"].sum(1).tolist() == [0, 2 * LENGTH, 0, 2 * LENGTH]
    assert rows.__getitems__([-1, -1])["labels"].sum() == 0


def test_one_sample_has_no_batch_dimension(folder):
    rows = dataset(folder(samples(4)))

    assert rows[2]["labels"].tolist() == list(range(3, 3 + LENGTH))
    assert rows[-1]["input_ids"][0] == 3
    with pytest.raises(IndexError):
        rows[4]


def test_rows_that_were_never_written_have_the_fill_value(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = file.create_dataset(
            "data", (6, 3, 8), "i4", chunks=(1, 3, 8), compression="gzip", fillvalue=7
        )
        data[2:4] = samples(2)

    batch = dataset(str(tmp_path)).__getitems__([0, 3, 2, 5])

    assert ids(batch) == [7, 1, 0, 7]
    assert batch["labels"][0].tolist() == [7] * 8


# ---- open files


def test_few_files_are_open_at_a_time(folder):
    path = Path(folder(samples(30), [1] * 30))
    opened = OpenFiles(limit=4)
    for file in sorted(path.iterdir()):
        opened.read(read_header(str(file)), 0, 1)
        assert len(opened) <= 4

    opened.close()
    assert len(opened) == 0


def test_files_of_contiguous_rows_are_closed_with_the_dataset(folder):
    path = folder(samples(8), [4, 4], chunks=None, compression=None)
    before = len(os.listdir("/proc/self/fd"))
    rows = dataset(path)
    rows.__getitems__(list(range(8)))
    assert len(os.listdir("/proc/self/fd")) == before + 2

    del rows

    assert len(os.listdir("/proc/self/fd")) == before


def test_headers_of_unchanged_files_are_read_once(folder, monkeypatch):
    path = folder(samples(8), [4, 4])
    dataset(path)
    monkeypatch.setattr("modelzoo_trainer.zoo.data.hdf5.files.h5py_module", None)

    assert len(dataset(path)) == 8


def test_a_dataset_that_is_pickled_opens_its_own_files(folder):
    rows = dataset(folder(samples(8)))
    rows.__getitems__([0])

    assert ids(pickle.loads(pickle.dumps(rows)).__getitems__([5])) == [5]


def test_a_forked_process_opens_its_own_files(folder):
    rows = dataset(folder(samples(8), [4, 4]))
    rows.__getitems__([0, 1])
    parent, child = multiprocessing.get_context("fork").Pipe()
    number = os.fork()
    if not number:
        child.send((ids(rows.__getitems__([3, 6])), len(rows._open)))
        os._exit(0)
    os.waitpid(number, 0)

    assert parent.recv() == ([3, 6], 2)
    assert ids(rows.__getitems__([2, 7])) == [2, 7]


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_workers_read_the_same_batches(folder, context, shuffle):
    path = folder(samples(20), [3, 10, 7])
    arguments = {"data_dir": path, "batch_size": 4, "shuffle": shuffle}
    alone = firsts(GptHDF5MapDataProcessor(**arguments).create_dataloader())
    made = GptHDF5MapDataProcessor(**arguments, num_workers=2, persistent_workers=False)
    loader = made.create_dataloader()
    made.dataset.__getitems__([0])  # opens a file in this process
    loader.multiprocessing_context = context

    assert firsts(loader) == alone
    assert sorted(flat(alone)) == list(range(20))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 4])
def test_memory_does_not_grow_with_the_number_of_files(tmp_path, chunk):
    for number in range(300):
        write(tmp_path / f"{number:03}.h5", samples(8, length=512), chunks=(chunk, 3, 512))
    made = GptHDF5MapDataProcessor(data_dir=str(tmp_path), batch_size=32, shuffle=True)
    used = []
    for _ in range(4):
        for _ in made.create_dataloader():
            pass
        used.append(memory())

    assert len(made.dataset._open) <= 128
    assert used[3] - used[0] < 4 * 2**20


def memory():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# ---- damage


def damaged(path, row):
    """Invert the bytes of a compressed row."""
    with h5py.File(path) as file:
        chunk = file["data"].id.get_chunk_info(row)
    with path.open("r+b") as file:
        file.seek(chunk.byte_offset)
        content = file.read(chunk.size)
        file.seek(chunk.byte_offset)
        file.write(bytes(255 - byte for byte in content))


@pytest.mark.parametrize("indices", [[6, 7, 8, 9], [9, 8, 2]])
def test_a_damaged_row_is_named(folder, indices):
    path = folder(samples(12), [4, 8])
    damaged(Path(path, "f001.h5"), 4)

    with pytest.raises(ConfigError, match=r"f001\.h5: dataset 'data', row 4 cannot be read"):
        dataset(path).__getitems__(indices)


def test_a_file_that_is_gone_or_truncated_is_named(folder):
    path = folder(samples(12), [4, 8], chunks=None, compression=None)
    rows = dataset(path)
    Path(path, "f000.h5").unlink()
    os.truncate(Path(path, "f001.h5"), Path(path, "f001.h5").stat().st_size - 50)

    with pytest.raises(ConfigError, match=r"f000\.h5: dataset 'data', row 2 .*"):
        rows.__getitems__([2])
    with pytest.raises(ConfigError, match=r"f001\.h5: dataset 'data', row 7 .*ends"):
        rows.__getitems__([9, 10, 11])


def test_a_value_that_does_not_fit_int32_is_named(folder):
    content = samples(6).astype(np.uint32)
    content[4, 1, 2] = 2**31
    with pytest.raises(ConfigError, match=r"f001\.h5: dataset 'data', row 1: .*int32.*2147483648"):
        dataset(folder(content, [3, 3])).__getitems__([0, 5, 4])


def test_bytes_that_the_library_cannot_explain_are_a_damaged_file(folder):
    path = Path(folder(samples(12)), "f000.h5")
    content = path.read_bytes()
    numbers = random.Random(1)
    for _ in range(100):
        changed = bytearray(content)
        changed[numbers.randrange(len(content))] = numbers.randrange(256)
        path.write_bytes(changed)
        os.utime(path, ns=(0, numbers.randrange(10**9)))  # no cached header
        try:
            dataset(str(path.parent)).__getitems__([*range(12)])
        except ConfigError as error:
            assert "f000.h5" in str(error)  # noqa: PT017  # others are failures


def test_a_link_to_nothing_is_not_left_out(folder):
    path = folder(samples(4))
    Path(path, "g.h5").symlink_to("nowhere")
    with pytest.raises(ConfigError, match=r"g\.h5"):
        dataset(path)


def test_samples_without_tokens_are_refused(tmp_path):
    write(tmp_path / "a.h5", np.zeros((4, 3, 0), np.int32), chunks=None)
    with pytest.raises(ConfigError, match=r"a\.h5.*\(4, 3, 0\)"):
        dataset(str(tmp_path))


def test_a_count_that_is_no_number_is_only_reported(folder, caplog):
    path = folder(samples(4))
    with h5py.File(Path(path, "f000.h5"), "a") as file:
        file.attrs["n_examples"] = [1, 2]
    assert len(dataset(path)) == 4
    assert "[1 2]" in caplog.text


# ---- the model


def test_a_token_id_that_the_model_lacks_is_named_before_training(folder):
    content = samples(6)
    content[4, 0, 5] = 99
    rows = dataset(folder(content, [3, 3]))
    rows.check_model(100, LENGTH)

    with pytest.raises(ConfigError) as caught:
        rows.check_model(99, None)
    facts = ["f001.h5: dataset 'data', row 1", "input_ids", "99 in column 5", "vocab_size is 99"]
    assert [fact for fact in facts if fact not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("feature", "token", "is_right"),
    [
        (0, -1, False),
        (2, -100, True),
        (2, -1, False),
        (2, 70, False),
        (1, 70, True),
        (1, -1, False),
    ],
)
def test_every_batch_is_checked(folder, feature, token, is_right):
    content = samples(300) % 50
    content[:, 1] = 1
    content[1, feature, 3] = token  # not among those that are read first
    rows = dataset(folder(content))
    rows.check_model(60, LENGTH)

    if is_right:
        assert rows.__getitems__([1, 2])["labels"].shape == (2, LENGTH)
        return
    with pytest.raises(ConfigError, match=rf"row 1: .*{token} in column 3"):
        rows.__getitems__([0, 1])


def test_a_token_of_a_corpus_that_the_model_lacks_is_named(folder):
    rows = dataset(folder(np.arange(41), [20, 21]), max_sequence_length=LENGTH)

    with pytest.raises(ConfigError, match=r"f001\.h5: dataset 'data', token 12.* 33 in column 1"):
        rows.check_model(33, None)


@pytest.mark.parametrize("position", [-1, LENGTH])
def test_a_position_that_the_model_lacks_is_named(folder, position):
    content = samples(6, features=5)
    content[4, 4, 2] = position
    rows = dataset(folder(content, [3, 3]), use_vsl=True)
    with pytest.raises(ConfigError, match=rf"f001\.h5.*row 1: position_ids has {position} in col"):
        rows.check_model(100, LENGTH)


def test_a_negative_span_is_named(folder):
    content = samples(6, features=5)
    content[4, 3, 2] = -7
    rows = dataset(folder(content, [3, 3]), use_vsl=True)
    with pytest.raises(ConfigError, match=r"f001\.h5.*row 1: attention_span has -7 in column 2"):
        rows.__getitems__([4])


@pytest.mark.parametrize("spelling", ["{}", "{}/", "{}/../{name}"])
def test_a_folder_that_is_named_twice_is_refused(folder, spelling):
    path = Path(folder(samples(4)))
    again = spelling.format(path, name=path.name)
    with pytest.raises(ConfigError, match=r"data_dir: .*same folder.*mixture"):
        dataset([str(path), again])


def test_samples_that_are_longer_than_the_model_takes_are_refused(folder):
    rows = dataset(folder(samples(4)))

    with pytest.raises(ConfigError, match=r"f000\.h5.* 8 .*max_position_embeddings is 7"):
        rows.check_model(None, 7)


# ---- changes between epochs


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (lambda path: write(path / "g.h5", samples(1)), "g.h5: has been added"),
        (lambda path: (path / "f001.h5").unlink(), "f001.h5: has been removed"),
        (lambda path: write(path / "f001.h5", samples(9)), "f001.h5: has been changed"),
        (lambda path: os.utime(path / "f000.h5", (1, 1)), "f000.h5: has been changed"),
    ],
)
def test_a_change_between_epochs_is_named(folder, change, facts):
    path = folder(samples(8), [4, 4])
    rows = dataset(path)
    rows.set_epoch(1)
    change(Path(path))

    with pytest.raises(ConfigError, match=facts):
        pickle.loads(pickle.dumps(rows)).set_epoch(2)


def test_other_files_may_come_and_go(folder):
    path = folder(samples(8))
    rows = dataset(path)
    Path(path, "notes.txt").touch()

    rows.set_epoch(1)


def test_the_fingerprint_tells_names_sizes_and_ranges(folder, tmp_path):
    kept = dataset(folder(samples(8), [4, 4])).fingerprint
    others = [
        dataset(folder(samples(8), [5, 3], name="b")).fingerprint,
        dataset(folder(samples(8), [4, 4]), data_subset="0-0.5").fingerprint,
        dataset(folder(samples(8), [8], name="c")).fingerprint,
    ]
    (tmp_path / "a").rename(tmp_path / "moved")

    assert dataset(str(tmp_path / "moved")).fingerprint == kept
    assert len({kept, *others}) == 4


def _replace(batch):
    batch["labels"] = batch["labels"] + 100
    return batch


def _add_in_place(batch):
    batch["labels"].add_(100)
    return batch


def _unchanged(batch):
    return batch


@pytest.mark.parametrize("form", ["samples", "corpus"])
@pytest.mark.parametrize("change", [_replace, _add_in_place])
@pytest.mark.slow_cases(every=4)
def test_a_batch_that_a_worker_changes_arrives_changed(folder, form, change):
    path = folder(samples(4) if form == "samples" else np.arange(17, dtype=np.uint16))
    rows = dataset(path, max_sequence_length=4 if form == "corpus" else None)
    plain = rows.__getitems__([0, 1, 2, 3])
    (batch,) = DataLoader(rows, 4, num_workers=1, collate_fn=change)

    assert type(batch) is dict
    assert torch.equal(batch["labels"], plain["labels"] + 100)
    assert torch.equal(batch["input_ids"], plain["input_ids"])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32, np.int64, ">u2"])
@pytest.mark.parametrize("length", [4, 200_000])  # through a pipe, through shared memory
@pytest.mark.slow_cases(every=4)
def test_windows_of_any_dtype_arrive_from_a_worker_as_in_one_process(folder, dtype, length):
    path = folder((np.arange(4 * length + 1) % 100).astype(dtype))
    rows = dataset(path, max_sequence_length=length)
    plain = rows.__getitems__([0, 1, 2, 3])
    (batch,) = DataLoader(rows, 4, num_workers=1, collate_fn=_unchanged)

    assert type(batch) is type(plain) is dict
    assert batch.keys() == plain.keys()
    for name, values in batch.items():
        assert torch.equal(values, plain[name])
        assert values.dtype == torch.int32
        assert values.is_contiguous()
        values.add_(1)  # belongs to the receiver
    assert torch.equal(batch["labels"], plain["labels"] + 1)
    assert torch.equal(batch["attention_mask"], plain["attention_mask"] + 1)


@pytest.mark.parametrize("length", [4, 60_000])  # through a pipe, through shared memory
def test_samples_that_a_worker_sends_belong_to_the_receiver(folder, length):
    rows = dataset(folder(samples(4, length=length)))
    plain = rows.__getitems__([0, 1, 2, 3])
    (batch,) = DataLoader(rows, 4, num_workers=1, collate_fn=_unchanged)

    for name, values in batch.items():
        assert torch.equal(values.add_(1), plain[name] + 1)


def test_a_token_that_the_model_lacks_is_found_in_a_corpus_of_small_integers(folder):
    path = folder(np.array([1, 2, 3, 4, 5, 9, 7, 8, 1], np.uint16))
    rows = dataset(path, max_sequence_length=4)
    with pytest.raises(
        ConfigError, match=r"the corpus has token id 9 in column 1.*vocab_size is 9"
    ):
        rows.check_model(9, None)
