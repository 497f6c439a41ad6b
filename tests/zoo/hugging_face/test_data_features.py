"""`HuggingFaceDataProcessor` with columns that are already what a model takes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from modelzoo_trainer import Callback, register_global_callback
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data import processor_class
from modelzoo_trainer.zoo.data.hugging_face import stream
from tests.distributed.ranks import run_ranks, try_ranks

pytestmark = pytest.mark.slow
datasets = pytest.importorskip("datasets", reason="needs datasets")
pytest.importorskip("transformers", reason="needs transformers")
Image = pytest.importorskip("PIL.Image", reason="needs Pillow")

NUM = 40
VOCAB = 60
WAYS = pytest.mark.parametrize("streaming", [False, True])


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CHUNK", 7)


def columns() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    ids = [generator.integers(1, VOCAB, 2 + number % 5).tolist() for number in range(NUM)]
    return {
        "image": [
            Image.fromarray(generator.integers(0, 256, (6, 8, 3), dtype=np.uint8))
            for _ in range(NUM)
        ],
        "digit": [str(number % 10) for number in range(NUM)],
        "input_ids": ids,
        "mask": [[1] * len(one) for one in ids],
        "labels": [one[::-1] for one in ids],
        "share": [number / 7 for number in range(NUM)],
        "is_even": [number % 2 == 0 for number in range(NUM)],
        "sound": generator.normal(size=(NUM, 2, 3)).tolist(),
        "text": ["a"] * NUM,
    }


FEATURES = {
    "image": datasets.Image(),
    "digit": datasets.ClassLabel(names=[str(number) for number in range(10)]),
    "input_ids": datasets.List(datasets.Value("int32")),
    "mask": datasets.List(datasets.Value("int8")),
    "labels": datasets.List(datasets.Value("int64")),
    "share": datasets.Value("float64"),
    "is_even": datasets.Value("bool"),
    "sound": datasets.Array2D((2, 3), "float64"),
    "text": datasets.Value("string"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `save_to_disk` has written."""
    folder = tmp_path_factory.mktemp("features") / "saved"
    made = datasets.Dataset.from_dict(columns(), features=datasets.Features(FEATURES))
    made.save_to_disk(str(folder))
    return folder


def make(path: Path, **arguments: Any) -> Any:
    given = {"path": str(path), "task": "features", "batch_size": 4, "shuffle": False}
    return processor_class("HuggingFaceDataProcessor")(**{**given, **arguments})


def batches(path: Path, **arguments: Any) -> list[dict[str, torch.Tensor]]:
    return [*make(path, **arguments).create_dataloader()]


@WAYS
@pytest.mark.parametrize("num_workers", [0, 2])
def test_values_are_those_of_the_library(saved: Path, streaming: bool, num_workers: int) -> None:
    names = {"pixel_values": "image", "labels": "digit", "a": "share", "b": "is_even", "c": "sound"}
    expected = datasets.load_from_disk(str(saved)).with_format("torch")[:NUM]

    found = batches(saved, feature_columns=names, streaming=streaming, num_workers=num_workers)

    assert len(found) == NUM // 4
    for name, column in names.items():
        joined = torch.cat([batch[name] for batch in found])
        value = expected[column] / 255 if column == "image" else expected[column]
        if streaming and num_workers:  # workers take turns
            joined, value = (one.flatten(1).sort(0).values for one in _flat(joined, value))
        assert torch.equal(joined, value), name
        assert joined.dtype == value.dtype
    assert found[0]["pixel_values"].shape == (4, 3, 6, 8)


def _flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [one.reshape(NUM, -1) for one in tensors]


LENGTHS = [4, 1, 3, 2]
OF_LENGTHS = [[1] * length + [0] * (4 - length) for length in LENGTHS]


