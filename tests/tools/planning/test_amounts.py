from __future__ import annotations

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.tools.planning.figures import bytes_of, in_bytes, in_thousands


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 80 * 2**30),
        ("141 GB", 141 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("512B", 512),
        ("16000000000", 16 * 10**9),
    ],
)
def test_a_size_is_read_with_its_unit(text: str, expected: int) -> None:
    assert bytes_of(text) == expected


@pytest.mark.parametrize("text", ["", "-1GiB", "0GiB", "GiB", "80 gigs", "1e9", "80G", "nan"])
def test_a_size_has_a_number_and_a_whole_unit(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--memory.* 80GiB"):
        bytes_of(text)


@pytest.mark.parametrize(
    ("num", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1048575, "1.0 MiB"), (2**40, "1.0 TiB")],
)
def test_bytes_have_a_unit_that_fits(num: int, expected: str) -> None:
    assert in_bytes(num) == expected


def test_numbers_have_letters_for_their_thousands() -> None:
    assert in_thousands(627840) == "627.8 k"
    assert in_thousands(2.1e15, "FLOP") == "2.1 PFLOP"
    assert in_thousands(12) == "12"
