"""Train on the devices of this process and print the facts as JSON; started by a test.

Usage: python spmd_layout_worker.py (plain | spmd)
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

from backends.errors import BackendError
from backends.placement import move_model
from backends.xla.spmd import MeshShape, Spmd, start_spmd

NUM_STEPS = 10
Facts = dict[str, Any]


class Net(nn.Module):
    """Tied, frozen, scalar, indivisible and integer things beside what is usual."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 32)
        self.wide = nn.Linear(32, 64)
        self.drop = nn.Dropout(0.2)
        self.back = nn.Linear(64, 32)
        self.frozen = nn.Linear(32, 7)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(32, 96, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.tiny = nn.Parameter(torch.ones(3))
        self.counts: Tensor
        self.register_buffer("counts", torch.arange(64))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden: Tensor = self.drop(functional.relu(self.wide(self.embed(tokens))))
        hidden = self.back(hidden) * self.scale + self.tiny.sum() * 0.1
        extra: Tensor = self.frozen(hidden).mean() * 0.1 + self.counts.float().mean() * 1e-3
        return functional.cross_entropy(self.head(hidden), targets) + extra


class Run:
    def __init__(self, layout: MeshShape | None) -> None:
        torch.manual_seed(0)
        self.device = torch_xla.device()
        self.model = Net()
        self.names = list(self.model.state_dict())
        self.spmd = Spmd(layout, smallest=256) if layout else None
        move_model(self.model, self.device)
        self.lr = torch.tensor(1e-2).to(self.device)
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = AdamW(self.params, lr=self.lr, capturable=True, foreach=False)
        for param in self.params:
            self.optimizer.state[param] = {
                "step": torch.zeros(()).to(self.device),
                "exp_avg": torch.zeros(param.shape).to(self.device),
                "exp_avg_sq": torch.zeros(param.shape).to(self.device),
            }
        self.place()
        torch_xla.sync()
        self.data = torch.Generator().manual_seed(5)
        self.index = 0

    def place(self) -> None:
        if self.spmd:
            self.spmd.shard_model(self.model)
            self.spmd.shard_optimizer(self.optimizer)

    def send(self, *tensors: Tensor) -> list[Tensor]:
        specs = [self.spmd.batch_spec(tensor) for tensor in tensors] if self.spmd else None
        devices = [str(self.device)] * len(tensors)
        sent: list[Tensor] = torch_xla._XLAC._xla_tensors_from_aten(list(tensors), devices, specs)
        return sent

    def step(self, size: int) -> float:
        rows = torch.randint(0, 96, (2, size), generator=self.data)
        tokens, targets = self.send(rows[0].clone(), rows[1].clone())
        self.lr.fill_(1e-2 * (1 + self.index % 3))
        torch_xla.sync()
        xm.set_rng_state(1000 + self.index)
        with torch_xla.compile(full_graph=True):
            loss = self.model(tokens, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.params, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.index += 1
        return float(torch_xla._XLAC._xla_get_cpu_tensors([loss.detach()])[0])

    def losses(self, sizes: Sequence[int]) -> list[float]:
        return [self.step(size) for size in sizes]


def train(layout: MeshShape | None) -> Facts:
    facts: Facts = {}
    run = Run(layout)
    facts["losses"] = run.losses([32] * 3)
    if layout:
        facts["after_3"] = shapes(run)
    before = count("CompileTime")
    executed = count("ExecuteReplicatedTime")
    facts["losses"] += run.losses([32] * (NUM_STEPS - 3))
    facts["late_compilations"] = count("CompileTime") - before
    facts["executions"] = count("ExecuteReplicatedTime") - executed
    facts["names_kept"] = list(run.model.state_dict()) == run.names
    facts["tied"] = run.model.head.weight is run.model.embed.weight
    return facts


def train_uneven(layout: MeshShape | None) -> list[float]:
    return Run(layout).losses([6, 2])


def count(metric: str) -> int:
    xm.wait_device_ops()
    return int((met.metric_data(metric) or [0])[0])


def shapes(run: Run) -> Facts:
    """Return the shapes of what each device holds."""
    model = run.model
    tensors = {
        "embed": model.embed.weight,
        "wide.weight": model.wide.weight,
        "wide.bias": model.wide.bias,
        "frozen.weight": model.frozen.weight,
        "scale": model.scale,
        "counts": model.counts,
    }
    for key, value in run.optimizer.state[model.wide.weight].items():
        tensors[f"wide.weight.{key}"] = value
    return {name: [list(p.shape) for p, _ in parts(tensor)] for name, tensor in tensors.items()}


def parts(tensor: Any) -> list[tuple[Tensor, str]]:
    (held,) = torch_xla._XLAC._get_local_shards([tensor])
    return list(held)


def reload(layout: MeshShape) -> Facts:
    """Stop after four steps, load into a new run, go on."""
    facts: Facts = {}
    first = Run(layout)
    first.losses([32] * 4)
    spmd = first.spmd
    assert spmd is not None
    model_state = first.model.state_dict()
    before = count("CompileTime")
    model_copy = dict(zip(model_state, spmd.fetch(list(model_state.values())), strict=True))
    facts["compilations_of_fetch"] = count("CompileTime") - before
    facts["fetched_equals_own"] = all(
        torch.equal(model_copy[name], tensor.cpu()) for name, tensor in model_state.items()
    )
    optimizer_copy = first.optimizer.state_dict()
    optimizer_copy["state"] = {
        index: dict(zip(state, spmd.fetch(list(state.values())), strict=True))
        for index, state in optimizer_copy["state"].items()
    }
    expected = first.losses([32] * 3)

    second = Run(layout)
    second.losses([32] * 4)
    second.losses([32])  # goes astray
    second.model.load_state_dict(model_copy)
    second.optimizer.load_state_dict(optimizer_copy)
    second.optimizer.param_groups[0]["lr"] = second.lr
    second.place()
    facts["loaded"] = shapes(second)
    second.index = 4
    second.data.manual_seed(5)
    for _ in range(4):
        torch.randint(0, 96, (2, 32), generator=second.data)
    before = count("CompileTime")
    facts["differences"] = [a - b for a, b in zip(expected, second.losses([32] * 3), strict=True)]
    facts["compilations_after_load"] = count("CompileTime") - before
    return facts


def placing() -> Facts:
    facts: Facts = {}
    device = torch_xla.device()
    spmd = Spmd(MeshShape(replicate=2, shard=2), smallest=4)
    before = count("TransferToDeviceTime")
    whole = torch.arange(12.0).view(6, 2)
    spread, scalar = whole.to(device), torch.tensor(3.0).to(device)
    spmd.place(spread)
    spmd.place(scalar)
    facts["transfers"] = count("TransferToDeviceTime") - before
    facts["parts"] = [part.tolist() for part, _ in parts(spread)]
    facts["fetched"] = [t.tolist() for t in spmd.fetch([scalar, spread, spread * 2])]

    Spmd(MeshShape(replicate=4)).place(spread)  # another place
    facts["moved"] = [part.tolist() == whole.tolist() for part, _ in parts(spread)]

    before = count("TransferToDeviceTime")
    specs = [spmd.spec(whole), None]
    sent = torch_xla._XLAC._xla_tensors_from_aten([whole, whole], [str(device)] * 2, specs)
    spmd.place(sent[0])  # is there already
    facts["sent_parts"] = [[list(part.shape) for part, _ in parts(tensor)] for tensor in sent]
    facts["transfers_of_sent"] = count("TransferToDeviceTime") - before

    column = torch.ones(2, 8).to(device)
    spmd.place(column)
    facts["column_parts"] = [list(part.shape) for part, _ in parts(column)]
    shapes = ((8, 2), (6, 2), (2,), (), (4,))
    facts["divided"] = [spmd.batch_spec(torch.zeros(shape)) is not None for shape in shapes]
    return facts


def plain() -> Facts:
    facts = train(None) | {"uneven_losses": train_uneven(None)}
    try:
        start_spmd()
    except BackendError as error:
        facts["late_start"] = str(error)
    return facts


def spmd() -> Facts:
    num_devices = start_spmd()
    again = start_spmd()
    layouts = {f"{n}x{num_devices // n}": n for n in (1, 2, 4) if num_devices % n == 0}
    facts: Facts = {
        name: train(MeshShape(replicate=n, shard=num_devices // n)) for name, n in layouts.items()
    }
    facts["devices"] = [num_devices, again]
    if num_devices > 1:
        facts["uneven_losses"] = train_uneven(MeshShape(shard=num_devices))
        facts["reload"] = reload(MeshShape(shard=num_devices))
        facts["placing"] = placing()
    return facts


def main() -> None:
    modes: dict[str, Callable[[], Facts]] = {"plain": plain, "spmd": spmd}
    print(json.dumps(modes[sys.argv[1]]()), flush=True)  # noqa: T201  # what the test reads
    os._exit(0)


if __name__ == "__main__":
    main()
