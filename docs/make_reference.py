"""Writes docs/reference/: python docs/make_reference.py [folder]

Everything in it is taken from the classes: signatures, docstrings, and the hooks they override.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Union, get_args, get_origin

from torch.nn import Module

from modelzoo_trainer import callbacks, loggers
from modelzoo_trainer.callback import Callback, hook_names
from modelzoo_trainer.callback_list import core_callbacks
from modelzoo_trainer.core import Checkpoint, Logging, MixedPrecision, TrainingLoop, ValidationLoop
from modelzoo_trainer.hooks.spec import HOOKS
from modelzoo_trainer.trainer import Trainer

SECTION: Final = re.compile(r"^(Args|Metrics|State|Cost|Raises): ?(.*)$")
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


def parse(cls: type) -> Page:
    """Return the parts of a class's docstring."""
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


def contents(classes: list[type]) -> Iterator[str]:
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
        "What may stand under `callbacks` in a file, and in `Trainer(callbacks=[...])`. Units of "
        "metrics, what is saved in checkpoints and what a callback costs are given where there is "
        "something to say; each works on every device unless it says otherwise.",
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
    lines += ["What may stand under `loggers`. One that fails warns once; the run goes on.", ""]
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
        "In the order of their declaration, which is about that of a run; its whole order "
        "is in the README. At each hook core callbacks go first, in the order given, then the "
        "user's, then loggers, last the global ones. *run*: around a run or a stage; anything "
        "goes. "
        "*batch*: on the host, between two steps. *step*: inside the traced step, where nothing is "
        "read on the host.",
        "",
    ]
    for name, declared in HOOKS.items():
        if declared.default.__qualname__.split(".")[0] != "Callback":
            continue
        lines += [f"## {name}", ""]
        lines += [f"`{name}({', '.join(declared.parameters)})`, *{declared.phase.value}*", ""]
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
        *("loop", "checkpoint", "logging", "seed", "autorestart"),
    ]
    parts = {**dict.fromkeys(names), "model": Module}
    found: dict[str, list[str]] = {}
    for callback in core_callbacks(parts).values():
        for name in hooks_of(type(callback)):
            found.setdefault(name, []).append(type(callback).__name__)
    return found


def trainer_page() -> str:
    """Return the page of the trainer and of the core callbacks that take arguments."""
    classes = [Trainer, TrainingLoop, ValidationLoop, Checkpoint, Logging, MixedPrecision]
    lines = [HEAD, "# The trainer and its core callbacks", "", *contents(classes)]
    for cls in classes:
        if cls is Trainer:
            lines += list(class_lines_of_trainer())
        else:
            lines += class_lines(cls)
    return "\n".join(lines)


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


PAGES: Final[dict[str, Callable[[], str]]] = {
    "callbacks.md": callbacks_page,
    "loggers.md": loggers_page,
    "hooks.md": hooks_page,
    "trainer.md": trainer_page,
}


def tidy(text: str) -> str:
    """Return a page without runs of blank lines."""
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "reference"
    folder.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(tidy(page()), encoding="utf-8")


if __name__ == "__main__":
    main()
