"""Values that leave the device: the right ones, whatever becomes of their tensors; and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from backends import Backend, HostReadError, make_backend
from modelzoo_trainer import Callback, Checkpoint, Logging, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import (
    CheckLoss,
    ComputeNorm,
    KeepNCheckpoints,
    LogOptimizerParamGroup,
    RateProfiler,
    SaveBest,
)
from modelzoo_trainer.loggers import JsonlLogger, ProgressLogger
from tests.xla.test_counters import LateReader, Meter, Net, data, line_of

assert LateReader  # its line is found in that file
assert line_of


@pytest.fixture
def backend() -> Iterator[Backend]:
    made = make_backend("xla")
    made.seed = 1
    made.open()
    yield made
    made.close()


def test_views_of_one_memory_are_fetched_as_what_they_are(backend: Backend) -> None:
    base = torch.arange(4.0, device=backend.device)
    square = torch.arange(4.0, device=backend.device).view(2, 2)
    tree = {"low": base[:2], "high": base[2:], "m": square, "mt": square.t(), "again": square}
    for found in (backend.host_state(tree), backend.writable(tree)):
        assert found["low"].tolist() == [0, 1]
        assert found["high"].tolist() == [2, 3]
        assert found["m"].tolist() == [[0, 1], [2, 3]]
        assert found["mt"].tolist() == [[0, 2], [1, 3]]
    whole = backend.writable(tree)
    assert whole["m"] is whole["again"]  # so that a file has it once


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "add": lambda tensor: tensor.add_(1),
    "data": lambda tensor: tensor.data.add_(1),
    "view": lambda tensor: tensor.view(-1)[0:1].add_(1),
    "set": lambda tensor: setattr(tensor, "data", tensor.data + 1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["in the step", "in the next step", "between"])
def test_a_read_has_the_value_of_its_time(backend: Backend, change: str, when: str) -> None:
    seen: list[float] = []
    with backend.step(0):
        tensor = torch.ones((), device=backend.device) * 3
        if when == "in the step":
            backend.read([tensor], seen.extend)
            CHANGES[change](tensor)
    if when != "in the step":
        backend.read([tensor], seen.extend)
    if when == "between":
        CHANGES[change](tensor)
    for index in (1, 2):
        with backend.step(index):
            if when == "in the next step":
                CHANGES[change](tensor)
    backend.flush()
    assert seen == [3.0]


def test_an_overwritten_value_is_told_of(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[float] = []
    with backend.step(0):
        tensor = torch.ones((), device=backend.device) * 3
    backend.read([tensor], seen.extend)
    tensor.copy_(torch.tensor(9.0))
    with backend.step(1):
        pass
    backend.flush()
    assert "the new value is read" in caplog.text
    assert seen == [9.0]


def test_a_read_of_a_parameters_data_survives_the_optimizer(backend: Backend) -> None:
    model = backend.prepare_model(nn.Linear(2, 1))
    optimizer = backend.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    expected: list[Any] = []
    seen: list[Any] = []
    for index in range(4):
        expected.append(backend.host_state(model.weight).tolist())
        backend.read([model.weight.data], lambda values: seen.append(values[0].tolist()))
        with backend.step(index):
            model(torch.ones(1, 2, device=backend.device)).sum().backward()
            backend.optimizer_step(optimizer)
            backend.zero_grad(optimizer)
    backend.flush()
    assert seen == expected
    assert expected[0] != expected[1]


class Arrivals(Callback):
    """Notes at which step the metrics of each step arrive."""

    def __init__(self) -> None:
        self.now = 0
        self.late: list[int] = []

    @override
    def on_train_batch_start(
        self, trainer: Trainer, model: Any, batch: Any, batch_idx: int
    ) -> None:
        self.now += 1

    @override
    def on_metrics(self, trainer: Trainer, metrics: Any, step: int) -> None:
        self.late.append(self.now - step)


def train(folder: Path, *callbacks: Any, steps: int = 20, **settings: Any) -> Trainer:
    model = settings.pop("model", None) or Net()
    with Trainer(
        device="xla",
        model=model,
        model_dir=folder,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        loop=TrainingLoop(max_steps=steps, eval_frequency=settings.pop("eval_frequency", 0)),
        logging=Logging(log_steps=settings.pop("log_steps", 1)),
        callbacks=callbacks,
        seed=3,
        **settings,
    ) as trainer:
        trainer.fit(data(steps), data(2))
    return trainer


@pytest.mark.parametrize("log_steps", [1, 2, 5])
def test_logged_values_arrive_soon(tmp_path: Path, log_steps: int) -> None:
    arrivals = Arrivals()
    train(tmp_path, arrivals, log_steps=log_steps)
    assert len(arrivals.late) >= 20 // log_steps
    assert max(arrivals.late) <= 3


def test_a_loss_that_is_no_number_ends_the_run_soon(tmp_path: Path) -> None:
    class Spoil(Callback):
        @override
        def on_before_backward(self, trainer: Trainer, model: Any, outputs: Any) -> None:
            if trainer.global_step >= 5:
                outputs["loss"] = outputs["loss"] * math.nan

    with pytest.raises(FloatingPointError, match=r"loss is nan at global_step 6") as caught:
        train(tmp_path, Spoil(), CheckLoss())
    assert "global_step 6" in str(caught.value)


def test_every_callback_that_logs_or_saves_works_without_a_late_compilation(
    tmp_path: Path,
) -> None:
    meter = Meter()
    train(
        tmp_path,
        CheckLoss(),
        ComputeNorm(),
        RateProfiler(),
        LogOptimizerParamGroup("lr"),
        KeepNCheckpoints(n=2),
        SaveBest("validate_0/loss"),
        meter,
        checkpoint=Checkpoint(steps=5),
        eval_frequency=5,
        loggers=[ProgressLogger(), JsonlLogger()],
    )
    assert meter.counts[-1]["late_compilations"] == 0
    assert list(tmp_path.glob("best_*"))


class Average(Callback):
    """Keeps an average of the loss on the device, outside of the step."""

    @override
    def setup(self, trainer: Trainer) -> None:
        self.loss = torch.zeros((), device=trainer.backend.device)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.loss.mul_(0.9).add_(outputs["loss"].detach(), alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss.copy_(state["loss"])


def test_what_is_pending_when_a_checkpoint_is_written_stays_out_of_the_step(
    tmp_path: Path,
) -> None:
    meter = Meter()
    train(tmp_path, Average(), meter, checkpoint=Checkpoint(steps=5), log_steps=5)
    assert meter.per_step("compilations") == [0] * 17


def test_going_on_from_a_checkpoint_compiles_nothing(tmp_path: Path) -> None:
    trainer = train(tmp_path, checkpoint=Checkpoint(steps=5), steps=10)
    before = trainer.backend.counters()["compilations"]
    again = Trainer(
        device="xla",
        model=trainer.model,
        model_dir=tmp_path / "other",
        optimizer=trainer.optimizer,
        loop=TrainingLoop(max_steps=14, eval_frequency=0),
        logging=Logging(log_steps=1),
        seed=3,
    )
    with again:
        again.fit(data(14), ckpt_path=tmp_path / "checkpoint_10")
    assert again.global_step == 14
    assert again.backend.counters()["compilations"] - before <= 1  # the last batch's reads


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda loss: loss.item(),
    "repr": repr,
    "cpu": lambda loss: loss.cpu(),
    "to": lambda loss: loss.to("cpu"),
    "list": lambda loss: loss.tolist(),
    "if": lambda loss: 1 if loss > 0 else 0,
    "copy": lambda loss: torch.zeros(()).copy_(loss),
}


@pytest.mark.parametrize("step", [0, 8])
@pytest.mark.parametrize("read", READS)
def test_a_read_of_what_is_computed_now_is_named_in_any_step(
    tmp_path: Path, read: str, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Read(Callback):
        @override
        def on_after_backward(self, trainer: Trainer, model: Any, outputs: Any) -> None:
            if trainer.global_step == step:
                READS[read](outputs["loss"].detach() * 2)

    with pytest.raises(HostReadError, match=r"test_values\.py:\d+"):
        train(tmp_path, Read(), steps=12)


def test_a_host_tensor_as_an_index_is_no_read(tmp_path: Path) -> None:
    class Index(Callback):
        @override
        def on_after_backward(self, trainer: Trainer, model: Any, outputs: Any) -> None:
            outputs["output"].detach()[torch.tensor(2)].sum()

    assert train(tmp_path, Index(), steps=3).global_step == 3


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_running_averages_are_those_of_the_host(backend: Backend, kind: Any) -> None:
    host, moved = kind(3, track_running_stats=True), kind(3, track_running_stats=True)
    backend.prepare_model(moved)
    for index in range(3):
        x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(index))
        with backend.step(index):
            moved(x.to(backend.device))
        host(x)
    torch.testing.assert_close(backend.host_state(moved.running_var), host.running_var)
    torch.testing.assert_close(backend.host_state(moved.running_mean), host.running_mean)


def test_an_average_without_momentum_is_refused(backend: Backend) -> None:
    with pytest.raises(RuntimeError, match=r"norm is a BatchNorm1d with momentum=None"):
        backend.prepare_model(nn.ModuleDict({"norm": nn.BatchNorm1d(3, momentum=None)}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cache_dir": 3}, "backend.cache_dir: .* got 3"),
        ({"lag": -1}, "backend.lag: .* got -1"),
        ({"lag": "x"}, "backend.lag: .* got 'x'"),
        ({"matmul_precision": "fast"}, "backend.matmul_precision: expected"),
        ({"look_ahead": "yes"}, "backend.look_ahead: .* got 'yes'"),
        ({"parallel": {"replicate": 2.0}}, "backend.parallel.replicate: .* got 2.0"),
        ({"parallel": "all"}, "backend.parallel: .* got 'all'"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        make_backend("xla", options)


def test_a_cache_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"backend.cache_dir: '.*file/cache' is not writable"):
        make_backend("xla", {"cache_dir": str(tmp_path / "file" / "cache")}).open()
