"""What a run costs the device, by the runtime's own counts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from modelzoo_trainer import Callback, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import CheckLoss, ComputeNorm
from modelzoo_trainer.core import Checkpoint, Logging, MixedPrecision
from modelzoo_trainer.loggers import ProgressLogger
from modelzoo_trainer.optim.adam import AdamW
from modelzoo_trainer.optim.decay import LinearLR

NUM_STEPS = 33
LOG_STEPS = 10
WARM = 3


class Net(nn.Module):
    """Two layers with dropout; half of the inputs are zeros, whose weights get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.BatchNorm1d(16), nn.Linear(16, 1)
        )

    def forward(self, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        output = self.layers(x)
        return {"loss": nn.functional.mse_loss(output, y), "output": output}


class Meter(Callback):
    """Notes the backend's counts after each step."""

    def __init__(self) -> None:
        self.counts: list[dict[str, int]] = []
        self.metrics: dict[int, dict[str, float]] = {}

    @override
    def on_step_boundary(self, trainer: Trainer) -> None:
        self.counts.append(trainer.backend.counters())

    @override
    def on_metrics(self, trainer: Trainer, metrics: Any, step: int) -> None:
        self.metrics.setdefault(step, {}).update(metrics)

    def per_step(self, name: str) -> list[int]:
        """What each step has added, the first ones left out."""
        counts = [count[name] for count in self.counts]
        return [now - then for then, now in zip(counts[WARM - 1 :], counts[WARM:], strict=False)]


class Accuracy(Callback):
    """A user's metric, computed and logged within each step."""

    @override
    def on_after_forward(self, trainer: Trainer, model: Any, outputs: Any, batch: Any) -> None:
        near = (outputs["output"].detach() - batch[1]).abs() < 0.5
        trainer.log_metrics(near=near.float().mean())


def data(num: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    batches = []
    for _ in range(num):
        x = torch.randn(16, 8, generator=generator)
        x[:, 4:] = 0
        batches.append((x, x.sum(1, keepdim=True)))
    return batches


def fit(folder: Path, *, accumulation: str = "batch", **settings: Any) -> Meter:
    meter = Meter()
    num_parts = settings.pop("grad_accum_steps", 1)
    torch.manual_seed(0)
    with Trainer(
        device=settings.pop("device", "xla"),
        backend=settings.pop("backend", {"accumulation": accumulation}),
        model=Net(),
        model_dir=folder,
        optimizer=lambda model: AdamW(model, lr=0.01, weight_decay=0.1),
        schedulers=lambda optimizer: LinearLR(
            optimizer, initial_learning_rate=0.0, end_learning_rate=0.01, total_iters=NUM_STEPS - 5
        ),
        precision=MixedPrecision(enabled=settings.pop("bfloat16", False), max_gradient_norm=1.0),
        loop=TrainingLoop(max_steps=NUM_STEPS, grad_accum_steps=num_parts),
        logging=Logging(log_steps=LOG_STEPS),
        callbacks=[settings.pop("check", CheckLoss()), ComputeNorm(), Accuracy(), meter],
        loggers=[ProgressLogger()],
        seed=3,
    ) as trainer:
        trainer.fit(data(NUM_STEPS * num_parts))
    assert not settings
    return meter


@pytest.mark.parametrize(
    ("settings", "num_launches"),
    [
        ({}, 1),
        ({"bfloat16": True}, 1),
        ({"grad_accum_steps": 3}, 3),
        ({"grad_accum_steps": 3, "accumulation": "step"}, 1),
        ({"check": CheckLoss(policy="skip")}, 2),  # buffers are copied before the step
    ],
    ids=["plain", "bfloat16", "by-batch", "by-step", "skip"],
)
def test_a_step_is_one_graph_and_values_come_on_log_steps_alone(
    tmp_path: Path, settings: dict[str, Any], num_launches: int
) -> None:
    meter = fit(tmp_path, **copy.deepcopy(settings))
    num = NUM_STEPS - WARM
    assert meter.per_step("compilations") == [0] * num
    assert meter.per_step("fallbacks") == [0] * num
    assert meter.per_step("executions") == [num_launches] * num
    fetched = meter.per_step("transfers_to_host")
    assert sum(fetched) <= NUM_STEPS // LOG_STEPS
    assert max(fetched) == 1
    assert sorted(meter.metrics) == [10, 20, 30, NUM_STEPS]
    assert meter.counts[-1]["late_compilations"] == meter.counts[0]["late_compilations"]


def test_the_first_step_compiles_the_only_graph(tmp_path: Path) -> None:
    meter = fit(tmp_path)
    assert meter.counts[-1]["compilations"] == meter.counts[0]["compilations"]


def test_metrics_agree_with_those_of_the_host(tmp_path: Path) -> None:
    class Plain(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2] = nn.Identity()  # dropout draws other numbers on another device

    found = {}
    for device in ("xla", "cpu"):
        meter = Meter()
        torch.manual_seed(0)
        with Trainer(
            device=device,
            model=Plain(),
            model_dir=tmp_path / device,
            optimizer=lambda model: AdamW(model, lr=0.01, weight_decay=0.1),
            schedulers=lambda optimizer: LinearLR(
                optimizer, initial_learning_rate=0.0, end_learning_rate=0.01, total_iters=10
            ),
            precision=MixedPrecision(enabled=False, max_gradient_norm=1.0),
            loop=TrainingLoop(max_steps=12, grad_accum_steps=2),
            checkpoint=Checkpoint(steps=6),
            logging=Logging(log_steps=1),
            callbacks=[ComputeNorm(), Accuracy(), meter],
            seed=3,
        ) as trainer:
            trainer.fit(data(24), data(3))
        found[device] = meter.metrics
    assert found["xla"].keys() == found["cpu"].keys()
    for step, metrics in found["cpu"].items():
        assert found["xla"][step] == pytest.approx(metrics, rel=1e-4), step


class Reader(Callback):
    """Reads the loss where it must not."""

    @override
    def on_after_backward(self, trainer: Trainer, model: Any, outputs: Any) -> None:
        if outputs["loss"] > 1e9:  # LINE
            raise AssertionError


class LateReader(Callback):
    """Reads, from the twelfth batch on, a value that is there already."""

    def __init__(self) -> None:
        self.num = 0
        self.kept: Tensor | None = None

    @override
    def on_after_backward(self, trainer: Trainer, model: Any, outputs: Any) -> None:
        self.num += 1
        if self.kept is not None and self.num > 12:
            self.kept.item()  # LATE LINE

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.kept = outputs["loss"].detach()


def line_of(marker: str) -> int:
    text = Path(__file__).read_text(encoding="utf-8").splitlines()
    [number] = [idx for idx, line in enumerate(text, 1) if line.endswith(f"# {marker}")]
    return number


@pytest.mark.parametrize(
    ("callback", "marker"), [(Reader(), "LINE"), (LateReader(), "LATE LINE")], ids=["now", "late"]
)
def test_a_read_in_a_step_hook_is_named_with_its_line(
    tmp_path: Path, callback: Callback, marker: str
) -> None:
    from backends import HostReadError

    with (
        Trainer(
            device="xla",
            model=Net(),
            model_dir=tmp_path,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
            loop=TrainingLoop(max_steps=20),
            callbacks=[callback],
        ) as trainer,
        pytest.raises(HostReadError, match=rf"test_counters.py:{line_of(marker)}\b"),
    ):
        trainer.fit(data(20))
    # The device is as it was: another run goes on.
    with Trainer(
        device="xla",
        model=Net(),
        model_dir=tmp_path / "other",
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        loop=TrainingLoop(max_steps=2),
    ) as other:
        other.fit(data(2))
    assert other.global_step == 2


class Busy(Callback):
    """Computes on the device between steps, and launches it, as a logging callback may."""

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        torch.rand(3, device=trainer.backend.device).sum().item()


def losses_with(folder: Path, *callbacks: Callback) -> list[float]:
    meter = Meter()
    torch.manual_seed(0)
    with Trainer(
        device="xla",
        model=Net(),
        model_dir=folder,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        loop=TrainingLoop(max_steps=8),
        logging=Logging(log_steps=1),
        callbacks=[*callbacks, meter],
        seed=3,
    ) as trainer:
        trainer.fit(data(8))
    return [meter.metrics[step]["loss"] for step in range(1, 9)]


def test_what_is_computed_between_steps_changes_no_dropout_mask(tmp_path: Path) -> None:
    assert losses_with(tmp_path / "busy", Busy()) == losses_with(tmp_path / "quiet")


def test_a_model_that_moves_twice_averages_variances_once() -> None:
    from backends import make_backend

    host, moved = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    backend = make_backend("xla")
    backend.open()
    for _ in range(2):
        backend.prepare_model(moved)
    for index in range(3):
        with backend.step(index):
            moved(x.to(backend.device))
        host(x)
    torch.testing.assert_close(backend.host_state(moved.running_var), host.running_var)
    torch.testing.assert_close(backend.host_state(moved.running_mean), host.running_mean)
    backend.close()


def test_a_checkpoint_is_fetched_in_one_transfer(tmp_path: Path) -> None:
    with Trainer(
        device="xla",
        model=Net(),
        model_dir=tmp_path,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        loop=TrainingLoop(max_steps=4),
    ) as trainer:
        trainer.fit(data(4))
        before = trainer.backend.counters()
        trainer.save_checkpoint()
        after = trainer.backend.counters()
    assert after["transfers_to_host"] - before["transfers_to_host"] == 1
    assert after["compilations"] == before["compilations"]


def test_an_optimizer_that_was_made_before_the_move_trains_the_model(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.layers[0].weight.detach().clone()
    with Trainer(
        device="xla",
        model=model,
        model_dir=tmp_path,
        optimizer=optimizer,
        loop=TrainingLoop(max_steps=2),
    ) as trainer:
        trainer.fit(data(2))
    assert optimizer.param_groups[0]["params"][0] is model.layers[0].weight
    assert not torch.equal(model.layers[0].weight.detach().cpu(), before)
