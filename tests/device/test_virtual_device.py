"""Whole runs on a device of another type than the host's, alone and over a group of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils import backend_registration

from modelzoo_trainer import Callback, Checkpoint
from tests.core.test_initial_values import BATCH, Made, trainer_in
from tests.distributed.ranks import run_ranks, try_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no device types of Python",
)
PLAIN = {"dropout_rate": 0.0, "attention_dropout_rate": 0.0}
NUM_STEPS = 4
ENGINES: dict[str, dict[str, Any]] = {
    "copies": {},
    "sharded": {"parallel": {"shard": -1}},
    "split": {"parallel": {"tensor": 2}},
}


def make_options(backend: dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of a trainer on the device; `backend` None = on the host."""
    if backend is None:
        return {}
    from tests.virtual_backend import add_device

    add_device()
    return {"device": "virtual", "backend": backend}


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].detach().clone())


def train(rank: int, folder: Path, backend: dict[str, Any] | None) -> dict[str, Any]:
    """Train alone; return the losses, and what the device had to do."""
    from tests.virtual_device import counts

    keep = Losses()
    options = {"model": Made(**PLAIN), "callbacks": [keep], "checkpoint": None}
    with trainer_in(folder, NUM_STEPS, **options, **make_options(backend)) as trainer:
        counts.clear()
        trainer.fit([BATCH])
        found = dict(counts)
        assert trainer.model.get_parameter("lm_head.weight").device == trainer.backend.device
    return {"losses": [loss.item() for loss in keep.losses], "counts": found}


@pytest.mark.slow
def test_a_run_has_the_numbers_of_the_host_and_nothing_is_read_in_it(tmp_path: Path) -> None:
    [host] = run_ranks(1, train, tmp_path / "host", None)
    [device] = run_ranks(1, train, tmp_path / "device", {})
    assert device["losses"] == host["losses"]
    assert len(host["losses"]) == NUM_STEPS
    assert "read" not in device["counts"]
    assert device["counts"]["to device"] == 2 * NUM_STEPS  # inputs and labels


def train_together(
    rank: int, folder: Path, backend: dict[str, Any], group: str, uuid: str | None = None
) -> dict[str, Any]:
    """Train with others; `group`: "own" = that of the program, for tensors of the device alone."""
    import torch.distributed as dist

    from tests import virtual_device
    from tests.virtual_group import ENGINE, install_group, sent

    install_group(takes_host=group != "own")
    if uuid is not None:
        virtual_device.module().uuid = uuid
    given: dict[str, Any] = {}
    init = dist.init_process_group
    dist.init_process_group = lambda *args, **options: (
        given.update(options),
        init(*args, **options),
    )
    if group == "own":
        dist.init_process_group(ENGINE)
    found = train(rank, folder, {"timeout": 60, **backend})
    return found | {"sent": dict(sent), "bound": str(given.get("device_id"))}


@pytest.mark.slow_cases(every=2)
@pytest.mark.parametrize("group", ["own", "of the trainer"])
@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_send_only_what_the_device_has(engine: str, group: str, tmp_path: Path) -> None:
    backend = ENGINES[engine]
    expected = run_ranks(1, train, tmp_path / "host", None)[0]["losses"]
    found = run_ranks(2, train_together, tmp_path / "device", backend, group)
    for one in found:
        assert one["losses"] == pytest.approx(expected, rel=1e-4 if engine == "split" else 1e-5)
        assert "read" not in one["counts"]
        assert one["bound"] == ("None" if group == "own" else "virtual:0")
        assert sum(one["sent"].values()) > NUM_STEPS


def train_and_resume(rank: int, folder: Path, backend: dict[str, Any]) -> dict[str, list[float]]:
    """Return the losses of a whole run, and of one that stops and is resumed."""
    from tests.virtual_group import install_group

    install_group(takes_host=True)
    found: dict[str, list[float]] = {}
    for name, ends in (("whole", [NUM_STEPS]), ("resumed", [2, NUM_STEPS])):
        keep = Losses()
        for end in ends:
            options = {"model": Made(), "callbacks": [keep], **make_options(backend)}
            options["checkpoint"] = Checkpoint(steps=2, asynchronous=True)
            with trainer_in(folder / name, end, **options) as trainer:
                trainer.fit([BATCH] * NUM_STEPS)
        found[name] = [loss.item() for loss in keep.losses]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["copies", "sharded"])
def test_a_run_resumes_from_a_save_in_the_background(engine: str, tmp_path: Path) -> None:
    for one in run_ranks(2, train_and_resume, tmp_path, {"timeout": 60, **ENGINES[engine]}):
        assert len(one["whole"]) == NUM_STEPS
        assert one["resumed"] == one["whole"]


def broadcast(rank: int, place: str) -> tuple[list[float], int]:
    """Send weights that were drawn on the host; return those of this process, and the messages."""
    import torch
    import torch.distributed as dist

    from backends.parallel.apply import _broadcast
    from tests.virtual_group import ENGINE, install_group, sent

    install_group(takes_host=False)
    dist.init_process_group(ENGINE)
    torch.manual_seed(rank)
    model = torch.nn.BatchNorm1d(3)
    torch.nn.init.normal_(model.weight)
    _broadcast(model, torch.device(place))
    assert model.weight.device.type == "cpu"
    return model.weight.tolist(), sent["broadcast"]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "num_sent"), [("virtual", 2), ("cpu", 0)])
def test_weights_of_the_host_are_sent_by_the_device_or_by_gloo(place: str, num_sent: int) -> None:
    first, second = run_ranks(2, broadcast, place)
    assert first == second
    assert first[1] == num_sent  # floats, and the number of batches


@pytest.mark.slow
def test_ranks_that_see_the_same_device_are_refused(tmp_path: Path) -> None:
    found = try_ranks(2, train_together, tmp_path, {}, "of the trainer", "the same")
    assert [ok for ok, _ in found] == [False, False]
    assert all("Each of 2 processes of this node sees one virtual device" in e for _, e in found)
