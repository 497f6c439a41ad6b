"""Two processes give the scores of one, and a killed evaluation is repeated."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop, ValidationCallback
from modelzoo_trainer.callbacks import EleutherEvalHarness
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.loggers import JsonlLogger
from modelzoo_trainer.zoo.models.registry import model_class
from tests.distributed.ranks import run_ranks, try_ranks
from tests.zoo.hugging_face.harness import (
    CHOICE,
    PERPLEXITY,
    WRITE,
    language_batches,
    make_llama,
    make_tasks,
    make_tokenizer,
    our_llama,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
pytest.importorskip("lm_eval", reason="needs lm_eval")

ENGINES: dict[str, dict[str, Any]] = {
    "replicated": {},
    "sharded": {"parallel": {"shard": -1}},
    "split": {"parallel": {"tensor": 2}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("harness")
    make_llama(base / "model", make_tokenizer(base / "tokenizer"))
    make_tasks(base / "tasks")
    return base


ALL = f"{CHOICE},{WRITE},{PERPLEXITY}"


def harness(
    folder: Path, tokens: int = 12, tasks: str = ALL, **options: Any
) -> EleutherEvalHarness:
    own = {"tasks": tasks, "include_path": str(folder / "tasks")}
    tokenizer = str(folder / "tokenizer")
    options = {"batch_size": 3, "pretrained_model_name_or_path": tokenizer} | options
    return EleutherEvalHarness(own | {"log_samples": True, "max_tokens": tokens}, **options)


def evaluate(folder: Path, out: Path, backend: dict[str, Any]) -> dict[str, float]:
    """Return the metrics, and write the answers."""
    trainer = Trainer(
        device="cpu",
        backend=backend or None,
        model=our_llama(folder / "model"),
        model_dir=out,
        callbacks=[harness(folder)],
    )
    found = dict(trainer.validate_all().metrics)
    trainer.close()
    return found


def in_rank(rank: int, folder: Path, out: Path) -> dict[str, dict[str, float]]:
    return {name: evaluate(folder, out / name, backend) for name, backend in ENGINES.items()}


def texts(out: Path, task: str = WRITE) -> list[Any]:
    (path,) = out.rglob(f"samples_{task}_0.jsonl")
    return [json.loads(line)["resps"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_two_processes_give_the_scores_of_one(folder, tmp_path) -> None:
    expected = evaluate(folder, tmp_path / "one", {})

    found = run_ranks(2, in_rank, folder, tmp_path)

    assert len(expected) > 6
    for of_rank in found:
        for name in ENGINES:
            assert of_rank[name] == pytest.approx(expected, rel=1e-5), name
    for name in ENGINES:
        assert texts(tmp_path / name) == texts(tmp_path / "one")


def write_long(rank: int, folder: Path, out: Path, of_transformers: bool) -> list[Any]:
    """Return texts that no ending text ends, after prompts of different lengths."""
    model: Any = our_llama(folder / "model")
    if of_transformers:
        kind = model_class("hf_causal_lm")
        model = kind(pretrained_model_name_or_path=str(folder / "model"))
    trainer = Trainer(
        device="cpu",
        backend={"parallel": {"shard": -1}},
        model=model,
        model_dir=out,
        callbacks=[harness(folder, tasks="endless")],
    )
    trainer.validate_all()
    trainer.close()
    return texts(out, "endless") if rank == 0 else []


@pytest.mark.parametrize("of_transformers", [False, True])
def test_sharded_processes_wait_for_the_longest_text(folder, tmp_path, of_transformers) -> None:
    task = yaml.safe_load((folder / f"tasks/{WRITE}.yaml").read_text(encoding="utf-8"))
    task["task"], task["generation_kwargs"]["until"] = "endless", ["###"]
    prompts = [{"prompt": "the cat " * num, "target": ""} for num in (9, 9, 1, 1, 1, 1, 1)]
    data = folder / "tasks/endless.jsonl"
    data.write_text("".join(f"{json.dumps(one)}\n" for one in prompts), encoding="utf-8")
    task["dataset_kwargs"]["data_files"]["test"] = str(data)
    (folder / "tasks/endless.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    (expected,) = run_ranks(1, write_long, folder, tmp_path / "one", of_transformers)

    found, _ = run_ranks(2, write_long, folder, tmp_path / "two", of_transformers)

    assert found == expected
    assert len(found) == 7


class Kill(ValidationCallback):
    """Kills the process in the second batch of the evaluation at a step, once."""

    name_scope, every_n_vals, num_validate_loops = "kill", 1, 0

    def __init__(self, step: int, mark: Path) -> None:
        self.step = step
        self.mark = mark

    def run_validation(self, trainer, loop_idx, is_last):
        pass

    def on_eleuther_eval_harness_batch_end(self, trainer, model, outputs, batch, batch_idx):
        is_due = trainer.global_step == self.step and trainer.backend.is_main
        if is_due and batch_idx == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(rank: int, folder: Path, out: Path, kills_at: int | None) -> dict[str, Any]:
    import torch

    killers = [] if kills_at is None else [Kill(kills_at, out.with_suffix(".mark"))]
    trainer = Trainer(
        device="cpu",
        model=our_llama(folder / "model", dropout_rate=0.1),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        model_dir=out,
        loop=TrainingLoop(max_steps=4, eval_frequency=2),
        checkpoint=Checkpoint(steps=2),
        callbacks=[harness(folder), *killers],
        loggers=[JsonlLogger()],
        seed=1,
    )
    trainer.fit(language_batches(4), language_batches(1))
    found = {name: tensor.numpy() for name, tensor in trainer.model.state_dict().items()}
    trainer.close()
    return found


def metrics_of(out: Path) -> dict[tuple[int, str], float]:
    """Return the last value of each metric, of every step, without times."""
    found = {}
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    for line in map(json.loads, lines):
        step = line.pop("step")
        own = {key: one for key, one in line.items() if key.startswith(("eleuther", "validate"))}
        found |= {(step, key): value for key, value in own.items()}
    return found


# CI: two processes.
@pytest.mark.soak_cases("1")
@pytest.mark.parametrize("num", [1, 2])
def test_a_run_that_is_killed_in_an_evaluation_has_the_metrics_of_one_that_is_not(
    folder, tmp_path, num
) -> None:
    whole, *_ = run_ranks(num, train, folder, tmp_path / "whole", None)

    ended = try_ranks(num, train, folder, tmp_path / "killed", 4)
    again, *_ = run_ranks(num, train, folder, tmp_path / "killed", 4)

    assert not any(ok for ok, _ in ended)
    assert str(-signal.SIGKILL) in str(ended)
    expected, found = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "killed")
    assert found == expected
    assert {step for step, name in found if name.endswith(f"{CHOICE}/acc")} == {2, 4}
    assert {name: value.tobytes() for name, value in again.items()} == {
        name: value.tobytes() for name, value in whole.items()
    }


class Stops(ValidationCallback):
    """Stops the run in the second batch of an evaluation."""

    name_scope, every_n_vals, num_validate_loops = "stops", 1, 0

    def run_validation(self, trainer, loop_idx, is_last):
        pass

    def on_eleuther_eval_harness_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if batch_idx == 1 and trainer.backend.is_main:
            trainer.early_exit.stop("enough")


def end_early(rank: int, folder: Path, out: Path) -> list[str]:
    """Return the outcomes of an evaluation that is stopped, and of one that is refused."""
    found = []
    short = harness(folder, tasks=CHOICE, max_sequence_length=2)
    for number, callbacks in enumerate(([harness(folder), Stops()], [short])):
        trainer = Trainer(
            device="cpu",
            model=our_llama(folder / "model"),
            model_dir=out / str(number),
            callbacks=callbacks,
        )
        try:
            found.append(str(dict(trainer.validate_all().metrics)))
        except ConfigError as error:
            found.append(str(error))
        trainer.close()
    return found


def test_all_processes_end_together(folder, tmp_path) -> None:
    found = run_ranks(2, end_early, folder, tmp_path)

    assert found[0] == found[1]
    assert found[0][0] == "{}"
    assert "and 2 is the most that can be scored" in found[0][1]


def make_unusable(rank: int, folder: Path, out: Path) -> str:
    """Return the message about a task that cannot be evaluated."""
    try:
        Trainer(
            device="cpu",
            model=our_llama(folder / "model"),
            model_dir=out,
            callbacks=[harness(folder, tokens=48)],
        )
    except ConfigError as error:
        return str(error)
    return ""


def test_all_processes_refuse_a_task_together(folder, tmp_path) -> None:
    found = run_ranks(2, make_unusable, folder, tmp_path)

    assert found[0] == found[1]
    assert "generates up to 48 tokens" in found[0]


def fail(rank: int, folder: Path, out: Path) -> tuple[int, dict[str, float], str]:
    """Return the steps of a fit with a metric that fails, its metrics, and what validation says."""
    trainer = Trainer(
        device="cpu",
        model=our_llama(folder / "model"),
        model_dir=out,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(max_steps=2, eval_frequency=1),
        callbacks=[harness(folder, tasks="failing"), JsonlLogger()],
    )
    metrics = dict(trainer.fit(language_batches(4), language_batches(2)).metrics)
    with pytest.raises(ConfigError) as caught:
        trainer.validate_all()
    trainer.close()
    return trainer.global_step, metrics, str(caught.value)


# CI: two processes.
@pytest.mark.soak_cases("1")
@pytest.mark.parametrize("num_processes", [1, 2])
def test_training_continues_after_a_metric_that_fails(folder, tmp_path, num_processes) -> None:
    task = yaml.safe_load((folder / "tasks" / f"{WRITE}.yaml").read_text(encoding="utf-8"))
    task |= {"task": "failing", "metric_list": [{"metric": "f1", "aggregation": "f1"}]}
    (folder / "tasks" / "failing.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")

    found = run_ranks(num_processes, fail, folder, tmp_path)

    for steps, metrics, message in found:
        assert steps == 2
        assert "validate_0/loss" in metrics
        assert not any("failing" in name for name in metrics)
        assert "EleutherEvalHarness: lm_eval failed (" in message
        assert "Correct the task" in message
