"""Runs over four devices of one process, against one device with the same global batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.xla.test_training import losses_of, tensors_of

Run = Callable[..., Any]
FOUR = {"CPU_NUM_DEVICES": "4"}


@pytest.fixture
def wide(params: dict[str, Any]) -> dict[str, Any]:
    """The small run, with a layer that is large enough to be sharded."""
    params["trainer"]["init"]["model"]["hidden_sizes"] = [256]
    return params


def test_copies_and_shards_train_as_one_device(
    run: Run, wide: dict[str, Any], tmp_path: Path
) -> None:
    done = run(wide, "--model_dir", str(tmp_path / "one"))
    assert done.returncode == 0, done.stderr
    one = losses_of(tmp_path / "one")
    for name, parallel in (
        ("copies", {"replicate": -1}),
        ("shards", {"shard": 4}),
        ("both", {"replicate": 2, "shard": -1}),
    ):
        wide["trainer"]["init"]["backend"] = {"parallel": parallel}
        done = run(wide, "--model_dir", str(tmp_path / name), **FOUR)
        assert done.returncode == 0, done.stderr
        assert losses_of(tmp_path / name) == pytest.approx(one, rel=1e-4), name
        assert tensors_of(tmp_path / name, 12).keys() == tensors_of(tmp_path / "one", 12).keys()
    # What shards have written, one device and the host go on from; and back.
    half = str(tmp_path / "shards" / "checkpoint_8")
    rest = {step: loss for step, loss in one.items() if step > 8}
    del wide["trainer"]["init"]["backend"]
    done = run(wide, "--model_dir", str(tmp_path / "again"), "--checkpoint_path", half)
    assert done.returncode == 0, done.stderr
    assert losses_of(tmp_path / "again") == pytest.approx(rest, rel=1e-4)
    wide["trainer"]["init"]["backend"] = {"parallel": {"shard": 4}}
    half = str(tmp_path / "one" / "checkpoint_8")
    done = run(wide, "--model_dir", str(tmp_path / "back"), "--checkpoint_path", half, **FOUR)
    assert done.returncode == 0, done.stderr
    assert losses_of(tmp_path / "back") == pytest.approx(rest, rel=1e-4)


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"shard": 3}, "{shard: 3} does not match 4 XLA devices"),
        ({"tensor": 2}, "tensor parallelism is not supported on XLA"),
        ({"context": 2}, "context parallelism is not supported on XLA"),
        ({"shards": 4}, "Did you mean 'shard'"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(
    run: Run, params: dict[str, Any], tmp_path: Path, parallel: dict[str, int], said: str
) -> None:
    params["trainer"]["init"]["backend"] = {"parallel": parallel}
    done = run(params, "--model_dir", str(tmp_path / "run"), **FOUR)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
