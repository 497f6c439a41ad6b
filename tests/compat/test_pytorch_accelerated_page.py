"""The page from pytorch-accelerated: what it names exists, what it shows works; and PA-43."""

from __future__ import annotations

import csv
import importlib
import inspect
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import modelzoo_trainer
from modelzoo_trainer import HOOKS, Checkpoint, TrainingLoop, callbacks, loggers, optim
from modelzoo_trainer.trainer import Trainer
from tests.doubles import Scale, constant_batches

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from_pytorch_accelerated.md"
TEXT = PAGE.read_text(encoding="utf-8")
NAME = re.compile(r"`([A-Za-z_][\w.]*)")
# All but the two programs side by side, which test_migration_pages.py runs.
EXAMPLE = re.compile(
    r"(?<!-accelerated -->\n)(?<!after -->\n)^```python\n(.*?)^```", re.MULTILINE | re.DOTALL
)
OTHERS = {
    "AttributeError",
    "MODELZOO_LIMIT_BATCHES",
    "Name",
    "Name_2",
    "SystemExit",
    "WarmupStableDecay",
}


def cells_of(heading: str, column: int) -> list[str]:
    """Return a column of the table under a heading."""
    section = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return [row[column].strip("| ") for row in rows if "theirs" not in row[0]]


def names_in(heading: str) -> set[str]:
    return {name for cell in cells_of(heading, 1) for name in NAME.findall(cell)}


def test_its_hooks_are_all_there() -> None:
    theirs = [NAME.findall(cell)[0] for cell in cells_of("Hooks", 0)]
    ours = {name for name in names_in("Hooks") if name.startswith(("on_", "run_", "post_"))}
    assert len(theirs) == len(set(theirs)) == 15
    assert ours <= HOOKS.keys()


HEADINGS = ["Hooks", "Behaviour of hooks", "Callbacks", "The trainer's methods", "Features"]


@pytest.mark.parametrize("heading", HEADINGS)
def test_its_classes_are_all_there(heading) -> None:
    found = {name for name in names_in(heading) if name[0].isupper()} - OTHERS
    homes = (callbacks, loggers, modelzoo_trainer)
    missing = {
        name for name in found if not any(hasattr(home, name.partition(".")[0]) for home in homes)
    }
    assert missing == set()


def test_what_it_names_of_a_trainer_is_there(trainer_of) -> None:
    trainer = trainer_of()
    names = {name for heading in HEADINGS for name in names_in(heading)}
    found = {name for name in names if name.startswith("trainer.")}
    assert len(found) == 11
    for name in found:
        attrgetter(name.removeprefix("trainer."))(trainer)  # raises, if it is not there


@pytest.mark.parametrize("name", ["SaveBest", "EarlyStopping"])
def test_arguments_that_have_other_names_are_there(name) -> None:
    [cell] = [cell for cell in cells_of("Callbacks", 1) if cell.startswith(f"`{name}`")]
    ours = re.findall(r"` (?:is|are) `(\w+)`", cell)
    assert len(ours) >= 3
    assert set(ours) <= inspect.signature(getattr(callbacks, name)).parameters.keys()


@pytest.mark.parametrize("name", ["optim.SCHEDULERS", "zoo.models.freezing.ModelFreezer"])
def test_what_it_names_of_modules_is_there(name) -> None:
    assert f"`{name}`" in TEXT
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(f"modelzoo_trainer.{module}"), attribute)
    assert "WarmupStableDecay" in optim.SCHEDULERS


def test_its_methods_are_the_trainers() -> None:
    own = {"fit", "validate", "compute_loss", "training_step", "validation_step", "backward"}
    own |= {"optimizer_step", "schedulers_step", "optimizer_zero_grad", "save_checkpoint"}
    assert own <= names_in("The trainer's methods")
    assert all(callable(getattr(Trainer, name)) for name in own)


def test_arguments_that_it_names_are_taken() -> None:
    ours = "\n".join(cell for heading in HEADINGS for cell in cells_of(heading, 1))
    calls = re.findall(r"([A-Za-z]+)\(((?:\w+=(?:True)?, ?)*\w+=(?:True)?)\)`", ours)
    assert len(calls) == 8
    for name, arguments in calls:
        wanted = re.findall(r"(\w+)=", arguments)
        assert set(wanted) <= inspect.signature(thing(name)).parameters.keys(), name


