"""Adam with eps added before the bias correction, in every implementation of torch."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from backends.fast_step import fuse_optimizer
from backends.sync_guard import SyncGuard
from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.optim import Adam, AdamBase, AdamW

CPU = torch.device("cpu")
KINDS = (AdamW, Adam, AdamBase)
FLAGS: dict[str, dict[str, bool]] = {
    "one by one": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (4,), (2, 2))
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def make(cls: Any, flags: dict[str, bool], **settings: Any) -> Any:
    """Return an optimizer; the last parameter gets a gradient from the fourth step on."""
    group = {"params": weights(), **flags}
    return cls([group], **{"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1, **settings})


def train(optimizer: Any, first: int = 0, last: int = 8) -> list[Tensor]:
    params = optimizer.param_groups[0]["params"]
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for idx, param in enumerate(params):
            grad = 1e-4 * torch.randn(param.shape, generator=generator)
            param.grad = None if idx == 2 and step < 3 else grad
        optimizer.step()
    return [param.detach().clone() for param in params]


def test_the_first_update_with_a_small_gradient_is_that_of_the_model_zoo() -> None:
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.full((3,), 1e-5)
    AdamW([param], lr=1e-3, betas=(0.9, 0.999), eps=1e-6).step()
    torch.testing.assert_close(param.detach(), torch.full((3,), -0.00024025), rtol=1e-4, atol=0)


@pytest.mark.parametrize("cls", KINDS)
@pytest.mark.parametrize("settings", [{}, {"amsgrad": True}, {"betas": (0.0, 0.9)}])
@pytest.mark.parametrize("flags", ["foreach", "fused"])
def test_all_implementations_agree(cls: Any, settings: dict[str, Any], flags: str) -> None:
    expected = train(make(cls, FLAGS["one by one"], **settings))
    found = train(make(cls, FLAGS[flags], **settings))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("cls", KINDS)
def test_the_loss_is_maximized_if_the_group_says_so(cls: Any) -> None:
    for flags in FLAGS.values():
        up = make(cls, {**flags, "maximize": True}, weight_decay=0.0)
        down = make(cls, flags, weight_decay=0.0)
        moved = [a + b for a, b in zip(train(up), train(down), strict=True)]
        torch.testing.assert_close(moved, [2 * param.detach() for param in weights()])


@pytest.mark.parametrize("flags", FLAGS)
def test_a_resumed_optimizer_takes_the_same_steps_bit_by_bit(flags: str) -> None:
    expected = train(make(AdamW, FLAGS[flags]))
    first = make(AdamW, FLAGS[flags])
    train(first, 0, 5)  # counts differ then
    second = make(AdamW, FLAGS[flags])
    for old, new in zip(
        first.param_groups[0]["params"], second.param_groups[0]["params"], strict=True
    ):
        new.data.copy_(old.data)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert all(map(torch.equal, train(second, 5), expected))
    assert all(map(torch.equal, train(copy.deepcopy(first), 5), expected))


def test_a_state_that_was_dropped_counts_from_zero() -> None:
    found = {}
    for name, flags in FLAGS.items():
        optimizer = make(AdamW, flags)
        train(optimizer, 0, 5)
        del optimizer.state[optimizer.param_groups[0]["params"][1]]
        found[name] = train(optimizer, 5, 8)
        counts = [int(state["step"]) for state in optimizer.state.values()]
        assert sorted(counts) == [3, 5, 8]
    torch.testing.assert_close(found["fused"], found["one by one"], rtol=1e-6, atol=1e-7)


class Kernels(TorchDispatchMode):
    """Count calls of fused kernels."""

    count = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_fused_adam" in str(func)
        return func(*args, **(kwargs or {}))


def test_parameters_with_equal_counts_are_updated_by_one_kernel() -> None:
    optimizer = make(AdamW, FLAGS["fused"])
    numbers = []
    for step in range(6):
        with Kernels() as kernels:
            train(optimizer, step, step + 1)
        numbers.append(kernels.count)
    assert numbers == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("cls", KINDS)
def test_counts_on_the_device_are_not_read(cls: Any) -> None:
    optimizer = make(cls, FLAGS["fused"])
    guard = SyncGuard()
    guard.arm()
    try:
        train(optimizer)
    finally:
        guard.disarm()
    assert guard.num_refused == 0


@pytest.mark.parametrize("cls", KINDS)
def test_they_are_fused_as_those_of_torch(cls: Any) -> None:
    optimizer = cls(weights())
    assert fuse_optimizer(optimizer, CPU)

    class Own(cls):  # type: ignore[misc]  # a parameter
        @override
        def step(self, closure: Any = None) -> Any:
            return None

    assert not fuse_optimizer(Own(weights()), CPU)


@pytest.mark.parametrize("cls", [AdamW, Adam])
def test_a_checkpoint_of_before_keeps_its_formula(
    cls: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before: Any = {AdamW: torch.optim.AdamW, Adam: torch.optim.Adam}[cls]
    old = make(before, {})
    expected = train(make(before, {}))
    train(old, 0, 5)
    resumed = make(cls, {})
    for theirs, ours in zip(
        old.param_groups[0]["params"], resumed.param_groups[0]["params"], strict=True
    ):
        ours.data.copy_(theirs.data)
    with caplog.at_level(logging.WARNING, logger="modelzoo_trainer.optimizer"):
        resumed.load_state_dict(copy.deepcopy(old.state_dict()))
    assert [record.args for record in caplog.records] == [(cls.__name__,) * 2]
    assert "eps_after_correction" in caplog.text
    assert all(map(torch.equal, train(resumed, 5), expected))
    caplog.clear()
    make(cls, {}).load_state_dict(resumed.state_dict())
    make(cls, {}, eps_after_correction=True).load_state_dict(old.state_dict())
    assert not caplog.records


class AsBefore(Callback):
    """Write checkpoints as before the setting existed."""

    def on_save_checkpoint(self, trainer: Any, state_dict: dict[str, Any]) -> None:
        state = state_dict["optimizer"]
        for group in (*state["param_groups"], *state["settings"]):
            del group["eps_after_correction"]


def run(folder: Path, num_steps: int, callbacks: list[Callback], **settings: Any) -> list[Tensor]:
    """Return the weights of a run in a folder, which resumes if there is a checkpoint."""

    class Net(nn.Linear):
        @override
        def forward(self, batch: Tensor) -> Tensor:
            return 1e-4 * super().forward(batch).square().mean()

    trainer = Trainer(
        device="cpu",
        model_dir=folder,
        model=lambda: Net(4, 2),
        optimizer=lambda model: AdamW(model, lr=0.1, weight_decay=0.1, **settings),
        loop=TrainingLoop(max_steps=num_steps),
        checkpoint=Checkpoint(steps=3),
        callbacks=callbacks,
        progress="none",
        seed=1,
    )
    trainer.fit([torch.ones(2, 4) * n for n in range(1, 7)])
    trainer.close()
    return [param.detach().clone() for param in trainer.model.parameters()]


def test_a_run_of_before_is_resumed_bit_by_bit_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = run(tmp_path / "whole", 6, [], eps_after_correction=True)
    run(tmp_path / "run", 3, [AsBefore()], eps_after_correction=True)
    caplog.clear()

    found = run(tmp_path / "run", 5, [])
    messages = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len([one for one in messages if "eps_after_correction" in one]) == 1
    assert not any("Using the checkpoint's settings" in one for one in messages)
    caplog.clear()
    found = run(tmp_path / "run", 6, [])

    assert "eps_after_correction" not in caplog.text
    assert all(map(torch.equal, found, expected))
    assert not all(map(torch.equal, run(tmp_path / "new", 6, []), expected))
