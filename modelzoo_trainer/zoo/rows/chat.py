"""Chat templates: from the turns of a chat to text, with the place of each region in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from itertools import islice
from typing import Any, Final, NamedTuple, NoReturn

from modelzoo_trainer.errors import ConfigError

CHATML: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
)
"""The template of a tokenizer that has none."""

_ASSISTANT: Final = "assistant"
_FIRST_MARK: Final = 0xE000  # the first character of Unicode's private use area
_GENERATION: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_GENERATION_MARKS: Final = ("_generation_begin", "_generation_end")  # variables of the template


class TextSpan(NamedTuple):
    """Characters start to stop of a text, which are region `region` of turn `turn`."""

    start: int
    stop: int
    turn: int
    region: int


_Marked = tuple[int, int, str, str, str]
"""Turn, region, and its text: white space before, the rest, and white space after."""


class Located(NamedTuple):
    """The text of a chat, and what is where in it."""

    text: str
    spans: list[TextSpan]
    """Of all regions, in order."""
    generated: list[tuple[int, int]]
    """Of what is in `{% generation %}` blocks."""


class TemplateRefusal(ConfigError):
    """A chat template fails on the messages of a document.

    Args:
        error: What it raised.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(
            f"the chat template fails: {error}. Change the messages, or set another template."
        )
        is_own = isinstance(error, ValueError)  # its own words, of `raise_exception`
        what = str(error).strip() if is_own else type(error).__name__
        self.reason = f"the chat template refuses the messages ({what[:80]})"
        """Why a document is skipped."""


