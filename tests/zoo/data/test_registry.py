"""Data processors by name."""

import pytest

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.data import PROCESSORS, processor_class


@pytest.mark.parametrize("name", PROCESSORS)
def test_every_name_leads_to_the_class_of_that_name(name: str) -> None:
    found = processor_class(name)

    assert found.__name__ == name
    assert hasattr(found, "create_dataloader")


def test_case_does_not_matter() -> None:
    assert processor_class("textfileprocessor") is processor_class("TextFileProcessor")


def test_a_misspelt_name_is_refused_with_a_suggestion_and_the_list() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'DigitProcessor' is not .*mean 'DigitsProcessor'\? Shipped: .*Digits.*dotted path",
    ):
        processor_class("DigitProcessor")


def test_a_name_that_resembles_none_gets_the_names_once() -> None:
    with pytest.raises(ConfigError, match=r"not a shipped data processor\. Shipped: Bert"):
        processor_class("zzz")
