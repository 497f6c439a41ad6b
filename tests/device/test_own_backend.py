"""A backend of a user's own: whatever it overrides is called."""

from __future__ import annotations

import inspect
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from backends import Backend, BackendError, Caps, make_backend
from backends.cpu import CpuBackend, _HostRegion
from backends.meta import MetaBackend
from backends.select import _over_ranks
from modelzoo_trainer import Callback, Checkpoint, Logging, MixedPrecision, Trainer
from modelzoo_trainer.callbacks.check_loss import CheckLoss
from modelzoo_trainer.callbacks.op_profiler import OpProfiler
from modelzoo_trainer.tools.lr_finder import LRFinder
from tests.device.conftest import HostAccelerator
from tests.distributed.ranks import run_ranks
from tests.doubles import (
    TinyModel,
    differing,
    make_trainer,
    run_trainer,
    tiny_batches,
    weights_of,
)

NOT_IN_A_FIT = {"counters"}  # the command `compile` calls it
HALF = frozenset({torch.float16})


def overridable() -> dict[str, Any]:
    """Return the methods and properties that a subclass of `Backend` may override."""
    return {
        name: value
        for name, value in vars(Backend).items()
        if not name.startswith("__")
        and name not in Backend._never_called
        and isinstance(value, property | staticmethod | type(overridable))
    }


