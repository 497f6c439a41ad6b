"""Runs of models of `transformers` that are sharded: killed, compiled, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from modelzoo_trainer import Checkpoint, Logging, Trainer, TrainingLoop
from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm
from tests.distributed.ranks import run_ranks, try_ranks
from tests.distributed.test_callback_resume import KILLED, Die
from tests.distributed.training import Metrics
from tests.zoo.hugging_face.hf_cases import config_of, language_batch

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("peft", reason="needs peft")
pytestmark = pytest.mark.slow

SHARD: dict[str, Any] = {"parallel": {"shard": -1}}
PEFT = {"r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
STEPS, KILL = 6, 3
OPTIONS: dict[str, dict[str, Any]] = {"all": {}, "adapters": {"peft_config": PEFT}}
COMPILED = SHARD | {"compile": {"target": "blocks", "backend": "aot_eager"}}


def fit(
    rank: int,
    folder: Path,
    options: dict[str, Any],
    backend: dict[str, Any],
    die_at: int | None = None,
) -> dict[str, Any]:
    """Train on 8 rows, 2 a process and step; return the weights and the metrics of each step."""
    config = config_of("llama") | {"attention_dropout": 0.1}
    metrics = Metrics()
    trainer = Trainer(
        device="cpu",
        backend=backend,
        model=lambda: HfCausalLm(config=config, init_device="meta", **options),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        loop=TrainingLoop(max_steps=STEPS),
        logging=Logging(log_steps=1),
        checkpoint=Checkpoint(steps=1),
        callbacks=[Die(die_at)],
        loggers=[metrics],
        model_dir=folder,
        progress="none",
        seed=1,
    )
    batch = language_batch(num_rows=8)
    rows: Any = [{key: value[idx] for key, value in batch.items()} for idx in range(8)]
    trainer.fit(DataLoader(rows, batch_size=2, shuffle=True))
    weights = trainer.backend.host_state(dict(trainer.model.state_dict()))
    return {
        "weights": {name: value.tolist() for name, value in weights.items()},
        "losses": {step: row["loss"] for step, row in metrics.rows if "loss" in row},
    }


def fit_all(rank: int, folder: Path) -> dict[str, Any]:
    """Return what comes of runs that are not killed, and the message of one that is refused."""
    found: dict[str, Any] = {
        name: fit(rank, folder / name, options, SHARD) for name, options in OPTIONS.items()
    }
    found["compiled"] = fit(rank, folder / "compiled", {}, COMPILED)
    try:
        fit(rank, folder / "split", {}, {"parallel": {"tensor": 2}})
    except Exception as error:  # noqa: BLE001  # of a class that the test names
        found["refused"] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of two processes found."""
    return run_ranks(2, fit_all, tmp_path_factory.mktemp("unbroken"))


# CI: adapters, with frozen and with trained weights.
@pytest.mark.soak_cases("all")
@pytest.mark.parametrize("kind", OPTIONS)
def test_a_killed_run_resumes_bitwise(kind: str, unbroken: Any, tmp_path: Path) -> None:
    given = tmp_path, OPTIONS[kind], SHARD
    assert try_ranks(2, fit, *given, KILL) == [KILLED, KILLED]
    resumed = run_ranks(2, fit, *given)
    assert unbroken[0][kind]["weights"] == unbroken[1][kind]["weights"]
    for found, expected in zip(resumed, unbroken, strict=True):
        assert found["weights"] == expected[kind]["weights"]
    losses = unbroken[0][kind]["losses"]
    assert len(losses) == STEPS
    assert resumed[0]["losses"] == {step: one for step, one in losses.items() if step > KILL}


def test_a_compiled_run_is_that_of_one_that_is_not(unbroken: Any) -> None:
    found = unbroken[0]["compiled"]["losses"]
    assert list(found) == list(unbroken[0]["all"]["losses"])
    for step, loss in unbroken[0]["all"]["losses"].items():
        assert found[step] == pytest.approx(loss, abs=1e-5)


def test_tensor_parallelism_is_refused_with_one_message(unbroken: Any) -> None:
    for one in unbroken:
        assert one["refused"].startswith("BackendError: backend.parallel.tensor is 2, but HfCausal")
        assert "tensor_plan" in one["refused"]
