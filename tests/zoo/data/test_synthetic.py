"""Random data."""

from typing import Any

import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.processor import LoadingOptions
from modelzoo_trainer.zoo.data.synthetic import SyntheticProcessor


def first(**arguments: Any) -> Any:
    return next(iter(SyntheticProcessor(batch_size=64, **arguments).create_dataloader()))


def test_classification_has_points_and_labels() -> None:
    inputs, labels = first(num_features=5, num_classes=3)

    assert inputs.shape == (64, 5)
    assert labels.unique().tolist() == [0, 1, 2]


def test_points_lie_around_the_centre_of_their_class_whatever_the_seed() -> None:
    inputs, labels = first(seed=1, num_samples=64)
    others, other_labels = first(seed=2, num_samples=64)
    centres = torch.stack([inputs[labels == label].mean(dim=0) for label in range(4)])

    nearest = torch.cdist(others, centres).argmin(dim=1)

    assert not torch.equal(inputs, others)
    assert (nearest == other_labels).float().mean() > 0.95


def test_a_token_is_one_of_two_that_its_predecessor_determines() -> None:
    batch = first(kind="tokens", max_sequence_length=9, vocab_size=32)

    rule = (batch["labels"] - batch["input_ids"] * 5 - 1) % 32

    assert batch["input_ids"].shape == (64, 9)
    assert batch["input_ids"].dtype == torch.int32
    assert rule.unique().tolist() == [0, 1]


@pytest.mark.parametrize("kind", ["classification", "tokens"])
def test_the_same_seed_gives_the_same_data(kind: str) -> None:
    one, same = (
        SyntheticProcessor(batch_size=8, kind=kind, seed=3).dataset[5]  # type: ignore[arg-type]
        for _ in range(2)
    )

    assert str(one) == str(same)


def test_the_order_can_be_shuffled() -> None:
    assert not torch.equal(first(shuffle=True)[0], first()[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0}, "num_samples: expected an integer > 0, got 0"),
        ({"num_features": 0}, "num_features: expected an integer > 0, got 0"),
        ({"num_classes": -1}, "num_classes: expected an integer > 0, got -1"),
        ({"kind": "tokens", "vocab_size": 1}, "vocab_size: expected an integer >= 2, got 1"),
        ({"kind": "tokens", "max_sequence_length": 0}, "max_sequence_length: .*, got 0"),
        ({"num_samples": 3, "drop_last": True}, "batch_size is 64, but there are only 3 samples"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        first(**arguments)


def test_a_batch_for_all_processes_is_marked() -> None:
    loader = SyntheticProcessor(global_batch_size=8, num_samples=20).create_dataloader()
    assert (loader.batch_size, loader.is_global_batch) == (8, True)
    assert not hasattr(SyntheticProcessor(batch_size=8).create_dataloader(), "is_global_batch")


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({}, "neither is set"),
        ({"batch_size": 2, "global_batch_size": 4}, "both are set"),
    ],
)
def test_one_of_the_two_batch_sizes_is_given(sizes, said) -> None:
    with pytest.raises(ConfigError, match=said):
        SyntheticProcessor(**sizes)
    with pytest.raises(ConfigError, match=said):
        SyntheticProcessor.check_arguments(**sizes)


@pytest.mark.parametrize("size", ["batch_size", "global_batch_size"])
def test_either_of_them_is_positive(size) -> None:
    for making in (SyntheticProcessor, LoadingOptions):
        with pytest.raises(ConfigError, match=rf"\.{size}: expected .* > 0 .*, got 0"):
            making(**{size: 0})
