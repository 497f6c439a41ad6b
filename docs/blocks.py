"""Run the programs, commands and files that the pages show, and compare their output.

python docs/blocks.py [PAGE ...]            run them; exit code 1 if one fails or prints otherwise
python docs/blocks.py --update [PAGE ...]   write what they print into the pages' output blocks

A comment on the line before a block says how it is run:

(nothing), python      a program, in an empty folder
(nothing), bash        commands, in a folder that the page's files and commands share
(nothing), console     lines `$ command` with what each prints; exit codes do not matter
(nothing), yaml        a whole file is checked; with it `configs/` and `run.py` are there
<!-- continues -->     python: goes on where the page's last program ended
<!-- file: NAME -->    is stored in the page's folder; python is run there, yaml is checked there
<!-- inside: KEYS -->  yaml: a part of a file, for example the value of trainer.init
<!-- output -->        text: what the last program or commands print, stdout and stderr;
                       a line `...` stands for any lines
<!-- not run: WHY -->  is not run
<!-- ci: NAME -->      is run by .ci/run
<!-- keras -->         a program of another library, which tests/compat/test_migration_pages.py
                       runs where it is installed; so are <!-- arctic-training -->, <!-- fabric -->,
                       <!-- lightning -->, <!-- pytorch-accelerated -->, <!-- transformers -->

Other comments there mean nothing here; several may stand above one another.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
RUNNABLE: Final = ("python", "bash", "console", "yaml")
LIBRARIES: Final = (
    "arctic-training",
    "fabric",
    "keras",
    "lightning",
    "pytorch-accelerated",
    "transformers",
)
ELSEWHERE: Final = ("ci", "not run", *LIBRARIES)
"""Markers of blocks that are not run here."""
MARKERS: Final = ("continues", "file", "inside", "output", *ELSEWHERE)
MARKER: Final = re.compile(r"^\s*<!-- (.+?) -->\s*$")
FENCE: Final = re.compile(r"^( *)(`{3,})(\S*)\s*$")
MARK: Final = "\x1e"
"""Printed between the programs that continue each other."""
EXIT_INVALID: Final = 2
LACKS_DATA: Final = re.compile(r"^Verdict: needs data: ", re.MULTILINE)
SECONDS: Final = 240
FORMER_PATHS: Final = "error:modelzoo_trainer.:DeprecationWarning"
"""A page imports no module by a former path (`modelzoo_trainer/_moved.py`), in commands either."""
BASE: Final = """\
trainer:
  init:
    device: cpu
    model: {name: fc_mnist, hidden_sizes: [8], input_size: 64, num_classes: 10}
    optimizer: {SGD: {lr: 0.1}}
    loop: {max_steps: 100}
  fit:
    train_dataloader: {data_processor: DigitsProcessor, split: train, batch_size: 8}
    val_dataloader: {data_processor: DigitsProcessor, split: val, batch_size: 8, shuffle: false}
"""
"""What a part of a file is put into."""


@dataclass(slots=True)
class Block:
    """A fenced block of a page."""

    line: int  # of its fence, from 1
    end: int  # of its closing fence
    language: str
    marker: str
    text: str
    indent: str = ""

    @property
    def name(self) -> str:
        """What the marker says before its colon."""
        return self.marker.partition(":")[0].strip()

    @property
    def value(self) -> str:
        """What the marker says after its colon."""
        return self.marker.partition(":")[2].strip()


def blocks_of(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a Markdown text."""
    lines = text.splitlines()
    start, fence = -1, ""
    for number, line in enumerate(lines):
        match = FENCE.match(line)
        if start >= 0:
            if match and match[2] == fence and not match[3]:
                yield _block(lines, start, number)
                start = -1
        elif match:
            start, fence = number, match[2]


def _block(lines: list[str], start: int, end: int) -> Block:
    """Return the block between two fences."""
    match = FENCE.match(lines[start])
    assert match
    marker = next((one for one in _comments_above(lines, start) if is_known(one)), "")
    indent = match[1]
    body = [line.removeprefix(indent) for line in lines[start + 1 : end]]
    text = "".join(f"{line}\n" for line in body)
    return Block(start + 1, end + 1, match[3], marker, text, indent)


def _comments_above(lines: list[str], start: int) -> Iterator[str]:
    """Yield the comments right above a block, from the lowest."""
    while start and (match := MARKER.match(lines[start - 1])):
        yield match[1]
        start -= 1


def is_known(marker: str) -> bool:
    """Whether a comment says how a block is run."""
    return marker.partition(":")[0].strip() in MARKERS


@dataclass(slots=True)
class Result:
    """What running a page gave."""

    failures: list[str] = field(default_factory=list)
    outputs: list[tuple[Block, str]] = field(default_factory=list)  # block, what was printed
    num_run: int = 0