class ChatTemplate:
    """A template in Jinja, in the form that transformers uses.

    It has no clock: `strftime_now` is undefined, so that the text does not depend on the day.

    Attributes:
        marks_answers: Whether it says with `{% generation %}` blocks what the model writes.

    Args:
        source: Text of the template.
        tokens: Variables of the template, such as `bos_token`.

    Raises:
        ConfigError: If jinja2 is missing, or the template is invalid.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source = source
        self.marks_answers = _GENERATION.search(source) is not None
        self._tokens = dict(tokens)
        self._template = _compiled(source)

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.source, self._tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: str | bool) -> str:
        """Return the text of messages, each with `role` and `content`.

        Args:
            messages: Of the chat.
            **variables: Others of the template.

        Raises:
            TemplateRefusal: If the template refuses them.
        """
        given = {"add_generation_prompt": False, **self._tokens, **variables}
        try:
            text: str = self._template.render(messages=messages, **given)
        except Exception as error:  # jinja2's own, or what the template does to the content
            raise TemplateRefusal(error) from error
        return text

    def locate(self, turns: Sequence[tuple[str, Sequence[str]]]) -> Located | None:
        """Return the text of turns and where their regions are in it.

        Each region is put between two marks before the template is applied, inside its white
        space, so that a template may strip the content. A template may divide the last answer, such
        as into thinking and the rest: it is then what follows the prompt for it.

        Args:
            turns: Role and texts of the regions.

        Returns:
            None if the template omits, repeats or changes a region, or decides by how one begins or
            ends.

        Raises:
            TemplateRefusal: If the template refuses the roles.
        """
        texts = [text for _, regions in turns for text in regions]
        begin, end, *around = _unused_characters(texts)
        messages, marked = [], []
        for turn, (role, regions) in enumerate(turns):
            content = ""
            for region, text in enumerate(regions):
                core = text.strip()
                before = text[: len(text) - len(text.lstrip())] if core else text
                after = text[len(before) + len(core) :]
                content += f"{before}{begin}{core}{end}{after}"
                marked.append((turn, region, before, core, after))
            messages.append({"role": role, "content": content})
        variables = dict(zip(_GENERATION_MARKS, around, strict=True))
        text, blocks = _blocks(self.render(messages, **variables), *around)
        found = _without_marks(text, marked, begin, end)
        if found is None:
            messages[-1] = _plain(turns)[-1]
            text, blocks = _blocks(self.render(messages, **variables), *around)
            found = self._by_prefix(text, messages, marked, begin, end)
        if found is None or found[0] != self.render(_plain(turns)):
            return None
        # Marks of regions that are before a place are not in the text that is returned.
        places = [place - sum(map(text[:place].count, (begin, end))) for place in blocks]
        return Located(*found, list(zip(places[::2], places[1::2], strict=True)))

    def locate_answers(self, messages: Sequence[Mapping[str, Any]]) -> Located | None:
        """Return the text of messages and where each is in it, if they have more than a text.

        An answer is all that the template writes after the prompt for it, such as thinking and
        calls of tools, up to what ends it. A prompt is the text of its content.

        Args:
            messages: Each with `role`, `content` and what else the template writes.

        Returns:
            None if the template omits, repeats or changes a message when others follow.

        Raises:
            TemplateRefusal: If the template refuses them.
        """
        begin, end, *around = _unused_characters([repr(message) for message in messages])
        shown, marked = [], []
        for turn, message in enumerate(messages):
            core = message["content"].strip()
            if message["role"] == _ASSISTANT or not core:
                shown.append(message)
                continue
            shown.append({**message, "content": f"{begin}{core}{end}"})
            marked.append((turn, 0, "", core, ""))
        variables = dict(zip(_GENERATION_MARKS, around, strict=True))
        text, places = _blocks(self.render(messages, **variables), *around)
        found = _without_marks(self.render(shown), marked, begin, end)
        if found is None or found[0] != text:
            return None
        spans = list(found[1])
        for turn, message in enumerate(messages):
            if message["role"] == _ASSISTANT:
                before = self.render(messages[:turn], add_generation_prompt=True)
                until = self.render(messages[: turn + 1]).rstrip()
                is_there = text.startswith(until) and until.startswith(before)
                if not is_there or not _writes(message, until.removeprefix(before)):
                    return None
                spans.append(TextSpan(len(before), len(until), turn, 0))
        return Located(text, sorted(spans), list(zip(places[::2], places[1::2], strict=True)))

    def _by_prefix(
        self, text: str, messages: Sequence[Mapping[str, str]], marked: list[_Marked], *marks: str
    ) -> tuple[str, list[TextSpan]] | None:
        """Return the text without marks and the places of regions; the last has no mark.

        None if the text does not begin with the prompt for the last message, or does not have all
        of the message after it, apart from white space.
        """
        *before, last = messages
        turn, region, *_ = marked[-1]
        try:
            prompt = self.render(before, add_generation_prompt=True)
        except ConfigError:
            return None
        answer = text.removeprefix(prompt).rstrip()
        is_whole = "".join(last["content"].split()) in "".join(answer.split())
        found = _without_marks(prompt, marked[:-1], *marks)
        if found is None or region or not is_whole or not text.startswith(prompt):
            return None
        start, spans = found
        stop = len(start) + len(answer)
        rest = text[len(prompt) :]
        return start + rest, [*spans, TextSpan(len(start), stop, turn, region)]

    def end_of_answer(self) -> str | None:
        """Return what the template writes after the last message, an answer, and what is learned.

        In a template with `{% generation %}` blocks, only what is in them is learned. None if the
        template refuses a user's message with an answer.
        """
        try:
            found = self.locate([("user", ["a"]), ("assistant", ["b"])])
        except ConfigError:
            return None
        if found is None:
            return None
        stop = max((stop for _, stop in found.generated), default=0)
        return found.text[found.spans[-1].stop : stop if self.marks_answers else None]


def _writes(message: Mapping[str, Any], answer: str) -> bool:
    """Return whether an answer has the text, the thinking and the called tools of a message."""
    calls = message.get("tool_calls") or []
    calls = [*(calls if isinstance(calls, list) else [calls]), message.get("function_call")]
    names = [name for call in calls if (name := _name_of(call)) is not None]
    texts = [message.get(key) for key in ("content", "reasoning_content", "thinking")]
    parts = [*names, *(text for text in texts if isinstance(text, str))]
    found = "".join(answer.split())
    return all(isinstance(part, str) and "".join(part.split()) in found for part in parts)


def _name_of(call: Any) -> Any:
    """Return the name of a called tool; None if it has none."""
    if isinstance(call, Mapping):
        call = call.get("function") or call
    return call.get("name") if isinstance(call, Mapping) else call


def _plain(turns: Sequence[tuple[str, Sequence[str]]]) -> list[dict[str, str]]:
    return [{"role": role, "content": "".join(regions)} for role, regions in turns]


def _blocks(text: str, begin: str, end: str) -> tuple[str, list[int]]:
    """Return a text without two marks, and where each was in it."""
    pieces = re.split(f"[{begin}{end}]", text)
    places, length = [], 0
    for piece in pieces[:-1]:
        length += len(piece)
        places.append(length)
    return "".join(pieces), places


def _without_marks(
    text: str, marked: Iterable[_Marked], begin: str, end: str
) -> tuple[str, list[TextSpan]] | None:
    pieces, spans, length = [], [], 0
    for turn, region, before, core, after in marked:
        outside, found, rest = text.partition(f"{begin}{core}{end}")
        if not found or begin in outside or end in outside:
            return None
        start = length + len(outside)
        stop = start + len(core)
        pieces += [outside, core]
        length, text = stop, rest
        # White space of the region, unless the template has stripped it.
        start -= len(before) if outside.endswith(before) else 0
        stop += len(after) if rest.startswith(after) else 0
        spans.append(TextSpan(start, stop, turn, region))
    if begin in text or end in text:
        return None
    return "".join([*pieces, text]), spans


def _unused_characters(texts: Sequence[str]) -> list[str]:
    used = set().union(*texts)
    unused = (chr(code) for code in range(_FIRST_MARK, 0xF900) if chr(code) not in used)
    return list(islice(unused, 4))


def _compiled(source: str) -> Any:
    try:
        jinja2 = import_module("jinja2")
        sandbox = import_module("jinja2.sandbox")
    except ImportError as error:
        raise ConfigError(
            "A chat template requires jinja2, which is not installed: "
            'pip install "modelzoo-trainer[preprocess]"'
        ) from error
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.add_extension(_generation_blocks(import_module("jinja2.ext")))
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = _to_json
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template is invalid: {error}") from error


def _generation_blocks(ext: Any) -> Any:
    """Return an extension that writes `{% generation %}` blocks between two variables."""
    nodes = import_module("jinja2.nodes")

    class Generation(ext.Extension):  # type: ignore[misc]  # imported where it is used
        tags: Final = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in _GENERATION_MARKS)
            return [begin, *body, end]

    return Generation


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    import json

    return json.dumps(value, ensure_ascii=False, indent=indent)  # jinja2's own escapes HTML
