"""Time per step over a hand-written loop, interleaved in one process.

python benchmarks/overhead.py [--steps 1000] [--rounds 9] [--peers] [--memory]
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from modelzoo_trainer import Callback, Logging, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import EarlyStopping, ModelEma, default_callbacks
from modelzoo_trainer.loggers import TensorBoardLogger, default_loggers
from modelzoo_trainer.models.registry import model_class

ROOT = Path(__file__).resolve().parents[1]
Timed = Callable[[], float]  # seconds a step


class Mlp(nn.Module):
    """64-64-10, as in the figures that others publish."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the loss of a pair of inputs and labels."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def mlp_batches() -> list[Any]:
    """Return 100 batches of 32."""
    return [(torch.randn(32, 64), torch.randint(0, 10, (32,))) for _ in range(100)]


def gpt() -> nn.Module:
    """Return a decoder of 4 layers."""
    model: nn.Module = model_class("gpt2")(
        vocab_size=256,
        hidden_size=96,
        num_hidden_layers=4,
        num_heads=4,
        filter_size=384,
        max_position_embeddings=64,
    )
    return model


def gpt_batches() -> list[Any]:
    """Return 10 batches of 16 sequences of 64 tokens."""
    tokens = [torch.randint(0, 256, (16, 65)) for _ in range(10)]
    return [{"input_ids": t[:, :-1], "labels": t[:, 1:]} for t in tokens]


class Listener(Callback):
    """Overrides one hook of each batch."""

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pass


@dataclass
class Case:
    """One row of the table."""

    name: str
    timed: Timed
    target: str = ""
    divisor: int = 1
    over: Timed | None = None  # None = the hand-written loop
    bound: float | None = None


