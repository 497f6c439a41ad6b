"""N processes compute what one does with N times the batch; in float64, to 1e-12."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.distributed.training import train

ENGINES = {
    "DDP": {},
    "FSDP2": {"parallel": {"shard": -1}},
    "HSDP": {"parallel": {"replicate": 2, "shard": 2}},
    "TP": {"parallel": {"tensor": 2}},
    "TP and FSDP2": {"parallel": {"shard": 2, "tensor": 2}},
}
RANKS = {"HSDP": 4, "TP and FSDP2": 4}
slow = pytest.mark.slow


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-12,
        atol=1e-12,
    )


def equal_runs(
    tmp_path: Path, num: int, engine: str, options: dict[str, Any], *, parts: int | None = None
) -> list[dict[str, Any]]:
    """Train alone and together, compare, and return what the processes told."""
    parts = num if parts is None else parts
    alone = train(0, tmp_path / "alone", 4 * parts, options)
    backend = {"backend": ENGINES[engine]}
    ranks = run_ranks(num, train, tmp_path / "together", 4, {**options, **backend})
    for found in ranks:
        assert found["step"] == alone["step"]
        close(found["grads"], alone["grads"])
        for name, value in alone["weights"].items():
            close(found["weights"][name], value)
    main, *others = ranks
    assert [step for step, _ in main["rows"]] == [step for step, _ in alone["rows"]]
    for (_, row), (_, expected) in zip(main["rows"], alone["rows"], strict=True):
        for name, value in expected.items():
            close(row[name], value)
    assert all(found["rows"] == [] for found in others)  # logged once
    return ranks


# CI: each engine, and each way to count.
@pytest.mark.slow
@pytest.mark.soak_cases(
    "DDP-None",
    "FSDP2-int",
    "FSDP2-tensor",
    "HSDP-None",
    "HSDP-int",
    "TP-int",
    "TP-tensor",
    "TP and FSDP2-None",
    "TP and FSDP2-int",
)
@pytest.mark.parametrize(
    ("engine", "counts"),
    [
        pytest.param(engine, counts, marks=() if is_quick else slow)
        for engine in ENGINES
        for counts in (None, "int", "tensor")
        for is_quick in [(engine, counts) in {("DDP", "tensor"), ("FSDP2", None), ("TP", None)}]
    ],
)
def test_gradients_weights_losses_and_validation_are_those_of_one(tmp_path, engine, counts) -> None:
    num = RANKS.get(engine, 2)
    parts = {"TP": 1, "TP and FSDP2": 2}.get(engine, num)
    equal_runs(tmp_path, num, engine, {"counts": counts}, parts=parts)


# CI: each engine, each number, with and without counts.
@pytest.mark.soak_cases("*", "!DDP-tensor-3", "!FSDP2-None-4")
@slow
@pytest.mark.parametrize("num", [3, 4])
@pytest.mark.parametrize("counts", [None, "tensor"])
@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_whatever_the_number_of_processes(tmp_path, engine, counts, num) -> None:
    equal_runs(tmp_path, num, engine, {"counts": counts})


# CI: fewer samples than processes, and one sample more than divides.
@pytest.mark.soak_cases("*-9", "*-26", "DDP-25", "FSDP2-3")
@pytest.mark.slow_cases("DDP-3", "FSDP2-25")
@pytest.mark.parametrize(
    ("engine", "num_samples"),
    [
        ("DDP", 3),
        ("FSDP2", 25),
        *(pytest.param("DDP", num, marks=slow) for num in (9, 25, 26)),
        *(pytest.param("FSDP2", num, marks=slow) for num in (3, 9, 26)),
    ],
)
def test_a_last_batch_that_does_not_divide(tmp_path, engine, num_samples) -> None:
    ranks = equal_runs(tmp_path, 4, engine, {"num": num_samples, "counts": "tensor"})
    assert sum(sum(found["batches"]) for found in ranks) == 2 * num_samples


# CI: each engine, with and without counts.
@pytest.mark.soak_cases("DDP-None", "FSDP2-None", "TP and FSDP2-tensor")
@pytest.mark.parametrize(
    ("engine", "counts"),
    [
        ("DDP", "tensor"),
        pytest.param("DDP", None, marks=slow),
        *(pytest.param("FSDP2", counts, marks=slow) for counts in (None, "tensor")),
        *(pytest.param("TP and FSDP2", counts, marks=slow) for counts in (None, "tensor")),
    ],
)
def test_accumulation_is_that_of_one(tmp_path, engine, counts) -> None:
    num = RANKS.get(engine, 2)
    parts = {"TP and FSDP2": 2}.get(engine, num)
    options = {"counts": counts, "accumulate": 3, "clip": 0.1}
    equal_runs(tmp_path, num, engine, options, parts=parts)


# CI: each engine, with and without counts.
@pytest.mark.soak_cases("DDP-tensor", "FSDP2-None")
@slow
@pytest.mark.parametrize("counts", [None, "tensor"])
@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_micro_batches_are_those_of_one(tmp_path, engine, counts) -> None:
    equal_runs(tmp_path, 3, engine, {"counts": counts, "micro": 2, "num": 25})


@slow
@pytest.mark.parametrize("engine", ["DDP", "FSDP2", "TP"])
def test_clipping_is_by_the_norm_of_all(tmp_path, engine) -> None:
    options = {"clip": 0.01, "optimizer": torch.optim.AdamW}
    equal_runs(tmp_path, 2, engine, options, parts=1 if engine == "TP" else 2)
