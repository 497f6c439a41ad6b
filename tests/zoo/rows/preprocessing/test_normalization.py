"""Normalization gives what ftfy does, and reads only the lines that it may change."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from modelzoo_trainer.zoo.rows.preprocessing.normalization import detokenize_wikitext, fix_text

ftfy = pytest.importorskip("ftfy")

TEXTS = [
    "plain text\nof two lines\n",
    "sch\u00c3\u00b6n\n",
    "a\r\nb\rc\u2028d\x85e\n",
    "\x1b[31mred\x1b[0m \x07 bell\n",
    "&lt;tag&gt; before\n<b> &lt;after\n&amp; and again\n",
    "&amp;\n<b>\n&amp; not after a tag\n",
    "<a>&amp;</a>\n",
    "\u201cquoted\u201d \ufb01ne e\u0301 \uff21\n",
    "no end &eacute;",
    "\x00\x0c\x7f\n\n\u00a0\n",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("normalizer", ["NFC", "NFKC", None])
def test_a_text_is_fixed_as_ftfy_does(text: str, normalizer: str | None) -> None:
    assert fix_text(text, normalizer=normalizer) == ftfy.fix_text(text, normalization=normalizer)


def test_joined_texts_are_fixed_as_ftfy_does() -> None:
    text = "".join(TEXTS)
    assert fix_text(text) == ftfy.fix_text(text)


@pytest.mark.slow
def test_the_standard_library_is_fixed_as_ftfy_does() -> None:
    paths = [*Path(sysconfig.get_path("stdlib")).glob("*.py"), *Path("tests").rglob("*.py")]
    for path in paths:
        text = path.read_bytes().decode("utf-8", "replace")
        assert fix_text(text) == ftfy.fix_text(text), path


def test_spacing_of_wikitext_is_undone() -> None:
    text = " He paid 1 @,@ 000 @.@ 50 dollars ( or so ) , didn 't he ? "
    assert detokenize_wikitext(text) == " He paid 1,000.50 dollars (or so), didn't he? "
