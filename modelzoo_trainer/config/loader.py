"""Read YAML with positions, and write it: YAML 1.2 scalars, no duplicate keys, no tags."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from modelzoo_trainer.config.positions import (
    Entry,
    FilePosition,
    Mapping,
    Node,
    Problems,
    Scalar,
    Sequence,
)

TAG: Final = "tag:yaml.org,2002:"

_NULL: Final = re.compile(r"(?:null|Null|NULL|~)?")
_BOOL: Final = re.compile(r"(?:true|True|TRUE|false|False|FALSE)")
_INT: Final = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)")
_FLOAT: Final = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))"
)
_KINDS: Final = (("null", _NULL), ("bool", _BOOL), ("int", _INT), ("float", _FLOAT))

GROUPED: Final = r"[-+]?[0-9]+(_[0-9]+)+"  # text in YAML 1.2, a number where one is expected

MAX_DIGITS: Final = 300  # more than any float has; longer ones take quadratic time to read


def kind_of(text: str) -> str:
    """Return "null", "bool", "int", "float" or "str": what `text` is without quotes.

    `text`: a plain scalar. `1e-4` is a float; `on`, `no` and `12:30:45` are text; `0123` is 123.
    """
    for kind, pattern in _KINDS:
        if pattern.fullmatch(text):
            return kind
    return "str"


def value_of(kind: str, text: str) -> bool | int | float | str | None:
    """Return the value of a scalar.

    `kind`: as `kind_of` returns it, or from a tag in the file.

    Raises:
        ValueError: If `text` is not of that kind, or is a number that Python cannot hold; the
            message says why.
    """
    if kind == "str":
        return text
    natural = kind_of(text)
    if natural != kind and (kind, natural) != ("float", "int"):
        raise ValueError(f"{text!r} is not of type {kind}.")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    return _int(text) if kind == "int" else _float(text)


def whole_number(text: str) -> int | None:
    """Return the integer that a plain scalar such as `1e3` or `1_000` stands for.

    Returns:
        None if there is none: `1.5e0`, or a float without an exponent (`1.0`).
    """
    if len(text) > MAX_DIGITS:
        return None
    if re.fullmatch(GROUPED, text):
        return int(text.replace("_", ""))
    if kind_of(text) != "float" or "e" not in text.lower():
        return None
    number = Decimal(text)
    return int(number) if number == number.to_integral_value() else None


def _int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(
            f"a number of {len(text)} digits is too long; the maximum is {MAX_DIGITS}."
        )
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text, base)


def _float(text: str) -> float:
    if text.lower().endswith((".inf", ".nan")):
        return float(text.replace(".", ""))
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is too large for a float; write .inf for infinity.")
    return number


MAX_BYTES: Final = 2**20  # of a file; the largest run known has 23 KiB
MAX_DEPTH: Final = 50  # of nesting; a complete run needs about ten
MAX_VALUES: Final = 100_000  # with aliases written out; the largest run known has some thousands

_MERGE: Final = "merge"
_COLLECTIONS: Final = {"seq": yaml.SequenceNode, "map": yaml.MappingNode}
_SCALARS: Final = ("null", "bool", "int", "float", "str")


def read_file(path: Path) -> Node:
    """Return the content of a YAML file.

    Raises:
        ConfigError: If it cannot be read or is invalid; all problems together.
    """
    problems = Problems()
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            problems.add(FilePosition(str(path)), "", f"is larger than {MAX_BYTES >> 20} MiB.")
            problems.raise_if_any()
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problems.add(FilePosition(str(path)), "", f"is not UTF-8 text (byte {error.start}).")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        problems.add(FilePosition(str(path)), "", f"cannot be read: {reason}.")
    if path.suffix == ".py":
        what = (
            f"is a Python file, but a YAML file is required, such as params.yaml. To run a "
            f"program, use: python {path}"
        )
        problems.add(FilePosition(str(path)), "", what)
    problems.raise_if_any()
    return read_text(text, str(path))


def read_text(text: str, source: str) -> Node:
    """Return the content of YAML text.

    Raises:
        ConfigError: If it is invalid; all problems together.
    """
    problems = Problems()
    node = _Reading(source, problems).read(text)
    problems.raise_if_any()
    assert node is not None  # else there was a problem
    return node


def read_value(text: str, source: str) -> Node:
    """Return the value of a command-line option, in YAML's syntax.

    `text`: the value; empty means null. `source`: the option; it is the position of all that is in
    the value.

    Raises:
        ConfigError: If it is invalid.
    """
    problems = Problems()
    if not text.strip():
        return Scalar(None, FilePosition(source))
    node = _Reading(source, problems, lines=False).read(text)
    problems.raise_if_any()
    assert node is not None  # else there was a problem
    return node


class _Composer(Reader, Scanner, Parser, Composer, BaseResolver):
    """PyYAML up to the tree of nodes, with its recursion bounded; no constructors at all."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        BaseResolver.__init__(self)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self._depth > MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # as in the stubs
            raise yaml.MarkedYAMLError(
                problem=f"nested more than {MAX_DEPTH} levels deep", problem_mark=mark
            )
        self._depth += 1
        node = Composer.compose_node(self, parent, index)
        self._depth -= 1
        return node

    def resolve(
        self, kind: type[yaml.Node], value: str | None, implicit: bool | tuple[bool, bool]
    ) -> str:
        if kind is not yaml.ScalarNode:
            return TAG + ("seq" if kind is yaml.SequenceNode else "map")
        plain = implicit[0] if isinstance(implicit, tuple) else implicit
        if not plain or value is None:
            return TAG + "str"
        return TAG + (_MERGE if value == "<<" else kind_of(value))


