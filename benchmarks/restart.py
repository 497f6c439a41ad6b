"""Restart of a decoder with 500 million parameters, beside loading its checkpoint alone.

python -m benchmarks.restart [--processes 2] [--rounds 3] [--layers 14]

Each process has its shards (FSDP2) of parameters and AdamW's state, 6 GB in all. `restart`: from
the creation of the trainer until the first step begins; `load`: from the same beginning until the
checkpoint is loaded. `new run`: without a checkpoint, so that all parameters are drawn at random.
Medians of the slower process, in turn.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import nn
from typing_extensions import override

from modelzoo_trainer import Callback, Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.zoo.models.decoder_names import Llama
from tests.distributed.ranks import run_ranks

LENGTH: Final = 16
SETTINGS: Final[dict[str, Any]] = {
    "vocab_size": 32000,
    "hidden_size": 1536,
    "num_heads": 12,
    "filter_size": 4096,
    "max_position_embeddings": LENGTH,
    "position_embedding_type": "rotary",
    "rotary_dim": 128,
    "norm_type": "rmsnorm",
    "nonlinearity": "swiglu",
    "use_projection_bias_in_attention": False,
    "use_ffn_bias_in_attention": False,
    "use_ffn_bias": False,
    "share_embedding_weights": False,
    "dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
}


class Maker:
    """Makes the decoder, as a configuration file does."""

    makes = Llama

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers

    def __call__(self) -> nn.Module:
        """Return a new decoder."""
        return Llama(**SETTINGS, num_hidden_layers=self.num_layers)


class AdamMaker:
    """Makes the optimizer, as a configuration file does."""

    makes = torch.optim.AdamW

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return a new optimizer."""
        return torch.optim.AdamW(model.parameters(), lr=1e-4)


class FirstStep(Callback):
    """Notes when the first step begins."""

    def __init__(self) -> None:
        self.begin = 0.0

    @override
    def on_train_batch_start(
        self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int
    ) -> None:
        self.begin = self.begin or time.perf_counter()


def run(rank: int, folder: Path, num_layers: int, what: str) -> tuple[float, int]:
    """Return the seconds of a process, and how many parameters it drew."""
    logging.disable(logging.WARNING)
    tokens = torch.arange(2 * LENGTH).reshape(2, LENGTH)
    batches = [{"input_ids": tokens, "labels": tokens}] * 4
    first = FirstStep()
    checkpoint = Checkpoint(save_final_checkpoint=what == "new run")
    checkpoint.expected = ...  # a fit or a load follows at once, as in a run of a file
    begin = time.perf_counter()
    trainer = Trainer(
        device="cpu",
        backend={"parallel": {"shard": -1}},
        model_dir=folder,
        model=Maker(num_layers),
        optimizer=AdamMaker(),
        loop=TrainingLoop(max_steps=1 if what == "new run" else 2, eval_frequency=None),
        checkpoint=checkpoint,
        callbacks=[first],
        progress="none",
        seed=1,
    )
    with trainer:
        if what == "load":
            trainer.load_checkpoint(folder / "checkpoint_1")
            end = time.perf_counter()
        else:
            trainer.fit(batches)
            end = first.begin
        drawn = trainer.backend.initial_values.num_drawn
    assert drawn is not None
    return end - begin, drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=14)
    args = parser.parse_args()
    with torch.device("meta"):
        num = sum(param.numel() for param in Maker(args.layers)().parameters())
    print(f"{num:,} parameters, {args.processes} processes\n")
    found: dict[str, list[float]] = {"restart": [], "load": []}
    drawn: dict[str, int] = {}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run"

        def measure(what: str) -> float:
            ranks = run_ranks(args.processes, run, path, args.layers, what, timeout_s=1800)
            drawn[what] = sum(one for _, one in ranks)
            return max(seconds for seconds, _ in ranks)

        found["new run"] = [measure("new run")]
        for _ in range(args.rounds):
            for what in ("load", "restart"):
                found[what].append(measure(what))
    print("| | seconds | beside load | parameters drawn |\n|---|---|---|---|")
    load = statistics.median(found["load"])
    for what, seconds in found.items():
        middle = statistics.median(seconds)
        print(f"| {what} | {middle:.1f} | {middle / load:.2f} | {drawn[what]:,} |")


if __name__ == "__main__":
    main()