def thing(name: str) -> Any:
    """Return a class, or a method of the trainer, by its name."""
    homes = (Trainer, callbacks, loggers, modelzoo_trainer)
    return next(getattr(home, name) for home in homes if hasattr(home, name))


# ---- its examples


class Classifier(nn.Module):
    """Three numbers to one of two classes; has no loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, batch):
        return {"logits": self.head(batch[0])}


class WithLoss(Classifier):
    def forward(self, batch):
        logits = self.head(batch[0])
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, batch[1])}


@pytest.fixture
def shown(monkeypatch, tmp_path) -> dict[str, Any]:
    """What the page's code defines."""
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"__name__": "page"}
    for code in EXAMPLE.findall(TEXT):
        exec(code, scope)
    return scope


@pytest.fixture
def labelled() -> list[Any]:
    generator = torch.Generator().manual_seed(4)
    return [(torch.randn(4, 3, generator=generator), torch.tensor([0, 1, 1, 0])) for _ in range(3)]


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_first_example_trains(shown, labelled) -> None:
    model = Classifier()
    with shown["make_trainer"](model, 2) as trainer:
        trainer.fit(labelled, labelled[:1])
        logits, targets = model(labelled[0])["logits"], labelled[0][1]
        loss = nn.functional.cross_entropy(logits, targets, label_smoothing=0.1)
        [best] = trainer.callbacks["SaveBest"].best
        assert trainer.global_step == 6
        assert best["value"] == pytest.approx(loss.item())


def test_an_event_of_ones_own_verifies_batches(shown, labelled, tmp_path) -> None:
    verify = shown["VerifyBatch"]((3,))
    with shown["VerifyingTrainer"](
        model_dir=tmp_path,
        device="cpu",
        model=WithLoss,
        optimizer=optimizer,
        loop=TrainingLoop(num_steps=3),
        callbacks=[verify],
    ) as trainer:
        trainer.fit(labelled)
        assert verify.num_verified == 3
        with pytest.raises(ValueError, match=r"has inputs \(4, 2\)"):
            trainer.fit([(torch.ones(4, 2), torch.ones(4))], ckpt_path=None)


class Service:
    def __init__(self) -> None:
        self.logged: list[tuple[str, float, int]] = []

    def log(self, name: str, value: float, step: int) -> None:
        self.logged.append((name, value, step))


def test_metrics_go_to_a_service(shown, labelled, trainer_of) -> None:
    at_once, at_end = Service(), Service()
    trainer_of(
        shown["AzureMLAtTheEnd"](at_end), loggers=shown["AzureMLLogger"](at_once), model=WithLoss
    ).fit(labelled, labelled[:1])
    told = [("loss", 1), ("loss", 2), ("loss", 3), ("validate_0/loss", 3)]
    assert [(name, step) for name, _, step in at_once.logged] == told
    assert at_end.logged == at_once.logged[2:]


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_predictions_go_into_a_file(shown, labelled, trainer_of, tmp_path, device) -> None:
    path = tmp_path / "predictions.csv"
    trainer = trainer_of(shown["SavePredictions"](path), model=WithLoss, device=device)
    trainer.validate(labelled)
    with path.open(newline="") as file:
        found = [int(row[0]) for row in csv.reader(file)]
    expected = [trainer.model(batch)["logits"].argmax(-1).tolist() for batch in labelled]
    assert found == [row for part in expected for row in part]
    assert len(found) == 12


class TimmLike:
    """Has the two methods that schedulers of timm have."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.updates: list[int] = []
        self.epochs: list[int] = []

    def step_update(self, num_updates: int) -> None:
        self.updates.append(num_updates)
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + num_updates)

    def step(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": list(self.updates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = list(state["updates"])


def test_pa_43_schedulers_of_timm(shown, trainer_of) -> None:
    own = shown["UseTimm"](TimmLike)
    settings = {"model": Scale, "num_epochs": 2, "grad_accum_steps": 2}
    trainer = trainer_of(own, checkpoint=Checkpoint(epochs=1), **settings)
    trainer.fit(constant_batches(1, 1, 1))
    assert (own.scheduler.updates, own.scheduler.epochs) == ([1, 2, 3, 4], [1, 2])
    expected = 1 - 0.1 - 0.1 / 2 - 0.1 / 3 - 0.1 / 4
    assert trainer.model.weight.item() == pytest.approx(expected)
    again = shown["UseTimm"](TimmLike)
    trainer_of(again, **settings).load_checkpoint(...)
    assert again.scheduler.updates == [1, 2, 3, 4]
