"""Seeds that are none, and folders that cannot be."""

import numpy as np
import pytest
import torch

from modelzoo_trainer import ConfigError, Trainer
from modelzoo_trainer.core.reproducibility import Reproducibility


@pytest.mark.parametrize(
    "seed", [1.5, 1.0, "a", "1", [1], True, float("nan"), -1, 2**32, 10**30, np.int64(-3)]
)
def test_a_seed_that_is_no_integer_in_range_is_refused_before_anything_is_made(seed, tmp_path):
    with pytest.raises(ConfigError, match=r"^trainer\.seed: .* an integer in \[0, 4294967296\)"):
        Trainer(device="cpu", model=torch.nn.Linear(1, 1), model_dir=tmp_path / "run", seed=seed)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("seed", [0, 2**32 - 1, np.int64(3)])
def test_a_seed_in_range_is_taken_and_is_a_plain_integer(seed):
    assert type(Reproducibility(seed).seed) is int
    assert Reproducibility(seed).seed == seed


@pytest.mark.parametrize("model_dir", ["a\0b", "\0", 5, None])
def test_a_model_dir_that_is_no_path_is_refused(model_dir):
    with pytest.raises(ConfigError, match=r"^model_dir must be a path without null bytes"):
        Trainer(device="cpu", model=torch.nn.Linear(1, 1), model_dir=model_dir)
