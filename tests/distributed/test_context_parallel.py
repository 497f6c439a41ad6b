"""Context parallelism: what the backend gives a model, and runs with a small one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from backends.errors import BackendError
from backends.parallel.context import ContextParallel, split_rows
from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.core import MixedPrecision
from tests.distributed.ranks import run_ranks, try_ranks

WIDTH, LENGTH, NUM_ROWS, BATCH = 6, 8, 12, 4
CLOSE = 1e-12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(WIDTH, WIDTH, bias=False)  # a bias would not change the weights
        self.values = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)

    def forward(self, states: Tensor, positions: Tensor, parallel: Any) -> Tensor:
        pairs = torch.stack((self.keys(states), self.values(states)))
        keys, values = (pairs if parallel is None else parallel.gather(pairs, 2)).unbind()
        scores = states @ keys.transpose(-1, -2)
        hidden = positions[:, None] < torch.arange(keys.shape[1])
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.dropout(states + weights @ values)


class Net(nn.Module):
    """Causal attention in float64; the loss is a mean over the positions that are counted."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)
        self.parallel: ContextParallel | None = None
        self.drawn: list[list[bool]] = []
        self.double()
        for block in self.blocks:
            block.dropout.p = dropout

    def split_rows(self, parallel: ContextParallel) -> None:
        self.parallel = parallel

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        states, counted = batch
        num, positions, parallel = counted.sum(), torch.arange(states.shape[1]), self.parallel
        if parallel is not None:
            states, counted = parallel.take(states), parallel.take(counted)
            positions = parallel.take(positions, 0)
        for block in self.blocks:
            states = block(states, positions, parallel)
        self.drawn.append((states == 0).flatten().tolist())
        total = (self.head(states).squeeze(-1) ** 2 * counted).sum()
        if parallel is not None:
            total = parallel.total(total)
        return {"loss": total / num.clamp(min=1), "num_items": num}


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.rows: list[list[float]] = []

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
        self.rows.append(batch[0][:, 0, 0].tolist())

    def on_after_optimizer_step(self, trainer, model, optimizer):
        self.norms.append(trainer.backend.norms.grad_norm(list(model.parameters())).item())


def rows(length: int = LENGTH) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(NUM_ROWS, length, WIDTH, generator=generator, dtype=torch.float64)
    counted = torch.randint(0, 2, (NUM_ROWS, length), generator=generator).double()
    counted[0] = 0  # a row without any
    return TensorDataset(states, counted)