class _Reading:
    """Converts a document from PyYAML's nodes to ours."""

    def __init__(self, source: str, problems: Problems, *, lines: bool = True) -> None:
        self._source = source
        self._problems = problems
        self._lines = lines
        self._done: dict[int, tuple[Node, int]] = {}  # by id: the value, and its expanded size
        self._open: set[int] = set()
        self._num_merged = 0

    def read(self, text: str) -> Node | None:
        try:
            tree = _Composer(text).get_single_node()
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            column = error.position - text.rfind("\n", 0, error.position)
            at = (
                FilePosition(self._source, line, column)
                if self._lines
                else FilePosition(self._source)
            )
            self._problems.add(at, "", f"{_name_of(error.character)} is not allowed in YAML.")
            return None
        except yaml.MarkedYAMLError as error:
            at = self._at(error.problem_mark or error.context_mark)
            self._problems.add(at, "", _syntax(error, self._at(error.context_mark).line))
            return None
        if tree is None:
            self._problems.add(FilePosition(self._source), "", "the file is empty.")
            return None
        return self._node(tree)[0]

    def _at(self, mark: yaml.Mark | None) -> FilePosition:
        if mark is None or not self._lines:
            return FilePosition(self._source)
        return FilePosition(self._source, mark.line + 1, mark.column + 1)

    def _node(self, raw: yaml.Node) -> tuple[Node, int]:
        """Return the value and the number of values in it after expanding its aliases."""
        if id(raw) in self._done:
            return self._done[id(raw)]
        at = self._at(raw.start_mark)
        if id(raw) in self._open:
            self._problems.add(at, "", "an alias refers to a value that contains it.")
            return Scalar(None, at), 1
        self._open.add(id(raw))
        node, size = self._convert(raw, at)
        self._open.discard(id(raw))
        if size > MAX_VALUES:
            self._problems.add(
                at, "", f"contains more than {MAX_VALUES} values after expanding its aliases."
            )
            node, size = Scalar(None, at), 1
        self._done[id(raw)] = node, size
        return node, size

    def _convert(self, raw: yaml.Node, at: FilePosition) -> tuple[Node, int]:
        kind = raw.tag.removeprefix(TAG)
        if isinstance(raw, yaml.ScalarNode):
            return self._scalar(raw, kind, at), 1
        expected = _COLLECTIONS.get(kind)
        if expected is None or not isinstance(raw, expected):
            self._problems.add(at, "", _unknown_tag(raw.tag))
        if isinstance(raw, yaml.MappingNode):
            return self._mapping(raw, at)
        pairs = [self._node(item) for item in raw.value]
        return Sequence(tuple(node for node, _ in pairs), at), 1 + sum(size for _, size in pairs)

    def _scalar(self, raw: yaml.ScalarNode, kind: str, at: FilePosition) -> Scalar:
        kind = "str" if kind == _MERGE else kind
        if kind not in _SCALARS:
            self._problems.add(at, "", _unknown_tag(raw.tag))
            return Scalar(None, at)
        try:
            value = value_of(kind, raw.value)
        except ValueError as error:
            self._problems.add(at, "", str(error))
            return Scalar(None, at)
        if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
            self._problems.add(at, "", "the text contains half of a surrogate pair.")
        if isinstance(value, str) and "\0" in value:
            self._problems.add(at, "", "the text contains a null character.")
        return Scalar(value, at, "" if raw.style else raw.value)

    def _mapping(self, raw: yaml.MappingNode, at: FilePosition) -> tuple[Node, int]:
        own: dict[object, Entry] = {}
        merged: dict[object, Entry] = {}
        size = 1
        seen: dict[object, FilePosition] = {}
        for raw_key, raw_value in raw.value:
            key_at = self._at(raw_key.start_mark)
            if not isinstance(raw_key, yaml.ScalarNode):
                self._problems.add(
                    key_at, "", "a key must be a single value, not a list or mapping."
                )
                continue
            is_merge = raw_key.tag == TAG + _MERGE
            key = self._scalar(raw_key, raw_key.tag.removeprefix(TAG), key_at).value
            if key in seen:
                self._problems.add(
                    key_at, "", f"duplicate key {key!r}; first {_near(seen[key], key_at)}."
                )
                continue
            seen[key] = key_at
            value, value_size = self._node(raw_value)
            size += value_size
            if is_merge:
                self._merge(merged, value)
            else:
                own[key] = Entry(key_at, value)
        return Mapping({**merged, **own}, at), size

    def _merge(self, into: dict[object, Entry], value: Node) -> None:
        sources = value.items if isinstance(value, Sequence) else (value,)
        for source in sources:
            if isinstance(source, Mapping):
                self._num_merged += len(source.entries)
                if self._num_merged > MAX_VALUES:
                    what = f"'<<' copies more than {MAX_VALUES} keys in this file."
                    self._problems.add(source.at, "", what)
                    return
                for key, entry in source.entries.items():
                    into.setdefault(key, entry)
            else:
                self._problems.add(source.at, "", "'<<' takes a mapping or a list of mappings.")


