"""Few batch shapes, from samples of many lengths and an incomplete last batch."""

from __future__ import annotations

import pickle
import warnings
from collections import namedtuple
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from modelzoo_trainer.callbacks import ModelEvalMetrics
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loading.batch_dataset import already_a_batch
from modelzoo_trainer.loading.dataloader import PositionedLoader
from modelzoo_trainer.loading.position import EpochSeeds, EpochStart
from modelzoo_trainer.zoo.data import PadLastBatch, PadToBuckets, bucket_lengths
from modelzoo_trainer.zoo.models.decoder_names import Gpt2
from tests.doubles import History

TOKENS = {"input_ids": 0, "labels": -100}
Pair = namedtuple("Pair", ["inputs", "label"])


def tokens(*numbers: int) -> dict[str, Tensor]:
    """Return a sample of these tokens, to predict the next ones."""
    return {"input_ids": torch.tensor(numbers), "labels": torch.tensor(numbers) + 1}


def texts(num: int) -> list[dict[str, Tensor]]:
    """Return samples of 1 to 13 tokens."""
    return [tokens(*range(1, 2 + number**2 % 13)) for number in range(num)]


# ---- bucket lengths


@pytest.mark.parametrize(
    ("arguments", "lengths"),
    [
        ({"longest": 1024, "num": 5}, [64, 128, 256, 512, 1024]),
        ({"longest": 1000}, [64, 192, 448, 1024]),
        ({"longest": 2048, "num": 3, "multiple_of": 128}, [128, 512, 2048]),
        ({"longest": 100, "num": 8}, [64, 128]),
        ({"longest": 2048, "num": 6}, [64, 128, 256, 512, 1024, 2048]),
        ({"longest": 1000, "num": 1}, [1024]),
        ({"longest": 3, "num": 2}, [64]),
        ({"longest": 9, "num": 3, "multiple_of": 1}, [1, 3, 9]),
    ],
)
def test_buckets_grow_by_about_the_same_factor(arguments, lengths) -> None:
    assert bucket_lengths(**arguments) == lengths


@pytest.mark.parametrize("name", ["longest", "num", "multiple_of"])
@pytest.mark.parametrize("number", [0, -64, 1.5, "64"])
def test_a_number_that_makes_no_buckets_is_refused(name, number) -> None:
    arguments = {"longest": 100, "num": 2, "multiple_of": 8} | {name: number}
    with pytest.raises(ConfigError, match=rf"^bucket_lengths: {name} is {number!r}; it must be"):
        bucket_lengths(**arguments)


# ---- samples of different lengths


@pytest.mark.parametrize(("num", "bucket"), [(1, 4), (3, 4), (4, 4), (5, 8), (8, 8)])
def test_the_smallest_bucket_that_holds_the_longest_sample_is_taken(num, bucket) -> None:
    batch = PadToBuckets([4, 8, 16], TOKENS)([tokens(7), tokens(*range(num))])
    assert batch["input_ids"].shape == batch["labels"].shape == (2, bucket)


def test_padding_comes_after_the_sample_and_has_the_value_of_its_entry() -> None:
    batch = PadToBuckets([3], TOKENS)([tokens(5, 6), tokens(8)])
    assert batch["input_ids"].tolist() == [[5, 6, 0], [8, 0, 0]]
    assert batch["labels"].tolist() == [[6, 7, -100], [9, -100, -100]]


def test_there_are_as_many_shapes_as_buckets() -> None:
    loader = DataLoader(texts(40), 4, collate_fn=PadToBuckets([4, 8, 16], TOKENS))
    assert {tuple(batch["labels"].shape) for batch in loader} == {(4, 8), (4, 16)}
    assert len({tuple(batch["labels"].shape) for batch in DataLoader(texts(40))}) == 7


def test_entries_of_different_lengths_get_one_length() -> None:
    samples = [{"source": [1, 2, 3, 4, 5], "target": [1]}, {"source": [1], "target": [1, 2]}]
    batch = PadToBuckets([2, 4, 8], {"source": 0, "target": 0})(samples)
    assert batch["source"].shape == batch["target"].shape == (2, 8)


