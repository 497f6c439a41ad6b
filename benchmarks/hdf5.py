"""Speed of reading HDF5 files, as a share of a plain loop over h5py.

python benchmarks/hdf5.py [--rounds 3] [--rows 20000] [--files 4] [--length 2048]
    [--batch-size 32] [--cpu-time]

The plain loop is `for i in order: d[i]` over files that stay open, stacked into batches; of a
corpus, `d[i * length : (i + 1) * length + 1]`, as int32, which an embedding takes. Ours is the
dataloader of `GptHDF5MapDataProcessor`, with the check of token ids, in the same order. With
workers, the plain loop is in the workers of a torch DataLoader with the same options. A round is
plain, ours, plain, in one process; `share` is the samples per second of ours divided by the mean of
the two plain ones of its round. The table shows medians of the rounds. The target is a share of at
least 90 %. Of few rows, the start of an epoch in the workers counts most. With `--cpu-time`,
seconds are those of the CPU, of workers including their start in each epoch: for a machine that has
other work.

Samples are (3, length) int32, compressed with gzip in chunks of one sample, as published files are;
`gzip 1, shuffle` is what our preprocessing writes. A corpus is contiguous uint16. Files are in the
cache of the operating system.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from modelzoo_trainer.zoo.data.hdf5.gpt import GptHDF5MapDataProcessor

LEAST_SHARE: Final = 0.9
VOCAB_SIZE: Final = 50257
FORMATS: Final = {
    "samples, gzip 4": {"compression": "gzip"},
    "samples, gzip 1, shuffle": {"compression": "gzip", "compression_opts": 1, "shuffle": True},
    "corpus": {},
}


class Plain(Dataset[Any]):
    """Batches of samples that h5py reads one by one.

    Args:
        paths: Files with equally many samples.
        length: Tokens per sample of a corpus; None = files have whole samples.
    """

    def __init__(self, paths: list[Path], length: int | None) -> None:
        self.paths = paths
        self.length = length
        self.data: list[Any] = []

    def batches(self, order: list[int], size: int) -> Iterator[torch.Tensor]:
        """Yield batches in an order."""
        for start in range(0, len(order) - size + 1, size):
            yield self.__getitems__(order[start : start + size])

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        if not self.data:
            self.data = [h5py.File(path, "r")["data"] for path in self.paths]
        data, length = self.data, self.length
        last = len(data) - 1
        if length is None:
            num = data[0].shape[0]
            rows = [data[i // num][i % num] for i in indices]
        else:
            num = (data[0].shape[0]) // length
            rows = []
            for i in indices:
                first, file = (i % num) * length, min(i // num, last)
                rows.append(data[file][first : first + length + 1])
        return torch.from_numpy(np.stack(rows, dtype=np.int32))


def tokens(num: int) -> NDArray[np.int64]:
    """Return token ids that are about as frequent as those of a text."""
    return np.random.default_rng(0).zipf(1.2, num) % VOCAB_SIZE


def write(folder: Path, arguments: argparse.Namespace, options: dict[str, Any]) -> list[Path]:
    """Write the files of a format."""
    length, num = arguments.length, arguments.rows // arguments.files
    paths = []
    folder.mkdir()
    for number in range(arguments.files):
        paths.append(folder / f"{number}.h5")
        with h5py.File(paths[-1], "w") as file:
            if options:
                rows = np.ones((num, 3, length), np.int32)
                text = tokens(num * length + 1)
                rows[:, 0], rows[:, 2] = text[:-1].reshape(num, -1), text[1:].reshape(num, -1)
                file.create_dataset("data", data=rows, chunks=(1, 3, length), **options)
            else:
                file["data"] = tokens(num * length + 1).astype(np.uint16)
    return paths


def samples_per_s(batches: Iterable[Any], num: int, clock: Callable[[], float]) -> float:
    """Return how many of `num` samples are read per second."""
    begin = clock()
    for _ in batches:
        pass
    return num / (clock() - begin)


def cpu_time() -> float:
    """Return the CPU time of this process and of workers that have ended, in seconds."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def measure(
    paths: list[Path],
    arguments: argparse.Namespace,
    *,
    workers: int,
    shuffle: bool,
    length: int | None,
) -> list[tuple[float, float]]:
    """Return (samples per second of the plain loop, of ours) of each round."""
    size = arguments.batch_size
    made = GptHDF5MapDataProcessor(
        data_dir=str(paths[0].parent),
        batch_size=size,
        shuffle=shuffle,
        num_workers=workers,
        max_sequence_length=length,
        persistent_workers=not arguments.cpu_time,
    )
    persistent = workers > 0 and not arguments.cpu_time
    made.dataset.check_model(VOCAB_SIZE, arguments.length)
    ours = made.create_dataloader()
    num = len(ours) * size
    plain = Plain(paths, length)
    order = list(ours.sampler)[:num]
    loader = DataLoader(
        plain,
        batch_size=size,
        sampler=order,
        num_workers=workers,
        collate_fn=lambda batch: batch,
        prefetch_factor=10 if workers else None,
        persistent_workers=persistent,
    )
    clock = cpu_time if arguments.cpu_time else time.perf_counter
    found = []
    for number in range(arguments.rounds + 1):
        times = []
        for is_plain in (True, False, True):
            if not is_plain:
                times.append(samples_per_s(ours, num, clock))
            elif workers:
                times.append(samples_per_s(loader, num, clock))
            else:
                times.append(samples_per_s(plain.batches(order, size), num, clock))
        if number:  # the first one starts workers and opens files
            found.append(((times[0] + times[2]) / 2, times[1]))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=20000)
    parser.add_argument("--files", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    is_reached = True
    print(f"{'format':26} {'order':9} {'workers':>7} {'plain/s':>9} {'ours/s':>9} {'share':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, options) in enumerate(FORMATS.items()):
            paths = write(Path(folder) / str(number), arguments, options)
            length = None if options else arguments.length
            for shuffle in (False, True):
                for workers in (0, 2):
                    rounds = measure(
                        paths, arguments, workers=workers, shuffle=shuffle, length=length
                    )
                    plain, ours = (statistics.median(one) for one in zip(*rounds, strict=True))
                    share = statistics.median(own / other for other, own in rounds)
                    is_reached &= share >= LEAST_SHARE
                    order = "shuffled" if shuffle else "in order"
                    print(
                        f"{name:26} {order:9} {workers:7} {plain:9.0f} {ours:9.0f} {share:7.1%}",
                        flush=True,
                    )
    print(f"target: a share of {LEAST_SHARE:.0%}: {'reached' if is_reached else 'missed'}")


if __name__ == "__main__":
    main()