_OPEN: Final = {
    "while parsing a flow sequence": "'['",
    "while parsing a flow mapping": "'{'",
    "while scanning a quoted scalar": "a quote",
}


def _syntax(error: yaml.MarkedYAMLError, line: int) -> str:
    """Return what is wrong in terms of the file, not of the parser.

    `line`: where the parser began what it could not finish; 0 = not in a file.
    """
    context, problem = error.context or "", error.problem or ""
    if problem.startswith("found character '\\t'"):
        return "tab character; indent YAML with spaces."
    if start := re.match(r"found character '(.)' that cannot", problem):
        return f"a value cannot begin with {start[1]!r}; write it in quotes."
    if context in _OPEN:
        where = f" in line {line}" if line else ""
        got = problem.replace("'<stream end>'", "the end").replace(
            "found unexpected end of stream", ""
        )
        return f"{_OPEN[context]}{where} is not closed{f': {got}' if got else ''}."
    if problem.startswith("mapping values are not allowed"):
        return "unexpected ':'. Check the indentation; write a text with ': ' in it in quotes."
    if problem.startswith("found undefined alias"):
        return f"{problem}; write a text that begins with '*' in quotes."
    if found := re.search(r"but found '(.+)'", problem):
        token = "indentation" if found[1].startswith("<block") else repr(found[1])
        return f"unexpected {token}. Check the indentation, brackets and quotes."
    return f"{', '.join(part for part in (context, problem) if part)}."


def _near(first: FilePosition, second: FilePosition) -> str:
    return f"in line {first.line}" if first.line else f"in {second.source}"


def _name_of(character: int | str) -> str:
    code = character if isinstance(character, int) else ord(character)
    return f"character U+{code:04X}"


def _unknown_tag(tag: str) -> str:
    known = ", ".join(f"!!{name}" for name in (*_SCALARS, *_COLLECTIONS))
    return f"tag {tag.replace(TAG, '!!')!r} is not supported. Known: {known}."


# ---- back to text


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper without aliases, quoting what YAML 1.1 or 1.2 would not read as text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def resolve(
        self, kind: type[yaml.Node], value: str | None, implicit: bool | tuple[bool, bool]
    ) -> str:
        older = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]  # stubs
        plain = implicit[0] if isinstance(implicit, tuple) else implicit
        if kind is not yaml.ScalarNode or not plain or value is None:
            return str(older)
        newer = TAG + kind_of(value)
        return str(older) if newer == TAG + "str" else newer


def to_yaml(plain: Any) -> str:
    """Return `plain` as YAML, keys in their order, nothing shared."""
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