def test_entries_that_are_not_named_are_stacked_as_they_are() -> None:
    samples = [
        {"input_ids": torch.ones(num), "image": torch.zeros(2, 2), "label": num, "name": f"n{num}"}
        for num in (2, 3)
    ]
    batch = PadToBuckets([4], {"input_ids": 0})(samples)
    assert batch["image"].shape == (2, 2, 2)
    assert batch["label"].tolist() == [2, 3]
    assert batch["name"] == ["n2", "n3"]
    assert list(batch) == ["input_ids", "image", "label", "name"]


def test_entries_of_tuples_go_by_their_position() -> None:
    inputs, label, targets = PadToBuckets([3], {0: 0, 2: -1})([([1, 2], 7, [3]), ([4], 8, [5, 6])])
    assert inputs.tolist() == [[1, 2, 0], [4, 0, 0]]
    assert label.tolist() == [7, 8]
    assert targets.tolist() == [[3, -1, -1], [5, 6, -1]]


def test_named_tuples_stay_what_they_are() -> None:
    batch = PadToBuckets([2], {0: 0})([Pair([1], 5), Pair([2, 3], 6)])
    assert isinstance(batch, Pair)
    assert batch.inputs.tolist() == [[1, 0], [2, 3]]
    assert batch.label.tolist() == [5, 6]


@pytest.mark.parametrize(
    "samples",
    [
        [torch.tensor([1, 2]), torch.tensor([3])],
        [np.array([1, 2]), np.array([3])],
        [[1, 2], [3]],
        [(1, 2), (3,)],
    ],
)
def test_a_sample_may_be_one_sequence(samples) -> None:
    batch = PadToBuckets([3], 9)(samples)
    assert batch.tolist() == [[1, 2, 9], [3, 9, 9]]
    assert batch.dtype == torch.int64


def test_no_element_is_as_good_as_a_sample() -> None:
    batch = PadToBuckets([2], -1)([torch.empty(0, dtype=torch.int64), torch.tensor([3])])
    assert batch.tolist() == [[-1, -1], [3, -1]]


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int16, torch.int32, torch.bool, torch.bfloat16, torch.float64]
)
def test_types_are_kept(dtype) -> None:
    batch = PadToBuckets([3], 1)([torch.zeros(2, dtype=dtype), torch.zeros(1, dtype=dtype)])
    assert batch.dtype == dtype
    assert batch.tolist() == [[0, 0, 1], [0, 1, 1]]


def test_types_of_arrays_are_kept() -> None:
    assert PadToBuckets([3], 0)([np.zeros(2, np.float32)]).dtype == torch.float32
    assert PadToBuckets([3], 0)([np.zeros(2, np.uint16)]).dtype == torch.uint16


def test_arrays_that_are_read_only_or_backwards_are_copied() -> None:
    numbers = np.arange(3)
    numbers.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = PadToBuckets([3], 0)([numbers, numbers[::-1]])
    assert batch.tolist() == [[0, 1, 2], [2, 1, 0]]


@pytest.mark.parametrize(("dim", "shape"), [(0, (2, 5, 3)), (1, (2, 3, 5)), (-1, (2, 3, 5))])
def test_any_dimension_may_be_the_length(dim, shape) -> None:
    samples = [torch.ones(3, 2), torch.ones(3, 4)] if dim else [torch.ones(2, 3), torch.ones(4, 3)]
    batch = PadToBuckets([5], 0, dim=dim)(samples)
    assert batch.shape == shape
    assert batch.sum().item() == 18
    assert torch.equal(batch[1].narrow(dim, 0, 4), samples[1])


def test_a_sample_longer_than_all_buckets_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^PadToBuckets: sample 1 of the batch: 'input_ids' has length 9, but the last "
        r"bucket is 8\. Add a longer bucket, shorten the samples, or set truncate=True\.$",
    ):
        PadToBuckets([4, 8], TOKENS)([tokens(1), tokens(*range(9))])


def test_a_sample_longer_than_all_buckets_is_truncated_if_requested() -> None:
    collate = PadToBuckets([2, 4], TOKENS, truncate=True, mask="attention_mask")
    batch = collate([tokens(1, 2, 3, 4, 5), tokens(6, 7, 8)])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4], [6, 7, 8, 0]]
    assert batch["labels"].tolist() == [[2, 3, 4, 5], [7, 8, 9, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]


def test_a_mask_says_where_samples_are() -> None:
    batch = PadToBuckets([4], TOKENS, mask="attention_mask")([tokens(0, 0), tokens(7)])
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0]]
    assert batch["attention_mask"].dtype == torch.int64


