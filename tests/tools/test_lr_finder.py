"""The learning-rate range test: what it finds, and that nothing of it is left."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset

from modelzoo_trainer import (
    Callback,
    Checkpoint,
    ConfigError,
    MixedPrecision,
    Trainer,
    TrainingLoop,
    checkpointing,
)
from modelzoo_trainer.callbacks import LRFinder, ScopedTrainFlags
from modelzoo_trainer.optim.decay import LinearLR
from modelzoo_trainer.tools.checkpoints.compare import compare
from modelzoo_trainer.tools.lr_finder import suggested
from tests.doubles import History, Recorder, Scale, TinyModel, make_trainer, sgd, tiny_batches

STEPS = 6


class Counting(nn.Module):
    """Keeps what a state dict has and has not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TinyModel(dropout=0.3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.num_calls = 0
        self.seen: list[int] = []
        self.latest: Tensor | None = None

    def forward(self, batch: Any) -> Any:
        inputs, targets = batch
        self.num_calls += 1
        self.seen.append(len(inputs))
        self.latest = inputs.mean()
        self.hidden += 1
        scaled = self.norm(inputs) * (1 + 0.1 * self.num_calls)
        loss, logits = self.net((scaled + self.hidden.sum() + len(self.seen), targets))
        return loss, logits


class Augmented(Dataset):
    """Draws from all generators of the host, and counts."""

    def __init__(self) -> None:
        self.num_items = 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, idx: int) -> Any:
        self.num_items += 1
        noise = random.random() + np.random.rand() + float(torch.rand(())) + 0.01 * self.num_items
        return torch.full((3,), idx / 16) + noise, torch.full((1,), noise)


class Stream(IterableDataset):
    def __init__(self) -> None:
        self.num_epochs = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_epochs += 1
        for _ in range(16):
            yield torch.rand(3) * self.num_epochs, torch.rand(1)


class Own:
    """An iterable of one's own with a generator."""

    def __init__(self) -> None:
        self.generator = random.Random(4)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(5):
            yield torch.full((4, 3), self.generator.random()), torch.ones(4, 1)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: tiny_batches(4),
    "shuffled": lambda: DataLoader(Augmented(), batch_size=4, shuffle=True),
    "generator": lambda: DataLoader(Augmented(), 4, shuffle=True, generator=generator()),
    "workers": lambda: DataLoader(Augmented(), 4, shuffle=True, num_workers=1),
    "persistent": lambda: DataLoader(Augmented(), 4, num_workers=1, persistent_workers=True),
    "stream": lambda: DataLoader(Stream(), batch_size=4),
    "own": Own,
    "made anew": lambda: lambda: iter(tiny_batches(12)),
}


def run(folder: Path, data: Any, *callbacks: Any, **settings: Any) -> tuple[Any, ...]:
    """Return the content of the last checkpoint, and what was logged."""
    history = History()
    trainer = make_trainer(
        folder,
        *callbacks,
        **{
            "model": Counting,
            "optimizer": adam,
            "max_steps": STEPS,
            "checkpoint": Checkpoint(steps=STEPS),
            "loggers": history,
            **settings,
        },
    )
    with trainer:
        trainer.fit(data)
        module = trainer.model
        rest = module.num_calls, list(module.seen), module.hidden.tolist(), float(module.latest)
    return checkpointing.load(folder / f"checkpoint_{STEPS}"), history.lines, rest


def assert_same(folder: Path, data: Callable[[], Any], settings: Callable[[], Any]) -> LRFinder:
    finder = LRFinder(num_steps=12)
    plain = run(folder / "plain", data(), **settings())
    tested = run(folder / "tested", data(), finder, **settings())
    assert compare(plain[0], tested[0]) == []
    assert plain[1:] == tested[1:]
    assert len(finder.lrs) > 1
    return finder


# ---- nothing is left of it


@pytest.mark.slow_cases("persistent", every=4)
@pytest.mark.parametrize("name", LOADERS)
def test_a_run_is_the_same_with_and_without_the_test(tmp_path, name) -> None:
    assert_same(tmp_path, LOADERS[name], dict)


SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "schedule of torch": lambda: {"schedulers": lambda optimizer: StepLR(optimizer, 2)},
    "schedule": lambda: {"schedulers": lambda optimizer: LinearLR(optimizer, 0.1, 0.0, 6)},
    "momentum": lambda: {
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    },
    "tensor": lambda: {
        "optimizer": lambda model: torch.optim.Adam(
            model.parameters(), lr=torch.tensor(0.01), foreach=False
        )
    },
    "half type": lambda: {"precision": MixedPrecision(max_gradient_norm=0.5)},
    "accumulated": lambda: {"grad_accum_steps": 2},
    "groups": lambda: {
        "optimizer": lambda model: torch.optim.AdamW(
            [{"params": model.net.parameters(), "lr": 0.1}, {"params": model.norm.parameters()}]
        )
    },
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.slow_cases(every=4)
def test_it_is_the_same_under_other_settings(tmp_path, name) -> None:
    assert_same(tmp_path, LOADERS["shuffled"], SETTINGS[name])


def test_it_is_the_same_with_micro_batches(tmp_path) -> None:
    flags = {"csx.performance.micro_batch_size": 2}
    plain = run(tmp_path / "plain", tiny_batches(4), ScopedTrainFlags(**flags))
    finder = LRFinder(num_steps=12)
    tested = run(tmp_path / "tested", tiny_batches(4), ScopedTrainFlags(**flags), finder)
    assert compare(plain[0], tested[0]) == []
    assert plain[1:] == tested[1:]
    assert len(finder.lrs) > 1


def test_a_loss_scale_is_put_back(tmp_path) -> None:
    def settings() -> dict[str, Any]:
        precision = MixedPrecision(fp16_type="float16", loss_scaling_factor="dynamic")
        return {"device": "fake", "precision": precision, "model": TinyModel}

    scales = []
    for callbacks in ((), (LRFinder(num_steps=12),)):
        with make_trainer(
            tmp_path / str(len(callbacks)), *callbacks, max_steps=3, **settings()
        ) as trainer:
            trainer.fit(tiny_batches())
            scales.append((trainer.precision.scaler.state_dict(), trainer.model.state_dict()))
    assert scales[0][0] == scales[1][0]
    assert compare(scales[0][1], scales[1][1]) == []


def test_generators_of_the_host_are_put_back(tmp_path) -> None:
    drawn = []

    class Draws(Callback):
        def on_train_epoch_start(self, trainer, epoch):
            drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))

    for callbacks in ((), (LRFinder(num_steps=12),)):
        folder = tmp_path / str(len(callbacks))
        with make_trainer(folder, *callbacks, Draws(), max_steps=1) as trainer:
            trainer.fit(LOADERS["shuffled"]())
    assert drawn[0] == drawn[1]


def test_weights_come_back_when_the_test_fails(tmp_path) -> None:
    class Fails(TinyModel):
        def forward(self, batch):
            if self.head.weight.abs().max() > 5:
                raise KeyError("in the middle")
            return super().forward(batch)

    with make_trainer(tmp_path, LRFinder(end_lr=1e4, divergence=1e9), model=Fails) as trainer:
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        with pytest.raises(KeyError, match="in the middle"):
            trainer.fit(tiny_batches())
        assert compare(before, dict(trainer.model.state_dict())) == []


def test_other_callbacks_and_loggers_hear_nothing_of_it(tmp_path) -> None:
    seen: list[list[str]] = []
    for callbacks in ((), (LRFinder(num_steps=12),)):
        recorder = Recorder()
        with make_trainer(tmp_path / str(len(callbacks)), recorder, *callbacks) as trainer:
            trainer.fit(tiny_batches())
        seen.append(recorder.names)
    assert seen[0] == seen[1]


# ---- what it finds


def curve(lrs: list[float]) -> list[float]:
    """Return losses that fall most steeply at 1e-3, and rise from 1e-1 on."""
    return [2 - 1 / (1 + math.exp(-4 * math.log(lr / 1e-3))) + (lr / 0.3) ** 2 for lr in lrs]


def test_the_steepest_place_is_suggested() -> None:
    lrs = [1e-7 * 10 ** (idx / 12) for idx in range(97)]
    assert suggested(lrs, curve(lrs)) == pytest.approx(1e-3, rel=0.25)


