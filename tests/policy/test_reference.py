"""The pages of docs/reference/ are what the classes say, and that is what happens."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback, Logger, Logging, Trainer, TrainingLoop, callbacks, loggers
from modelzoo_trainer.hooks.spec import HOOKS
from tests.callback_makers import ELSEWHERE, MAKERS, shipped

Batches = list[tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(scope="module")
def maker(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", root / "docs/make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NAMES = [
    *("callbacks", "data", "foreign_configs", "hooks", "loggers", "models", "optimizers"),
    *("schedules", "trainer"),
]


@pytest.mark.parametrize("name", [f"{name}.md" for name in NAMES])
def test_a_page_is_what_the_classes_say(maker, root, name):
    written = (root / "docs" / "reference" / name).read_text(encoding="utf-8")
    again = maker.tidy(maker.PAGES[name]())
    assert written == again, "run: python docs/make_reference.py"


def test_there_is_no_other_page(maker, root):
    here = {name for name in maker.PAGES if "/" not in name}
    assert {path.name for path in (root / "docs" / "reference").iterdir()} == here
    assert here == {f"{name}.md" for name in NAMES}


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="other Pythons lay a help out otherwise"
)
def test_the_page_of_the_command_line_is_its_help(maker, root):
    written = (root / "docs" / "command_line.md").read_text(encoding="utf-8")
    again = maker.tidy(maker.command_page())
    assert written == again, "run: python docs/make_reference.py"


def test_commands_are_found_in_a_help(maker):
    text = (
        "usage: x\n\ncommands (say):\n  fit       train\n  check_it  check\n\noptions:\n  -h  x\n"
    )
    assert maker.commands_in(text) == ["fit", "check_it"]
    text = "positional arguments:\n  COMMAND\n    list    list them\n    diff    compare\n\nmore:\n"
    assert maker.commands_in(text) == ["list", "diff"]
    assert maker.commands_in("options:\n  --check   check\n") == []


def test_every_class_and_hook_has_its_place(root):
    folder = root / "docs" / "reference"
    for module, name in ((callbacks, "callbacks.md"), (loggers, "loggers.md")):
        classes = [cls for cls in module.__all__ if isinstance(getattr(module, cls), type)]
        heads = re.findall(r"^## (\w+)$", (folder / name).read_text("utf-8"), re.MULTILINE)
        assert heads == classes
    heads = re.findall(r"^## (\w+)$", (folder / "hooks.md").read_text("utf-8"), re.MULTILINE)
    assert heads == [name for name in HOOKS if name in vars(Callback)]


# ---- the metrics that a class names are those that it logs


class Net(nn.Module):
    """Two layers of one block and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 1)

    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
        hidden, target = batch
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        loss = ((self.head(hidden) - target) ** 2).mean()
        return {"loss": loss, "accuracy": (target > 0).float().mean()}


class Names(Logger):
    """Keeps the names of what is logged."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        self.seen |= metrics.keys()


def logged_by(made: list[Any], folder: Path, **settings: Any) -> set[str]:
    """Return the names of all metrics of a small run with validation."""
    generator = torch.Generator().manual_seed(1)
    data: Batches = [
        (torch.randn(8, 4, generator=generator), torch.randn(8, 1, generator=generator))
        for _ in range(4)
    ]
    names = Names()
    trainer = Trainer(
        device="cpu",
        model_dir=folder,
        model=settings.pop("model", Net),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        loop=TrainingLoop(max_steps=4, eval_frequency=2),
        logging=Logging(log_steps=1),
        callbacks=made,
        loggers=[names],
        seed=0,
        **settings,
    )
    with trainer:
        trainer.fit(data, data[:2])
    return names.seen


CHOSEN: dict[str, Any] = {  # as others are in `callback_makers`
    "CheckLoss": lambda: callbacks.CheckLoss("skip"),
    "ComputeNormGNS": lambda: callbacks.ComputeNormGNS("Linear"),
    "FlopUtilization": lambda: callbacks.FlopUtilization(peak_flops=1e12),
    "LogOptimizerParamGroup": lambda: callbacks.LogOptimizerParamGroup("lr"),
    "NormTensorListener": lambda: callbacks.NormTensorListener("size", ["*.bias.grad"]),
    "SummaryTensorListener": lambda: callbacks.SummaryTensorListener("seen", ["*.bias.grad"]),
}
RUNS: dict[str, Any] = {
    name: CHOSEN.get(name, make)
    for name, make in MAKERS.items()
    if "\nMetrics:" in (inspect.getdoc(getattr(callbacks, name)) or "")
}


class WithExperts(Net):
    """Returns what a decoder with experts returns in training."""

    def forward(self, batch: Any) -> dict[str, Any]:
        routing = {"expert_shares": torch.ones(1, 2), "load_balancing_loss": torch.ones(())}
        return {**super().forward(batch), **routing}


SETTINGS: dict[str, dict[str, Any]] = {
    "LogExpertLoad": {"model": WithExperts},
    "LogSparsity": {"sparsity": 0.5},
}
"""What a run needs so that a callback has something to log."""


def pattern(name: str) -> str:
    """Return a regular expression for a name with places such as <i>."""
    return "".join(
        r".+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", name)
    )


@pytest.mark.parametrize("name", RUNS)
def test_a_callback_logs_what_its_docstring_names(maker, tmp_path, name):
    without = logged_by([], tmp_path / "without")
    logged = logged_by([RUNS[name]()], tmp_path / "with", **SETTINGS.get(name, {})) - without
    told = maker.parse(getattr(callbacks, name)).entries("Metrics")
    assert told
    known = "|".join(pattern(each) for each in told)  # the same in a validation, with its prefix
    unknown = {m for m in logged if not re.fullmatch(f"(validate_0/)?({known})", m)}
    assert not unknown
    silent = {each for each in told if not any(re.fullmatch(pattern(each), m) for m in logged)}
    assert not silent


def test_every_callback_that_names_metrics_is_run_here(maker):
    naming = {name for name, cls in shipped().items() if maker.parse(cls).entries("Metrics")}
    assert naming == set(RUNS) | ELSEWHERE
    assert set(CHOSEN) < set(RUNS)