def test_samples_are_left_as_they_are() -> None:
    sample = tokens(1, 2)
    batch = PadToBuckets([2], TOKENS, mask="attention_mask")([sample])
    batch["input_ids"].zero_()
    assert sample["input_ids"].tolist() == [1, 2]
    assert list(sample) == ["input_ids", "labels"]


def test_a_collation_goes_to_worker_processes() -> None:
    given = PadLastBatch(3, {"labels": -100}, collate=PadToBuckets([4, 8], TOKENS))
    copy = pickle.loads(pickle.dumps(given))
    assert plain(copy(texts(2))) == plain(given(texts(2)))


def test_a_run_that_resumes_gets_the_batches_that_it_would_have_got() -> None:
    collate = PadLastBatch(4, {"labels": -100}, collate=PadToBuckets([4, 8, 16], TOKENS))
    loader = DataLoader(texts(22), 4, shuffle=True, collate_fn=collate)
    whole, rest = taken(loader, start=0), taken(loader, start=2)
    assert [number for number, _ in whole] == [0, 1, 2, 3, 4, 5]
    assert rest == whole[2:]


def taken(loader: DataLoader[Any], start: int) -> list[Any]:
    seeds = EpochSeeds(order=5, samples=9, fetches=0)
    items = PositionedLoader(loader).begin(
        EpochStart(epoch=1, batch_idx=start, offset=start, seeds=seeds)
    )
    return [(number, plain(batch)) for batch, _, number in items]


def plain(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in batch.items()}


@pytest.mark.parametrize(
    "lengths", [[], [0, 4], [-4], [8, 4], [4, 4], [4, 8.5], ["4"], 4, None, [None]]
)
def test_lengths_that_are_no_buckets_are_refused(lengths) -> None:
    with pytest.raises(ConfigError, match=r"^PadToBuckets: lengths is .* such as \[128, 256, 512"):
        PadToBuckets(lengths, 0)


@pytest.mark.parametrize("pad", [{}, {"labels": "-100"}, {"labels": None}, {1.5: 0}, None, "0"])
def test_a_pad_without_entries_or_numbers_is_refused(pad) -> None:
    with pytest.raises(
        ConfigError, match=r"^PadToBuckets: pad is .* It must map one or more entries"
    ):
        PadToBuckets([4], pad)


@pytest.mark.parametrize(("pad", "mask"), [({"x": 0}, "x"), ({0: 0}, "mask"), (0, "mask")])
def test_a_mask_that_cannot_be_added_is_refused(pad, mask) -> None:
    with pytest.raises(ConfigError, match=rf"^PadToBuckets: with mask='{mask}', .*; got "):
        PadToBuckets([4], pad, mask=mask)


def test_a_mask_that_samples_have_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"mask is 'label', but sample 0 of the batch already has that key"
    ):
        PadToBuckets([4], {"x": 0}, mask="label")([{"x": [1], "label": 3}])


def test_a_mask_of_entries_of_different_lengths_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lengths \(\{'x': 1, 'y': 2\}\), so there is no"):
        PadToBuckets([4], {"x": 0, "y": 0}, mask="mask")([{"x": [1], "y": [1, 2]}])


