"""EleutherEvalHarness gives the scores of `lm_eval --model hf` for the exported model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelzoo_trainer import Callback, Trainer, TrainingLoop, ValidationCallback
from modelzoo_trainer.callbacks import EleutherEvalHarness, ScopedEleutherEvalHarnessFlags
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.zoo.models.registry import model_class
from tests.doubles import History
from tests.zoo.hugging_face.harness import (
    CHOICE,
    GROUP,
    LIMIT,
    PERPLEXITY,
    VOCAB,
    WRITE,
    language_batches,
    make_llama,
    make_tasks,
    make_tokenizer,
    our_llama,
)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
pytest.importorskip("lm_eval", reason="needs lm_eval")

UNTRAINED = ("--set", "validate_all.ckpt_paths=null")
ALL = f"{CHOICE},{WRITE},{PERPLEXITY}"
# The command itself, but without reading the 10,000 files of its own tasks.
COMMAND = """
import functools, lm_eval.tasks
lm_eval.tasks.TaskManager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
from lm_eval.__main__ import cli_evaluate
cli_evaluate()
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Folders of a tokenizer, of tasks, and of a model of transformers."""
    base = tmp_path_factory.mktemp("harness")
    tokenizer = make_tokenizer(base / "tokenizer")
    make_llama(base / "model", tokenizer)
    return {"tokenizer": tokenizer, "tasks": make_tasks(base / "tasks"), "model": base / "model"}


@pytest.fixture(scope="module")
def reference(folders, tmp_path_factory) -> Path:
    """The folder that the command of `lm_eval` writes."""
    out = tmp_path_factory.mktemp("reference")
    words = f"run --model hf --model_args pretrained={folders['model']} --device cpu --tasks {ALL}"
    words += f" --include_path {folders['tasks']} --batch_size 4 --num_fewshot 1 --log_samples"
    subprocess.run(
        [sys.executable, "-c", COMMAND, *words.split(), "--output_path", str(out)],
        check=True,
        capture_output=True,
    )
    return out


def evaluate(
    folders, folder: Path, model: Any = None, *, is_static: bool = False, **options: Any
) -> tuple[Path, History]:
    """Evaluate our model, and return the folder of the results, and the metrics."""
    history = History()
    device, others = options.pop("device", "cpu"), options.pop("callbacks", [])
    own = {"tasks": ALL, "include_path": str(folders["tasks"]), "num_fewshot": 1}
    own |= {"log_samples": True} | options.pop("eeh_args", {})
    options = {
        "batch_size": 4,
        "pretrained_model_name_or_path": str(folders["tokenizer"]),
    } | options
    harness = EleutherEvalHarness(own, **options)
    trainer = Trainer(
        device=device,
        model=model or our_llama(folders["model"]),
        model_dir=folder,
        callbacks=[harness, *others],
        loggers=[history],
    )
    if is_static:
        trainer.backend.caps = replace(trainer.backend.caps, static_shapes=True)
    trainer.validate_all()
    return trainer.artifact_dir / "eleuther_0", history


def answers(folder: Path, task: str) -> list[Any]:
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row["resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]


def scores(folder: Path, task: str) -> list[tuple[float, bool]]:
    """Return log-likelihoods and whether they are greedy."""
    flat = [one[0] for document in answers(folder, task) for one in document]
    return [
        (float(one[0]), str(one[1]) == "True") if isinstance(one, list) else (float(one), False)
        for one in flat
    ]


def prompts_of(folder: Path, task: str) -> list[Any]:
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row["arguments"] for row in sorted(rows, key=lambda row: row["doc_id"])]


def results(folder: Path) -> dict[str, Any]:
    (path,) = folder.rglob("results_*.json")
    return json.loads(path.read_text(encoding="utf-8"))["results"]


def test_scores_are_those_of_lm_eval_on_the_exported_model(folders, reference, tmp_path) -> None:
    found, history = evaluate(folders, tmp_path)

    expected = results(reference)
    for task in (CHOICE, WRITE, PERPLEXITY):
        for name, value in expected[task].items():
            value = value if isinstance(value, str) else pytest.approx(value, rel=1e-5)
            assert results(found)[task][name] == value, (task, name)
    for task in (CHOICE, PERPLEXITY):
        ours, theirs = scores(found, task), scores(reference, task)
        assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
        assert [one for one, _ in ours] == pytest.approx([one for one, _ in theirs], abs=2e-4)
    assert len(scores(found, CHOICE)) > 30
    assert answers(found, WRITE) == answers(reference, WRITE)
    texts = [one[0][0] for one in answers(found, WRITE)]
    assert len(set(texts)) > 4
    assert history.of(f"eleuther_0/{CHOICE}/acc") == [(0, expected[CHOICE]["acc,none"])]
    assert history.of(f"eleuther_0/{PERPLEXITY}/byte_perplexity")
    assert history.of(f"eleuther_0/{CHOICE}/acc_stderr")


def test_scores_of_a_model_of_transformers_are_those_of_lm_eval(
    folders, reference, tmp_path
) -> None:
    model = model_class("hf_causal_lm")(pretrained_model_name_or_path=str(folders["model"]))

    found, _ = evaluate(folders, tmp_path, model)

    assert answers(found, WRITE) == answers(reference, WRITE)
    for task in (CHOICE, PERPLEXITY):
        ours, theirs = scores(found, task), scores(reference, task)
        assert [one for one, _ in ours] == pytest.approx([one for one, _ in theirs], abs=2e-4)


class NoCache(torch.nn.Module):
    """A model of which only `logits` and sizes are known."""

    vocab_size, max_position_embeddings = VOCAB, LIMIT

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.inner.logits(input_ids)


class Shapes(Callback):
    """Notes the shapes of the batches."""

    def __init__(self) -> None:
        self.found: set[tuple[int, ...]] = set()

    def on_eleuther_eval_harness_step_start(self, trainer, model, batch):
        self.found.add(tuple(batch["input_ids"].shape))


SIZE = "csx.performance.micro_batch_size"


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 1},
        {"batch_size": 5, "device": "fake"},
        {"batch_size": 5, "is_static": True},
        {"batch_size": 6, "flags": {SIZE: 4}},
        {"batch_size": 6, "callbacks": [ScopedEleutherEvalHarnessFlags(**{SIZE: 4})]},
    ],
    ids=["single", "device", "static", "split", "scoped"],
)
def test_a_model_without_caches_and_other_batches_give_the_same(
    folders, reference, tmp_path, options
) -> None:
    own = our_llama(folders["model"])
    model = NoCache(own) if options["batch_size"] == 5 else own
    shapes = Shapes()
    options = {**options, "callbacks": [shapes, *options.get("callbacks", ())]}

    found, _ = evaluate(folders, tmp_path, model, **options)

    sizes = {size for size, _ in shapes.found}
    assert max(sizes) == {1: 1, 5: 5, 6: 4}[options["batch_size"]]
    if options.get("is_static"):
        assert shapes.found == {(5, LIMIT)}

    assert answers(found, WRITE) == answers(reference, WRITE)
    ours, theirs = scores(found, CHOICE), scores(reference, CHOICE)
    assert [one for one, _ in ours] == pytest.approx([one for one, _ in theirs], abs=2e-4)


def test_chats_are_those_of_lm_eval(folders, tmp_path) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    names = f"{CHOICE},{WRITE}"
    chat = {"apply_chat_template": True, "system_instruction": "short", "num_fewshot": 1}

    found, _ = evaluate(folders, tmp_path, eeh_args={"tasks": names, "limit": 5, **chat})

    expected = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={folders['model']}",
        tasks=names.split(","),
        task_manager=TaskManager(include_path=str(folders["tasks"]), include_defaults=False),
        batch_size=4,
        device="cpu",
        limit=5,
        **chat,
    )
    for task in (CHOICE, WRITE):
        theirs = [row["resps"] for row in expected["samples"][task]]
        prompts = [row["arguments"] for row in expected["samples"][task]]
        assert "s: short" in str(prompts[0])
        assert json.dumps(prompts) == json.dumps(prompts_of(found, task))
        if task == WRITE:
            assert answers(found, task) == theirs
        else:
            flat = [one[0][0] for document in theirs for one in document]
            assert [one for one, _ in scores(found, task)] == pytest.approx(flat, abs=2e-4)


class OfTransformers(torch.nn.Module):
    """A model of transformers with the methods that an evaluation needs."""

    vocab_size, max_position_embeddings = VOCAB, 2**31 - 1  # no limit

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder)

    def logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, use_cache=False).logits


def test_texts_end_where_the_settings_of_the_model_say(folders, tmp_path, caplog) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    folder = tmp_path / "model"
    shutil.copytree(folders["model"], folder)
    plain, _ = evaluate(folders, tmp_path / "plain", eeh_args={"tasks": WRITE})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = "".join(one[0] for (one,) in answers(plain, WRITE))
    ((common, _),) = Counter(filter(str.isalnum, texts)).most_common(1)
    (last,) = tokenizer.encode(common)
    ends = {"eos_token_id": [0, last], "pad_token_id": 1, "repetition_penalty": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(ends))

    model = OfTransformers(folder)
    found, _ = evaluate(
        folders, tmp_path / "found", model, eeh_args={"tasks": WRITE}, max_sequence_length=LIMIT
    )

    expected = lm_eval.simple_evaluate(
        model="hf",
        model_args=f"pretrained={folder}",
        tasks=[WRITE],
        task_manager=TaskManager(include_path=str(folders["tasks"]), include_defaults=False),
        batch_size=4,
        device="cpu",
        num_fewshot=1,
    )
    assert answers(found, WRITE) == [row["resps"] for row in expected["samples"][WRITE]]
    assert answers(found, WRITE) != answers(plain, WRITE)
    assert "repetition_penalty" not in caplog.text
    model.model.generation_config.repetition_penalty = 1.5
    evaluate(
        folders, tmp_path / "said", model, eeh_args={"tasks": WRITE}, max_sequence_length=LIMIT
    )
    assert "repetition_penalty of the model's generation_config: not applied" in caplog.text


def test_a_group_has_metrics_of_its_own(folders, tmp_path) -> None:
    _, history = evaluate(folders, tmp_path, eeh_args={"tasks": GROUP, "limit": 4})
    (step, of_group), (_, of_task) = (
        history.of(f"eleuther_0/{name}/acc")[0] for name in (GROUP, CHOICE)
    )
    assert (step, of_group) == (0, of_task)


def test_sampling_depends_on_the_seed_alone(folders, tmp_path) -> None:
    def drawn(number: int, **args: Any) -> list[Any]:
        own = {"tasks": WRITE, "temperature": 1.0, "top_k": 50, "top_p": 0.9, **args}
        torch.manual_seed(number)  # the seed of the run
        return answers(evaluate(folders, tmp_path / str(number), eeh_args=own)[0], WRITE)

    torch.manual_seed(5)
    first = drawn(5)
    assert answers(evaluate(folders, tmp_path / "greedy", eeh_args={"tasks": WRITE})[0], WRITE) != (
        first
    )
    (tmp_path / "5").rename(tmp_path / "before")
    assert drawn(5) == first
    (tmp_path / "5").rename(tmp_path / "between")
    assert drawn(5, seed=7) != first


def train(folders, folder: Path, *callbacks: Any, steps: int = 4) -> tuple[Any, History]:
    """Train with dropout, and return the weights and the metrics."""
    history = History()
    trainer = Trainer(
        device="cpu",
        model=our_llama(folders["model"], dropout_rate=0.1),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        model_dir=folder,
        loop=TrainingLoop(max_steps=steps, eval_frequency=1),
        callbacks=callbacks,
        loggers=[history],
        seed=1,
    )
    trainer.fit(language_batches(steps), language_batches(1))
    return trainer.model.state_dict(), history


class Stops(Callback):
    """Stops the run in the second batch of the evaluation at step 2."""

    def on_eleuther_eval_harness_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.global_step == 2 and batch_idx == 1:
            trainer.early_exit.interrupt("stop file")


def test_an_evaluation_that_is_stopped_is_repeated(folders, tmp_path) -> None:
    _, expected = train(folders, tmp_path / "whole", harness(folders), steps=2)

    _, before = train(folders, tmp_path / "stopped", harness(folders), Stops(), steps=2)
    _, after = train(folders, tmp_path / "stopped", harness(folders), steps=2)

    name = f"eleuther_0/{CHOICE}/acc_norm"
    assert [step for step, _ in before.of(name)] == [1]
    assert before.of(name) + after.of(name) == expected.of(name)


def harness(folders, **options: Any) -> EleutherEvalHarness:
    args = {"tasks": f"{CHOICE},{WRITE}", "include_path": str(folders["tasks"]), "limit": 4}
    return EleutherEvalHarness(
        args, batch_size=4, pretrained_model_name_or_path=str(folders["tokenizer"]), **options
    )


class Records(ValidationCallback):
    """Notes the hooks of the evaluation and the random state after it."""

    name_scope, every_n_vals, num_validate_loops = "records", 1, 0

    def __init__(self) -> None:
        self.names: list[str] = []

    def on_eleuther_eval_harness_start(self, trainer, model, val_dataloader, loop):
        self.names.append("start")
        assert not model.training

    def on_eleuther_eval_harness_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.names.append("batch_end")

    def on_eleuther_eval_harness_end(self, trainer, model, loop):
        self.names.append("end")

    def run_validation(self, trainer, loop_idx, is_last):
        pass


def test_it_runs_when_due_and_training_does_not_change(folders, tmp_path) -> None:
    plain, expected = train(folders, tmp_path / "plain")
    records = Records()

    found, history = train(
        folders, tmp_path / "with", harness(folders, every_n_vals=3, name_scope="own"), records
    )

    assert [step for step, _ in history.of(f"own/{CHOICE}/acc")] == [3, 4]
    assert history.of("loss") == expected.of("loss")
    assert history.of("validate_0/loss") == expected.of("validate_0/loss")
    for name, tensor in plain.items():
        assert torch.equal(tensor, found[name]), name
    assert records.names[0] == "start"
    assert records.names.count("end") == 4  # two kinds of requests, twice
    assert "batch_end" in records.names


def test_the_command_evaluates_what_a_file_describes(
    folders, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    model = "{name: gpt2, vocab_size: 320, hidden_size: 8, num_heads: 2, num_hidden_layers: 1, "
    model += f"filter_size: 8, max_position_embeddings: {LIMIT}}}"
    callback = f"{{eeh_args: {{tasks: a}}, pretrained_model_name_or_path: {folders['tokenizer']}}}"
    text = f"trainer:\n  init:\n    device: cpu\n    model_dir: ./out\n    model: {model}\n"
    text += f"    callbacks: [{{EleutherEvalHarness: {callback}}}]\n"
    Path("params.yaml").write_text(text)
    words = ["lm_eval", "params.yaml", "--tasks", CHOICE, "--include_path", str(folders["tasks"])]

    assert main([*words, "--limit", "3", "--output_path", "found"]) != 0  # no checkpoint
    assert main([*words, "-L", "3", "--output_path", "found", *UNTRAINED]) == 0

    assert results(tmp_path / "found")[CHOICE]["sample_len"] == 3
    assert f"|{CHOICE}|" in (tmp_path / "out/logs/latest/run.log").read_text()
    lines = (tmp_path / "out/metrics.jsonl").read_text().splitlines()
    assert any(f"eleuther_0/{CHOICE}/acc" in json.loads(line) for line in lines)


@pytest.mark.parametrize("name", ["mamba", "openai-gpt", "minimax"])
def test_texts_of_a_model_with_another_cache_are_those_without_one(
    folders, tmp_path, name: str
) -> None:
    own = {
        "mamba": {"state_size": 8},
        "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LIMIT},
        "minimax": {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8},
    }[name]
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
    sizes = own if name == "openai-gpt" else sizes | own
    torch.manual_seed(0)
    model = model_class("hf_causal_lm")(
        config={"model_type": name, "pad_token_id": 1, **sizes, "vocab_size": VOCAB}
    )

    found, _ = evaluate(folders, tmp_path / "kept", model)
    again, _ = evaluate(folders, tmp_path / "all", NoCache(model))

    assert answers(found, WRITE) == answers(again, WRITE)