class PageRun:
    """Runs the blocks of one page, in their order."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.page = page
        self.folder = folder
        self.shared = folder / "page"
        self.result = Result()
        self.printed: str | None = None  # by the last program or commands
        self.num_programs = 0

    def run(self) -> Result:
        """Run all blocks; return what failed and what was printed."""
        blocks = list(blocks_of(self.page.read_text(encoding="utf-8")))
        self.shared.mkdir()
        for name in ("configs", "run.py"):
            (self.shared / name).symlink_to(ROOT / name)
        while blocks:
            block = blocks.pop(0)
            if block.name == "output":
                self.compare(block)
            elif block.language in RUNNABLE and block.name not in ELSEWHERE:
                self.result.num_run += 1
                self.start(block, blocks)
        return self.result

    def start(self, block: Block, later: list[Block]) -> None:
        """Run one block, and the programs that continue it."""
        if block.name == "file":
            path = self.shared / block.value
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        if block.language == "python" and block.name == "file":
            self.execute(block, [sys.executable, "-W", "error", block.value], self.shared)
        elif block.language == "python":
            self.run_programs(block, later)
        elif block.language == "bash":
            self.execute(block, ["bash", "-eo", "pipefail", "-c", block.text], self.shared)
        elif block.language == "console":
            self.run_console(block)
        else:
            self.check(block)

    def run_programs(self, block: Block, later: list[Block]) -> None:
        """Run a program with those that continue it, as one, in an empty folder."""
        group, outputs = continued(block, later)
        self.result.num_run += len(group) - 1
        self.num_programs += 1
        folder = self.folder / f"program_{self.num_programs}"
        folder.mkdir()
        divider = f"\nimport sys; print({MARK!r}, end='', file=sys.stderr, flush=True)\n"
        (folder / "program.py").write_text(divider.join(one.text for one in group), "utf-8")
        self.execute(block, [sys.executable, "-u", "-W", "error", "program.py"], folder)
        parts = (self.printed or "").split(MARK)
        for output, part in zip(outputs, parts, strict=False):
            self.printed = part
            if output:
                self.compare(output)

    def run_console(self, block: Block) -> None:
        """Run the lines with a prompt, and compare the block with what a terminal would show."""
        shown = []
        for line in block.text.splitlines():
            if line.startswith("$ "):
                command = f"{{ {line[2:]}; }} || true"
                self.execute(block, ["bash", "-o", "pipefail", "-c", command], self.shared)
                shown.append(f"{line}\n{self.printed}")
        self.printed = "\n".join(text.rstrip("\n") for text in shown)
        self.compare(block)

    def execute(
        self, block: Block, command: Sequence[str], folder: Path, *, lacks_data: bool = False
    ) -> None:
        """Run a command; keep what it prints.

        `lacks_data`: a check may find that data are missing: a page shows a file before its data.
        """
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": path, "COLUMNS": "100"}
        settings["PYTHONWARNINGS"] = FORMER_PATHS
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, **settings, "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=SECONDS,
            )
            code, self.printed = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            code, self.printed = -1, f"{error}"
        self.printed = cleaned(self.printed, folder)
        if lacks_data and code == EXIT_INVALID and LACKS_DATA.search(self.printed):
            code = 0
        if code != 0 or "Exception ignored in" in self.printed:
            self.fail(block, f"exit code {code}\n{self.printed[-3000:]}")

    def check(self, block: Block) -> None:
        """Check a configuration file, or a part of one, as `--check` does."""
        text = within(block.text, block.value) if block.name == "inside" else block.text
        if not re.search(r"^-? *trainer:", text, re.MULTILINE):
            self.fail(block, "is no whole file: say <!-- inside: KEYS --> or <!-- not run: WHY -->")
            return
        if block.name == "file":
            command = [sys.executable, "-m", "modelzoo_trainer", "--params", block.value, "--check"]
            printed = self.printed
            self.execute(block, command, self.shared, lacks_data=True)
            self.printed = printed  # of the program before: a file prints nothing
            return
        path = self.shared / "page.yaml"
        path.write_text(text, encoding="utf-8")
        error = mistakes_in(path)
        if error:
            self.fail(block, error)

    def compare(self, block: Block) -> None:
        """Compare an output block with what was printed."""
        if self.printed is None:
            self.fail(block, "no program or commands before this output")
            return
        self.result.outputs.append((block, self.printed))
        difference = differs(block.text, self.printed)
        if difference:
            self.fail(block, f"{difference}\nprinted:\n{self.printed}")

    def fail(self, block: Block, text: str) -> None:
        """Note a failure with its place."""
        self.result.failures.append(f"{self.page.name}:{block.line}: {text}")


def continued(block: Block, later: list[Block]) -> tuple[list[Block], list[Block | None]]:
    """Take the programs that continue one, and the output after each, out of the later blocks."""
    group: list[Block] = [block]
    outputs: list[Block | None] = [None]
    place, is_next = 0, True
    while place < len(later):
        candidate = later[place]
        if candidate.name == "continues":
            group.append(later.pop(place))
            outputs.append(None)
            is_next = True
        elif candidate.name == "output" and is_next:
            outputs[-1] = later.pop(place)
            is_next = False
        elif candidate.language == "python" and not candidate.marker:
            break
        else:
            place += 1
            is_next = False
    return group, outputs


def mistakes_in(path: Path) -> str:
    """Return what `--check` says against a configuration; nothing if it is valid."""
    from modelzoo_trainer.config.build import load_plans
    from modelzoo_trainer.config.shipped import shipped_names
    from modelzoo_trainer.errors import ConfigError

    try:
        load_plans(path, shipped_names, mode=None, for_a_run=False)
    except ConfigError as error:
        return str(error)
    return ""


def within(text: str, keys: str) -> str:
    """Return a whole file with a part put at `keys`, such as trainer.init, over what is there."""
    import yaml

    whole = yaml.safe_load(BASE)
    place = whole
    for key in keys.split("."):
        place = place.setdefault(key, {})
    place.update(yaml.safe_load(text))
    return yaml.safe_dump(whole, sort_keys=False)


def cleaned(text: str, folder: Path) -> str:
    """Return an output as a page shows it: no control characters, no paths of this machine."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    text = "\n".join(lines)
    for path in (f"{folder.resolve()}/", f"{folder}/", f"{ROOT}/"):
        text = text.replace(path, "")
    return text


