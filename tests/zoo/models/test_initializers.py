"""Initializers in configurations."""

import pytest
import torch

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.initializers import read_initializer


def test_a_truncated_normal_is_cut_at_two_deviations_by_default() -> None:
    initializer = read_initializer("initializer", {"name": "truncated_normal", "std": 0.5, "b": 3})

    assert initializer.options == {"mean": 0.0, "std": 0.5, "a": -1.0, "b": 3}


def test_a_name_alone_takes_the_defaults_and_fills_the_tensor() -> None:
    tensor = torch.zeros(64, 64)

    read_initializer("initializer", "glorot_uniform")(tensor)

    assert tensor.abs().max() <= (6 / 128) ** 0.5
    assert tensor.std() > 0.1


def test_an_unknown_name_is_refused_with_a_suggestion() -> None:
    with pytest.raises(
        ConfigError,
        match=r"initializer.name: 'truncated_norm' is not an init.*mean 'truncated_normal'",
    ):
        read_initializer("initializer", {"name": "truncated_norm", "std": 0.02})


def test_an_unknown_argument_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"initializer.sdt: no such argument of 'normal'.*'std'"):
        read_initializer("initializer", {"name": "normal", "sdt": 0.02})
