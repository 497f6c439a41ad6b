"""Writes docs/reference/ and docs/command_line.md: python docs/make_reference.py [folder]

Everything in it is taken from the classes: signatures, docstrings, and the hooks they override; and
from the help of the command line.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from torch.nn import Module

from modelzoo_trainer import callbacks, loggers
from modelzoo_trainer.base.constraints import inert_fields
from modelzoo_trainer.callback import Callback, hook_names
from modelzoo_trainer.cli.command import main as run_command
from modelzoo_trainer.config.json_schema.components import NO_EFFECT
from modelzoo_trainer.core import (
    AutoRestart,
    Checkpoint,
    Logging,
    MixedPrecision,
    ObjectStore,
    TrainingLoop,
    ValidationLoop,
)
from modelzoo_trainer.core.parts.core_callbacks import core_callbacks
from modelzoo_trainer.core.parts.predictions import Predictions
from modelzoo_trainer.core.parts.results import RunResult
from modelzoo_trainer.core.parts.summaries import summarize_scalar, summarize_tensor
from modelzoo_trainer.hooks.foreign import OF_CEREBRAS
from modelzoo_trainer.hooks.spec import HOOKS
from modelzoo_trainer.optim import OPTIMIZERS, SCHEDULERS
from modelzoo_trainer.tools.foreign_configs.tables import FOREIGN_KEYS
from modelzoo_trainer.trainer import Trainer
from modelzoo_trainer.zoo.data import (
    PROCESSORS,
    BatchDataset,
    DataProcessor,
    LoadingOptions,
    PadLastBatch,
    PadToBuckets,
    ShardedStream,
    TensorRows,
    processor_class,
)
from modelzoo_trainer.zoo.models.registry import MODELS, model_class

SECTION: Final = re.compile(r"^(Args|Metrics|State|Cost|Raises|Returns|Shapes|Yields): ?(.*)$")
ENTRY: Final = re.compile(r"^    (\*{0,2}[^\s:][^:]*): (.*)$")
QUALIFIED: Final = re.compile(r"\b(?:[A-Za-z_]\w*\.)+(\w+)")
HEAD: Final = "<!-- written by docs/make_reference.py -->\n"


class Page(NamedTuple):
    """A class's docstring in parts."""

    text: str
    sections: dict[str, str]

    def entries(self, name: str) -> dict[str, str]:
        """Return the lines `name: text` of a section; continued lines are joined."""
        found: dict[str, str] = {}
        last = ""
        for line in self.sections.get(name, "").splitlines():
            match = ENTRY.match(line)
            if match:
                last = match[1]
                found[last] = match[2]
            elif last:
                found[last] += f" {line.strip()}"
        return found

    def paragraph(self, name: str) -> str:
        """Return a section as one line."""
        return " ".join(self.sections.get(name, "").split())


def parse(cls: Any) -> Page:
    """Return the parts of the docstring of a class or function."""
    text: list[str] = []
    sections: dict[str, list[str]] = {}
    into = text
    for line in inspect.cleandoc(cls.__doc__ or "").splitlines():
        match = SECTION.match(line)
        if match:
            into = sections.setdefault(match[1], [])
            into.append(match[2])
        elif line and not line.startswith(" ") and into is not text and not into[-1]:
            into = text  # a paragraph after a section
            text.append(line)
        else:
            into.append(line)
    return Page(
        "\n".join(text).strip(), {name: "\n".join(lines) for name, lines in sections.items()}
    )


def shipped(module: Any, base: type) -> list[type]:
    """Return the classes that a module exports."""
    found = [getattr(module, name) for name in module.__all__]
    return [cls for cls in found if isinstance(cls, type) and issubclass(cls, base)]


def hooks_of(cls: type) -> list[str]:
    """Return the declared hooks that a class overrides, in their order."""
    return list(hook_names(cls.__new__(cls)))


