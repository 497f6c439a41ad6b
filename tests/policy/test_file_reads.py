"""Files of a run are read through `regular_files`: anything may lie in their place."""

import ast

_OF_USERS = "files that a user names, which may be pipes and devices"
ELSEWHERE = {
    **dict.fromkeys(("config/", "zoo/conversion/", "zoo/data/", "zoo/rows/"), _OF_USERS),
    "base/regular_files.py": "reads them",
    "backends/coordination/liveness.py": "files of /proc",
    "tools/supervisor/settings.py": "the program of the run",
    "checkpointing/slots.py": "a file of /proc",
    "base/stderr.py": "the null device",
}
"""Folders and files that read others, and what these are."""


def mode_of(call: ast.Call, place: int) -> str:
    given = [word.value for word in call.keywords if word.arg == "mode"]
    given += call.args[place : place + 1]
    constants = [one.value for one in given if isinstance(one, ast.Constant)]
    return str(constants[0]) if constants else "r"


def is_resource(node: ast.expr) -> bool:
    """Whether a file of the package is read."""
    return any(isinstance(one, ast.Name) and one.id == "files" for one in ast.walk(node))


def is_read(node: ast.AST) -> bool:
    """Whether a call opens a file to read only, or reads it."""
    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr="read_text" | "read_bytes")):
            return not is_resource(owner)
        case ast.Call(func=ast.Name(id="open")):
            return mode_of(node, 1) in ("r", "rb", "rt")
        case ast.Call(func=ast.Attribute(value=owner, attr="open")):
            is_path = bool(node.args or node.keywords) and not isinstance(owner, ast.Constant)
            is_module = isinstance(owner, ast.Name) and owner.id in ("os", "opener", "module")
            return is_path and not is_module and mode_of(node, 0) in ("r", "rb", "rt")
    return False


def reads_in(source: str) -> list[int]:
    return [node.lineno for node in ast.walk(ast.parse(source)) if is_read(node)]


def test_reads_are_found():
    assert reads_in("path.read_text()\npath.read_bytes()\npath.open('rb')\nopen(path)") == [
        *(1, 2, 3, 4)
    ]
    assert reads_in("path.open('xb')\nopen(path, 'a')\nbackend.open()\nread_text(path)") == []


def test_files_of_a_run_are_read_as_regular_files(sources):
    found = [
        f"{source.name}:{node.lineno}"
        for source in sources
        if not source.name.removeprefix("modelzoo_trainer/").startswith(tuple(ELSEWHERE))
        for node in ast.walk(source.tree)
        if is_read(node)
    ]
    assert found == [], "use read_bytes, read_text or open_regular of regular_files"


def test_all_exceptions_are_used(sources):
    names = [
        source.name.removeprefix("modelzoo_trainer/")
        for source in sources
        if any(map(is_read, ast.walk(source.tree)))
    ]
    assert [one for one in ELSEWHERE if not any(name.startswith(one) for name in names)] == []