@pytest.mark.parametrize(
    ("name", "mask"),
    [
        ("input_ids", "attention_mask"),
        ("input_values", "attention_mask"),
        ("inputs_embeds", "attention_mask"),
        ("input_features", "attention_mask"),
        ("decoder_input_ids", "decoder_attention_mask"),
        ("decoder_inputs_embeds", "decoder_attention_mask"),
    ],
)
def test_each_padded_argument_has_its_mask(tmp_path: Path, name: str, mask: str) -> None:
    is_nested = name in ("inputs_embeds", "input_features", "decoder_inputs_embeds")
    values = [[[1.0, 2.0] if is_nested else 1] * length for length in LENGTHS]
    rows = {name: values, "labels": [[1]] * 4}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "rows"))
    given = {"feature_columns": list(rows), "padding": {name: 0}}

    [batch] = batches(tmp_path / "rows", **given)

    assert list(batch) == [name, "labels", mask]
    assert batch[mask].tolist() == OF_LENGTHS


def test_a_mask_of_two_padded_arguments_is_that_of_the_text(tmp_path: Path) -> None:
    sounds = [[0.5] * (5 - length) for length in LENGTHS]
    rows = {"input_values": sounds, "input_ids": [[1] * length for length in LENGTHS]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "rows"))

    [batch] = batches(tmp_path / "rows", feature_columns=list(rows), padding={"input_values": 0})

    assert batch["attention_mask"].tolist() == OF_LENGTHS


@WAYS
def test_rows_are_padded_to_the_longest_of_their_batch(saved: Path, streaming: bool) -> None:
    given = {"feature_columns": {"input_ids": "input_ids", "labels": "labels"}}

    first, *_ = batches(saved, **given, streaming=streaming)

    assert list(first) == ["input_ids", "labels", "attention_mask"]
    assert all(one.shape == (4, 5) and one.dtype == torch.int64 for one in first.values())
    theirs = datasets.load_from_disk(str(saved)).with_format("torch")[:4]
    for number, length in enumerate([2, 3, 4, 5]):
        assert torch.equal(first["input_ids"][number][:length], theirs["input_ids"][number])
        assert torch.equal(first["labels"][number][:length], theirs["labels"][number])
        assert first["input_ids"][number][length:].eq(0).all()
        assert first["labels"][number][length:].eq(-100).all()
        assert first["attention_mask"][number].tolist() == [1] * length + [0] * (5 - length)

    with_mask = {"input_ids": "input_ids", "attention_mask": "mask", "spans": "labels"}
    fill = {"input_ids": 59, "spans": -1}
    other, *_ = batches(saved, feature_columns=with_mask, padding=fill, streaming=streaming)
    assert list(other) == list(with_mask)
    assert torch.equal(other["attention_mask"], first["attention_mask"])
    assert other["input_ids"][0].tolist()[2:] == [59] * 3
    assert other["spans"][0].tolist()[2:] == [-1] * 3


def test_images_are_resized_and_normalized(saved: Path) -> None:
    columns = {"pixel_values": "image"}
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    first, *_ = batches(
        saved, feature_columns=columns, image_size=[12, 10], image_mean=mean, image_std=std
    )
    image = datasets.load_from_disk(str(saved))[1]["image"].resize((10, 12), 2)
    expected = (np.asarray(image) / 255 - mean) / std
    np.testing.assert_allclose(first["pixel_values"][1].permute(1, 2, 0), expected, atol=1e-6)

    grey, *_ = batches(saved, feature_columns=columns, image_size=5, image_channels=1)
    assert grey["pixel_values"].shape == (4, 1, 5, 5)


