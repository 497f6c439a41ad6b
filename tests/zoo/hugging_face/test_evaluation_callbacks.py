"""Evaluations together with other callbacks: averaged weights, and what watches their metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import (
    EarlyStopping,
    EleutherEvalHarness,
    LimitBatches,
    LimitEvalSteps,
    ModelEma,
    SaveBest,
)
from modelzoo_trainer.errors import ConfigError
from tests.distributed.ranks import run_ranks
from tests.doubles import History
from tests.zoo.hugging_face.harness import (
    CHOICE,
    PERPLEXITY,
    language_batches,
    make_llama,
    make_tasks,
    make_tokenizer,
    our_llama,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
pytest.importorskip("lm_eval", reason="needs lm_eval")

DECAY = 0.5
METRIC = f"{PERPLEXITY}/byte_perplexity"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("harness")
    make_llama(base / "model", make_tokenizer(base / "tokenizer"))
    make_tasks(base / "tasks")
    return base


def harness(folder: Path, *, tasks: str = PERPLEXITY, **options: Any) -> EleutherEvalHarness:
    own = {"tasks": tasks, "include_path": str(folder / "tasks")}
    tokenizer = str(folder / "tokenizer")
    return EleutherEvalHarness(
        own, batch_size=4, pretrained_model_name_or_path=tokenizer, **options
    )


def make(
    folder: Path,
    out: Path,
    *callbacks: Any,
    steps: int = 4,
    backend: Any = None,
) -> tuple[Trainer, History]:
    history = History()
    trainer = Trainer(
        device="cpu",
        backend=backend,
        model=our_llama(folder / "model", dropout_rate=0.1),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        model_dir=out,
        loop=TrainingLoop(max_steps=steps, eval_frequency=1),
        checkpoint=Checkpoint(steps=2),
        callbacks=callbacks,
        loggers=[history],
        seed=1,
    )
    return trainer, history


def train(
    folder: Path, out: Path, *callbacks: Any, steps: int = 4, backend: Any = None
) -> tuple[Trainer, History]:
    trainer, history = make(folder, out, *callbacks, steps=steps, backend=backend)
    trainer.fit(language_batches(steps), language_batches(1))
    return trainer, history


def both(folder: Path) -> list[Any]:
    return [
        ModelEma(DECAY),
        harness(folder, name_scope="plain"),
        harness(folder, name_scope="mean", averaged=True),
    ]


def test_averaged_weights_are_evaluated(folder: Path, tmp_path: Path) -> None:
    trainer, history = train(folder, tmp_path / "run", *both(folder))
    average: Any = trainer.get_callback(ModelEma)
    with average.swap():
        trainer.model.eval()
        weights = {name: one.clone() for name, one in trainer.model.state_dict().items()}
    own, expected = make(folder, tmp_path / "own", harness(folder, name_scope="plain"))
    own.model.load_state_dict(weights)
    own.validate_all()

    found = dict(history.of(f"mean/{METRIC}"))
    assert sorted(found) == [1, 2, 3, 4]
    assert found[4] == dict(expected.of(f"plain/{METRIC}"))[0]
    assert all(found[step] != value for step, value in history.of(f"plain/{METRIC}"))
    plain, other = train(folder, tmp_path / "plain", ModelEma(DECAY))
    assert other.of("loss") == history.of("loss")
    for name, one in plain.model.state_dict().items():
        assert torch.equal(one, trainer.model.state_dict()[name]), name

    later, again = make(folder, tmp_path / "run", *both(folder))
    later.validate_all(ckpt_paths="last")
    assert dict(again.of(f"mean/{METRIC}")) == {4: found[4]}


def test_averaged_weights_that_do_not_exist_are_not_evaluated(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match="averaged requires the callback ModelEma"):
        make(folder, tmp_path, harness(folder, averaged=True))
    trainer, history = make(folder, tmp_path, *both(folder))

    trainer.validate_all()

    assert history.of(f"plain/{METRIC}")
    assert not history.of(f"mean/{METRIC}")
    assert "mean: not evaluated; there are no averaged weights yet" in caplog.text


def in_rank(rank: int, folder: Path, out: Path) -> dict[int, float]:
    backend = {"parallel": {"shard": -1}}
    trainer, history = train(folder, out, *both(folder), steps=2, backend=backend)
    found = dict(history.of(f"mean/{METRIC}")) if trainer.backend.is_main else {}
    trainer.close()
    return found


def test_sharded_weights_are_averaged_and_evaluated(folder: Path, tmp_path: Path) -> None:
    (expected,) = run_ranks(1, in_rank, folder, tmp_path / "one")

    found, _ = run_ranks(2, in_rank, folder, tmp_path / "two")

    assert sorted(found) == [1, 2]
    assert sorted(expected) == [1, 2]
    for value in found.values():
        assert 1 < value < 400


@pytest.mark.parametrize(
    ("limit", "num"),
    [(LimitBatches(2), 8), (LimitEvalSteps(1, intermediate_only=False), 14)],
    ids=["smoke", "validation"],
)
def test_limits_of_batches_leave_no_request_unanswered(
    folder: Path, tmp_path: Path, limit: Any, num: int
) -> None:
    trainer, history = make(folder, tmp_path, harness(folder, tasks=CHOICE), limit)

    trainer.validate_all()

    (path,) = tmp_path.rglob("results_0.json")
    assert json.loads(path.read_text())["n-samples"][CHOICE] == {"original": 14, "effective": num}
    assert history.of(f"eleuther_0/{CHOICE}/acc")


def test_metrics_of_an_evaluation_can_be_watched(folder: Path, tmp_path: Path) -> None:
    name = f"eleuther_0/{METRIC}"
    watching = [SaveBest(name, mode="max"), EarlyStopping(name, mode="min", patience=1)]

    trainer, history = train(folder, tmp_path, harness(folder), *watching, steps=8)

    values = dict(history.of(name))
    best = max(values, key=lambda step: values[step])
    assert (tmp_path / f"best_{best}").is_dir()
    steps = sorted(values)
    worse = next(n for n in steps[1:] if values[n] >= min(values[m] for m in steps if m < n))
    assert trainer.global_step == worse < 8
