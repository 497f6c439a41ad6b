"""Steps that a flag on the device takes back: bit by bit, and without waiting."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.lr_scheduler import StepLR

from backends import Backend, BackendError
from backends.conditional_step import ConditionalSteps
from modelzoo_trainer.optim import OPTIMIZERS

Make = Callable[..., Backend]

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in OPTIMIZERS),
    ("AdamW", {"correct_bias": False, "amsgrad": True}),
    ("AdamW", {"weight_decay": 0.1, "amsgrad": True}),
    ("AdamW", {"weight_decay": 0.1, "eps_after_correction": True}),
    ("Adafactor", {"beta1": 0.9, "weight_decay": 0.1}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
]
ON_HOST = {"ASGD", "Adafactor"}  # these count in Python's numbers
BAD = (0, 1, 4, 6)
NUM_STEPS = 8


def net() -> nn.Module:
    """Return matrices, vectors and a layer that gets no gradient at first."""
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"first": nn.Linear(3, 4), "norm": nn.LayerNorm(4), "late": nn.Linear(2, 2)}
    )


def give_gradients(model: nn.Module, step: int, *, spoilt: bool = False) -> None:
    generator = torch.Generator().manual_seed(step)
    for name, param in model.named_parameters():
        if name.startswith("late") and step < 3:
            continue
        grad = torch.randn(param.shape, generator=generator)
        param.grad = (grad * torch.nan if spoilt else grad).to(param.device)


def masked_run(backend: Backend, name: str, settings: dict[str, Any]) -> Any:
    """Take all steps, those of `BAD` with gradients that are no numbers and a flag that says so."""
    model = backend.prepare_model(net())
    optimizer = backend.prepare_optimizer(OPTIMIZERS[name](model, **settings))
    for step in range(NUM_STEPS):
        give_gradients(model, step, spoilt=step in BAD)
        with backend.step(step):
            backend.optimizer_step(optimizer, torch.tensor(step not in BAD).to(backend.device))
        backend.zero_grad(optimizer)
    return model, optimizer


def reference(backend: Backend, name: str, settings: dict[str, Any]) -> Any:
    """Take only the good steps, without a mask."""
    model = backend.prepare_model(net())
    optimizer = backend.prepare_optimizer(OPTIMIZERS[name](model, **settings))
    for step in range(NUM_STEPS):
        give_gradients(model, step)
        if step not in BAD:
            backend.optimizer_step(optimizer)
        backend.zero_grad(optimizer)
    return model, optimizer


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree, key=str) for leaf in leaves(tree[key])]
    if isinstance(tree, (list, tuple)):
        return [leaf for item in tree for leaf in leaves(item)]
    return [tree]


def assert_same_bits(one: Any, other: Any) -> None:
    mine, theirs = leaves(one), leaves(other)
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def assert_near(one: Any, other: Any) -> None:
    mine, theirs = leaves(one), leaves(other)
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5, check_device=False)


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
@pytest.mark.slow_cases(every=4)
def test_masked_steps_leave_no_trace(
    valued_kind: str, open_backend: Make, name: str, settings: dict[str, Any]
) -> None:
    if valued_kind == "xla" and name in ON_HOST:
        with pytest.raises(BackendError, match=rf"{name} keeps a part of its state on the CPU"):
            masked_run(open_backend(valued_kind), name, settings)
        return
    model, optimizer = masked_run(open_backend(valued_kind), name, settings)
    wanted, its_optimizer = reference(open_backend(valued_kind), name, settings)
    # A graph with a mask is another graph, which may round otherwise; that a step is left out
    # bit by bit is shown in tests/xla.
    same = assert_near if valued_kind == "xla" else assert_same_bits
    same(model.state_dict(), wanted.state_dict())
    same(optimizer.state_dict()["state"], its_optimizer.state_dict()["state"])


@pytest.mark.parametrize("kind", ["fake", "host-accelerator"])
@pytest.mark.parametrize(("name", "settings"), VARIANTS)
@pytest.mark.slow_cases(every=4)
def test_only_first_steps_and_counts_on_the_host_wait(
    open_backend: Make, kind: str, name: str, settings: dict[str, Any]
) -> None:
    backend: Any = open_backend(kind)
    masked_run(backend, name, settings)
    # The first good step is number 2; in number 3 the parameters of `late` have their first, and
    # Adagrad's have a state from the start, which is found in the first good step as well.
    expected = NUM_STEPS if name in ON_HOST else 4
    assert backend.conditional_steps.num_looks == expected


def test_an_optimizer_that_counts_on_the_host_says_what_it_costs(
    open_backend: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="modelzoo_trainer.backends.masking"):
        masked_run(open_backend("fake"), "Adafactor", {})
        masked_run(open_backend("fake"), "AdamW", {})
    [message] = [record.getMessage() for record in caplog.records]
    assert message.startswith("Adafactor counts its steps on the CPU")
    assert "capturable" not in message  # it has no such option


def cuda_steps(optimizer_of: Callable[..., torch.optim.Optimizer], **settings: Any) -> int:
    """Return how many of three steps wait for the device, which is a CUDA device without data."""
    with FakeTensorMode():
        param = nn.Parameter(torch.empty(3, device="cuda"))
        optimizer = optimizer_of([param], **settings)
        steps = ConditionalSteps(lambda keep: True)
        for _ in range(3):
            param.grad = torch.empty(3, device="cuda")
            steps.step(optimizer, torch.empty((), dtype=torch.bool, device="cuda"))
    return steps.num_looks


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.RMSprop])
def test_capturable_is_recommended_where_it_avoids_the_wait(
    caplog: pytest.LogCaptureFixture, kind: type[torch.optim.Optimizer]
) -> None:
    with caplog.at_level(logging.INFO, logger="modelzoo_trainer.backends.masking"):
        assert cuda_steps(kind, lr=0.1) == 3
        [message] = [record.getMessage() for record in caplog.records]
        assert "capturable=True" in message
        assert cuda_steps(kind, lr=0.1, capturable=True) == 1
    assert len(caplog.records) == 1


def test_an_optimizer_that_counts_in_its_groups_is_decided_on_the_host(open_backend: Make) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
            return super().step(closure)

    backend = open_backend("fake")
    weight = nn.Parameter(torch.ones(2))
    optimizer = Counting([weight], lr=0.5)
    for keep in (True, True, False, True):
        weight.grad = torch.ones(2)
        backend.optimizer_step(optimizer, torch.tensor(keep))
    assert optimizer.param_groups[0]["k"] == 3
    assert weight.tolist() == [-0.5, -0.5]


def test_a_state_that_was_loaded_is_looked_at_anew(open_backend: Make) -> None:
    backend: Any = open_backend("fake")
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.5)
    empty = copy.deepcopy(optimizer.state_dict())
    weight.grad = torch.ones(2)
    backend.optimizer_step(optimizer, torch.tensor(True))
    optimizer.load_state_dict(empty)
    before = weight.detach().clone()
    backend.optimizer_step(optimizer, torch.tensor(False))
    assert torch.equal(weight, before)
    assert optimizer.state_dict()["state"] == {}


def test_a_state_that_each_step_makes_anew_is_taken_back_too(open_backend: Make) -> None:
    class Replacing(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure
            for param in self.param_groups[0]["params"]:
                state = self.state[param]
                state["sum"] = state.get("sum", torch.zeros_like(param)) + param.grad
                param -= state["sum"]

    weight = nn.Parameter(torch.zeros(2))
    optimizer = Replacing([weight])
    backend = open_backend("fake")
    for keep, value in ((True, 1.0), (False, torch.nan), (True, 2.0)):
        weight.grad = torch.full((2,), value)
        backend.optimizer_step(optimizer, torch.tensor(keep))
    assert optimizer.state[weight]["sum"].tolist() == [3.0, 3.0]
    assert weight.tolist() == [-4.0, -4.0]


def test_a_scheduler_of_torch_does_not_mind_a_first_step_that_is_left_out(valued: Backend) -> None:
    weight = nn.Parameter(torch.ones(2, device=valued.device))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scheduler = StepLR(optimizer, 1)
    weight.grad = torch.ones_like(weight)
    valued.optimizer_step(optimizer, torch.tensor(False, device=valued.device))
    scheduler.step()  # would warn, which is an error here
    assert weight.tolist() == [1.0, 1.0]


def test_the_mask_is_no_read_in_the_step(open_backend: Make) -> None:
    backend = open_backend("fake")
    masked_run(backend, "AdamW", {})
    assert backend.counters()["host_reads"] == 0


def test_a_dry_run_takes_every_step(open_backend: Make) -> None:
    backend = open_backend("meta")
    masked_run(backend, "AdamW", {})
    backend.restore([torch.ones(2, device="meta")], [torch.ones(2, device="meta")], VALUELESS)


VALUELESS = torch.empty((), dtype=torch.bool, device="meta")


@pytest.mark.parametrize("keep", [True, False])
def test_buffers_are_put_back_where_the_flag_is_false(valued: Backend, keep: bool) -> None:
    buffers = [torch.tensor([1.0, torch.nan]), torch.tensor(3, dtype=torch.int64)]
    buffers = [buffer.to(valued.device) for buffer in buffers]
    copies = [torch.tensor([5.0, 6.0]), torch.tensor(7, dtype=torch.int64)]
    copies = [own.to(valued.device) for own in copies]
    with valued.step(0):
        valued.restore(buffers, copies, torch.tensor(keep).to(valued.device))
    assert buffers[0][0].item() == (1.0 if keep else 5.0)
    assert buffers[1].item() == (3 if keep else 7)


# ---- the norm of gradients


def test_the_norm_is_that_of_all_gradients(valued: Backend) -> None:
    weights = [nn.Parameter(torch.zeros(n, device=valued.device)) for n in (2, 3, 4)]
    weights[0].grad, weights[1].grad = torch.full_like(weights[0], 3.0), torch.ones_like(weights[1])
    with valued.step(0):
        norm = valued.norms.grad_norm(weights)
    assert norm.item() == pytest.approx(21**0.5)


def test_the_norm_of_no_gradient_is_zero(valued: Backend) -> None:
    assert valued.norms.grad_norm([nn.Parameter(torch.zeros(2))]).item() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_norm_of_half_gradients_does_not_overflow(dtype: torch.dtype, valued: Backend) -> None:
    weight = nn.Parameter(torch.zeros(4, dtype=dtype, device=valued.device))
    weight.grad = torch.full_like(weight, 6e4)
    assert valued.norms.grad_norm([weight]).item() == pytest.approx(1.2e5, rel=0.01)


def test_the_norm_of_double_gradients_stays_double(valued: Backend) -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64, device=valued.device))
    weight.grad = torch.full_like(weight, 1e200)
    assert valued.norms.grad_norm([weight]).item() == pytest.approx(1e200)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_norm_of_sparse_gradients_shows_what_is_no_number(
    value: float, valued: Backend
) -> None:
    if valued.device.type == "xla":
        pytest.skip("the device has no sparse gradients")
    table = nn.Embedding(4, 2, sparse=True).to(valued.device)
    table(torch.tensor([1, 1], device=valued.device)).sum().mul(value).backward()
    with valued.step(0):
        norm = valued.norms.grad_norm(list(table.parameters()))
    assert not torch.isfinite(norm)