def test_pixels_of_an_image_processor_are_those_of_the_library(saved: Path, tmp_path: Path) -> None:
    import transformers

    settings = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 16, "width": 12},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2, 0.3, 0.4],
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    images = datasets.load_from_disk(str(saved))[:4]["image"]
    classes: Any = transformers.AutoImageProcessor
    library = classes.from_pretrained(tmp_path)

    first, *_ = batches(
        saved, feature_columns={"pixel_values": "image"}, image_processor=str(tmp_path)
    )

    expected = library(images=images, return_tensors="pt")["pixel_values"]
    assert expected.shape == (4, 3, 16, 12)
    assert torch.equal(first["pixel_values"], expected)


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_state_of_a_stream_continues_with_the_next_batch(saved: Path, drop_last: bool) -> None:
    given: dict[str, Any] = {
        "feature_columns": ["input_ids"],
        "streaming": True,
        "shuffle": True,
        "batch_size": 3,
        "drop_last": drop_last,
    }
    whole = [batch["input_ids"].tolist() for batch in make(saved, **given).dataset]
    assert len(whole) == NUM // 3 + (not drop_last)
    for number in range(1, len(whole)):
        before, after = (make(saved, **given).dataset for _ in range(2))
        iterator = iter(before)
        for _ in range(number):
            next(iterator)
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert [batch["input_ids"].tolist() for batch in after] == whole[number:]


def test_the_fingerprint_of_a_stream_is_of_its_columns_and_files(
    tmp_path: Path,
) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1, "b": 2}\n')
    (tmp_path / "b.jsonl").write_text('{"a": 1, "b": 3}\n')
    given = [("a.jsonl", ["a"]), ("a.jsonl", ["b"]), ("b.jsonl", ["a"]), ("a.jsonl", ["a"])]

    found = [
        make(tmp_path / name, feature_columns=columns, streaming=True).dataset.fingerprint
        for name, columns in given
    ]

    assert len(set(found)) == 3
    assert found[0] == found[3]


def test_lines_of_json_without_a_schema_are_streamed(tmp_path: Path) -> None:
    rows = [{"input_ids": [number, 1][: 1 + number % 2], "y": number} for number in range(8)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"input_ids": "input_ids", "labels": "y"}

    found = batches(tmp_path / "a.jsonl", feature_columns=columns, streaming=True)

    assert [batch["labels"].tolist() for batch in found] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found[1]["input_ids"].tolist() == [[4, 0], [5, 1], [6, 0], [7, 1]]


def test_processes_divide_a_stream(saved: Path) -> None:
    given = {"feature_columns": {"labels": "digit", "a": "share"}, "streaming": True}
    parts = []
    for index in range(2):
        dataset = make(saved, **given, batch_size=None, global_batch_size=8).dataset
        dataset.take_shard(index, 2)
        parts += [one for batch in dataset for one in batch["a"].tolist()]

    assert len(parts) == NUM
    assert len(set(parts)) == NUM


