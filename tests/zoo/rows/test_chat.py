"""Chat templates: the text, and where the messages are in it."""

from __future__ import annotations

import pickle
import sys

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.rows.chat import CHATML, ChatTemplate

pytest.importorskip("jinja2")

TURNS = [("user", ["Hi ", "there"]), ("assistant", ["Yes\n"])]
STRIPS = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{{ eos_token }}{% endfor %}"


def regions(found):
    """Return the text and what the spans cut out of it."""
    text, spans, _ = found
    return text, [(span.turn, span.region, text[span.start : span.stop]) for span in spans]


def test_regions_are_found_in_the_text_of_the_template():
    text, found = regions(ChatTemplate(CHATML, {}).locate(TURNS))
    assert text == (
        "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\nYes\n<|im_end|>\n"
    )
    assert found == [(0, 0, "Hi "), (0, 1, "there"), (1, 0, "Yes\n")]


def test_a_template_may_strip_its_messages():
    text, found = regions(ChatTemplate(STRIPS, {"eos_token": "</s>"}).locate(TURNS))
    assert text == "[user]Hi there</s>[assistant]Yes</s>"
    assert found == [(0, 0, "Hi "), (0, 1, "there"), (1, 0, "Yes")]


def test_text_like_the_marks_does_no_harm():
    turns = [("user", ["\ue000\ue001"]), ("assistant", ["\ue001"])]
    _, found = regions(ChatTemplate(CHATML, {}).locate(turns))
    assert [text for _, _, text in found] == ["\ue000\ue001", "\ue001"]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content + m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content.split('Y')[-1] }}{% endfor %}",
        "{% for m in messages %}{{ m.content[:1] == 'H' }}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_omits_repeats_or_looks_at_text_has_no_places(source):
    assert ChatTemplate(source, {}).locate(TURNS) is None


def test_a_template_that_refuses_the_roles_says_so():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ConfigError, match="roles must alternate"):
        template.locate(TURNS)


def test_an_invalid_template_is_refused():
    with pytest.raises(ConfigError, match=r"chat template is invalid: .*endfor"):
        ChatTemplate("{% for m in messages %}", {})


def test_templates_of_transformers_are_understood():
    source = (
        "{%- for m in messages %}\n    {%- if m.role == 'tool' %}{%- continue %}{%- endif %}\n"
        "{% generation %}{{ m.content }}{% endgeneration %}"
        "{{ {'\u00e9': 1} | tojson }}{%- endfor %}"
    )
    text = ChatTemplate(source, {}).render([{"role": "user", "content": "a"}])
    assert text == 'a{"\u00e9": 1}'


def test_what_is_in_generation_blocks_is_found():
    source = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' %}{{ m.content }}"
        "{% else %}{% generation %}{{ m.content | trim }}</s>{% endgeneration %}{% endif %}"
        "{{ '\n' }}{% endfor %}"
    )
    turns = [*TURNS, ("user", ["ok"]), ("assistant", ["No"])]
    text, spans, generated = ChatTemplate(source, {}).locate(turns)
    assert text == "[user]Hi there\n[assistant]Yes</s>\n[user]ok\n[assistant]No</s>\n"
    assert [text[start:stop] for start, stop in generated] == ["Yes</s>", "No</s>"]
    assert [text[span.start : span.stop] for span in spans] == ["Hi ", "there", "Yes", "ok", "No"]


def test_the_text_does_not_depend_on_the_day():
    source = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}none{% endif %}"
    assert ChatTemplate(source, {}).render([]) == "none"


def test_a_template_can_be_sent_to_another_process():
    sent = pickle.loads(pickle.dumps(ChatTemplate(STRIPS, {"eos_token": "</s>"})))
    assert sent.locate(TURNS) == ChatTemplate(STRIPS, {"eos_token": "</s>"}).locate(TURNS)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"jinja2.*modelzoo-trainer\[preprocess\]"):
        ChatTemplate(CHATML, {})
