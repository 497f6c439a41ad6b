"""Digits of scikit-learn."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data.digits import DigitsProcessor

# Not imported here: that takes a second of each process that collects tests.
pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")


def rows(**arguments: Any) -> tuple[Tensor, Tensor]:
    batches = list(DigitsProcessor(batch_size=100, **arguments).create_dataloader())
    return torch.cat([batch[0] for batch in batches]), torch.cat([batch[1] for batch in batches])


def test_a_batch_is_images_between_0_and_1_and_labels() -> None:
    inputs, labels = next(iter(DigitsProcessor(batch_size=7).create_dataloader()))

    assert inputs.shape == (7, 8, 8)
    assert inputs.dtype == torch.float32
    assert labels.shape == (7,)
    assert 0 == inputs.min() < inputs.max() == 1


def test_the_splits_have_no_image_in_common_and_all_images_together() -> None:
    train, val = (rows(split=split)[0].flatten(1) for split in ("train", "val"))

    assert len(train) + len(val) == 1797
    assert len(val) == 359
    assert torch.cdist(train, val).min() > 0


def test_the_split_is_the_same_every_time() -> None:
    assert torch.equal(
        rows(split="val", shuffle=False)[0], rows(split="val", shuffle=False, shuffle_seed=9)[0]
    )


def test_the_order_depends_on_the_seed() -> None:
    assert torch.equal(rows(shuffle_seed=1)[1], rows(shuffle_seed=1)[1])
    assert not torch.equal(rows(shuffle_seed=1)[1], rows(shuffle_seed=2)[1])


def test_the_last_smaller_batch_can_be_skipped() -> None:
    assert len(rows(split="val", drop_last=True)[0]) == 300


@pytest.mark.slow
def test_they_are_those_that_scikit_learn_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    found = DigitsProcessor(batch_size=1).load()
    monkeypatch.setattr(Path, "is_file", lambda self: False)  # its file is elsewhere
    loaded = DigitsProcessor(batch_size=1).load()

    assert loaded[0].dtype == torch.float32
    assert all(map(torch.equal, found, loaded))


@pytest.mark.slow
def test_they_are_loaded_without_importing_scikit_learn() -> None:
    program = """if True:
        import sys
        from modelzoo_trainer.zoo.data.digits import DigitsProcessor

        DigitsProcessor(batch_size=1)
        assert "sklearn" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_a_share_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"val_fraction: expected a number in \(0, 1\), got 0.0"):
        DigitsProcessor(batch_size=1, val_fraction=0.0)


def test_missing_scikit_learn_is_reported_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)

    with pytest.raises(ConfigError, match="pip install scikit-learn"):
        DigitsProcessor(batch_size=1)