IDS = {"feature_columns": ["input_ids"]}
PIXELS = {"feature_columns": {"pixel_values": "image"}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "task features requires feature_columns"),
        ({"feature_columns": ["labels", "labels"]}, "'labels' is named twice"),
        (
            {"feature_columns": ["input_idz"]},
            r"feature_columns.input_idz: .*no column 'input_idz'.*Did you mean 'input_ids'",
        ),
        (
            {"feature_columns": {"labels": "text"}},
            r"row 0: column 'text'.*got the text 'a'.*class_",
        ),
        ({**IDS, "padding": {"inputs": 1}}, "padding: 'inputs' is not one of feature_columns"),
        ({**IDS, "tokenizer": "a"}, "tokenizer has no effect with task features"),
        ({**IDS, "packing": True}, "packing has no effect with task features"),
        ({**IDS, "image_size": 8}, r"none of the columns of .* \(input_ids\) is a datasets.Image"),
        ({**PIXELS, "image_mean": [0.1, 0.2]}, "image_mean: expected 3 numbers"),
        ({**PIXELS, "image_std": [0.0]}, r"image_std\[0\]: expected"),
        ({**PIXELS, "image_size": 8, "image_processor": "a"}, "image_size has no effect with im"),
        ({**PIXELS, "image_processor": "/none"}, "image_processor: there is no folder '/none'"),
        ({"task": "text", "tokenizer": None}, "tokenizer is missing, which task text requires"),
        ({"task": "text", "padding": {"a": 0}}, "padding has no effect with task text"),
    ],
)
def test_what_does_not_fit_is_one_message(saved: Path, arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(saved, **arguments)


def test_a_check_needs_no_data(tmp_path: Path) -> None:
    check = processor_class("HuggingFaceDataProcessor").check_arguments
    given = {"path": "owner/name", "task": "features", "batch_size": 1}

    assert check(**given, feature_columns=["a"], image_processor=str(tmp_path)) == []
    (missing,) = check(**given, feature_columns=["a"], image_processor="/none")
    assert "image_processor: there is no folder '/none'" in missing
    with pytest.raises(ConfigError, match="requires feature_columns"):
        check(**given)


def save(folder: Path, rows: dict[str, Any], **features: Any) -> Path:
    known = datasets.Features(features) if features else None
    datasets.Dataset.from_dict(rows, features=known).save_to_disk(str(folder))
    return folder


@WAYS
@pytest.mark.parametrize(
    ("rows", "name", "message"),
    [
        (
            {"x": [[1], [1, 2]]},
            "x",
            r"row 0 and row 1: .* \[1\] and \[2\] .*Set padding: {x: VALUE",
        ),
        ({"x": [[[1]], [[1, 2]]]}, "labels", r"shapes \[1, 1\] and \[1, 2\].*Only the first dim"),
        ({"x": [1, None]}, "labels", "row 1: column 'x' must have labels as numbers.*null or NaN"),
        ({"x": [[1.0], [None]]}, "a", "row 1: .*got a list with null or NaN"),
        ({"x": [[[1]], [[1], [2, 3]]]}, "a", "row 1: .*lists of different lengths"),
        ({"x": [[1], [-1]]}, "input_ids", "row 1: column 'x' has the token id -1"),
        ({"x": [[1], [60]]}, "input_ids", "token id 60; the model's are 0 to 59"),
        ({"x": [[1], [60]]}, "labels", "token id 60; the model's are 0 to 59"),
        ({"x": [[1], [1] * 9]}, "input_ids", "9 tokens, but .* max_position_embeddings is 8"),
        ({"x": [[1.5], [1.5]]}, "input_ids", "numbers that are no integers"),
    ],
)
def test_rows_that_cannot_be_used_are_one_message(
    tmp_path: Path, streaming: bool, rows: Any, name: str, message: str
) -> None:
    folder = save(tmp_path / "rows", rows)
    with pytest.raises(ConfigError, match=message):
        _take_all(make(folder, feature_columns={name: "x"}, streaming=streaming, batch_size=2))


def _take_all(processor: Any) -> None:
    processor.dataset.check_model(VOCAB, 8)
    next(iter(processor.create_dataloader()))


def test_images_that_cannot_be_used_are_one_message(tmp_path: Path) -> None:
    small, large = (Image.new("RGB", (size, 4)) for size in (4, 5))
    sizes = save(tmp_path / "sizes", {"x": [small, large]}, x=datasets.Image())
    given = {"feature_columns": {"pixel_values": "x"}, "batch_size": 2}

    with pytest.raises(ConfigError, match=r"\[3, 4, 4\] and \[3, 4, 5\] in one batch. Set image_s"):
        batches(sizes, **given)
    assert batches(sizes, **given, image_size=4)[0]["pixel_values"].shape == (2, 3, 4, 4)

    broken = {"x": [{"bytes": b"no image", "path": None}]}
    folder = save(tmp_path / "broken", broken, x=datasets.Image())
    with pytest.raises(ConfigError, match=r"row 0, column 'x': the image cannot be read"):
        make(folder, **given)
    missing = save(tmp_path / "missing", {"x": [None, small]}, x=datasets.Image())
    with pytest.raises(ConfigError, match=r"row 0, column 'x': there is no image"):
        make(missing, **given)


# ---- runs of files

VIT = {
    "name": "hf_model",
    "auto_class": "AutoModelForImageClassification",
    "config": {
        "model_type": "vit",
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "image_size": 8,
        "patch_size": 2,
        "num_channels": 1,
        "num_labels": 10,
    },
}
T5 = {
    "name": "hf_model",
    "auto_class": "AutoModelForSeq2SeqLM",
    "config": {
        "model_type": "t5",
        "vocab_size": VOCAB,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 1,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    },
}
DIGITS: dict[str, Any] = {
    "feature_columns": {"pixel_values": "image", "labels": "label"},
    "image_channels": 1,
}
PAIRS: dict[str, Any] = {"feature_columns": ["input_ids", "labels"]}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sklearn = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn")
    found = sklearn.load_digits()
    images = [Image.fromarray((one * 15.9).astype(np.uint8)) for one in found.images]
    names = [str(number) for number in range(10)]
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
    rows = {"image": images, "label": found.target.tolist()}
    whole = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    folder = tmp_path_factory.mktemp("digits") / "saved"
    whole.train_test_split(0.2, seed=0).save_to_disk(str(folder))
    return folder


def write(
    folder: Path, model: dict[str, Any], path: Path, steps: int, every: int, data: dict[str, Any]
) -> Path:
    """Write a file of a run, and return it; `data`: of the processor."""
    loader = {"data_processor": "HuggingFaceDataProcessor", "path": str(path), "task": "features"}
    loader |= {"batch_size": 32} | data
    init = {
        "device": "cpu",
        "seed": 1,
        "model_dir": str(folder / "run"),
        "model": model,
        "optimizer": {"AdamW": {"lr": 0.003}},
        "loop": {"max_steps": steps, "eval_frequency": steps},
        "checkpoint": {"steps": every},
    }
    validation = loader | {"split": "test" if model is VIT else "train", "shuffle": False}
    fit = {"train_dataloader": loader, "val_dataloader": validation}
    folder.mkdir(exist_ok=True)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({"trainer": {"init": init, "fit": fit}}))
    return file