def fit(rank: int, folder: Path, batch_size: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train and return what this process saw of it."""
    losses = Losses()
    data = rows(options.get("length", LENGTH))
    trainer = Trainer(
        device="cpu",
        backend=options.get("backend"),
        model_dir=folder,
        model=options.get("model", lambda: Net(options.get("dropout", 0.0))),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        precision=MixedPrecision(enabled=False, max_gradient_norm=0.5),
        loop=TrainingLoop(
            max_steps=options.get("max_steps", 5),
            grad_accum_steps=options.get("accumulate", 1),
            eval_frequency=None,
        ),
        checkpoint=Checkpoint(steps=options.get("save")),
        callbacks=[losses],
        seed=1,
    )
    trainer.fit(DataLoader(data, batch_size=batch_size, shuffle=True), DataLoader(data, batch_size))
    weights = trainer.backend.host_state(dict(trainer.model.named_parameters()))
    return {
        "losses": losses.losses,
        "norms": losses.norms,
        "rows": losses.rows,
        "shard": trainer.backend.data_shard,
        "drawn": trainer.model.drawn,
        "weights": {name: value.numpy() for name, value in weights.items()},
    }


def gathered_and_summed(rank: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    parallel = ContextParallel(rank, size, dist.group.WORLD.group_name)
    row = torch.arange(2.0 * 8 * size).view(2, 8 * size, 1).requires_grad_()
    own = parallel.take(row)
    everything = parallel.gather(own)
    assert torch.equal(everything, row)
    assert torch.equal(parallel.gather(own.transpose(0, 1), 0), row.transpose(0, 1))
    (everything * row.detach() * (rank + 1)).sum().backward()
    of_all = sum(range(1, size + 1))
    assert torch.equal(parallel.take(row.grad), parallel.take(row.detach()) * of_all)
    value = torch.tensor(rank + 1.0, requires_grad=True)
    total = parallel.total(value)
    total.backward()
    assert (total.item(), value.grad.item()) == (of_all, size)
    return {"chunks": parallel.chunks(8 * size)}


def test_positions_are_gathered_in_their_order_and_sums_are_those_of_all() -> None:
    first, second = run_ranks(2, gathered_and_summed)
    assert (first["chunks"], second["chunks"]) == (((0, 4), (12, 16)), ((4, 8), (8, 12)))


ARRANGEMENTS: dict[str, tuple[int, dict[str, int], int]] = {
    # processes, axes, processes with different data
    "context 2": (2, {"context": 2}, 1),
    "context 4": (4, {"context": -1}, 1),
    "replicate 2, context 2": (4, {"context": 2}, 2),
    "shard 2, context 2": (4, {"shard": 2, "context": 2}, 2),
}


@pytest.mark.slow_cases("context 4", "replicate 2, context 2", "shard 2, context 2")
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_training_is_that_of_one_process(tmp_path: Path, name: str) -> None:
    num, axes, shards = ARRANGEMENTS[name]
    options = {"accumulate": 2} if name == "shard 2, context 2" else {}
    alone = fit(0, tmp_path / "alone", BATCH, options)
    options |= {"backend": {"parallel": axes}}
    found = run_ranks(num, fit, tmp_path / "together", BATCH // shards, options)
    ranks_per_shard = num // shards
    for rank, one in enumerate(found):
        assert one["shard"] == (rank // ranks_per_shard, shards)
        assert one["rows"] == found[rank // ranks_per_shard * ranks_per_shard]["rows"]
        torch.testing.assert_close(one["weights"], alone["weights"], rtol=CLOSE, atol=CLOSE)
        torch.testing.assert_close(one["norms"], alone["norms"], rtol=CLOSE, atol=CLOSE)
    if shards == 1:
        for one in found:
            assert one["rows"] == alone["rows"]
            torch.testing.assert_close(one["losses"], alone["losses"], rtol=CLOSE, atol=CLOSE)


@pytest.mark.slow
def test_a_run_resumes_with_fewer_processes_along_context(tmp_path: Path) -> None:
    alone = fit(0, tmp_path / "alone", BATCH, {"max_steps": 6})
    folder, losses, seen = tmp_path / "together", [], []
    for num in (4, 2, 1):
        options: dict[str, Any] = {"max_steps": 2 + len(losses), "save": 2}
        if num > 1:
            options["backend"] = {"parallel": {"context": num}}
            found = run_ranks(num, fit, folder, BATCH, options)[-1]
        else:
            found = fit(0, folder, BATCH, options)
        losses += found["losses"]
        seen += found["rows"]
    assert seen == alone["rows"]
    torch.testing.assert_close(losses, alone["losses"], rtol=CLOSE, atol=CLOSE)
    torch.testing.assert_close(found["weights"], alone["weights"], rtol=CLOSE, atol=CLOSE)


@pytest.mark.slow
def test_dropout_differs_along_context_and_resumes_exactly(tmp_path: Path) -> None:
    options = {"backend": {"parallel": {"context": 2}}, "dropout": 0.3, "max_steps": 4}
    whole = run_ranks(2, fit, tmp_path / "whole", BATCH, options)
    assert whole[0]["drawn"] != whole[1]["drawn"]
    assert whole[0]["losses"] == whole[1]["losses"]
    cut = tmp_path / "cut"
    first = run_ranks(2, fit, cut, BATCH, options | {"max_steps": 2, "save": 2})
    rest = run_ranks(2, fit, cut, BATCH, options)
    for one, early, late in zip(whole, first, rest, strict=True):
        assert early["drawn"] + late["drawn"] == one["drawn"]
        assert early["losses"] + late["losses"] == one["losses"]


def test_rows_that_cannot_be_split_are_refused_with_a_length_that_can() -> None:
    with pytest.raises(BackendError) as caught:
        ContextParallel(1, 4, "").take(torch.zeros(2, 1022))
    assert "backend.parallel.context is 4, but a row has 1022 positions" in str(caught.value)
    assert "a multiple of 8" in str(caught.value)
    assert "1016" in str(caught.value)


def test_a_model_without_the_method_is_refused() -> None:
    mesh: Any = SimpleNamespace(get_group=lambda axis: SimpleNamespace(size=lambda: 2))
    with pytest.raises(BackendError) as caught:
        split_rows(nn.Linear(WIDTH, 1), mesh)
    assert "backend.parallel.context is 2, but Linear does not support" in str(caught.value)
    assert "split_rows" in str(caught.value)


def without_support() -> nn.Module:
    return nn.Linear(WIDTH, 1)


@pytest.mark.slow
def test_a_model_without_support_is_refused_before_the_first_step(tmp_path: Path) -> None:
    options = {"backend": {"parallel": {"context": 2}}, "model": without_support}
    for is_ok, found in try_ranks(2, fit, tmp_path, BATCH, options, stay=False):
        assert not is_ok
        assert "backend.parallel.context is 2, but Linear does not support" in found
