"""What the source says about itself."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from modelzoo_trainer import callbacks, loggers
from modelzoo_trainer.callback import Callback
from modelzoo_trainer.config.json_schema.components import argument_texts
from modelzoo_trainer.hooks.spec import HOOKS
from modelzoo_trainer.optim import OPTIMIZERS, SCHEDULERS
from modelzoo_trainer.zoo.data import PROCESSORS, processor_class

Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"
ENTRY = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \(.*\))?:")
UNTRACKED = re.compile(r"\b(?:TODO(?!\(#\d+\): )|FIXME|XXX)\b")


def documented(docstring: str) -> list[str]:
    """Return the names under `Args:`, in order."""
    names: list[str] = []
    inside = False
    for line in textwrap.dedent(docstring).splitlines():
        if line and not line.startswith(" "):
            inside = line == "Args:"
        elif inside and line.startswith("    ") and not line.startswith("     "):
            entry = ENTRY.match(line.strip())
            names += [name.lstrip("*") for name in entry[1].split(", ")] if entry else []
    return names


def parameters(function: Function, *, method: bool) -> list[str]:
    """Return the names of a function's parameters, without that of the object or class."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    static = any(ast.unparse(mark) == "staticmethod" for mark in function.decorator_list)
    ordered = [
        *(positional[1:] if method and not static else positional),
        *([given.vararg] if given.vararg else []),
        *given.kwonlyargs,
        *([given.kwarg] if given.kwarg else []),
    ]
    return [parameter.arg for parameter in ordered]


def makers(tree: ast.Module) -> dict[str, list[str]]:
    """Return what the constructor of each class of a module takes."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            taken = constructor(node, found)
            if taken is not None:
                found[node.name] = taken
    return found


def constructor(node: ast.ClassDef, known: dict[str, list[str]]) -> list[str] | None:
    """Return the parameters of a class, or None if another module would have to tell."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return parameters(item, method=True)
    bases = [ast.unparse(base) for base in node.bases]
    inherited = [name for base in bases for name in known.get(base, [])]
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    if any(mark.startswith("checked_dataclass") for mark in marks):
        return None  # fields of classes in other modules: see the tests of registries
    if any("dataclass" in mark for mark in marks):
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
        return inherited + [ast.unparse(item.target) for item in fields if not is_constant(item)]
    return inherited if all(base in known for base in bases) and bases else None


def is_constant(field: ast.AnnAssign) -> bool:
    return ast.unparse(field.annotation).startswith("ClassVar")