@pytest.mark.parametrize(
    ("pad", "sample", "message"),
    [
        ({"lables": 0}, {"labels": [1]}, r"'lables', .* is a dict without it. Did you mean 'labe"),
        ({"zzz": 0}, {"labels": [1]}, r"'zzz', but sample 0 .* a dict without it. Known: labels\."),
        ({2: 0}, ([1], [2]), r"2, but sample 0 of the batch is a tuple without it. Known: 0, 1\."),
        ({"x": 0}, ([1],), r"'x', .* is a tuple without it. Known: 0\."),
        ({"x": 0}, torch.ones(2), r"'x', .* is a Tensor without it. Only dicts, tuples"),
        ({"x": 0}, {"x": "text"}, r"sample 0 of the batch: 'x' is a str; only tensors, "),
        ({"x": 0}, {"x": None}, r": 'x' is a NoneType; only tensors"),
        ({"x": 0}, {"x": []}, r": 'x' is an empty list; only tensors"),
        ({"x": 0}, {"x": [[1, 2], [3]]}, r": 'x' cannot become a tensor: expected sequence of"),
        ({"x": 0}, {"x": np.array(["a"])}, r": 'x' cannot become a tensor: can't convert"),
        ({"x": 0}, {"x": torch.tensor(1)}, r"'x' has shape \(\), so it has no dimension 0\."),
        (0, torch.tensor(1), r"sample 0 of the batch has shape \(\), so it has no dimension 0"),
        (
            {"x": -1},
            {"x": torch.ones(2, dtype=torch.uint8)},
            r"'x' is padded with -1, but .* from 0 to 255\.",
        ),
        (
            {"x": -1},
            {"x": torch.ones(2) > 0},
            r"'x' is padded with -1, but .* torch.bool, .* from 0 to 1\.",
        ),
        ({"x": 0.5}, {"x": [1, 2]}, r"'x' is padded with 0.5, but its dtype is"),
    ],
)
def test_samples_that_do_not_fit_are_refused(pad, sample, message) -> None:
    with pytest.raises(ConfigError, match=rf"^PadToBuckets: .*{message}"):
        PadToBuckets([4], pad)([sample])


def test_a_sample_that_lacks_an_entry_is_named() -> None:
    with pytest.raises(ConfigError, match=r"pad has 'x', but sample 1 of the batch is a dict"):
        PadToBuckets([4], {"x": 0})([{"x": [1]}, {"y": [1]}])


@pytest.mark.parametrize("samples", [{"x": torch.ones(2, 2)}, torch.ones(2, 2), []])
def test_whole_batches_are_refused(samples) -> None:
    with pytest.raises(ConfigError, match=r"^PadToBuckets got a \w+, but requires a list of at"):
        PadToBuckets([4], {"x": 0})(samples)


# ---- the last batch


def test_a_smaller_batch_gets_copies_of_its_last_sample_that_do_not_count() -> None:
    inputs, labels = PadLastBatch(4, {1: -100})([(torch.ones(2), 7), (torch.zeros(2), 8)])
    assert inputs.tolist() == [[1, 1], [0, 0], [0, 0], [0, 0]]
    assert labels.tolist() == [7, 8, -100, -100]


def test_a_full_batch_is_left_as_it_is() -> None:
    batch = (torch.ones(2, 2), torch.tensor([7, 8]))
    assert PadLastBatch(2, {1: -100}, collate=already_a_batch)(batch) is batch
    assert batch[1].tolist() == [7, 8]


def test_all_batches_of_a_pass_have_one_shape() -> None:
    loader = DataLoader(torch.arange(10), 4, collate_fn=PadLastBatch(4, {0: -1}, collate=paired))
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, -1, -1]]


def paired(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.stack(samples), torch.stack(samples)


def test_a_weight_is_added_to_every_batch() -> None:
    collate = PadLastBatch(3, weight="weight")
    assert collate([{"x": 1.0}])["weight"].tolist() == [1, 0, 0]
    assert collate([{"x": 1.0}] * 3)["weight"].tolist() == [1, 1, 1]
    assert collate([{"x": 1.0}])["weight"].dtype == torch.float32
    assert list(collate([{"x": 1.0}])) == ["x", "weight"]


def test_buckets_and_full_batches_go_together() -> None:
    buckets = PadToBuckets([2, 4], TOKENS, mask="attention_mask")
    batch = PadLastBatch(3, {"attention_mask": 0}, collate=buckets)([tokens(1, 2, 3)])
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0]] * 3
    assert batch["labels"].tolist() == [[2, 3, 4, -100]] * 3
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


def test_a_batch_that_the_data_set_made_is_padded_too() -> None:
    given = {"x": torch.ones(2, 3), "labels": torch.tensor([4, 5])}
    batch = PadLastBatch(4, {"labels": -100}, collate=already_a_batch)(given)
    assert batch["x"].shape == (4, 3)
    assert batch["labels"].tolist() == [4, 5, -100, -100]
    assert given["labels"].tolist() == [4, 5]


