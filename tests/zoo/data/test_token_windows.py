"""Windows of a token file."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from modelzoo_trainer.zoo.data.token_cache import TokenWindows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(100, dtype=np.uint16))
    return path


def test_windows_follow_each_other_and_each_has_the_token_after_it(path: Path) -> None:
    windows = TokenWindows(path, 33)

    batch = windows.__getitems__([2, 0])

    assert len(windows) == 3
    assert batch["input_ids"].tolist() == [list(range(66, 99)), list(range(33))]
    assert batch["labels"].tolist() == [list(range(67, 100)), list(range(1, 34))]


def test_a_window_that_lacks_the_last_label_is_skipped(path: Path) -> None:
    assert len(TokenWindows(path, 50)) == 1


def test_one_window_is_a_row_of_the_batch(path: Path) -> None:
    windows = TokenWindows(path, 10)

    assert torch.equal(windows[4]["labels"], windows.__getitems__([4])["labels"][0])


def test_another_process_gets_the_path_and_not_the_tokens(path: Path) -> None:
    np.save(path, np.zeros(10_000, dtype=np.uint16))
    windows = TokenWindows(path, 10)

    packed = pickle.dumps(windows)

    assert len(packed) < 1000
    assert torch.equal(pickle.loads(packed)[3]["labels"], windows[3]["labels"])


def test_writing_to_a_batch_does_not_change_the_tokens(path: Path) -> None:
    windows = TokenWindows(path, 10)

    windows.__getitems__([0])["input_ids"].zero_()

    assert windows[0]["input_ids"].tolist() == list(range(10))
