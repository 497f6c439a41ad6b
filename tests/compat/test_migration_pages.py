"""The pages for those who migrate: their names exist, and both programs of a page do the same."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import modelzoo_trainer
from modelzoo_trainer import HOOKS, callbacks, loggers, optim

ROOT = Path(__file__).resolve().parents[2]
HOMES = (modelzoo_trainer, callbacks, loggers, optim)
PAGES = ("from_lightning", "from_hf_trainer", "from_keras")
CALL = re.compile(r"\b([A-Z]\w+)\(([^()]*)\)")
FOREIGN = {"DataLoader", "LambdaLR", "ReduceLROnPlateau", "LoraConfig"}


def text_of(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def program(page: str, marker: str, number: int = 0) -> str:
    """Return a Python block of a page after a line <!-- marker -->: the first, or number + 1st."""
    found = text_of(page).split(f"<!-- {marker} -->\n```python\n")[1:]
    rest = found[number] if number < len(found) else ""
    assert rest, f"{page}.md has no program after <!-- {marker} -->"
    return rest.partition("\n```")[0] + "\n"


def our_cells(page: str) -> list[str]:
    """Return the right column of the table under "Names"."""
    section = text_of(page).partition("\n## Names\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [row[-1] for row in rows[1:]]


def spans(page: str) -> list[str]:
    return [span for cell in our_cells(page) for span in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.parametrize("page", PAGES)
def test_classes_and_arguments_of_the_table_exist(page: str) -> None:
    missing = []
    for span in spans(page):
        for name, arguments in CALL.findall(span):
            cls = next((getattr(home, name) for home in HOMES if name in home.__all__), None)
            if cls is None:
                missing += [] if name in FOREIGN else [name]
                continue
            given = re.findall(r"(\w+)=", arguments)
            known = inspect.signature(cls).parameters if given else {}
            missing += [f"{name}({word}=)" for word in given if word not in known]
    assert len(spans(page)) > 30
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_hooks_of_the_table_exist(page: str) -> None:
    named = {span for span in spans(page) if re.fullmatch(r"on_\w+", span)}
    assert named
    assert {name for name in named if name not in HOOKS and "predict" not in name} == set()


def run(text: str, folder: Path, **environment: str) -> str:
    """Run a program in a folder of its own and return what it printed."""
    folder.mkdir(parents=True)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def trained(
    text: str, model: str, folder: Path, *, fit: str = "trainer.fit("
) -> dict[str, torch.Tensor]:
    """Run a program from fixed weights, without shuffling, and return the weights at its end.

    Args:
        text: The program.
        model: The expression in it that is the model.
        folder: Where it runs.
        fit: What its training begins with.
    """
    head, fit, tail = text.rpartition(fit)
    if not fit:
        head, fit, tail = text.rpartition("trainer.train(")
    head = head.replace("shuffle=True", "shuffle=False")
    tail = tail.replace("shuffle=True", "shuffle=False")
    start = (
        "generator = torch.Generator().manual_seed(5)\n"
        f"for parameter in {model}.parameters():\n"
        "    parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1\n"
    )
    end = f"torch.save({model}.state_dict(), 'end.pt')\n"
    run(f"{head}{start}{fit}{tail}{end}", folder)
    state: dict[str, torch.Tensor] = torch.load(folder / "end.pt", weights_only=True)
    return state


def assert_same(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    assert theirs.keys() == ours.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_lightning_and_ours_train_the_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    theirs = trained(program("from_lightning", "lightning"), "model", tmp_path / "theirs")
    ours = trained(program("from_lightning", "after"), "trainer.model", tmp_path / "ours")
    assert_same(theirs, ours)


@pytest.mark.slow
def test_hugging_face_and_ours_train_the_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = program("from_hf_trainer", "transformers").replace(
        "use_cpu=True", "use_cpu=True, train_sampling_strategy='sequential'"
    )
    theirs = trained(text, "model", tmp_path / "theirs")
    ours = trained(program("from_hf_trainer", "after"), "trainer.model", tmp_path / "ours")
    assert_same(theirs, ours)


@pytest.mark.slow
def test_pytorch_accelerated_and_ours_train_the_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_accelerated")
    page, marker = "from_pytorch_accelerated", "pytorch-accelerated"
    text = program(page, marker).replace('"shuffle": True', '"shuffle": False')
    theirs = trained(text, "model", tmp_path / "theirs")
    ours = trained(program(page, "after"), "model", tmp_path / "ours")
    assert_same(theirs, ours)


@pytest.mark.slow
def test_fabric_and_ours_train_the_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    text = program("from_fabric", "fabric")
    theirs = trained(text, "model", tmp_path / "theirs", fit="for epoch in")
    ours = trained(program("from_fabric", "after"), "trainer.model", tmp_path / "ours")
    assert_same(theirs, ours)


@pytest.mark.slow
def test_the_program_on_hugging_face_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("datasets")
    run(program("hugging_face", "transformers"), tmp_path / "run")
    assert (tmp_path / "run" / "trained" / "tokenizer.json").is_file()
    assert (tmp_path / "run" / "runs" / "sums" / "checkpoint_20").is_dir()
    run(program("hugging_face", "transformers", 1), tmp_path / "second")
    assert (tmp_path / "second" / "trained_bert" / "config.json").is_file()


@pytest.mark.slow
def test_the_program_with_a_metric_that_is_not_an_average_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    printed = run(program("from_hf_trainer", "transformers", 1), tmp_path / "run")
    assert 0 < float(printed) <= 1


@pytest.mark.slow
def test_keras_and_ours_learn_alike(tmp_path: Path) -> None:
    if importlib.util.find_spec("keras") is None:  # importing it needs a backend
        pytest.skip("keras is not installed")
    theirs = run(program("from_keras", "keras"), tmp_path / "theirs", KERAS_BACKEND="torch")
    ours = run(program("from_keras", "after"), tmp_path / "ours")
    accuracies = [float(text.split()[-1]) for text in (theirs, ours)]
    assert min(accuracies) > 0.8
    assert abs(accuracies[0] - accuracies[1]) < 0.1


def test_a_program_that_is_not_there_is_noticed() -> None:
    with pytest.raises(AssertionError, match="from_keras"):
        program("from_keras", "no such marker")


def test_a_module_of_the_page_is_imported_from_its_home() -> None:
    for page in PAGES:
        imports = re.findall(r"^from (modelzoo_trainer\S*) import (.+)$", text_of(page), re.M)
        assert len(imports) >= 2
        for home, names in imports:
            module = importlib.import_module(home)
            assert [name for name in names.split(", ") if not hasattr(module, name)] == []