def counting(*names: str) -> tuple[type[Backend], Counter[str]]:
    """Return a subclass of `CpuBackend` that overrides methods, and the counts of their calls."""
    counts: Counter[str] = Counter()

    def count(name: str) -> Any:
        own: Any = inspect.getattr_static(CpuBackend, name)
        inner = own.fget if isinstance(own, property) else getattr(CpuBackend, name)

        def counted(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return inner(*args, **options)

        if isinstance(own, property):
            return property(counted, own.fset)
        return staticmethod(counted) if isinstance(own, staticmethod) else counted

    made = {name: count(name) for name in names}
    return type("Counting", (CpuBackend,), {"name": "counting", **made}), counts


class Normed(TinyModel):
    """Has buffers, which are restored after a non-finite loss."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))  # type: ignore[assignment]


class OutOfMemory(Callback):
    """Ends a fit as a full memory does."""

    def on_train_end(self, trainer: Trainer, model: Any, loop: Any, loop_idx: int) -> None:
        raise MemoryError


class LogsInStep(Callback):
    """Logs in each step, also where nothing is due."""

    def on_after_forward(self, trainer: Trainer, model: Any, outputs: Any, batch: Any) -> None:
        trainer.log_metrics(own=outputs["loss"])


def plain_fit(folder: Path, cls: type[Backend]) -> None:
    fit(folder, cls, max_steps=2)


def guarded_fits(folder: Path, cls: type[Backend]) -> None:
    """Skip steps and profile; then resume, with an error at the end."""
    added = [CheckLoss(policy="skip"), OpProfiler(), LRFinder(num_steps=10)]
    fit(folder, cls, *added, max_steps=2)
    with pytest.raises(MemoryError):
        fit(folder, cls, OutOfMemory(), max_steps=4)


def half_precision_fit(folder: Path, cls: type[Backend]) -> None:
    caps = Caps(autocast_dtypes=HALF, needs_scaler=HALF, lazy=True)
    of_device = type("OfDevice", (cls,), {"caps": caps})
    precision = MixedPrecision(enabled=True, fp16_type="float16")
    fit(folder, of_device, LogsInStep(), max_steps=2, precision=precision)


def fit(folder: Path, cls: type[Backend], *callbacks: Any, **settings: Any) -> None:
    trainer = make_trainer(
        folder,
        *callbacks,
        device=None,
        backend=make_backend(cls, {}),
        model=Normed,
        checkpoint=Checkpoint(steps=2),
        logging=Logging(log_steps=2),
        grad_accum_steps=2,
        **settings,
    )
    with trainer:
        trainer.fit(tiny_batches(6), tiny_batches(1))


# ---- overrides


@pytest.mark.parametrize("name", sorted(overridable().keys() - NOT_IN_A_FIT))
@pytest.mark.slow_cases(every=4)
def test_a_method_that_alone_is_overridden_is_called(name: str, tmp_path: Path) -> None:
    cls, counts = counting(name)
    for run in (plain_fit, guarded_fits, half_precision_fit):
        if not counts[name]:
            run(tmp_path / run.__name__, cls)
    assert counts[name]


@pytest.mark.parametrize(
    ("name", "num"),
    [("to_device", 5), ("_enter_step", 5), ("_exit_step", 5), ("_seed_device", 5), ("batches", 2)],
)
def test_it_is_called_for_each_batch(name: str, num: int, tmp_path: Path) -> None:
    cls, counts = counting(name)
    plain_fit(tmp_path, cls)
    assert counts[name] == num  # four batches of training, one of validation


def test_the_numbers_are_the_same_whatever_is_overridden(tmp_path: Path) -> None:
    states = []
    for names in ((), overridable()):
        trainer = run_trainer(
            tmp_path / str(len(names)),
            device=None,
            backend=counting(*names)[0](),
            model=partial(TinyModel, 0.5),
            num_epochs=2,
        )
        states.append(weights_of(trainer))
    assert differing(*states) == []


def test_the_cpu_itself_takes_the_fast_path() -> None:
    cls, _ = counting("zero_grad")
    for backend in (CpuBackend(), cls(), _over_ranks(CpuBackend)()):
        batches = tiny_batches(1)
        assert type(backend.step(0)) is _HostRegion
        assert next(backend.batches(batches)) is batches[0]
        assert backend.reads_at_once


def test_values_are_not_read_past_its_own_read() -> None:
    for name in ("read", "_make_reads"):
        assert not counting(name)[0]().reads_at_once


def test_batches_go_to_its_own_device() -> None:
    own = type("Own", (CpuBackend,), {"device": torch.device("meta")})()
    (batch,) = own.batches([torch.ones(2)])
    assert batch.is_meta
    assert own.to_device(torch.ones(2)).is_meta


# ---- what cannot be overridden


@pytest.mark.parametrize("name", sorted(Backend._never_called))
def test_a_method_that_the_trainer_does_not_call_is_refused(name: str) -> None:
    with pytest.raises(BackendError, match=rf"^Own\.{name} is never called: .*_make_"):
        type("Own", (CpuBackend,), {name: lambda self: None})
    mixin = type("Mixin", (), {name: lambda self: None})
    with pytest.raises(BackendError, match=rf"^Mixin\.{name} is never called"):
        type("Own", (mixin, CpuBackend), {})


@pytest.mark.parametrize("name", ["_make_comm", "_place_model"])
def test_what_several_processes_replace_is_refused_there(name: str) -> None:
    cls, _ = counting(name)
    with pytest.raises(BackendError, match=rf"^Counting\.{name} is never called: several proc"):
        _over_ranks(cls)


def test_a_device_without_values_does_not_look_at_a_flag() -> None:
    with pytest.raises(BackendError, match=r"^Own\._look is never called: .*optimizer_step"):
        type("Own", (MetaBackend,), {"_look": lambda self, flag: True})


# ---- other devices and several processes


def test_batches_are_not_copied_in_a_stream_past_to_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("backends.accelerator.has_streams", lambda device: True)
    monkeypatch.setattr("backends.accelerator.StreamLane", lambda device: "stream")
    own = type("Own", (HostAccelerator,), {"to_device": lambda self, batch: "own"})
    assert HostAccelerator().make_lane() == "stream"
    backend = own()
    backend.open()
    assert list(backend.batches([1, 2])) == ["own", "own"]


def counts_of_rank(rank: int, sizes: dict[str, int], names: list[str]) -> dict[str, int]:
    """Train a model in several processes; return the number of calls of overridden methods."""
    cls, counts = counting(*names)
    on_meta = {"sharding": {"meta_init": True}} if "shard" in sizes else {}
    backend = make_backend(cls, {"parallel": sizes, **on_meta})
    backend.open()
    with backend.building():
        model = TinyModel()
    module = backend.prepare_model(model)
    optimizer = backend.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for index, batch in enumerate(backend.batches(tiny_batches(2))):
        with backend.accumulating() if index == 0 else nullcontext(), backend.step(index):
            backend.window.add(1.0)
            backend.backward(module(batch)[0])
    backend.window.sums()
    backend.optimizer_step(optimizer, torch.tensor(True))
    backend.zero_grad(optimizer)
    with backend.inference():
        backend.host_state({"weight": next(iter(model.parameters()))})
    backend.close()
    return dict(counts)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"replicate": 2}, {"shard": 2}])
def test_overrides_are_called_in_several_processes(sizes: dict[str, int]) -> None:
    names = [
        *("accumulating", "backward", "building", "host_state", "inference", "optimizer_step"),
        *("prepare_model", "prepare_optimizer", "to_device", "zero_grad", "_enter_step"),
    ]
    for counts in run_ranks(2, counts_of_rank, sizes, names):
        assert counts.keys() == set(names)
        assert counts["backward"] == counts["to_device"] == 2


def open_with_norms(rank: int) -> str:
    cls, _ = counting("_make_norms")
    with pytest.raises(BackendError) as caught:
        make_backend(cls, {"parallel": {"shard": 2}}).open()
    return str(caught.value)


@pytest.mark.slow
def test_norms_of_its_own_are_refused_for_shards() -> None:
    for said in run_ranks(2, open_with_norms):
        assert "_make_norms: backend.parallel shards the parameters" in said
