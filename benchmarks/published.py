"""Which published configurations train here: python -m benchmarks.published FOLDER [--jobs 2].

Each file is checked as it is, then scaled down (the rule: `published_scaling.py`) and trained for
20 steps on rows of the text of Python's standard library. It trains if the mean loss of the last
five steps is less than that of the first five, and if a run that is killed by SIGKILL in the middle
of step 14 and resumed from its checkpoint ends with the same bits: every loss since the checkpoint,
every parameter. Prints a table: file, model, whether it trains, why not.

The runs are forked from a server that has imported torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing as mp
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from threading import Lock
from typing import Any, Final

from typing_extensions import override

from benchmarks.published_data import write_data
from benchmarks.published_scaling import STEPS, scaled
from modelzoo_trainer import Callback, register_global_callback

_PAGE: Final = Path(__file__).resolve().parents[1] / "docs/published.md"
_BEGIN, _END = "<!-- published: begin -->\n", "<!-- published: end -->\n"
_KILL_AT: Final = 13  # optimizer steps before the one that is interrupted
_TIMEOUT_S: Final = 600
_AVERAGED: Final = 5  # losses
_SERVER: Final = mp.get_context("forkserver")
_SERVER.set_forkserver_preload(["benchmarks.published_imported"])
_starting = Lock()


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table.

    Args:
        name: The file, relative to the folder.
        model: Its model's name.
        why: Why it does not train; "" if it does.
        losses: Mean losses of the first and the last steps; None if it was not trained.
        seconds: Time of all runs.
    """

    name: str
    model: str
    why: str
    losses: tuple[float, float] | None = None
    seconds: float = 0.0

    @property
    def line(self) -> str:
        """The row in Markdown."""
        shown = "" if self.losses is None else "{:.2f} to {:.2f}".format(*self.losses)
        answer = "no" if self.why else "yes"
        return f"| `{self.name}` | {self.model} | {answer} | {shown} | {self.why} |"


# ---- in a child process