def test_nested_batches_and_lists_of_samples_get_rows_and_the_rest_is_left() -> None:
    given = {
        "inner": (torch.ones(2, 1), [torch.zeros(2)]),
        "pair": Pair(torch.ones(2), torch.ones(2)),
        "step": torch.tensor(3),
        "name": ["a", "b"],
        "kind": "text",
        "labels": torch.tensor([4, 5]),
    }
    batch = PadLastBatch(3, {"labels": -100}, collate=already_a_batch)(given)
    assert batch["inner"][0].shape == (3, 1)
    assert batch["inner"][1][0].shape == (3,)
    assert isinstance(batch["inner"], tuple)
    assert isinstance(batch["pair"], Pair)
    assert batch["step"].item() == 3
    assert batch["name"] == ["a", "b", "b"]
    assert batch["kind"] == "text"


@pytest.mark.parametrize("size", [0, -1, 1.5, None])
def test_a_size_that_is_none_is_refused(size) -> None:
    with pytest.raises(ConfigError, match=rf"^PadLastBatch: batch_size is {size}; it must be a"):
        PadLastBatch(size, {1: -100})


@pytest.mark.parametrize("fill", [None, {}])
def test_rows_that_would_count_are_refused(fill) -> None:
    with pytest.raises(ConfigError, match=r"^PadLastBatch: without fill or weight"):
        PadLastBatch(4, fill)


def test_a_fill_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^PadLastBatch: fill is \{'labels': None\}\. It must "):
        PadLastBatch(4, {"labels": None})


def test_a_batch_of_more_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch_size is 2, but a batch has 3 samples"):
        PadLastBatch(2, {1: 0})([(1, 2)] * 3)


@pytest.mark.parametrize(
    ("fill", "sample", "message"),
    [
        ({"lables": 0}, {"labels": 1}, r"'lables', but the batch is a dict without it. Did you m"),
        ({"y": 0}, {"x": 1, "y": "text"}, r"'y', which is a list in a batch of 2 samples\. Only a"),
        (
            {"y": -1},
            {"y": True},
            r"'y' is filled with -1, but its dtype is torch.bool, which holds ",
        ),
    ],
)
def test_a_fill_that_does_not_fit_is_refused_in_a_full_batch_too(fill, sample, message) -> None:
    with pytest.raises(ConfigError, match=rf"^PadLastBatch: .*{message}"):
        PadLastBatch(2, fill)([sample] * 2)


@pytest.mark.parametrize(
    ("sample", "problem"),
    [({"x": 1}, r"\(a dict\) already has that entry"), ((1, 2), r"\(a list\) is not a dict")],
)
def test_a_weight_that_cannot_be_added_is_refused(sample, problem) -> None:
    with pytest.raises(
        ConfigError, match=rf"^PadLastBatch: weight='x' .* but this batch {problem}"
    ):
        PadLastBatch(2, weight="x")([sample])


def test_a_fill_of_a_tensor_without_a_row_for_each_sample_is_refused() -> None:
    batch = {"x": torch.ones(2), "count": torch.tensor(2)}
    with pytest.raises(
        ConfigError, match=r"'count', which is a Tensor of shape \(\) in a batch of 2 sampl"
    ):
        PadLastBatch(3, {"count": 0}, collate=already_a_batch)(batch)


def test_a_tensor_without_the_samples_in_front_is_refused() -> None:
    batch = {"labels": torch.ones(2), "positions": torch.ones(7, 2)}
    with pytest.raises(ConfigError, match=r"of 2 samples has a tensor of shape \(7, 2\)"):
        PadLastBatch(3, {"labels": 0}, collate=already_a_batch)(batch)


# ---- what is logged


class Classifier(nn.Module):
    """Scores of five classes; means are over the labels that are not ignored."""

    def __init__(self, *, counts: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 5, dtype=torch.float64)
        self.counts = counts

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        labels = batch["labels"].flatten()
        scores = self.embedding(batch["input_ids"]).flatten(0, 1)
        losses = functional.cross_entropy(scores, labels, ignore_index=-100, reduction="sum")
        num_items = (labels != -100).sum()
        outputs = {"loss": losses / num_items.clamp(min=1)}
        return {**outputs, "num_items": num_items} if self.counts else outputs


