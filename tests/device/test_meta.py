"""The dry run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from backends.meta import MetaBackend

MATRIX = torch.zeros(2, 3, device="meta")
READS: dict[str, Callable[[], Any]] = {
    "item": lambda: MATRIX.sum().item(),
    "if": lambda: bool(MATRIX.sum() > 0),
    "tolist": lambda: MATRIX.tolist(),
    "cpu": lambda: MATRIX.cpu(),
    "numpy": lambda: MATRIX.numpy(),
    "nonzero": lambda: MATRIX.nonzero(),
    "mask": lambda: MATRIX[MATRIX > 0],
    "equal": lambda: torch.equal(MATRIX, MATRIX),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_on_the_host_is_explained(name: str) -> None:
    backend = MetaBackend()
    with pytest.raises((RuntimeError, TypeError)) as caught, backend.step(0):
        READS[name]()
    backend.explain(caught.value)
    backend.explain(caught.value)
    (note,) = caught.value.__notes__
    assert "inside a step" in note
    assert "trainer.read" in note


def test_a_tensor_from_the_host_in_the_model_is_explained() -> None:
    backend = MetaBackend()
    with pytest.raises(RuntimeError) as caught, backend.step(0):
        MATRIX + torch.arange(3)
    backend.explain(caught.value)
    assert "device=x.device" in caught.value.__notes__[0]


def test_other_errors_are_left_as_they_are() -> None:
    error = RuntimeError("the metadata of the file is damaged")
    MetaBackend().explain(error)
    assert not hasattr(error, "__notes__")


def test_a_model_larger_than_any_memory_is_built_and_trained() -> None:
    backend = MetaBackend()
    with backend.building():
        model = nn.Linear(10**6, 10**6)
    model = backend.prepare_model(model)
    optimizer = backend.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    (batch,) = backend.batches([torch.zeros(2, 10**6)])
    with backend.step(0):
        model(batch).sum().backward()
        backend.norms.clip_grad_norm(list(model.parameters()), 1.0)
        backend.optimizer_step(optimizer)
    assert sum(p.numel() for p in model.parameters()) == 10**12 + 10**6


def test_reads_are_zeros_of_the_right_kind() -> None:
    backend = MetaBackend()
    seen: list[Any] = []
    with backend.step(0):
        backend.read([MATRIX.sum(), MATRIX, MATRIX.argmax(), torch.tensor(4.0)], seen.extend)
    backend.flush()
    number, matrix, integer, host = seen
    assert (number, integer, host) == (0.0, 0, 4.0)
    assert isinstance(integer, int)
    assert torch.equal(matrix, torch.zeros(2, 3))


def test_a_wrong_shape_is_found() -> None:
    backend = MetaBackend()
    model = backend.prepare_model(nn.Linear(4, 2))
    with pytest.raises(RuntimeError, match=r"reduction dim|2x3"), backend.step(0):
        model(MATRIX)


def test_state_is_handed_out_without_values() -> None:
    state = {"weight": MATRIX, "step": 1}
    assert MetaBackend().host_state(state) is state


def test_autocast_changes_nothing() -> None:
    backend = MetaBackend()
    with backend.autocast(torch.bfloat16):
        assert (MATRIX @ MATRIX.t()).dtype is torch.float32
