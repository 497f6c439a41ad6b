"""Overhead per step compared with a hand-written loop, interleaved in one process.

python benchmarks/overhead.py [--steps 1000] [--rounds 9] [--rows ghijkl] [--peers] [--memory]

Rows (a) to (f) train on a list of batches. Rows (g) to (k) train on a torch DataLoader; the
hand-written loop has its own DataLoader of the same kind over the same data set. (j) has persistent
workers on both sides. Row (l) trains on another iterable: a stream without a length.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from typing_extensions import override

from modelzoo_trainer import Callback, Logging, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import EarlyStopping, ModelEma, default_callbacks
from modelzoo_trainer.loggers import TensorBoardLogger, default_loggers
from modelzoo_trainer.zoo.models.registry import model_class

ROOT = Path(__file__).resolve().parents[1]
EPOCH = 100  # batches
LIST_ROWS, LOADER_ROWS = "abcdef", "ghijkl"
Timed = Callable[[], float]  # seconds per step
Maker = Callable[[nn.Module, Any, int], Timed]  # creates a run with that number of steps


class Mlp(nn.Module):
    """64-64-10, as in published benchmarks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, batch: Any) -> torch.Tensor:
        """Return the loss of a pair of inputs and labels."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def mlp_batches() -> list[Any]:
    """Return 100 batches of 32."""
    return [(torch.randn(32, 64), torch.randint(0, 10, (32,))) for _ in range(EPOCH)]


def mlp_samples(batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and labels of 100 batches."""
    num = EPOCH * batch_size
    return torch.randn(num, 64), torch.randint(0, 10, (num,))


