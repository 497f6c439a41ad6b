"""The callbacks that look at tensors, in several processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, TensorDataset

from modelzoo_trainer.callbacks.dump_activations import DumpActivations
from modelzoo_trainer.callbacks.nan_checker import NaNChecker
from modelzoo_trainer.callbacks.parts.tensor_listeners import (
    NormTensorListener,
    SummaryTensorListener,
)
from modelzoo_trainer.callbacks.selective_grad import SelectiveGrad
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.callbacks.compute_norm_gns import ComputeNormGNS
from tests.distributed.ranks import run_ranks
from tests.distributed.training import make_trainer, samples

FSDP2 = {"parallel": {"shard": -1}}


def fit(
    rank: int, folder: Path, callbacks: Any, backend: dict[str, Any], batch_size: int = 2
) -> list[dict[str, Any]]:
    """Train on 24 samples in order; return the metrics of the training steps."""
    trainer = make_trainer(folder, callbacks=callbacks(), backend=backend, eval_frequency=None)
    inputs, mask = samples(24).tensors
    trainer.fit(DataLoader(TensorDataset(inputs, mask), batch_size=batch_size))
    return [row for _, row in trainer.metrics.rows if "loss" in row]


def noise() -> list[Any]:
    return [ComputeNormGNS("Linear")]


@pytest.mark.slow
def test_the_examples_of_all_processes_make_the_noise_scale(tmp_path) -> None:
    alone = run_ranks(1, fit, tmp_path / "alone", noise, {}, 4)[0]
    together = run_ranks(2, fit, tmp_path / "together", noise, {})[0]
    assert len(alone) == len(together) > 0
    names = [name for name in alone[0] if "sqnorm" in name or "noise" in name]
    assert {name.partition("/")[0] for name in names} >= {"pegsqnorm", "gsqnorm"}
    for one, two in zip(alone, together, strict=True):
        assert {name: two[name] for name in names} == pytest.approx(
            {name: one[name] for name in names}, rel=1e-3
        )


def watching() -> list[Any]:
    return [NaNChecker(), DumpActivations(), NormTensorListener("x", ["*.weight", "*.grad"])]


@pytest.mark.slow
def test_norms_of_parts_are_those_of_the_whole(tmp_path) -> None:
    whole = run_ranks(2, fit, tmp_path / "whole", watching, {})[0]
    parts = run_ranks(2, fit, tmp_path / "parts", watching, FSDP2)[0]
    names = [name for name in whole[0] if name.startswith("x/")]
    assert len(names) > 2
    for one, two in zip(whole, parts, strict=True):
        assert {name: two[name] for name in names} == pytest.approx(
            {name: one[name] for name in names}, rel=1e-4
        )
        assert all(math.isfinite(one[name]) for name in names)


def refusing(rank: int, folder: Path) -> list[str]:
    """Return what those say that need whole tensors."""
    messages = []
    for callback in (
        ComputeNormGNS("Linear"),
        SelectiveGrad({}),
        SummaryTensorListener("x", "*"),
    ):
        with pytest.raises(ConfigError) as found:
            make_trainer(folder, callbacks=[callback], backend=FSDP2)
        messages.append(str(found.value))
    return messages


def test_those_that_need_whole_tensors_refuse_parts(tmp_path) -> None:
    for messages in run_ranks(2, refusing, tmp_path):
        assert [message.partition(" ")[0] for message in messages] == [
            "ComputeNormGNS",
            "SelectiveGrad",
            "SummaryTensorListener",
        ]
        assert all("shard" in message for message in messages)