def hand_loop(model: nn.Module, batches: list[Any], steps: int, averages: bool = False) -> Timed:
    """Return the loop that everything is compared with; with a moving average of the weights."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())
    weights = [param.detach() for param in model.parameters()]
    averaged = [weight.clone() for weight in weights]

    def run() -> float:
        begin = time.perf_counter()
        done = 0
        while done < steps:
            for batch in batches:
                output = model(batch)
                loss = output["loss"] if isinstance(output, dict) else output
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if averages:
                    torch._foreach_lerp_(averaged, weights, 0.001)
                done += 1
        return (time.perf_counter() - begin) / done

    return run


def ours(model: nn.Module, batches: list[Any], steps: int, **options: Any) -> Timed:
    """Return a fit of so many steps."""
    log_steps = options.pop("log_steps", 10)
    trainer = Trainer(
        model=model,
        optimizer=lambda m: torch.optim.AdamW(m.parameters()),
        loop=TrainingLoop(num_steps=steps, eval_frequency=None),
        logging=Logging(log_steps=log_steps),
        model_dir=tempfile.mkdtemp(),
        seed=1,
        **options,
    )

    def run() -> float:
        begin = time.perf_counter()
        trainer.fit(batches)
        return (time.perf_counter() - begin) / steps

    return run


def cases(steps: int) -> list[Case]:
    """Return the rows on the MLP."""
    batches = mlp_batches()

    def mlp(**options: Any) -> Timed:
        return ours(Mlp(), batches, steps, **options)

    def defaults(log_steps: int) -> Timed:
        return mlp(log_steps=log_steps, callbacks=default_callbacks(), loggers=default_loggers())

    many = [Callback() for _ in range(200)]
    listeners = [Listener() for _ in range(20)]
    core = mlp(check_loss=False)
    with_average = hand_loop(Mlp(), batches, steps, averages=True)
    return [
        Case("(a) every core callback, nothing else", core, "at most 15", bound=15),
        Case("(b) YAML defaults, log_steps 10", defaults(10), "at most 30", bound=30),
        Case("(c) YAML defaults, log_steps 1", defaults(1), "at most 60", bound=60),
        Case(
            "(d) (a) + 200 silent callbacks",
            mlp(callbacks=many, check_loss=False),
            "under 1 over (a)",
            over=core,
            bound=1,
        ),
        Case(
            "(e) (a) + 20 that listen, each",
            mlp(callbacks=listeners, check_loss=False),
            "at most 0.3 over (a)",
            divisor=20,
            over=core,
            bound=0.3,
        ),
        Case(
            "(f) (b) + EarlyStopping, ModelEma, TensorBoard",
            mlp(
                callbacks=[
                    *default_callbacks(),
                    EarlyStopping("loss", patience=10**9),
                    ModelEma(decay=0.999),
                ],
                loggers=[*default_loggers(), TensorBoardLogger()],
            ),
            "at most 80 over a loop by hand that averages as well",
            over=with_average,
            bound=80,
        ),
    ]


def paired(base: Timed, other: Timed, rounds: int) -> tuple[float, float]:
    """Return the medians of `base`, and of the differences of runs in turn: base, other, base."""
    bases, differences = [], []
    for _ in range(rounds):
        before, between, after = base(), other(), base()
        bases.append(before)
        differences.append(between - (before + after) / 2)
    return statistics.median(bases), statistics.median(differences)


def print_table(steps: int, rounds: int) -> None:
    """Print the rows of the MLP and the GPT."""
    hand = hand_loop(Mlp(), mlp_batches(), steps)
    rows = cases(steps)
    for run in (hand, *(row.timed for row in rows), *(row.over for row in rows if row.over)):
        run()
    print("| workload | per step | target | met |\n|---|---|---|---|")
    for row in rows:
        base = row.over or hand
        alone, extra = paired(base, row.timed, rounds)
        figure = extra * 1e6 / row.divisor
        met = "yes" if row.bound is None or figure <= row.bound else "no"
        print(f"| {row.name} | {figure:+.1f} us | {row.target} us | {met} |", flush=True)
    num = max(20, steps // 20)
    base, fit = (
        hand_loop(gpt(), gpt_batches(), num),
        ours(gpt(), gpt_batches(), num, check_loss=False),
    )
    base(), fit()
    alone, extra = paired(base, fit, rounds)
    share = 100 * extra / alone
    met = "yes" if share <= 1 else "no"
    name = f"GPT, 4 layers ({alone * 1e3:.1f} ms a step by hand)"
    print(f"| {name} | {share:+.2f} % | within 1 % | {met} |")


def print_memory() -> None:
    """Print how memory grows over 10,000 steps with the defaults."""
    run = ours(Mlp(), mlp_batches(), 1000, callbacks=default_callbacks(), loggers=default_loggers())
    run()
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(10):
        run()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    print(f"\nMemory after 10,000 steps: {(after - before) / 1024:+.1f} KiB")


def print_start() -> None:
    """Print the time of --help, and of the import on top of torch's."""

    def seconds(*command: str) -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, capture_output=True, cwd=ROOT)
        return time.perf_counter() - begin

    shown = statistics.median(seconds("run.py", "--help") for _ in range(5))
    names = "import torch", "import torch; from modelzoo_trainer import Trainer"
    pairs = [[seconds("-c", name) for name in names] for _ in range(5)]
    extra = statistics.median(both - alone for alone, both in pairs)
    print(f"\nrun.py --help: {shown:.2f} s (target 0.5)")
    print(f"import of Trainer on top of torch: {extra:+.2f} s (target 0.3)")


def print_peers(steps: int, rounds: int) -> None:
    """Print the rows of other trainers that are installed."""
    from peers import PEERS  # beside this file

    hand = hand_loop(Mlp(), mlp_batches(), steps)
    for name, (module, make) in PEERS.items():
        if importlib.util.find_spec(module) is None:
            print(f"| {name} | not installed | | |")
            continue
        run = make(Mlp(), mlp_batches(), steps)
        run()
        _, extra = paired(hand, run, rounds)
        print(f"| {name} | {extra * 1e6:+.1f} us | | |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Time per step over a hand-written loop.")
    parser.add_argument("--steps", type=int, default=1000, help="steps a run")
    parser.add_argument("--rounds", type=int, default=9, help="paired runs; medians are shown")
    parser.add_argument("--peers", action="store_true", help="other trainers, if installed")
    parser.add_argument("--memory", action="store_true", help="memory over 10,000 steps")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("modelzoo_trainer").addHandler(logging.NullHandler())
    print(f"torch {torch.__version__}, one thread, medians of {arguments.rounds} paired rounds\n")
    print_table(arguments.steps, arguments.rounds)
    if arguments.peers:
        print_peers(arguments.steps, max(3, arguments.rounds // 3))
    print_start()
    if arguments.memory:
        print_memory()


if __name__ == "__main__":
    main()