def described(tree: ast.Module) -> Iterator[tuple[str, str, list[str]]]:
    """Yield where, the docstring and the parameters of every function and class that says them."""
    taken = makers(tree)
    methods = {
        id(item): node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for item in node.body
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            owner = f"{methods[id(node)]}." if id(node) in methods else ""
            names = parameters(node, method=bool(owner))
            yield f"{owner}{node.name}", ast.get_docstring(node) or "", names
        elif isinstance(node, ast.ClassDef) and node.name in taken:
            yield node.name, ast.get_docstring(node) or "", taken[node.name]


def drift(tree: ast.Module) -> list[str]:
    """Return what the docstrings of a module name otherwise than its signatures."""
    found = []
    for where, docstring, names in described(tree):
        said = documented(docstring)
        if said and said != [name for name in names if name in said]:
            found.append(f"{where}: Args: {', '.join(said)}; the signature: {', '.join(names)}")
    return found


def comments(text: str) -> Iterator[str]:
    """Yield every comment and docstring-like text as "line: text"."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield f"{token.start[0]}: {token.string}"


def written(root: Path) -> list[Path]:
    """Return the files that people write."""
    names = ["*.py", "*.md", "*.toml", "backends/**/*.py", "modelzoo_trainer/**/*.py"]
    names += ["tests/**/*.py", "tests/*.md", "benchmarks/*.py", "configs/**/*.yaml", "docs/**/*.md"]
    return sorted(path for name in names for path in root.glob(name))


@pytest.mark.parametrize(
    "code",
    [
        'def f(a):\n    """Do it.\n\n    Args:\n        b: A number.\n    """',
        'def f(a, b):\n    """Do it.\n\n    Args:\n        b: One.\n        a: Two.\n    """',
        'class C:\n    """It.\n\n    Args:\n        b: One.\n    """\n    def __init__(s, a): ...',
        '@dataclass\nclass C:\n    """It.\n\n    Args:\n        b: One.\n    """\n\n    a: int',
    ],
)
def test_a_docstring_that_names_other_parameters_is_seen(code: str) -> None:
    assert len(drift(ast.parse(code))) == 1


def test_a_docstring_may_leave_parameters_out() -> None:
    code = (
        'def f(a, *, b):\n    """Do it.\n\n    Args:\n        b: A number:\n            x\n    """'
    )
    assert drift(ast.parse(code)) == []


def test_docstrings_name_the_parameters_of_their_signatures(sources: list[Any]) -> None:
    assert [f"{source.name}: {said}" for source in sources for said in drift(source.tree)] == []


SHIPPED = [getattr(module, name) for module in (callbacks, loggers) for name in module.__all__]


@pytest.mark.parametrize(
    "cls",
    [
        *(*OPTIMIZERS.values(), *SCHEDULERS.values(), *map(processor_class, PROCESSORS)),
        *(cls for cls in SHIPPED if is_dataclass(cls)),
    ],
)
def test_dataclasses_name_their_parameters(cls: Any) -> None:
    names = list(inspect.signature(cls).parameters)
    for base in cls.__mro__:
        said = documented(base.__doc__ or "") if base.__module__.startswith("modelzoo_") else []
        known = names if base is cls else list(inspect.signature(base).parameters)
        assert said == [name for name in known if name in said]


@pytest.mark.parametrize("name", PROCESSORS)
def test_every_argument_of_a_data_processor_has_a_text(name: str) -> None:
    cls = processor_class(name)
    assert inspect.signature(cls).parameters.keys() <= argument_texts(cls).keys()


def test_the_examples_in_docstrings_run(sources: list[Any]) -> None:
    modules = [source.module for source in sources if ">>> " in source.text]
    results = {name: doctest.testmod(importlib.import_module(name)) for name in modules}
    assert "backends.fake" in results
    assert {name: result.failed for name, result in results.items() if result.failed} == {}


def test_every_hook_says_when_it_is_called() -> None:
    docs = {name: getattr(Callback, name).__doc__ or "" for name in HOOKS}
    assert [name for name, text in docs.items() if not text.startswith("Called ")] == []


def test_every_hook_names_its_parameters_as_they_are() -> None:
    said = {name: documented(hook_doc(name)) for name in HOOKS}
    wrong = {
        name: names
        for name, names in said.items()
        if names != [known for known in HOOKS[name].parameters if known in names]
    }
    assert len(HOOKS) >= 50
    assert wrong == {}


def hook_doc(name: str) -> str:
    first, _, rest = (getattr(Callback, name).__doc__ or "").partition("\n")
    return f"{first}\n{textwrap.dedent(rest)}"


def test_files_are_ascii(root: Path) -> None:
    files = written(root)
    names = [path.relative_to(root).as_posix() for path in files if not path.read_bytes().isascii()]
    assert len(files) > 100
    assert names == []


@pytest.mark.parametrize(
    "comment", ["# TODO: later", "# TODO(me): later", "# FIXME", "# XXX(#1): x"]
)
def test_a_task_without_an_issue_is_seen(comment: str) -> None:
    assert UNTRACKED.search(comment)


def test_a_task_with_an_issue_passes() -> None:
    assert not UNTRACKED.search("# TODO(#12): drop it with torch 2.10")


def test_no_task_is_left_without_an_issue(sources: list[Any]) -> None:
    found = [
        f"{source.name}:{comment}"
        for source in sources
        for comment in comments(source.text)
        if UNTRACKED.search(comment)
    ]
    assert found == []