class Samples(Dataset[Any]):
    """A data set that loads one sample at a time."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x = x
        self.y = y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[idx], self.y[idx]


class ListedSamples(Samples):
    """A data set that loads the samples of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the samples of some indices."""
        return [(self.x[idx], self.y[idx]) for idx in indices]


class Stream:
    """Batches one after the other: neither a DataLoader nor a list, and without a length."""

    def __init__(self) -> None:
        batches = mlp_batches()
        self.read = lambda: iter(batches)

    def __iter__(self) -> Iterator[Any]:
        yield from self.read()


Data = list[Any] | DataLoader[Any] | Stream


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
    """Override one hook of each batch."""

    @override
    def on_train_batch_end(
        self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pass


class EpochEnds(Callback):
    """Record when epochs end."""

    def __init__(self) -> None:
        self.times: list[float] = []

    @override
    def on_train_epoch_end(self, trainer: Trainer, epoch: int) -> None:
        self.times.append(time.perf_counter())


@dataclass
class Case:
    """A row of the table.

    Args:
        name: Begins with the letter of the row.
        timed: What is measured.
        baseline: What it is compared with.
        minus: Baseline and `timed` of another row, whose overhead is subtracted.
    """

    name: str
    timed: Timed
    baseline: Timed
    target: str
    bound: float
    divisor: int = 1
    minus: tuple[Timed, Timed] | None = None

    @property
    def letter(self) -> str:
        """Letter of the row, for `--rows`."""
        return self.name[1]


def hand_loop(model: nn.Module, batches: Data, steps: int, averages: bool = False) -> Timed:
    """Return the hand-written loop, optionally with a moving average of the weights."""
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


def ours(model: nn.Module, batches: Data, steps: int, **options: Any) -> Timed:
    """Return a fit of that number of steps."""
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


def list_cases(steps: int) -> list[Case]:
    """Return the rows on the MLP and a list of batches."""
    batches = mlp_batches()

    def mlp(**options: Any) -> Timed:
        return ours(Mlp(), batches, steps, **options)

    def defaults(log_steps: int) -> Timed:
        return mlp(log_steps=log_steps, callbacks=default_callbacks(), loggers=default_loggers())

    many = [Callback() for _ in range(200)]
    listeners = [Listener() for _ in range(20)]
    hand = hand_loop(Mlp(), batches, steps)
    core = mlp(check_loss=False)
    return [
        Case("(a) every core callback, nothing else", core, hand, "at most 15", 15),
        Case("(b) YAML defaults, log_steps 10", defaults(10), hand, "at most 30", 30),
        Case("(c) YAML defaults, log_steps 1", defaults(1), hand, "at most 60", 60),
        Case(
            "(d) (a) + 200 silent callbacks",
            mlp(callbacks=many, check_loss=False),
            core,
            "under 1 over (a)",
            1,
        ),
        Case(
            "(e) (a) + 20 that listen, each",
            mlp(callbacks=listeners, check_loss=False),
            core,
            "at most 0.3 over (a)",
            0.3,
            divisor=20,
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
            hand_loop(Mlp(), batches, steps, averages=True),
            "at most 80 over a loop by hand that averages as well",
            80,
        ),
    ]


def loader(dataset: Dataset[Any], batch_size: int = 32, **options: Any) -> DataLoader[Any]:
    """Return a DataLoader for the DataLoader rows."""
    return DataLoader(dataset, batch_size, shuffle=True, **options)


def whole_epochs(steps: int) -> int:
    """Round a number of steps up to whole epochs, at least two."""
    return max(2, -(-steps // EPOCH)) * EPOCH


def loader_pair(dataset: Dataset[Any], steps: int, batch_size: int = 32) -> tuple[Timed, Timed]:
    """Return the hand-written loop and a fit as in (a), each with its own DataLoader."""
    return (
        hand_loop(Mlp(), loader(dataset, batch_size), steps),
        ours(Mlp(), loader(dataset, batch_size), steps, check_loss=False),
    )


def worker_pair(dataset: Dataset[Any], steps: int) -> tuple[Timed, Timed]:
    """Return the hand-written loop and a fit as in (a), with two persistent workers on both sides.

    A fit ends its workers, so both sides start them in each run, and are timed from the end of the
    first epoch to the end of the last.
    """
    workers = {"num_workers": 2, "persistent_workers": True}
    timed_steps = steps - EPOCH
    ends = EpochEnds()
    options = {"callbacks": [ends], "check_loss": False}
    fit = ours(Mlp(), loader(dataset, **workers), steps, **options)
    model = Mlp()

    def by_hand() -> float:
        batches = loader(dataset, **workers)
        first_epoch = hand_loop(model, batches, EPOCH)
        others = hand_loop(model, batches, timed_steps)
        first_epoch()
        return others()

    def by_trainer() -> float:
        ends.times.clear()
        fit()
        return (ends.times[-1] - ends.times[0]) / timed_steps

    return by_hand, by_trainer


def loader_cases(steps: int) -> list[Case]:
    """Return the rows on the MLP and DataLoaders."""
    steps = whole_epochs(steps)
    samples = mlp_samples(32)
    hand_g, fit_g = loader_pair(TensorDataset(*samples), steps)
    hand_h, fit_h = loader_pair(Samples(*samples), steps)
    hand_i, fit_i = loader_pair(ListedSamples(*samples), steps)
    hand_j, fit_j = worker_pair(Samples(*samples), steps)
    hand_k, fit_k = loader_pair(Samples(*mlp_samples(256)), steps, batch_size=256)
    return [
        Case("(g) DataLoader over a TensorDataset", fit_g, hand_g, "at most 20", 20),
        Case("(h) DataLoader, `__getitem__`", fit_h, hand_h, "at most 30", 30),
        Case("(i) DataLoader, `__getitems__`", fit_i, hand_i, "at most 25", 25),
        Case("(j) (h) with two persistent workers", fit_j, hand_j, "at most 30", 30),
        Case(
            "(k) (h) with batches of 256, over (h)",
            fit_k,
            hand_k,
            "at most 10 over (h)",
            10,
            minus=(hand_h, fit_h),
        ),
        Case(
            "(l) another iterable, as a stream",
            ours(Mlp(), Stream(), steps, check_loss=False),
            hand_loop(Mlp(), Stream(), steps),
            "at most 50",
            50,
        ),
    ]


def extra_of(base: Timed, other: Timed) -> tuple[float, float]:
    """Return the time of `base`, and the extra time of `other`; runs base, other, base."""
    before, between, after = base(), other(), base()
    alone = (before + after) / 2
    return alone, between - alone


def paired(
    base: Timed, other: Timed, rounds: int, minus: tuple[Timed, Timed] | None = None
) -> tuple[float, float]:
    """Return the median time of `base`, and the median extra time of `other`.

    `minus` is another base and other, whose extra time is subtracted in each round.
    """
    bases, differences = [], []
    for _ in range(rounds):
        alone, extra = extra_of(base, other)
        bases.append(alone)
        differences.append(extra - (extra_of(*minus)[1] if minus else 0))
    return statistics.median(bases), statistics.median(differences)


def print_table(steps: int, rounds: int, letters: str) -> None:
    """Print the rows of the MLP, and of the GPT unless `letters` selects rows."""
    wanted = set(letters or LIST_ROWS + LOADER_ROWS)
    rows = list_cases(steps) if wanted & set(LIST_ROWS) else []
    rows += loader_cases(steps) if wanted & set(LOADER_ROWS) else []
    rows = [row for row in rows if row.letter in wanted]
    for run in dict.fromkeys(
        run for row in rows for run in (row.baseline, row.timed, *(row.minus or ()))
    ):
        run()
    print("| workload | per step | target | met |\n|---|---|---|---|")
    for row in rows:
        _, extra = paired(row.baseline, row.timed, rounds, row.minus)
        figure = extra * 1e6 / row.divisor
        met = "yes" if figure <= row.bound else "no"
        print(f"| {row.name} | {figure:+.1f} us | {row.target} us | {met} |", flush=True)
    if not letters:
        print_gpt(max(20, steps // 20), rounds)


def print_gpt(steps: int, rounds: int) -> None:
    """Print the row of the GPT."""
    base = hand_loop(gpt(), gpt_batches(), steps)
    fit = ours(gpt(), gpt_batches(), steps, check_loss=False)
    base(), fit()
    alone, extra = paired(base, fit, rounds)
    share = 100 * extra / alone
    met = "yes" if share <= 1 else "no"
    name = f"GPT, 4 layers ({alone * 1e3:.1f} ms a step by hand)"
    print(f"| {name} | {share:+.2f} % | within 1 % | {met} |")


def print_memory() -> None:
    """Print the memory growth over 10,000 steps with the default callbacks."""
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
    """Print the time of --help, and of the import in addition to that of torch."""

    def seconds(*command: str) -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, capture_output=True, cwd=ROOT)
        return time.perf_counter() - begin

    shown = statistics.median(seconds("run.py", "--help") for _ in range(5))
    names = "import torch", "import torch; from modelzoo_trainer import Trainer"
    pairs = [[seconds("-c", name) for name in names] for _ in range(5)]
    extra = statistics.median(both - alone for alone, both in pairs)
    print(f"\nrun.py --help: {shown:.2f} s (target 0.5)")
    print(f"import of Trainer in addition to torch: {extra:+.2f} s (target 0.3)")


def print_peers(steps: int, rounds: int, letters: str) -> None:
    """Print the overhead of installed other trainers and of this one, as in (a) and (h)."""
    from peers import PEERS  # beside this file

    found = {name: make for name, (module, make) in PEERS.items() if find_spec(module)}
    makers: dict[str, Maker] = {"ours": partial(ours, check_loss=False), **found}
    dataset = Samples(*mlp_samples(32))
    print("\n| trainer | data | per step |\n|---|---|---|")
    if not letters or "a" in letters:
        print_trainers("(a) list of batches", makers, mlp_batches, steps, rounds)
    if not letters or "h" in letters:
        steps = whole_epochs(steps)
        print_trainers("(h) DataLoader", makers, lambda: loader(dataset), steps, rounds)
    if not letters or "l" in letters:
        streaming = {name: makers[name] for name in ("ours", "Ignite") if name in makers}
        print_trainers("(l) a stream", streaming, Stream, whole_epochs(steps), rounds)
    for name in PEERS:
        if name not in found:
            print(f"| {name} | not installed | |")


def print_trainers(
    name: str,
    makers: dict[str, Maker],
    make_data: Callable[[], Data],
    steps: int,
    rounds: int,
) -> None:
    """Print the overhead of each trainer; each round runs all in turn."""
    hand = hand_loop(Mlp(), make_data(), steps)
    runs = {trainer: make(Mlp(), make_data(), steps) for trainer, make in makers.items()}
    for run in (hand, *runs.values()):
        run()
    extras: dict[str, list[float]] = {trainer: [] for trainer in runs}
    for _ in range(rounds):
        for trainer, run in runs.items():
            extras[trainer].append(extra_of(hand, run)[1])
    for trainer, values in extras.items():
        print(f"| {trainer} | {name} | {statistics.median(values) * 1e6:+.1f} us |", flush=True)


def arguments_of() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Time per step over a hand-written loop.")
    parser.add_argument("--steps", type=int, default=1000, help="steps per run")
    parser.add_argument("--rounds", type=int, default=9, help="paired runs; medians are shown")
    parser.add_argument(
        "--rows",
        default="",
        metavar="LETTERS",
        help="only these rows, such as ghijkl; default: all",
    )
    parser.add_argument("--peers", action="store_true", help="other trainers, if installed")
    parser.add_argument("--memory", action="store_true", help="memory growth over 10,000 steps")
    arguments = parser.parse_args()
    if unknown := set(arguments.rows) - set(LIST_ROWS + LOADER_ROWS):
        known = LIST_ROWS + LOADER_ROWS
        parser.error(f"--rows: {min(unknown)!r} is not a row; the rows are {known}")
    return arguments


def main() -> None:
    """Print the tables."""
    arguments = arguments_of()
    torch.set_num_threads(1)
    logging.getLogger("modelzoo_trainer").addHandler(logging.NullHandler())
    print(f"torch {torch.__version__}, one thread, medians of {arguments.rounds} paired rounds\n")
    print_table(arguments.steps, arguments.rounds, arguments.rows)
    if arguments.peers:
        print_peers(arguments.steps, max(3, arguments.rounds // 3), arguments.rows)
    if not arguments.rows:
        print_start()
    if arguments.memory:
        print_memory()


if __name__ == "__main__":
    main()