def without_bounds(kind: Any) -> Any:
    """Return a type as the page names it; the argument's text says its range."""
    if get_origin(kind) is Annotated:
        return without_bounds(get_args(kind)[0])
    if get_origin(kind) is Union:
        return reduce(or_, map(without_bounds, get_args(kind)))
    return kind


def annotations_of(cls: type) -> dict[str, str]:
    """Return the types of a constructor's arguments; aliases are resolved where they can be."""
    try:
        found = inspect.get_annotations(cls.__init__, eval_str=True)
    except NameError:  # of a module that is imported for checkers only
        found = inspect.get_annotations(cls.__init__)
    return {
        name: QUALIFIED.sub(r"\1", inspect.formatannotation(without_bounds(kind)))
        if not isinstance(kind, str)
        else kind
        for name, kind in found.items()
    }


def signature(cls: type) -> Iterator[tuple[str, str, str]]:
    """Yield name, type and default of each argument."""
    kinds = annotations_of(cls)
    for name, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]:
        kind = kinds.get(name, "")
        stars = {parameter.VAR_KEYWORD: "**", parameter.VAR_POSITIONAL: "*"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"`{parameter.default!r}`"
        yield stars + name, f"`{kind}`" if kind else "", default


def cell(text: str) -> str:
    """Return a text as it may stand in a table."""
    return text.replace("|", "\\|")


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Yield the lines of a table; none if it has no row."""
    if rows:
        yield ""
        yield f"| {' | '.join(head)} |"
        yield f"|{'---|' * len(head)}"
        for row in rows:
            yield f"| {' | '.join(map(cell, row))} |"


def class_lines(cls: type) -> Iterator[str]:
    """Yield what a page says of a class."""
    page = parse(cls)
    yield f"## {cls.__name__}"
    yield ""
    yield page.text
    described = page.entries("Args")
    rows = [
        (f"`{name}`", kind, default, described.get(name, described.get(name.lstrip("*"), "")))
        for name, kind, default in signature(cls)
        if cls.__init__ is not object.__init__
    ]
    yield from table(("argument", "type", "default", "meaning"), rows)
    metrics = [(f"`{name}`", text) for name, text in page.entries("Metrics").items()]
    yield from table(("metric", "unit and meaning"), metrics)
    for name in ("State", "Cost"):
        if name in page.sections:
            yield ""
            yield f"**{name}.** {page.paragraph(name)}"
    names = hooks_of(cls)
    if names:
        yield ""
        yield "**Hooks.** " + ", ".join(f"`{name}`" for name in names)
    yield ""


def methods_of(cls: type) -> Iterator[str]:
    """Yield what a page says of the public methods of a class that have a docstring."""
    for name, member in vars(cls).items():
        function = inspect.unwrap(member) if callable(member) else None
        if name.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        yield f"### {cls.__name__}.{name}"
        yield from function_lines(function, f"{name}{call_of(function)}")


def function_lines(function: Callable[..., Any], call: str) -> Iterator[str]:
    """Yield what a page says of a function below its heading."""
    page = parse(function)
    yield ""
    yield f"`{call}`"
    yield ""
    yield page.text
    yield from table(("argument", "meaning"), quoted(page.entries("Args")))
    if "Returns" in page.sections:
        yield ""
        yield f"**Returns.** {page.paragraph('Returns')}"
    yield from table(("raises", "when"), quoted(page.entries("Raises")))
    if "Cost" in page.sections:
        yield ""
        yield f"**Cost.** {page.paragraph('Cost')}"
    yield ""


def call_of(function: Callable[..., Any], num_bound: int = 1) -> str:
    """Return the parameters of a method or a function, without types.

    Args:
        function: The function.
        num_bound: How many of its first parameters are not passed: `self` of a method.
    """
    given = list(inspect.signature(function).parameters.values())[num_bound:]
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in given]
    return str(inspect.Signature(bare)).replace("Ellipsis", "...")


def quoted(entries: dict[str, str]) -> list[tuple[str, ...]]:
    """Return the rows of a table of names."""
    return [(f"`{name}`", text) for name, text in entries.items()]


def contents(classes: list[Any]) -> Iterator[str]:
    """Yield a list of links."""
    for cls in classes:
        first = " ".join(parse(cls).text.split("\n\n")[0].split())
        yield f"* [`{cls.__name__}`](#{cls.__name__.lower()}): {first}"
    yield ""


def callbacks_page() -> str:
    """Return the page of the add-on callbacks."""
    classes = shipped(callbacks, Callback)
    lines = [HEAD, "# Callbacks", ""]
    lines += [
        "Callbacks you can list under `callbacks` in a file, and in `Trainer(callbacks=[...])`. "
        "Units of metrics, what is saved in checkpoints and what a callback costs are given "
        "where there is something to say; each works on every device unless it says otherwise.",
        "",
        *contents(classes),
    ]
    for cls in classes:
        lines += class_lines(cls)
    return "\n".join(lines)


def loggers_page() -> str:
    """Return the page of the loggers."""
    classes = shipped(loggers, Callback)
    lines = [HEAD, "# Loggers", ""]
    lines += [
        "Loggers you can list under `loggers`. One that fails warns once; the run continues.",
        "",
    ]
    lines += contents(classes)
    for cls in classes:
        lines += class_lines(cls)
    return "\n".join(lines)


def hooks_page() -> str:
    """Return the page of the hooks."""
    listeners: dict[str, list[str]] = {}
    for cls in [*shipped(callbacks, Callback), *shipped(loggers, Callback)]:
        for name in hooks_of(cls):
            listeners.setdefault(name, []).append(cls.__name__)
    core = core_listeners()
    lines = [HEAD, "# Hooks", ""]
    lines += [
        "All hooks that a callback can define. In which order a run calls them: "
        "[How it works](../how_it_works.md#lifecycle). *Core* and *Shipped* list the callbacks of "
        "this package that define a hook. At each hook core callbacks are called first, then the "
        "user's, then loggers, then global ones.",
        "",
        "The word after the signature says what a hook may do:",
        "",
        "* *run*: called at the start or end of a run, a stage or an epoch, and for checkpoints. "
        "No restrictions.",
        "* *batch*: called between two steps. It may read a value of the device, such as "
        "`loss.item()`, but waits for the device then.",
        "* *step*: called during forward, backward or the optimizer step. It must not read a value "
        "of the device, use files or the network, or branch on a value: use `trainer.log_metrics` "
        "or `trainer.read`.",
        "",
        "*added*: not a hook of the Cerebras Model Zoo.",
        "",
    ]
    for name, declared in HOOKS.items():
        if declared.default.__qualname__.split(".")[0] != "Callback":
            continue
        lines += [f"## {name}", ""]
        added = "" if name in OF_CEREBRAS else ", *added*"
        call = f"`{name}({', '.join(declared.parameters)})`"
        lines += [f"{call}, *{declared.phase.value}*{added}", ""]
        lines += [" ".join(declared.doc.split()), ""]
        if core.get(name):
            lines += ["Core: " + ", ".join(f"`{who}`" for who in core[name]), ""]
        if listeners.get(name):
            lines += ["Shipped: " + ", ".join(f"`{who}`" for who in listeners[name]), ""]
    return "\n".join(lines)


def core_listeners() -> dict[str, list[str]]:
    """Return the core callbacks that override each hook, in the order in which they are called."""
    names = [
        *("device", "backend", "model", "optimizer", "schedulers", "precision", "sparsity"),
        *("loop", "checkpoint", "logging", "seed", "autorestart", "object_store"),
    ]
    parts = {**dict.fromkeys(names), "model": Module}
    found: dict[str, list[str]] = {}
    for callback in core_callbacks(parts).values():
        for name in hooks_of(type(callback)):
            found.setdefault(name, []).append(type(callback).__name__)
    return found


def trainer_page() -> str:
    """Return the page of the trainer and of the core callbacks that take arguments."""
    classes: list[type] = [Trainer, TrainingLoop, ValidationLoop, Checkpoint, Logging]
    classes += [MixedPrecision, AutoRestart, ObjectStore]
    lines = [HEAD, "# The trainer and its core callbacks", ""]
    lines += contents([*classes, RunResult, Predictions, summarize_scalar, summarize_tensor])
    for cls in classes:
        if cls is Trainer:
            lines += list(class_lines_of_trainer())
        else:
            lines += class_lines(cls)
    lines += [*result_lines(RunResult), *result_lines(Predictions)]
    for function in (summarize_scalar, summarize_tensor):
        plain = inspect.unwrap(function)  # the compiler's wrapper takes anything
        lines += [f"## {function.__name__}"]
        lines += function_lines(plain, f"{function.__name__}{call_of(plain, num_bound=0)}")
    return "\n".join(lines)


def result_lines(cls: type) -> Iterator[str]:
    """Yield what a page says of a class that a method of the trainer returns."""
    page = parse(cls)
    yield f"## {cls.__name__}"
    yield ""
    yield page.text
    described = page.entries("Args")
    rows = [
        (f"`{name}`", f"`{kind}`", described[name])
        for name, kind in inspect.get_annotations(cls).items()
        if name in described
    ]
    yield from table(("attribute", "type", "meaning"), rows)
    yield from table(("member", "meaning"), list(members_of(cls)))
    yield ""


def members_of(cls: type) -> Iterator[tuple[str, ...]]:
    """Yield the public properties and methods of a class, each with the start of its docstring."""
    for name, member in vars(cls).items():
        if name.startswith("_") or not getattr(member, "__doc__", None):
            continue
        if isinstance(member, property):
            yield f"`{name}`", parse(member).text
        elif isinstance(member, classmethod):
            yield f"`{cls.__name__}.{name}{call_of(member.__func__)}`", parse(member).text
        elif inspect.isfunction(member):
            yield f"`{name}{call_of(member)}`", parse(member).text


def class_lines_of_trainer() -> Iterator[str]:
    """Yield the trainer's arguments; it has no hooks of its own."""
    page = parse(Trainer)
    yield "## Trainer"
    yield ""
    yield page.text
    described = page.entries("Args")
    rows = [
        (f"`{name}`", kind, default, described.get(name, ""))
        for name, kind, default in signature(Trainer)
    ]
    yield from table(("argument", "type", "default", "meaning"), rows)
    yield ""
    yield from methods_of(Trainer)


# ---- optimizers, models, data: no hooks, and arguments of dataclasses


def plain_lines(cls: type, head: str = "") -> Iterator[str]:
    """Yield what a page says of a class without hooks."""
    page = parse(cls)
    yield f"## {head or cls.__name__}"
    yield ""
    yield page.text.replace("\n\nThe arguments are described in `DecoderSettings`.", "")
    described = described_in(cls)
    rows = [
        (f"`{name}`", kind, default, described.get(name, ""))
        for name, kind, default in constructor_of(cls)
        if name not in ("optimizer", "model") or name in described
        if cls.__init__ is not object.__init__
    ]
    rows.sort(key=lambda row: (row[3].startswith(NO_EFFECT[:-1]), bool(row[2])))
    yield from table(("argument", "type", "default", "meaning"), rows)
    if "Shapes" in page.sections:
        yield ""
        yield f"**Shapes.** {page.paragraph('Shapes')}"
    yield ""


def described_in(cls: type) -> dict[str, str]:
    """Return what is said of the arguments by a class and its bases."""
    found = {one.name: NO_EFFECT for one in inert_fields(cls)}
    for one in reversed(cls.__mro__):
        if one.__module__.startswith("modelzoo_trainer."):
            found |= parse(one).entries("Args")
    return found


def constructor_of(cls: type) -> Iterator[tuple[str, str, str]]:
    """Yield name, type and default of each argument of a class, types without their ranges."""
    for name, parameter in inspect.signature(cls).parameters.items():
        kind = "" if parameter.annotation is parameter.empty else in_short(parameter.annotation)
        given = parameter.default
        default = "" if given is parameter.empty else f"`{getattr(given, '__name__', repr(given))}`"
        yield name, f"`{kind}`" if kind else "", default


def in_short(kind: Any) -> str:
    """Return a type as a reader would write it."""
    if isinstance(kind, str):
        return kind
    if get_origin(kind) is Annotated:
        return in_short(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return " | ".join(map(repr, get_args(kind)))
    if get_origin(kind) in (list, dict, tuple, Mapping):
        return f"{get_origin(kind).__name__}[{', '.join(map(in_short, get_args(kind)))}]"
    if kind is ...:
        return "..."
    if get_args(kind) and get_origin(kind) is not None and len(get_args(kind)) > 1:
        return " | ".join(map(in_short, get_args(kind)))
    if kind is type(None):
        return "None"
    return QUALIFIED.sub(r"\1", inspect.formatannotation(kind))


def optimizers_page() -> str:
    """Return the page of the optimizers."""
    classes = list(OPTIMIZERS.values())
    lines = [HEAD, "# Optimizers", ""]
    lines += [
        "Optimizers you can name under `optimizer`. How to choose and tune one: "
        "[Optimizers and schedules](../optimizers.md).",
        "",
        *contents(classes),
    ]
    for cls in classes:
        lines += plain_lines(cls)
    return "\n".join(lines)


def schedules_page() -> str:
    """Return the page of the schedules, with their pictures."""
    pictures = pictures_module().EXAMPLES
    lines = [HEAD, "# Schedules", ""]
    lines += [
        "Schedules you can list under `schedulers`: `...LR` sets the learning rate, `...WD` the "
        "weight decay, as a function of the number of optimizer steps. Each picture has the "
        "values of the file below it.",
        "",
        "The first argument, `optimizer`, comes from the trainer: a YAML file omits it, and in "
        "Python `schedulers` takes functions that get it, such as "
        "`schedulers=[lambda optimizer: LinearLR(optimizer, ...)]`.",
        "",
        *contents(list(SCHEDULERS.values())),
    ]
    for name, cls in SCHEDULERS.items():
        lines += plain_lines(cls)
        if name in pictures:
            shown = yaml.safe_dump({"schedulers": [{name: pictures[name]}]}, sort_keys=False)
            lines += [f"![{name}](../pictures/{name}.svg)", "", "<!-- inside: trainer.init -->"]
            lines += ["```yaml", shown.rstrip(), "```", ""]
    return "\n".join(lines)


def pictures_module() -> Any:
    """Return make_pictures.py, which lies beside this file."""
    place = Path(__file__).with_name("make_pictures.py")
    spec = importlib.util.spec_from_file_location("make_pictures", place)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def models_page() -> str:
    """Return the page of the shipped models."""
    lines = [HEAD, "# Models", ""]
    lines += ["Models you can give as `name` under `model`, with their arguments beside it.", ""]
    for name in MODELS:
        lines += plain_lines(model_class(name), name)
    return "\n".join(lines)


def data_page() -> str:
    """Return the page of the shipped data processors, and what helps with data."""
    classes = [*map(processor_class, PROCESSORS)]
    classes += [DataProcessor, LoadingOptions, TensorRows, BatchDataset]
    classes += [PadLastBatch, PadToBuckets, ShardedStream]
    lines = [HEAD, "# Data", ""]
    lines += [
        "Classes you can give as `data_processor`, the base class for your own, and wrappers of "
        "datasets. Import the others from `modelzoo_trainer.zoo.data`. How to write a data "
        "processor: [Data processors](../data_processors.md#write-a-data-processor).",
        "",
    ]
    lines += contents(classes)
    for cls in classes:
        lines += plain_lines(cls)
    return "\n".join(lines)


# ---- the command line

COMMAND: Final = re.compile(r"^ {2,4}([a-z][\w-]*) {2,}\S", re.MULTILINE)


def help_of(*words: str) -> str:
    """Return what a command prints with --help, 100 characters wide."""
    os.environ["COLUMNS"] = "100"
    printed = io.StringIO()
    with redirect_stdout(printed), suppress(SystemExit):
        run_command([*words, "--help"])
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())


def commands_in(text: str) -> list[str]:
    """Return the sub-commands that a help lists."""
    part = re.search(
        r"(?:^commands\b|^ {2}COMMAND$).*?\n\n", text + "\n\n", re.DOTALL | re.MULTILINE
    )
    return COMMAND.findall(part[0]) if part else []


def command_lines(*words: str) -> Iterator[str]:
    """Yield what the page says of a command, and of those below it."""
    text = help_of(*words)
    if words:
        yield f"{'#' * (len(words) + 1)} {' '.join(words)}"
        yield ""
    yield f"```text\n{text}\n```"
    yield ""
    for name in commands_in(text):
        yield from command_lines(*words, name)


def command_page() -> str:
    """Return the page of the command line."""
    lines = [HEAD, "# Command line", ""]
    lines += [
        "`modelzoo-trainer` and `python -m modelzoo_trainer` are one command, and in a clone so is "
        "`python run.py`. A first run: [Quickstart in YAML](quickstart_yaml.md). The format of "
        "the file: [Configuration file](configuration.md).",
        "",
        *command_lines(),
    ]
    return "\n".join(lines)


def foreign_page() -> str:
    """Return the page of the keys of other libraries."""
    lines = [HEAD, "# Keys of other libraries", ""]
    lines += [
        "What `modelzoo-trainer config convert` does with each key of a file of another library: "
        "the key here, or why there is none and what to do instead. `*` is any other key. How to "
        "convert a file: [llm-foundry](../from_llm_foundry.md), [torchtune](../from_torchtune.md).",
        "",
    ]
    for title, keys in FOREIGN_KEYS.items():
        lines += [f"## {title}", "", "| key | here |", "|---|---|"]
        for path, key in keys.items():
            shown = path.partition(".")[2] if path.startswith(("hf.", "mpt.")) else path
            before = "" if key.kind is None else f"{key.kind.value.lower()}: "
            lines.append(f"| `{shown}` | {before}{key.text} |")
        lines.append("")
    return "\n".join(lines)


PAGES: Final[dict[str, Callable[[], str]]] = {
    "callbacks.md": callbacks_page,
    "loggers.md": loggers_page,
    "hooks.md": hooks_page,
    "trainer.md": trainer_page,
    "optimizers.md": optimizers_page,
    "schedules.md": schedules_page,
    "models.md": models_page,
    "data.md": data_page,
    "foreign_configs.md": foreign_page,
    "../command_line.md": command_page,
}


def tidy(text: str) -> str:
    """Return a page without runs of blank lines."""
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def with_lifecycle(page: str, trace: str) -> str:
    """Return the page on how it works with the trace of a run as its lifecycle."""
    before, start, rest = page.partition("<!-- lifecycle -->\n```text\n")
    return before + start + trace + "```" + rest.partition("```")[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    docs = Path(__file__).parent
    parser.add_argument("folder", nargs="?", type=Path, default=docs / "reference")
    folder: Path = parser.parse_args().folder
    folder.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(tidy(page()), encoding="utf-8")
    if folder == docs / "reference":
        path = docs / "how_it_works.md"
        trace = (docs.parent / "tests/golden/fit_hooks.txt").read_text(encoding="utf-8")
        path.write_text(with_lifecycle(path.read_text(encoding="utf-8"), trace), encoding="utf-8")


if __name__ == "__main__":
    main()