# ---- comparing

VARYING: Final = re.compile(
    r"\d{4}-\d\d-\d\d[T _]\d\d[:-]?\d\d[:-]?\d\d\S*"  # dates with times
    r"|\b\d+:\d\d(:\d\d)?\b"  # durations and times of day
    r"|\b\d{8}[_-]\d{6}\b"  # names of folders of logs
    r"|\d[\d,.]*(e[-+]?\d+)? ?(steps?/s|samples?/s|it/s|tokens?/s|[munk]?s/it|/s)\b"
    r"|\d[\d,.]* ?(s|ms|us|min|h)\b"
    r"|\d[\d,.]* ?(GiB|MiB|KiB)\b"
)
NUMBER: Final = re.compile(r"[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")


def differs(shown: str, printed: str, *, tolerance: float = 0.02) -> str:
    """Return in what an output differs from the one a page shows, or nothing."""
    expected = [line for line in map(normalized, shown.splitlines()) if line]
    found = [line for line in map(normalized, printed.splitlines()) if line]
    if matches(expected, found, tolerance):
        return ""
    for line in expected:
        if line != "..." and not any(is_equal(line, other, tolerance) for other in found):
            return f"not printed: {line}"
    return f"the page shows {len(expected)} lines, {len(found)} were printed, or in another order"


def matches(expected: list[str], found: list[str], tolerance: float) -> bool:
    """Whether lines are those of a page, where `...` stands for any number of lines."""
    if not expected:
        return not found
    if expected[0] == "...":
        return any(matches(expected[1:], found[n:], tolerance) for n in range(len(found) + 1))
    if not found or not is_equal(expected[0], found[0], tolerance):
        return False
    return matches(expected[1:], found[1:], tolerance)


def normalized(line: str) -> str:
    """Return a line without what differs from run to run: times, rates, sizes, widths."""
    line = VARYING.sub("<varies>", line)
    return " ".join(re.sub(r"([-=_#.])\1{3,}", r"\1\1\1\1", line).split())


def is_equal(one: str, other: str, tolerance: float) -> bool:
    """Whether two lines have the same words, and numbers that are nearly the same."""
    if NUMBER.sub("0", one) != NUMBER.sub("0", other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(a == b or is_near(number(a), number(b), tolerance) for a, b in pairs)


def is_near(one: float, other: float, tolerance: float) -> bool:
    """Whether two numbers agree; whole numbers have to be equal."""
    if one == int(one) and other == int(other):
        return one == other
    return abs(one - other) <= tolerance * max(abs(one), abs(other)) + 1e-3


def number(text: str) -> float:
    """Return the value of a number in a text."""
    return float(text.replace(",", "").rstrip(".") or 0)


# ---- pages


def pages() -> list[Path]:
    """Return the README and all pages that people write."""
    found = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name[0] != "_"]
    return [ROOT / "README.md", *found]


def run_page(page: Path) -> Result:
    """Run the blocks of a page in folders that are removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        return PageRun(page, Path(folder)).run()


def update(page: Path, outputs: list[tuple[Block, str]]) -> int:
    """Write outputs into a page where they differ; return how many."""
    lines = page.read_text(encoding="utf-8").splitlines()
    changed = 0
    for block, printed in sorted(outputs, key=lambda pair: -pair[0].line):
        if "...\n" in block.text or not differs(block.text, printed):
            continue  # one with `...` was cut by hand
        new = [f"{block.indent}{line}".rstrip() for line in printed.strip("\n").splitlines()]
        lines[block.line : block.end - 1] = new
        changed += 1
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return changed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the blocks of the given pages, or of all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--update", action="store_true", help="write the outputs into the pages")
    options = parser.parse_args(argv)
    failures = []
    for page in options.pages or pages():
        result = run_page(page)
        failures += result.failures
        changed = update(page, result.outputs) if options.update else 0
        print(f"{page}: {result.num_run} run, {len(result.failures)} failed, {changed} updated")
    print("\n\n".join(failures))
    return 1 if failures and not options.update else 0


if __name__ == "__main__":
    sys.exit(main())
