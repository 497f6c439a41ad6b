"""What a step of DINO counts: padding, steps that are skipped, fits that end within one."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.vision.dino.model import Dino
from tests.zoo.models.dino_cases import batch_of, make


def run_of(**changes: Any) -> Any:
    """Return what the hooks of the model read of a trainer with one process."""
    given: dict[str, Any] = {
        "is_padding": False,
        "manual_steps": None,
        "precision": SimpleNamespace(overflows=lambda optimizer: []),
        "grad_accum": SimpleNamespace(should_run_optimizer_step=True),
        "backend": SimpleNamespace(
            comm=SimpleNamespace(data_shard=(0, 1), local_part=lambda tensor: tensor)
        ),
    }
    return SimpleNamespace(**given | changes)


def step_of(model: Dino, trainer: Any, batch: dict[str, Tensor], ends: bool = True) -> None:
    """Call a model and its hooks as a trainer does in a step."""
    model.on_train_step_start(trainer, model, batch)
    trainer.grad_accum.should_run_optimizer_step = ends
    outputs = model(batch)
    if ends:
        model.on_before_optimizer_step(trainer, model, None)
    model.on_train_step_end(trainer, model, outputs, batch)


@pytest.mark.parametrize("ends", [False, True])
def test_a_padding_batch_counts_nothing(ends: bool) -> None:
    model, expected = make(), make()
    step_of(model, run_of(), batch_of(), ends=False)
    step_of(model, run_of(is_padding=True), batch_of(seed=3), ends=ends)
    step_of(expected, run_of(), batch_of(), ends=ends)
    torch.testing.assert_close(
        dict(model.named_buffers()), dict(expected.named_buffers()), rtol=0, atol=0
    )
    assert model.ema_step.item() == ends


def test_a_step_that_a_loss_scaler_skips_does_not_count() -> None:
    model = make()
    step_of(model, run_of(), batch_of())
    before = copy.deepcopy(dict(model.named_buffers()))
    scaler = SimpleNamespace(overflows=lambda optimizer: [torch.ones(1)])
    spoilt = batch_of()
    spoilt["global_view"].fill_(float("inf"))
    step_of(model, run_of(precision=scaler), spoilt)
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)
    step_of(model, run_of(), batch_of())
    assert (model.ema_step.item(), model.losses[0].step.item()) == (2, 2)
    assert model.losses[0].center.isfinite().all()


def test_a_fit_that_ends_within_a_step_leaves_nothing() -> None:
    model = make()
    with ExitStack() as stack:
        model.on_enter_fit(run_of(), stack, None, None, None)
        model(batch_of())
    assert [name for name, one in model._collected().items() if one.any()] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_refused(dtype: torch.dtype) -> None:
    model = make().to(dtype)
    for check in (
        lambda: model.on_fit_start(run_of(), None, None, None),
        model.end_step,
    ):
        with pytest.raises(ConfigError, match=str(dtype)):
            check()
    mixed = make()
    mixed.image_model_trunks[0].to(dtype)  # of the teacher
    with pytest.raises(ConfigError, match=r"image_model_trunks\.model\(0\)"):
        mixed.end_step()
    make().double().end_step()
