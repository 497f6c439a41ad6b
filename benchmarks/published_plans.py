"""Devices that published decoders fit on: python -m benchmarks.published_plans FOLDER [--jobs 2].

For each file that trains a decoder, at the size, the length and the batch that it has, the smallest
setting of devices of 80 GiB is searched as by `modelzoo-trainer plan FILE --devices 512 --memory
72GiB`: a tenth of each device stays free. No data and no device are needed. With `--write` the rows
replace those of the same files in docs/published.md; `--only` renews some of them.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import re
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

_PAGE: Final = Path(__file__).resolve().parents[1] / "docs/published.md"
_BEGIN, _END = "<!-- plans: begin -->\n", "<!-- plans: end -->\n"
_DEVICES: Final = 512
_MEMORY: Final = 72 << 30  # of 80 GiB: allocators, libraries and NCCL take some
_HEAD: Final = (
    "| file | parameters | batch | devices | setting | memory of each | FLOPs of a step |\n"
    "|---|---|---|---|---|---|---|\n"
)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table.

    Args:
        name: The file, relative to the folder.
        cells: The other cells.
        fits: Whether a setting fits.
        seconds: Of the search.
    """

    name: str
    cells: tuple[str, ...]
    fits: bool
    seconds: float = 0.0

    @property
    def line(self) -> str:
        """The row in Markdown."""
        return f"| `{self.name}` | {' | '.join(self.cells)} |"


def decoder_plan(path: Path) -> Any:
    """Return the plan of a file that trains a decoder; None for others.

    Raises:
        ConfigError: If the file is invalid.
    """
    from modelzoo_trainer.zoo.models.decoder import Decoder
    from modelzoo_trainer.zoo.models.dpo import Dpo

    plans = _load(path, [])
    target = getattr(plans[0].init.get("model"), "target", None)
    is_decoder = isinstance(target, type) and issubclass(target, Decoder | Dpo)
    return plans[0] if is_decoder and plans[0].method == "fit" else None


def _load(path: Path, changes: list[str]) -> list[Any]:
    from modelzoo_trainer.config.build import load_plans
    from modelzoo_trainer.config.shipped import shipped_names

    options = {"device": "cpu"}
    return load_plans(
        path, shipped_names, mode=None, changes=changes, options=options, for_a_run=False
    )


def search(path: Path, name: str) -> Row | None:
    """Return the row of a file; None if it trains no decoder."""
    from modelzoo_trainer.errors import in_bytes
    from modelzoo_trainer.tools.planning.figures import in_thousands
    from modelzoo_trainer.tools.planning.search import search as find

    warnings.simplefilter("ignore")  # of settings without an effect
    if decoder_plan(path) is None:
        return None
    begin = time.perf_counter()
    found = find(partial(_load, path), 0, _DEVICES, _MEMORY)
    figures, choice = found.figures, found.choice
    cells = (
        in_thousands(figures.num_params),
        str(figures.num_samples * figures.num_data_shards),
        str(choice.mesh.num_devices) if found.fits else f"more than {_DEVICES}",
        _words(choice),
        in_bytes(figures.peak_bytes),
        in_thousands(figures.flops * choice.mesh.num_devices, "FLOP"),
    )
    return Row(name, cells, found.fits, time.perf_counter() - begin)


def _words(choice: Any) -> str:
    """Return a setting in a few words."""
    mesh = choice.mesh
    axes = {"shard": mesh.shard, "context": mesh.context, "tensor": mesh.tensor}
    words = [f"{name} {size}" for name, size in axes.items() if size > 1]
    if choice.splits_positions:
        words.append("sequence_parallel")
    words.append(f"micro-batch {choice.micro_batch}")
    if choice.recomputation is not None:
        words.append(f"recomputation {choice.recomputation}")
    return ", ".join(words)


def rows_of_page() -> dict[str, str]:
    """Return the lines of the table of the page, by file."""
    text = _PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0]
    return {found[1]: found[0] for found in re.finditer(r"^\| `([^`]+)` \|.*$", text, re.M)}


def write_page(rows: Iterable[Row]) -> None:
    """Replace rows of the table of the documentation's page."""
    lines = rows_of_page() | {row.name: row.line for row in rows}
    table = _HEAD + "".join(f"{lines[name]}\n" for name in sorted(lines))
    page = _PAGE.read_text()
    before, after = page.partition(_BEGIN)[0], page.partition(_END)[2]
    _PAGE.write_text(f"{before}{_BEGIN}{table}{_END}{after}")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a file does not fit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a folder of configurations")
    parser.add_argument("--only", default="", help="only files whose path has one of these texts")
    parser.add_argument("--jobs", type=int, default=1, help="files at once, each on two cores")
    parser.add_argument("--write", action="store_true", help="write the rows to docs/published.md")
    given = parser.parse_args(argv)
    root, only = given.folder.resolve(), given.only.split(",")
    paths = [one for one in sorted(root.rglob("*.yaml")) if any(text in str(one) for text in only)]
    forkserver = mp.get_context("forkserver")
    with ProcessPoolExecutor(given.jobs, forkserver) as pool:
        pending = [pool.submit(search, path, str(path.relative_to(root))) for path in paths]
        rows = []
        for path, result in zip(paths, pending, strict=True):
            try:
                row = result.result()
            except Exception as error:  # noqa: BLE001  # of one file
                print(f"{path}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                continue
            if row is None:
                continue
            rows.append(row)
            print(row.line, file=sys.stdout, flush=True)
            print(f"{row.seconds:.0f} s", file=sys.stderr, flush=True)
            if given.write:
                write_page(rows)
    return int(any(not row.fits for row in rows))


if __name__ == "__main__":
    sys.exit(main())
