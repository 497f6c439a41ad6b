"""The multilayer perceptron."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.fc_mnist import FcMnist


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    return torch.rand(size, 1, 28, 28), torch.randint(10, (size,))


def widths(model: FcMnist) -> list[int]:
    return [module.out_features for module in model.modules() if isinstance(module, nn.Linear)]


def test_the_loss_is_the_cross_entropy_of_the_logits() -> None:
    model = FcMnist(hidden_sizes=[32, 16], activation_fn="relu")
    inputs, labels = batch_of(5)

    outputs = model((inputs, labels))

    assert outputs["logits"].shape == (5, 10)
    assert torch.equal(outputs["loss"], functional.cross_entropy(outputs["logits"], labels))
    assert outputs["loss"].item() == pytest.approx(math.log(10), abs=0.3)
    assert sorted(outputs) == ["logits", "loss", "num_items"]


def test_accuracy_is_the_share_of_hits_and_in_eval_mode_only() -> None:
    model = FcMnist(hidden_sizes=[8]).eval()
    inputs, _ = batch_of(8)
    guessed = model((inputs, torch.zeros(8, dtype=torch.int64)))["logits"].argmax(dim=-1)
    labels = guessed.clone()
    labels[:2] = (labels[:2] + 1) % 10

    outputs = model((inputs, labels))

    assert outputs["accuracy"].shape == ()
    assert outputs["accuracy"].item() == 0.75


def test_accuracy_can_be_switched_off() -> None:
    model = FcMnist(hidden_sizes=[8], compute_eval_metrics=False).eval()

    assert "accuracy" not in model(batch_of(2))


def test_a_batch_may_be_a_mapping() -> None:
    model = FcMnist(hidden_sizes=[8])
    inputs, labels = batch_of(3)

    as_mapping = model({"labels": labels, "inputs": inputs})["loss"]

    assert torch.equal(as_mapping, model([inputs, labels])["loss"])


def test_hidden_layers_are_given_as_a_list_or_as_two_numbers() -> None:
    assert widths(FcMnist(hidden_sizes=[32, 16])) == [32, 16, 10]
    assert widths(FcMnist(depth=3, hidden_size=20, num_classes=4)) == [20, 20, 20, 4]


def test_input_size_and_classes_can_be_set() -> None:
    model = FcMnist(hidden_sizes=[8], input_size=6, num_classes=3, use_bias=False)

    outputs = model((torch.rand(2, 2, 3), torch.tensor([0, 2])))

    assert outputs["logits"].shape == (2, 3)
    assert [name for name, _ in model.named_parameters() if "bias" in name] == []


def test_dropout_acts_in_training_only() -> None:
    model = FcMnist(hidden_sizes=[64], dropout=0.5)
    batch = batch_of(4)

    assert model(batch)["loss"] != model(batch)["loss"]
    model.eval()
    assert model(batch)["loss"] == model(batch)["loss"]


def test_forward_and_backward_run_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = FcMnist(depth=2, hidden_size=8, activation_fn="gelu")
        model(batch_of(4))["loss"].backward()

    assert {param.grad is None for param in model.parameters()} == {False}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "depth is None, hidden_size is None. Give both, or the list hidden_sizes"),
        ({"depth": 2}, "hidden_size is None"),
        ({"hidden_sizes": [4], "depth": 1}, r"got hidden_sizes=\[4\], depth=1"),
        ({"hidden_sizes": []}, r"hidden_sizes: .* not empty.*, got \[\]"),
        ({"hidden_sizes": [4, 0]}, r"hidden_sizes\[1\]: expected an integer > 0, got 0"),
        ({"depth": 0, "hidden_size": 4}, "depth: expected an integer > 0 or null, got 0"),
        ({"hidden_sizes": [4], "dropout": 1.5}, r"dropout: expected a number in \[0, 1\), got 1.5"),
        ({"hidden_sizes": [4], "input_size": 0}, "input_size: expected an integer > 0, got 0"),
        ({"hidden_sizes": [4], "to_float16": True}, "precision.enabled: true"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FcMnist(**arguments)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"input_ids": torch.zeros(1)}, r"got \['input_ids'\]"),
        ((torch.zeros(1),), "got tuple"),
        (torch.zeros(2, 4), "got Tensor"),
    ],
)
def test_a_batch_of_another_kind_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FcMnist(hidden_sizes=[4])(batch)