def metrics_of(file: Path) -> dict[tuple[int, str], float]:
    """Return the last value of each loss and accuracy, by step."""
    lines = (file.parent / "run/metrics.jsonl").read_text().splitlines()
    return {
        (row["step"], key): value
        for row in map(json.loads, lines)
        for key, value in row.items()
        if key in ("loss", "validate_0/loss", "validate_0/accuracy")
    }


def test_a_file_trains_a_vit_on_images(digits: Path, tmp_path: Path) -> None:
    file = write(tmp_path, VIT, digits, 160, 160, DIGITS | {"batch_size": 64})

    assert main(["fit", str(file)]) == 0

    assert metrics_of(file)[160, "validate_0/accuracy"] > 0.7


class Kill(Callback):
    """Kills the process before a step, once per folder."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def run_file(rank: int, file: Path, kills_at: int | None) -> int:
    if kills_at is not None:
        register_global_callback(Kill(kills_at))
    return main(["fit", str(file)])


@pytest.mark.parametrize("kind", ["t5", "t5 stream", "vit stream, workers"])
def test_a_run_of_a_file_that_is_killed_resumes_exactly(
    kind: str, saved: Path, digits: Path, tmp_path: Path
) -> None:
    model, path, data = (VIT, digits, DIGITS) if "vit" in kind else (T5, saved, PAIRS)
    data = data | {"streaming": "stream" in kind, "num_workers": 2 * ("workers" in kind)}
    data = data | {"batch_size": 8}
    whole, killed = (
        write(tmp_path / name, model, path, 12, 4, data) for name in ("whole", "killed")
    )

    assert run_ranks(1, run_file, whole, None) == [0]
    ((ok, ended),) = try_ranks(1, run_file, killed, 7)
    assert run_ranks(1, run_file, killed, None) == [0]

    assert not ok
    assert str(-signal.SIGKILL) in ended
    expected = metrics_of(whole)
    assert metrics_of(killed) == expected
    assert len(expected) > 12
    if kind == "t5":
        assert expected[12, "loss"] < expected[1, "loss"]
