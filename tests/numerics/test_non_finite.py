"""A bad step leaves no trace, bit by bit: left out, or gone back to before it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backends.accelerator import AcceleratorBackend
from modelzoo_trainer import Callback, Checkpoint, MixedPrecision, checkpointing
from modelzoo_trainer.callbacks import CheckLoss
from modelzoo_trainer.callbacks.step_guard import StepFinding
from modelzoo_trainer.errors import RollBack
from modelzoo_trainer.optim import OptimizerFactory, optimizer_class
from modelzoo_trainer.optim.decay import LinearLR
from tests.doubles import History, differing, weights_of

pytestmark = pytest.mark.slow

NUM_BATCHES = 12
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5},
    "Lion": {"lr": 0.01},
    "Adafactor": {"lr": 0.01},  # counts on the host
}
CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
)
DEVICES = ["cpu", "fake", "host-accelerator", CUDA]


class HostAccelerator(AcceleratorBackend):
    """The accelerator's logic on a device that is always there; its optimizers are fused."""

    def __init__(self) -> None:
        super().__init__(kind="cpu")

    @staticmethod
    def is_available(kind: str | None = None) -> bool:
        return True

    def select_device(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Normed(nn.Module):
    """Has buffers that a forward pass changes: whole numbers and others."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        scores = self.head(torch.tanh(self.norm(self.hidden(inputs))))
        return ((scores - targets) ** 2).mean()


def data(num: int = NUM_BATCHES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator))
        for _ in range(num)
    ]


def spoilt(batches: list[tuple[Tensor, Tensor]], *places: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of which some have inputs that are no numbers."""
    found = list(batches)
    for place in places:
        found[place] = (torch.full_like(found[place][0], math.nan), found[place][1])
    return found


class SpoilGradient(Callback):
    """Puts one infinite element into one gradient, when a batch of this number has been seen."""

    def __init__(self, *places: int) -> None:
        self.places = places

    def on_after_backward(self, trainer, model, outputs):
        if trainer.data.num_batches - 1 in self.places:
            model.head.weight.grad[0, 2] = math.inf


class Jump(Callback):
    """Multiplies the losses of some batches, and so their gradients."""

    def __init__(self, *places: int, factor: float = 1e4) -> None:
        self.places, self.factor = places, factor

    def on_before_backward(self, trainer, model, outputs):
        if trainer.data.num_batches - 1 in self.places:
            outputs["loss"] = outputs["loss"] * self.factor


class Withheld(MixedPrecision):
    """Does not take some steps, and undoes what their batches did to buffers: by hand, on the host.

    Args:
        *steps: These.
        **options: Those of `MixedPrecision`.
    """

    def __init__(self, *steps: int, **options: Any) -> None:
        super().__init__(**{"enabled": False, **options})
        self.steps = steps
        self._buffers: dict[str, Tensor] | None = None

    def on_train_step_start(self, trainer, model, batch):
        if self._buffers is None:
            self._buffers = {name: own.clone() for name, own in model.named_buffers()}

    def on_before_optimizer_step(self, trainer, model, optimizer):
        super().on_before_optimizer_step(trainer, model, optimizer)
        self._is_due = trainer.global_step + 1 in self.steps

    def optimizer_step(self, optimizer):
        if not self._is_due:
            super().optimizer_step(optimizer)
        elif self.scaler is not None:
            self.scaler.update()

    def on_train_step_end(self, trainer, model, outputs, batch):
        if trainer.should_run_optimizer_step:
            if self._is_due:
                for name, own in model.named_buffers():
                    own.copy_(self._buffers[name])
            self._buffers = None


def backend_of(device: str) -> dict[str, Any]:
    if device == "host-accelerator":
        return {"backend": HostAccelerator(), "device": None}
    return {"device": device}


Run = Callable[..., Any]


@pytest.fixture
def run(trainer_of: Any, tmp_path: Path) -> Run:
    """A function that trains on all batches once and returns the trainer."""
    counter = iter(range(1000))

    def train(
        batches: Any, *callbacks: Any, device: str = "cpu", fits: bool = True, **settings: Any
    ):
        name = settings.pop("optimizer", "AdamW")
        factory = OptimizerFactory(optimizer_class(name), OPTIMIZERS[name])
        arguments = {
            "model": Normed,
            "optimizer": factory,
            "schedulers": lambda optimizer: LinearLR(optimizer, 0.02, 0.001, NUM_BATCHES),
            "model_dir": tmp_path / f"run_{next(counter)}",
            "max_steps": None,
            "num_epochs": 1,
            **backend_of(device),
        }
        trainer = trainer_of(*callbacks, **(arguments | settings))
        if fits:
            trainer.fit(batches)
        return trainer

    return train


def assert_same_bits(one: Any, other: Any) -> None:
    assert differing(weights_of(one), weights_of(other)) == []
    mine, theirs = (trainer.optimizer.state_dict() for trainer in (one, other))
    assert mine["state"].keys() == theirs["state"].keys()
    for key, state in mine["state"].items():
        assert state.keys() == theirs["state"][key].keys()
        for name, value in state.items():
            wanted = theirs["state"][key][name]
            is_same = torch.equal(value, wanted) if isinstance(value, Tensor) else value == wanted
            assert is_same, (key, name)
    assert mine["param_groups"][0]["lr"] == theirs["param_groups"][0]["lr"]


# ---- skip


# CI: each optimizer on the CPU; each device, and accumulation, with one that counts on the device
# and one on the host.
@pytest.mark.soak_cases(
    "*-3-*", "*-1-fake", "*-1-host-accelerator", "!*-AdamW-*", "!*-Adafactor-1-*"
)
@pytest.mark.slow_cases("*-3-*")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_step_that_was_skipped_leaves_no_trace(
    run: Run, device: str, accumulation: int, name: str, kind: str
) -> None:
    common = {"device": device, "optimizer": name, "grad_accum_steps": accumulation}
    places = (0, 4, 7) if accumulation == 1 else (1, 6, 8)
    steps = tuple(place // accumulation + 1 for place in places)
    batches, others = (
        (spoilt(data(), *places), ()) if kind == "loss" else (data(), (SpoilGradient(*places),))
    )
    trainer = run(batches, *others, CheckLoss("skip"), **common)
    wanted = run(data(), precision=Withheld(*steps), **common)
    assert trainer.global_step == wanted.global_step == NUM_BATCHES // accumulation
    assert_same_bits(trainer, wanted)
    assert all(torch.isfinite(value).all() for value in weights_of(trainer).values())


@pytest.mark.parametrize("device", DEVICES)
def test_skipping_changes_nothing_where_nothing_is_bad(run: Run, device: str) -> None:
    check = CheckLoss("skip", spike_window=8, spike_threshold=1e6)
    assert_same_bits(run(data(), check, device=device), run(data(), device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip", [{"max_gradient_norm": 0.1}, {"max_gradient_value": 0.01}])
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_step_is_skipped_whatever_clipping_makes_of_it(
    run: Run, device: str, clip: dict[str, float], kind: str
) -> None:
    others = () if kind == "loss" else (SpoilGradient(4),)
    batches = spoilt(data(), 4) if kind == "loss" else data()
    precision = MixedPrecision(enabled=False, **clip)
    trainer = run(batches, *others, CheckLoss("skip"), device=device, precision=precision)
    wanted = run(data(), device=device, precision=Withheld(5, **clip))
    assert_same_bits(trainer, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_spike_is_skipped_by_the_step_that_has_it(
    run: Run, device: str, accumulation: int
) -> None:
    common = {"device": device, "grad_accum_steps": accumulation}
    batches = data(24)
    check = CheckLoss("skip", spike_window=8, spike_threshold=50)
    trainer = run(batches, Jump(20), check, **common)
    wanted = run(batches, precision=Withheld(20 // accumulation + 1), **common)
    assert_same_bits(trainer, wanted)


def test_a_short_window_at_the_end_of_a_pass_is_skipped_too(run: Run) -> None:
    batches = data(7)
    trainer = run(spoilt(batches, 6), CheckLoss("skip"), grad_accum_steps=3)
    wanted = run(batches, precision=Withheld(3), grad_accum_steps=3)
    assert trainer.global_step == 3
    assert_same_bits(trainer, wanted)


# ---- skip, beside a loss scaler


def half(**options: Any) -> dict[str, Any]:
    return {"fp16_type": "float16", "loss_scaling_factor": "dynamic", **options}


class Plain(Normed):
    """Without buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]  # in its place


@pytest.mark.parametrize("device", ["fake", "host-accelerator", CUDA])
def test_a_loss_scaler_goes_on_as_without_the_check(run: Run, device: str) -> None:
    scales = {"enabled": True, **half(initial_loss_scale=2.0**10)}
    common = {"device": device, "model": Plain}
    batches = spoilt(data(), 0, 5)
    alone = run(batches, precision=MixedPrecision(**scales), check_loss=False, **common)
    checked = run(batches, CheckLoss("skip"), precision=MixedPrecision(**scales), **common)
    assert_same_bits(checked, alone)
    assert checked.precision.scaler.get_scale() == alone.precision.scaler.get_scale() == 2.0**8


@pytest.mark.parametrize("device", ["fake", "host-accelerator", CUDA])
def test_an_overflow_is_the_scalers_affair(run: Run, device: str) -> None:
    history = History()
    precision = MixedPrecision(enabled=True, **half(initial_loss_scale=2.0**40))
    trainer = run(
        data(), CheckLoss("skip", max_skips=1), device=device, loggers=history, precision=precision
    )
    assert trainer.precision.scaler.get_scale() < 2.0**40
    assert {count for _, count in history.of("skipped_steps")} == {0}


@pytest.mark.parametrize("device", ["fake", "host-accelerator", CUDA])
def test_a_spike_under_a_scaler_is_skipped_and_the_scale_stays(run: Run, device: str) -> None:
    scales = {"enabled": True, **half(initial_loss_scale=4.0)}
    check = CheckLoss("skip", spike_window=8, spike_threshold=50)
    trainer = run(
        data(), Jump(10, factor=1e3), check, device=device, precision=MixedPrecision(**scales)
    )
    wanted = run(data(), device=device, precision=Withheld(11, **scales))
    assert trainer.precision.scaler.get_scale() == 4.0
    assert_same_bits(trainer, wanted)


# ---- a run that is resumed


class Stop(Exception):
    """Ends a run as a crash does."""


class Crash(Callback):
    """Writes a checkpoint after a batch and ends the run, also within a step of several."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.data.num_batches == self.num_batches and not trainer.should_run_optimizer_step:
            trainer.save_checkpoint()
            raise Stop

    def on_step_boundary(self, trainer):
        if trainer.data.num_batches == self.num_batches:
            trainer.save_checkpoint()
            raise Stop


# CI: each moment on the CPU; on the other device before, at and after bad steps.
@pytest.mark.soak_cases("[31]*-fake", "!3-fake", "!14-fake")
@pytest.mark.slow_cases("*-fake")
@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("at", [3, 8, 13, 14, 15, 16, 20])
def test_a_resumed_run_skips_what_the_unbroken_one_skips(
    run: Run, tmp_path: Path, device: str, at: int
) -> None:
    batches = spoilt(data(24), 2, 19)

    def trainer(name: str, *others: Any) -> Any:
        check = CheckLoss("skip", spike_window=8, spike_threshold=50)
        folder, history = tmp_path / name, History()
        made = run(
            batches,
            Jump(14),
            check,
            *others,
            device=device,
            model_dir=folder,
            fits=False,
            loggers=history,
        )
        return made, history

    whole, wanted = trainer("whole")
    whole.fit(batches)
    broken, first = trainer("broken", Crash(at))
    with pytest.raises(Stop):
        broken.fit(batches)
    broken.close()
    resumed, second = trainer("broken")
    resumed.fit(batches)
    assert_same_bits(resumed, whole)
    counts = dict(first.of("skipped_steps")) | dict(second.of("skipped_steps"))
    assert counts == dict(wanted.of("skipped_steps"))
    assert counts[24] == 3


class SaveAndLoad(Callback):
    """Takes the state of a check from a checkpoint, in the middle of a step, and puts it back."""

    def __init__(self, check: CheckLoss, num_batches: int) -> None:
        self.check, self.num_batches = check, num_batches

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.data.num_batches == self.num_batches:
            assert not trainer.should_run_optimizer_step
            state = checkpointing.load(trainer.save_checkpoint())["callbacks"]["CheckLoss"]
            self.check._guard.drop_batches()
            self.check._guard._num_skipped.add_(7)
            self.check.load_state_dict(state)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("at", [4, 5])
def test_the_batches_of_an_open_step_are_part_of_the_state(
    run: Run, device: str, at: int, caplog: Any
) -> None:
    check = CheckLoss("skip", spike_window=8)
    common = {"device": device, "grad_accum_steps": 3}
    with caplog.at_level(logging.WARNING, logger="modelzoo_trainer.check_loss"):
        trainer = run(spoilt(data(), 3), SaveAndLoad(check, at), check, **common)
    assert_same_bits(trainer, run(data(), precision=Withheld(2), **common))
    assert "loss is nan at global_step 2 (epoch 1, batches 3-5)" in caplog.text


def test_a_step_that_was_skipped_is_no_measure_of_spikes(run: Run) -> None:
    measures = []

    class Look(Callback):
        def on_fit_end(self, trainer, loop):
            measures.append(check.state_dict()["guard"]["window"]["losses"])

    batches = data(24)
    check = CheckLoss("skip", spike_window=8, spike_threshold=50)
    trainer = run(spoilt(batches, 18), Jump(20), check, Look())
    assert_same_bits(trainer, run(batches, precision=Withheld(19, 21)))
    assert measures[0].isfinite().all()
    assert measures[0].max() < 100


def test_the_count_of_skips_in_a_row_goes_on_over_a_restart(run: Run, tmp_path: Path) -> None:
    batches = spoilt(data(), 2, 3, 4, 5)

    def trainer(*others: Any) -> Any:
        check = CheckLoss("skip", max_skips=3)
        return run(batches, check, *others, model_dir=tmp_path / "run", fits=False)

    with pytest.raises(Stop):
        trainer(Crash(4)).fit(batches)
    with pytest.raises(FloatingPointError, match="global_step 6"):
        trainer().fit(batches)


# ---- rollback


# CI: each optimizer on the CPU; each device, and accumulation, with one of them.
@pytest.mark.soak_cases("*-3-*", "*-1-fake", "*-1-host-accelerator", "!*-AdamW-*")
@pytest.mark.slow_cases("*-fake", "*-3-*")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor"])
@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_run_that_went_back_ends_as_one_that_never_saw_the_batches(
    run: Run, device: str, accumulation: int, name: str, kind: str
) -> None:
    common = {"device": device, "optimizer": name, "grad_accum_steps": accumulation}
    place = 7
    if kind == "loss":
        batches, others = spoilt(data(), place), ()
    else:
        batches, others = data(), (SpoilGradientOnce(place),)
    saved = Checkpoint(steps=2)
    trainer = run(batches, *others, CheckLoss("rollback"), checkpoint=saved, **common)
    first = place // accumulation * accumulation
    wanted = run(data()[:first] + data()[first + accumulation :], **common)
    assert trainer.global_step == wanted.global_step
    assert_same_bits(trainer, wanted)


class SpoilGradientOnce(Callback):
    """Puts one infinite element into one gradient of a batch, the first time that it comes."""

    def __init__(self, place: int) -> None:
        self.place = place

    def on_after_backward(self, trainer, model, outputs):
        if trainer.data.batch_idx - 1 == self.place:
            self.place = -1
            model.head.weight.grad[0, 2] = math.inf


@pytest.mark.parametrize("device", DEVICES)
def test_a_spike_is_gone_back_from(run: Run, device: str) -> None:
    batches = data(24)
    jumped = list(batches)
    jumped[20] = (batches[20][0], batches[20][1] * 1e3)
    check = CheckLoss("rollback", spike_window=8, spike_threshold=50)
    trainer = run(jumped, check, device=device, checkpoint=Checkpoint(steps=3))
    wanted = run(batches[:20] + batches[21:], device=device)
    assert_same_bits(trainer, wanted)


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_what_is_passed_over_is_said(run: Run, device: str, caplog: Any) -> None:
    check = CheckLoss("rollback")
    with caplog.at_level(logging.WARNING, logger="modelzoo_trainer.check_loss"):
        run(
            spoilt(data(), 7),
            check,
            device=device,
            grad_accum_steps=3,
            checkpoint=Checkpoint(steps=1),
        )
    assert [
        record.getMessage() for record in caplog.records if record.name.endswith("check_loss")
    ] == [
        "loss is nan at global_step 3 (epoch 1, batches 6-8). Rolling back and skipping epoch 1, "
        "batches 6-8."
    ]


@pytest.mark.parametrize("every", [2, 3])  # with 3, each time a good step comes before the bad one
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_going_back_in_a_row_has_a_limit(run: Run, device: str, every: int) -> None:
    batches = spoilt(data(), 4, 5, 6)
    saved = Checkpoint(steps=every)
    trainer = run(batches, CheckLoss("rollback", max_rollbacks=3), device=device, checkpoint=saved)
    assert_same_bits(trainer, run(data()[:4] + data()[7:], device=device))
    check = CheckLoss("rollback", max_rollbacks=2)
    with pytest.raises(FloatingPointError, match="loss is nan at global_step 5 ") as caught:
        run(batches, check, device=device, checkpoint=Checkpoint(steps=every))
    assert any("CheckLoss.max_rollbacks" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_good_steps_in_between_begin_the_count_anew(run: Run, device: str) -> None:
    check = CheckLoss("rollback", max_rollbacks=1)
    trainer = run(spoilt(data(), 4, 8), check, device=device, checkpoint=Checkpoint(steps=2))
    kept = data()[:4] + data()[5:8] + data()[9:]
    assert_same_bits(trainer, run(kept, device=device))


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_without_a_checkpoint_the_error_is_raised(run: Run, device: str) -> None:
    with pytest.raises(FloatingPointError, match="loss is nan at global_step 2 "):
        run(spoilt(data(), 1), CheckLoss("rollback"), device=device)


def test_what_is_raised_names_step_and_batches(run: Run) -> None:
    check = CheckLoss("rollback")
    trainer = run(None, check, fits=False)
    found = StepFinding(step=3, is_bad=True, batches=[(0, 4), (0, 5)], loss=math.nan)
    with pytest.raises(RollBack) as caught:
        check._judge(trainer, found)
    assert (caught.value.step, caught.value.batches) == (3, [(0, 4), (0, 5)])
    assert isinstance(caught.value.cause, FloatingPointError)