@pytest.mark.parametrize("losses", [[], [1.0], [1.0] * 20, [float(idx) for idx in range(20)]])
def test_there_is_no_suggestion_where_the_loss_does_not_fall(losses) -> None:
    assert suggested([10.0**-idx for idx in range(len(losses), 0, -1)], losses) is None


class Quadratic(nn.Module):
    """Its loss falls for rates below 2, and grows for larger ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, batch: Tensor) -> Tensor:
        return 0.5 * self.weight.square().sum() + 0 * batch.sum()


def test_it_ends_where_the_loss_diverges(tmp_path, caplog) -> None:
    finder = LRFinder(start_lr=1e-4, end_lr=1e3, num_steps=80)
    with make_trainer(tmp_path, finder, model=Quadratic, optimizer=sgd) as trainer:
        trainer.fit([torch.ones(2)] * 3)
    assert finder.lrs[0] == 1e-4
    assert 2 < finder.lrs[-1] < 100
    assert len(finder.lrs) < 80
    assert 1e-3 < finder.suggestion < 2
    assert finder.losses[0] == pytest.approx(4.0)
    assert f"suggested lr {finder.suggestion:.3g}" in caplog.text


def test_it_ends_where_the_loss_is_not_finite(tmp_path) -> None:
    finder = LRFinder(start_lr=1e-2, end_lr=1e30, divergence=1e30, num_steps=30)
    with make_trainer(tmp_path, finder, model=Quadratic, optimizer=sgd) as trainer:
        trainer.fit([torch.ones(2)] * 3)
    assert 0 < len(finder.losses) < 30
    assert all(map(math.isfinite, finder.losses))


def test_the_rates_grow_by_one_factor_and_keep_those_of_groups(tmp_path) -> None:
    seen = []

    class Looks(torch.optim.SGD):
        def step(self, closure=None):
            seen.append([group["lr"] for group in self.param_groups])
            return super().step(closure)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = Looks([{"params": model.hidden.parameters()}, {"params": model.head.parameters()}])
        made.param_groups[1]["adjust_learning_rate"] = 0.5
        return made

    finder = LRFinder(start_lr=1e-6, end_lr=1e-3, num_steps=13)
    with make_trainer(tmp_path, finder, optimizer=optimizer, max_steps=1) as trainer:
        trainer.fit(tiny_batches())
    assert [first for first, _ in seen[:13]] == pytest.approx(
        [1e-6 * 10 ** (idx / 4) for idx in range(13)]
    )
    assert all(second == pytest.approx(first / 2) for first, second in seen[:13])
    assert seen[13] == [1e-3, 1e-3]


def test_a_first_batch_with_a_small_loss_does_not_end_it(tmp_path) -> None:
    finder = LRFinder(end_lr=1e-5, num_steps=20)
    batches = [torch.full((2,), value) for value in (1e-3, 1.0, 1.0, 1.0)]
    with make_trainer(tmp_path, finder, model=Scale, optimizer=sgd) as trainer:
        trainer.fit(batches)
    assert len(finder.lrs) == 20


def test_the_losses_are_written_and_drawn(tmp_path) -> None:
    finder = LRFinder(num_steps=12)
    with pytest.raises(ConfigError, match="nothing to plot"):
        finder.plot()
    with make_trainer(tmp_path, finder) as trainer:
        trainer.fit(tiny_batches())
        path = trainer.artifact_dir / "lr_finder.csv"
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [float(row["lr"]) for row in rows] == finder.lrs
    assert [float(row["loss"]) for row in rows] == finder.losses
    assert [int(row["step"]) for row in rows] == list(range(1, len(rows) + 1))
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = finder.plot(figure.subplots())
    assert list(axes.lines[0].get_xdata()) == finder.lrs
    assert list(axes.lines[1].get_ydata()) == finder.smoothed


def test_losses_that_cannot_be_written_end_no_run(tmp_path, caplog) -> None:
    with make_trainer(tmp_path, LRFinder(num_steps=12)) as trainer:
        (trainer.artifact_dir / "lr_finder.csv").symlink_to("/dev/full")
        trainer.fit(tiny_batches())
        assert trainer.global_step > 0
    assert caplog.text.count("No space left on device") == 1


def test_the_run_may_end_after_it(tmp_path) -> None:
    finder = LRFinder(num_steps=12, stop_after=True)
    with make_trainer(tmp_path, finder) as trainer:
        trainer.fit(tiny_batches())
    assert (trainer.global_step, len(finder.lrs)) == (0, 12)


# ---- when there is none


def test_a_run_that_resumes_skips_it(tmp_path, caplog) -> None:
    for max_steps, is_tested in ((3, True), (6, False)):
        finder = LRFinder(num_steps=12)
        settings = {"checkpoint": Checkpoint(steps=3), "loop": TrainingLoop(max_steps=max_steps)}
        with make_trainer(tmp_path, finder, **settings) as trainer:
            trainer.fit(tiny_batches(8))
        assert bool(finder.lrs) is is_tested
    assert "resumes at step 3" in caplog.text


def test_it_takes_place_once_a_fit(tmp_path) -> None:
    finder = LRFinder(num_steps=12)
    num_tests = []

    class Counts(LRFinder):
        def _test(self, trainer, given):
            num_tests.append(trainer.global_step)
            super()._test(trainer, given)

    finder = Counts(num_steps=12)
    with make_trainer(tmp_path, finder, max_steps=6, eval_frequency=2) as trainer:
        trainer.fit(tiny_batches(3), tiny_batches(1))
        trainer.fit(tiny_batches(3), tiny_batches(1))
    assert num_tests == [0]


class OwnStep(Trainer):
    def training_step(self, batch):
        return super().training_step(batch)


class Stateful(list):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        """Restore nothing."""


class Keeps:
    def __init__(self) -> None:
        self.items = iter(tiny_batches())

    def __iter__(self):
        return self.items


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(1)

    def forward(self, batch):
        return self.layer(batch[0]).mean()


@pytest.mark.parametrize(
    ("data", "settings", "words"),
    [
        (lambda: iter(tiny_batches()), {}, "is an iterator; pass a callable"),
        (lambda: Stateful(tiny_batches()), {}, r"\(Stateful\) is stateful"),
        (Keeps, {}, "keeps an iterator"),
        (tiny_batches, {"sparsity": 0.5}, "sparsity"),
        (tiny_batches, {"model": Lazy}, "lazy parameters"),
    ],
)
def test_what_cannot_be_tested_is_refused(tmp_path, data, settings, words) -> None:
    with (
        make_trainer(tmp_path, LRFinder(num_steps=12), **settings) as trainer,
        pytest.raises(ConfigError, match=f"LRFinder.*{words}"),
    ):
        trainer.fit(data())


class Grows:
    def __init__(self) -> None:
        self.seen = [Keeps()]

    def __iter__(self):
        for batch in tiny_batches():
            self.seen.append(Keeps())
            yield batch


@pytest.mark.parametrize(("data", "changed"), [(Keeps, "loader.items"), (Grows, "loader.seen")])
def test_a_dataloader_that_cannot_be_restored_may_be_created_anew(tmp_path, data, changed) -> None:
    finder = LRFinder(num_steps=12)
    with make_trainer(tmp_path, finder) as trainer:
        with pytest.raises(ConfigError, match=rf"{changed}.*lambda: iter\("):
            trainer.fit(data)
        trainer.fit(lambda: iter(data()))
    assert finder.lrs


def test_a_step_of_ones_own_is_refused(tmp_path) -> None:
    with (
        OwnStep(
            model=TinyModel, optimizer=sgd, callbacks=LRFinder(), device="cpu", model_dir=tmp_path
        ) as trainer,
        pytest.raises(ConfigError, match=r"LRFinder.*training_step"),
    ):
        trainer.fit(tiny_batches())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"start_lr": 0}, "start_lr"),
        ({"start_lr": 1.0, "end_lr": 1.0}, "end_lr"),
        ({"num_steps": 9}, "num_steps"),
        ({"divergence": 1}, "divergence"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, words) -> None:
    with pytest.raises(ConfigError, match=words):
        LRFinder(**arguments)