class Watch(Callback):
    """Write the losses and a digest of the parameters to a folder; kill the process in a step.

    Args:
        folder: For `losses.jsonl`, which is appended to, and `parameters`.
        kill_at: Steps before the interrupted one; None = run to the end.
    """

    def __init__(self, folder: Path, kill_at: int | None) -> None:
        self._folder = folder
        self._kill_at = kill_at

    @override
    def on_train_batch_end(
        self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    @override
    def on_metrics(self, trainer: Any, metrics: Any, step: int) -> None:
        if "loss" in metrics:
            with (self._folder / "losses.jsonl").open("a") as file:
                file.write(json.dumps([step, float(metrics["loss"]).hex()]) + "\n")

    @override
    def on_fit_end(self, trainer: Any, loop: Any) -> None:
        import torch

        digest = hashlib.sha256()
        for name, value in sorted(trainer.model.state_dict().items()):
            digest.update(name.encode())
            if isinstance(value, torch.Tensor):
                digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        (self._folder / "parameters").write_text(digest.hexdigest())


def train(folder: Path, kill_at: int | None) -> int:
    """Train with `params.yaml` of the parent folder; return the exit code."""
    import torch

    from modelzoo_trainer.cli.command import main

    torch.set_num_threads(1)  # the models are small, and other files run at the same time
    folder.mkdir(exist_ok=True)
    register_global_callback(Watch(folder, kill_at))
    words = ["fit", "../params.yaml", "--device", "cpu", "--model_dir", "run"]
    os.chdir(folder)
    return main(words)


def checked(path: Path, names: Callable[[], Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """Check a file; return what it lacks besides data, and its `trainer` sections.

    `names`: returns the names that a file may use.

    Raises:
        ConfigError: If it is invalid.
    """
    from modelzoo_trainer.config.build import load_plans
    from modelzoo_trainer.config.positions import DATA
    from modelzoo_trainer.config.printout import lacks_of

    options = {"device": "cpu"}
    plans = load_plans(path, names, mode=None, options=options, for_a_run=False)
    lacks = [] if plans[0].method == "fit" else ["section `fit`"]
    lacks += [f"{one.kind} `{one.what}`" for one in lacks_of(plans) if one.kind != DATA]
    if len(plans) > 1:
        lacks.append("a rule for several trainers in one file")
    return lacks, [plan.resolved["trainer"] for plan in plans]


def prepare(path: Path, folder: Path) -> int:
    """Check a file; write what it lacks to `checked.json`, and a scaled copy with its data."""
    from modelzoo_trainer.config.loader import to_yaml
    from modelzoo_trainer.config.shipped import shipped_names

    lacks, trainers = checked(path, shipped_names)
    model = trainers[0]["init"].get("model") or {}
    name = model.get("name") or model.get("model_name") or next(iter(model), "")
    (folder / "checked.json").write_text(json.dumps({"lacks": lacks, "model": name}))
    if not lacks:
        trainer, loaders = scaled(trainers[0], folder / "data")
        (folder / "params.yaml").write_text(to_yaml({"trainer": trainer}))
        for loader in loaders:
            write_data(loader)
    return 0


def _logged(log: Path, function: Callable[..., int], arguments: Sequence[Any]) -> None:
    """Call a function with its output in a file, and end with its result as the exit code."""
    with log.open("a") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.environ["COLUMNS"] = "200"
    sys.exit(function(*arguments))


# ---- in the main process


def _run(log: Path, function: Callable[..., int], *arguments: Any) -> int:
    """Call a function in a process of its own; return its exit code, negative for a signal."""
    process = _SERVER.Process(target=_logged, args=(log, function, arguments))
    with _starting:
        process.start()
    is_over = bool(wait([process.sentinel], _TIMEOUT_S))
    with _starting:  # starting a process reads the exit codes of all; a code can be read once
        if not is_over:
            process.kill()
        process.join()
        code = process.exitcode if is_over else -int(signal.SIGALRM)
    assert code is not None  # it has been joined
    return code


def prove(path: Path, name: str, folder: Path) -> Row:
    """Return the row of a file; `folder` is an empty one for its runs."""
    begin = time.perf_counter()
    why, losses = _why_not(path, folder)
    found = folder / "checked.json"
    model = json.loads(found.read_text())["model"] if found.exists() else ""
    return Row(name, model, why, losses, time.perf_counter() - begin)


def _why_not(path: Path, folder: Path) -> tuple[str, tuple[float, float] | None]:
    """Return why a file does not train, "" if it does, and its losses."""
    log = folder / "log.txt"
    if _run(log, prepare, path, folder):
        return _last_line(log, path, folder), None
    if lacks := json.loads((folder / "checked.json").read_text())["lacks"]:
        return f"missing: {', '.join(lacks)}", None
    whole = folder / "whole"
    if code := _run(log, train, whole, None):
        return f"exit code {code}: {_last_line(log, path, folder)}", None
    losses = _losses(whole)
    first, last = _mean(losses[:_AVERAGED]), _mean(losses[-_AVERAGED:])
    if len(losses) != STEPS or not last < first:
        return f"the loss does not fall: {first:.4f} to {last:.4f}", (first, last)
    return _why_not_resumed(path, folder), (first, last)


def _why_not_resumed(path: Path, folder: Path) -> str:
    """Kill a run and resume it; return how it differs from the uninterrupted one, "" if not."""
    log, whole, parts = folder / "log.txt", folder / "whole", folder / "parts"
    if (code := _run(log, train, parts, _KILL_AT)) != -signal.SIGKILL:
        return f"was not killed in step {_KILL_AT + 1}: exit code {code}"
    (parts / "losses.jsonl").rename(parts / "before.jsonl")
    if code := _run(log, train, parts, None):
        return f"does not resume, exit code {code}: {_last_line(log, path, folder)}"
    resumed = _losses(parts)
    num_done = STEPS - len(resumed)
    if not 0 < num_done <= _KILL_AT:
        return f"resumed after step {num_done}, was killed in step {_KILL_AT + 1}"
    if resumed != _losses(whole)[num_done:]:
        return "the losses of the resumed run differ"
    same = (whole / "parameters").read_text() == (parts / "parameters").read_text()
    return "" if same else "the parameters of the resumed run differ"


def _losses(folder: Path) -> list[float]:
    text = (folder / "losses.jsonl").read_text()
    by_step = dict(json.loads(line) for line in text.splitlines())
    return [float.fromhex(by_step[step]) for step in sorted(by_step)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _last_line(log: Path, path: Path, folder: Path) -> str:
    """Return the last line of the output, without the names of temporary folders."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    text = lines[-1] if lines else "no output"
    text = re.sub(rf"{re.escape(str(folder))}/?|{re.escape(str(path))}:?", "", text)
    return text.replace("|", "\\|")


def table(rows: Iterable[Row]) -> str:
    """Return the table in Markdown, with a summary below it."""
    rows = list(rows)
    num = sum(not row.why for row in rows)
    head = "| file | model | trains | loss | why not |\n|---|---|---|---|---|\n"
    lines = "".join(f"{row.line}\n" for row in rows)
    return f"{head}{lines}\n{num} of {len(rows)} files train.\n"


def write_page(text: str) -> None:
    """Replace the table of the documentation's page."""
    page = _PAGE.read_text()
    before, after = page.partition(_BEGIN)[0], page.partition(_END)[2]
    _PAGE.write_text(f"{before}{_BEGIN}{text}{_END}{after}")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a file that lacks nothing does not train."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a folder of configurations, or one file")
    parser.add_argument("--only", default="", help="only files whose path has this text")
    parser.add_argument("--jobs", type=int, default=1, help="files at the same time")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    parser.add_argument("--write", action="store_true", help="write the table to docs/published.md")
    given = parser.parse_args(argv)
    root = given.folder.resolve()
    paths = [root] if root.is_file() else sorted(root.rglob("*.yaml"))
    paths = [path for path in paths if given.only in str(path)]
    if not paths:
        parser.error(f"{given.folder} has no file with {given.only!r} in its path and .yaml.")
    with tempfile.TemporaryDirectory() as place:
        base = Path(given.keep or place).resolve()

        def one(path: Path) -> Row:
            name = path.name if path == root else str(path.relative_to(root))
            folder = base / name.removesuffix(".yaml")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            row = prove(path, name, folder)
            print(f"{row.line} {row.seconds:.0f} s", file=sys.stderr, flush=True)
            return row

        with ThreadPoolExecutor(given.jobs) as pool:
            rows = list(pool.map(one, paths))
    text = table(rows)
    print(text, end="")
    if given.write:
        write_page(text)
    return int(any(row.why and not row.why.startswith("missing: ") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
