"""A small model, and training it in any arrangement of processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from backends.cpu import CpuBackend
from backends.deferred_init import materialize
from backends.parallel.apply import accumulating, make_mesh, make_mesh_of_rows, parallelize
from backends.parallel.config import ParallelSettings
from backends.parallel.context import split_rows
from backends.parallel.norms import ShardedNorms

VOCAB, WIDTH, LENGTH, NUM_STEPS, BATCH = 11, 8, 5, 4, 12
CPU = torch.device("cpu")
PLAN = {
    "embedding": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "colwise_gather",
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(self.down(functional.gelu(self.up(self.norm(hidden)))))


class Net(nn.Module):
    """A language model whose output layer has the embedding's weights."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        for layer in self.layers:
            layer.dropout.p = dropout
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("saved", torch.zeros(3))
        self.register_buffer("passing", torch.zeros(3), persistent=False)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        scores = self.head(self.norm(hidden))
        assert type(scores) is Tensor
        return functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make_net(seed: int = 0, dropout: float = 0.0) -> Net:
    torch.manual_seed(seed)
    return Net(dropout)


def data() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCAB, (NUM_STEPS, BATCH, LENGTH), generator=generator)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(
    model: nn.Module,
    module: nn.Module,
    part: tuple[int, int] = (0, 1),
    *,
    make_optimizer: Any = None,
    max_norm: float = 0.3,
    num_parts: int = 1,
) -> dict[str, Any]:
    """Return losses, norms before and after clipping, and the weights at the end."""
    params = [param for param in model.parameters() if param.requires_grad]
    make_optimizer = make_optimizer or (lambda given: torch.optim.AdamW(given, lr=0.01))
    optimizer = make_optimizer(params)
    place, num = part
    losses, norms, clipped = [], [], []
    gradients = ShardedNorms(CpuBackend())
    for batch in data():
        loss = torch.zeros((), dtype=torch.float64)
        micro = batch.chunk(num)[place].chunk(num_parts)
        for tokens in micro[:-1]:
            with accumulating(module, model):
                (module(tokens) / num_parts).backward()
        for tokens in micro[-1:]:
            loss = module(tokens)
            (loss / num_parts).backward()
        loss = loss.detach().clone()
        if num > 1:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        losses.append(loss.item())
        norms.append(gradients.grad_norm(params).item())
        assert gradients.clip_grad_norm(params, max_norm).item() == norms[-1]
        clipped.append(gradients.grad_norm(params).item())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: whole(param).numpy() for name, param in model.named_parameters()}
    is_shared = getattr(model, "head", None) and model.head.weight is model.embedding.weight
    return {
        "losses": losses,
        "norms": norms,
        "clipped": clipped,
        "weights": weights,
        "is_shared": is_shared,
    }


def train_parallel(
    rank: int, options: dict[str, Any], model: nn.Module | None = None, **how: Any
) -> dict[str, Any]:
    """Train a net whose weights differ between processes at first, as options say."""
    model = make_net(seed=rank) if model is None else model
    module, part = spread(model, options)
    return train(model, module, part, **how)


def spread(
    model: nn.Module, options: dict[str, Any], compile: Any = None
) -> tuple[nn.Module, tuple[int, int]]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    settings = ParallelSettings.from_options(options)
    sizes = settings.sizes(dist.get_world_size())
    mesh = make_mesh(sizes, "cpu")
    rows = make_mesh_of_rows(sizes, "cpu")
    if rows is not None:
        split_rows(model, rows)
    initialize = partial(materialize, device=CPU)
    module = parallelize(model, settings, sizes, mesh, CPU, compile, initialize)
    return module, (dist.get_rank() // sizes.ranks_per_data_shard, sizes.num_data_shards)


def two_steps(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return the losses of two steps of AdamW, and the whole weights after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    losses = []
    for _ in range(2):
        loss = model(batch)["loss"]
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: whole(param).numpy() for name, param in model.named_parameters()}
    return {"losses": losses, "weights": weights}
