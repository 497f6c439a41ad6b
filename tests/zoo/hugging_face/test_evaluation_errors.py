"""What an evaluation refuses, before training starts."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from modelzoo_trainer import Trainer
from modelzoo_trainer.callbacks import EleutherEvalHarness
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.evaluation.tasks import messages_in_log
from modelzoo_trainer.zoo.models.gpt2 import Gpt2
from tests.zoo.hugging_face.harness import CHOICE, LIMIT, VOCAB, WRITE, make_tasks, make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
pytest.importorskip("lm_eval", reason="needs lm_eval")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("harness")
    make_tokenizer(base / "tokenizer")
    make_tasks(base / "tasks")
    return base


def gpt2(**settings: Any) -> Gpt2:
    sizes = {"hidden_size": 8, "num_heads": 2, "num_hidden_layers": 1, "filter_size": 8}
    sizes |= {"vocab_size": VOCAB, "max_position_embeddings": LIMIT}
    return Gpt2(**(sizes | settings))


def make(folder: Path, model: Any = None, args: Any = None, **options: Any) -> Trainer:
    own = {"tasks": CHOICE, "include_path": str(folder / "tasks")} | (args or {})
    if "tokenizer_file_path" not in options:
        options = {"pretrained_model_name_or_path": str(folder / "tokenizer")} | options
    harness = EleutherEvalHarness(own, **options)
    return Trainer(
        device="cpu", model=model or gpt2(), model_dir=folder / "run", callbacks=[harness]
    )


def test_a_task_that_does_not_exist_is_refused_with_a_suggestion(folder, monkeypatch) -> None:
    from lm_eval.tasks import TaskManager

    real = TaskManager.__init__

    def small(self, *args, **options):  # reading all takes 15 s
        real(self, *args, **(options | {"include_defaults": False}))

    monkeypatch.setattr(TaskManager, "__init__", small)
    with pytest.raises(ConfigError, match=r"no task, group or tag 'tiny_choise'\. Did you mean"):
        make(folder, args={"tasks": "tiny_choise"})


def test_a_task_whose_data_are_not_here_is_refused(folder, tmp_path, monkeypatch) -> None:
    import datasets

    def fails(*args, **options):
        raise ConnectionError("cannot reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(
        ConfigError, match=r"'tiny_choice' cannot be loaded .*cannot reach.*HF_HOME"
    ):
        make(folder)


def test_a_missing_library_is_named_with_its_extra(folder, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match=r"requires the library lm_eval.*modelzoo-trainer\[eval"):
        make(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": torch.nn.Linear(1, 1)}, r"Linear has no method logits\(input_ids\)"),
        ({"model": gpt2(vocab_size=200)}, "token id 299, but the vocab_size of the model is 200"),
        ({"max_sequence_length": 500}, r"at most max_position_embeddings of the model \(48\)"),
        ({"eos_id": 900}, "eos_id: 900 is not a token of the tokenizer"),
        ({"pretrained_model_name_or_path": "/none"}, "there is no folder '/none'"),
        (
            {"tokenizer_file_path": "/none.json", "eos_id": 0},
            "tokenizer_file_path: '/none.json' is not a file",
        ),
        ({"args": {"apply_chat_template": "own"}}, "no chat template named 'own'. It has one"),
        ({"args": {"include_path": "/none"}}, "include_path: '/none' is not a folder"),
        ({"args": {"tasks": f"{CHOICE},{CHOICE}*"}}, None),
    ],
)
def test_what_does_not_fit_is_refused_at_setup(folder, options, message) -> None:
    if message is None:
        make(folder, **options)  # the same task by its name and by a pattern
        return
    with pytest.raises(ConfigError, match=message):
        make(folder, **options)


def test_tasks_with_images_or_code_are_refused(folder, monkeypatch) -> None:
    from lm_eval.api.task import ConfigurableTask

    monkeypatch.setattr(ConfigurableTask, "MULTIMODAL", True, raising=False)
    with pytest.raises(ConfigError, match="'tiny_choice' has images or sound"):
        make(folder)
    monkeypatch.setattr(ConfigurableTask, "MULTIMODAL", False)
    monkeypatch.setattr(ConfigurableTask, "UNSAFE_CODE", True, raising=False)
    with pytest.raises(ConfigError, match="runs code that the model writes"):
        make(folder)
    make(folder, args={"confirm_run_unsafe_code": True})


def test_a_task_that_leaves_no_room_for_a_prompt_is_refused(folder) -> None:
    with pytest.raises(ConfigError, match=r"up to 48 tokens.*eeh_args.max_tokens"):
        make(folder, args={"tasks": WRITE, "max_tokens": LIMIT})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4}, r"'num_beams' \(4\), which is not supported"),
        ({"do_sample": True, "temperature": 0}, "do_sample: true with temperature 0"),
    ],
)
def test_settings_of_generation_that_cannot_be_used_are_refused(
    folder, tmp_path, settings, message
) -> None:
    task = task_of(folder, WRITE, "own")
    task["generation_kwargs"] |= settings
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        make(folder, args={"tasks": "own", "include_path": str(tmp_path)})


def task_of(folder: Path, name: str, new: str) -> Any:
    """Return the settings of a task under another name."""
    text = (folder / "tasks" / f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text) | {"task": new}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_fewshot": 14}, "no prompt of the task 'own' can be made with 14 examples"),
        (
            {"metric_list": [{"metric": "acu", "aggregation": "mean", "higher_is_better": True}]},
            "the metric 'acu' of the task 'own' is in neither .* Did you mean 'acc'",
        ),
        ({"test_split": "tst"}, "names 'tst', a split or a task, which does not exist"),
        ({"doc_to_text": "{{a.b}}"}, "'own' cannot be loaded .*'a' is undefined.*its YAML file"),
    ],
)
def test_a_task_that_cannot_be_used_is_refused(
    folder, tmp_path, monkeypatch, settings, message
) -> None:
    from lm_eval import tasks

    real = tasks.TaskManager  # reading all tasks takes 15 s
    task = task_of(folder, CHOICE, "own") | settings
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    monkeypatch.setattr(
        tasks, "TaskManager", lambda **own: real(**(own | {"include_defaults": False}))
    )
    with pytest.raises(ConfigError, match=message):
        make(folder, args={"tasks": "own", "include_path": str(tmp_path)})


def test_two_evaluations_have_different_names(folder) -> None:
    options = {"pretrained_model_name_or_path": str(folder / "tokenizer")}
    args = {"tasks": CHOICE, "include_path": str(folder / "tasks")}

    def both(*names: str | None) -> Trainer:
        harnesses = [EleutherEvalHarness(args, name_scope=name, **options) for name in names]
        return Trainer(device="cpu", model=gpt2(), model_dir=folder / "run", callbacks=harnesses)

    scopes = [one.name_scope for one in both(None, None).validation_callbacks]
    assert scopes == ["eleuther_0", "eleuther_1"]
    with pytest.raises(ConfigError, match="Two EleutherEvalHarness callbacks have the name_scope"):
        both("a", "a")
    args["output_path"] = str(folder / "out")
    with pytest.raises(
        ConfigError, match=r"Two EleutherEvalHarness .*out' as eeh_args.output_path"
    ):
        both("a", "b")


def test_messages_about_its_own_settings_are_not_repeated(tmp_path, caplog, capfd, monkeypatch):
    from lm_eval import evaluator

    monkeypatch.chdir(tmp_path)  # not a repository
    given = evaluator.get_git_commit_hash
    with messages_in_log("WARNING"), caplog.at_level("WARNING"):
        theirs = logging.getLogger("lm_eval.evaluator")
        theirs.warning("Overwriting default num_fewshot of %s from %s to %s", "a", 2, 2)
        theirs.warning("generation_kwargs: %s specified through cli, these settings", {})
        theirs.warning("The data of %s are old", "a")
        assert evaluator.get_git_commit_hash() is None
    assert [one.getMessage() for one in caplog.records] == ["lm_eval: The data of a are old"]
    assert capfd.readouterr().err == ""
    assert evaluator.get_git_commit_hash is given
