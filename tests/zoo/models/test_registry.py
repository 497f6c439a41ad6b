"""Models by name."""

import subprocess
import sys

import pytest
from torch import nn

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models import MODELS, model_class


@pytest.mark.parametrize("name", MODELS)
def test_every_name_leads_to_a_module(name: str) -> None:
    assert issubclass(model_class(name), nn.Module)


def test_case_does_not_matter() -> None:
    assert model_class("GPT2") is model_class("gpt2")
    assert model_class("Llama") is model_class("llama")


def test_a_misspelt_name_is_refused_with_a_suggestion_and_the_list() -> None:
    with pytest.raises(
        ConfigError,
        match=r"model name 'lama' is not .*mean 'llama'\? Shipped: bert, .*its dotted path",
    ):
        model_class("lama")


@pytest.mark.slow
def test_looking_at_the_names_imports_no_model() -> None:
    code = (
        "import sys; from modelzoo_trainer.zoo.models import MODELS; "
        "print([name for name in sys.modules if name.endswith('models.gpt2')])"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"
