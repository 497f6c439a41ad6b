"""Time to the next batch of an epoch that is resumed at step 10, and at step 1,000,000.

python benchmarks/resume.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Final

import torch
from torch.utils.data import DataLoader, Dataset

from modelzoo_trainer.loading.position import EpochSeeds, EpochStart
from modelzoo_trainer.loading.sharding import WHOLE
from modelzoo_trainer.loading.sources import make_source

STEPS: Final = (10, 1_000_000)
BATCH_SIZE: Final = 8
NUM_SAMPLES: Final = (STEPS[-1] + 10) * BATCH_SIZE


class Numbers(Dataset[torch.Tensor]):
    """A data set large enough for the later step."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def seconds_to_next(loader: DataLoader[torch.Tensor], step: int) -> float:
    """Return the seconds from creating the iterator to the first batch after a step."""
    start = EpochStart(
        epoch=3,
        batch_idx=step,
        offset=step,
        seeds=EpochSeeds(order=1, fetches=2, samples=3),
        restores=True,
    )
    begin = time.perf_counter()
    source = make_source(loader, WHOLE, lambda own: [own], "train")
    number, _ = next(iter(source.begin(start)))
    taken = time.perf_counter() - begin
    source.close()
    assert number == step
    return taken


def main() -> None:
    """Print a table of medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="runs of each")
    options = parser.parse_args()
    print(f"{NUM_SAMPLES:,} samples, batches of {BATCH_SIZE}, torch {torch.__version__}\n")
    print("| order | step 10 | step 1,000,000 | ratio of medians |\n|---|---|---|---|")
    for name, shuffle in (("in order", False), ("shuffled", True)):
        loader = DataLoader(Numbers(), BATCH_SIZE, shuffle=shuffle)
        times: dict[int, list[float]] = {step: [] for step in STEPS}
        for _ in range(options.rounds):
            for step in STEPS:
                times[step].append(seconds_to_next(loader, step))
        early, late = (statistics.median(times[step]) for step in STEPS)
        print(f"| {name} | {early * 1e3:.2f} ms | {late * 1e3:.2f} ms | {late / early:.2f} |")


if __name__ == "__main__":
    main()