class Weighted(nn.Module):
    """A regression whose samples have weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 2.0, dtype=torch.float64))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        weight = batch["weight"]
        losses = (self.scale * batch["x"] - batch["y"]) ** 2
        return {"loss": (losses * weight).sum() / weight.sum(), "num_items": weight.sum()}


def classes(num: int, length: int = 0) -> list[dict[str, Tensor]]:
    """Return samples for `Classifier`, of this or else of different lengths."""
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "input_ids": torch.randint(40, (length or 1 + number % 7,), generator=generator),
            "labels": torch.randint(5, (length or 1 + number % 7,), generator=generator),
        }
        for number in range(num)
    ]


def val_loss(trainer_of: Any, model: Any, loader: DataLoader[Any]) -> float:
    history = History()
    trainer_of(model=model, optimizer=None, loggers=history).validate(loader)
    [(_, loss)] = history.of("validate_0/loss")
    return float(loss)


def test_a_validation_of_padded_batches_logs_the_loss_of_the_samples_alone(trainer_of) -> None:
    samples = classes(10)
    collate = PadLastBatch(4, {"labels": -100}, collate=PadToBuckets([4, 8], TOKENS))
    loader = DataLoader(samples, 4, collate_fn=collate)
    assert [tuple(batch["labels"].shape) for batch in loader] == [(4, 4), (4, 8), (4, 4)]
    assert val_loss(trainer_of, Classifier, loader) == pytest.approx(
        val_loss(trainer_of, Classifier, DataLoader(samples, 1)), rel=1e-14
    )


def test_without_num_items_added_rows_weigh_as_samples(trainer_of) -> None:
    samples = classes(9, length=3)
    loader = DataLoader(samples, 4, collate_fn=PadLastBatch(4, {"labels": -100}))
    by_rows = val_loss(trainer_of, lambda: Classifier(counts=False), loader)
    parts = [
        val_loss(trainer_of, Classifier, DataLoader(part, 4))
        for part in (samples[:4], samples[4:8], samples[8:])
    ]
    assert by_rows == pytest.approx(sum(parts) / 3, rel=1e-14)
    assert val_loss(trainer_of, Classifier, loader) == pytest.approx(
        (4 * parts[0] + 4 * parts[1] + parts[2]) / 9, rel=1e-14
    )


def test_shipped_language_models_skip_what_the_mask_skips(trainer_of) -> None:
    samples = classes(6)
    buckets = PadToBuckets([4, 8], {"input_ids": 0, "labels": 0}, mask="attention_mask")
    collate = PadLastBatch(4, {"attention_mask": 0}, collate=buckets)
    padded = val_metrics(trainer_of, tiny_gpt2, DataLoader(samples, 4, collate_fn=collate))
    assert padded == pytest.approx(
        val_metrics(trainer_of, tiny_gpt2, DataLoader(samples, 1)), rel=1e-6
    )


def tiny_gpt2() -> Gpt2:
    return Gpt2(
        vocab_size=40,
        max_position_embeddings=8,
        hidden_size=8,
        num_hidden_layers=1,
        num_heads=2,
        filter_size=16,
    )


def val_metrics(trainer_of: Any, model: Any, loader: DataLoader[Any]) -> dict[str, float]:
    history = History()
    trainer_of(ModelEvalMetrics(), model=model, optimizer=None, loggers=history).validate(loader)
    found = {name: float(value) for _, line in history.lines for name, value in line.items()}
    names = ("accuracy", "lm_perplexity", "loss")
    assert sorted(found) == [f"validate_0/{name}" for name in names]
    return found


def test_a_weight_leaves_added_rows_out_where_labels_cannot(trainer_of) -> None:
    samples = [{"x": float(number), "y": float(number % 3)} for number in range(5)]
    loader = DataLoader(samples, 4, collate_fn=PadLastBatch(4, weight="weight"))
    exact = sum((2 * sample["x"] - sample["y"]) ** 2 for sample in samples) / 5
    assert val_loss(trainer_of, Weighted, loader) == pytest.approx(exact, rel=1e-14)


def test_micro_batches_of_added_rows_alone_do_not_count(trainer_of) -> None:
    samples = classes(5, length=3)
    history = History()
    trainer = trainer_of(model=Classifier, optimizer=None, loggers=history)
    trainer.val_micro_batch_size = 2
    trainer.validate(DataLoader(samples, 4, collate_fn=PadLastBatch(4, {"labels": -100})))
    exact = val_loss(trainer_of, Classifier, DataLoader(samples, 5))
    assert float(history.of("validate_0/loss")[0][1]) == pytest.approx(exact, rel=1e-14)
