"""Models of a configuration for other commands than a run: the same settings are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelzoo_trainer.config.arguments import schema_of
from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import to_yaml
from modelzoo_trainer.config.model_sections import models_in
from modelzoo_trainer.config.positions import FilePosition, from_plain
from modelzoo_trainer.config.published import published_fields
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.conversion.model_settings import (
    ModelSettings,
    RootSettings,
    find_settings,
)
from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.registry import MODELS, model_class

REQUIRED: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_heads": 2,
    "max_position_embeddings": 16,
    "attention_sliding_window_length": 8,
}
VALUES: tuple[Any, ...] = (None, False, True, 2, 0.5, "rotary", "gelu", [], {})
REST = {
    "optimizer": {"SGD": {"lr": 0.1}},
    "loop": {"max_steps": 1},
}
DATA = {"data_processor": "DigitsProcessor", "split": "train", "batch_size": 4}
DECODERS = [name for name in MODELS if issubclass(model_class(name), Decoder)]


def run_of(model: dict[str, Any]) -> dict[str, Any]:
    return {"trainer": {"init": {"model": model, **REST}, "fit": {"train_dataloader": DATA}}}


def found(content: dict[str, Any]) -> dict[str, Any]:
    ((settings, _),) = models_in(content, "the file")
    return settings


def kinds_of_decoders() -> list[str]:
    """Return a decoder of each class with the same settings in the format."""
    kinds = {
        (
            model_class(name),
            str({key: one.is_inert for key, one in published_fields(name).items()}),
        ): name
        for name in reversed(DECODERS)
    }
    return sorted(kinds.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", kinds_of_decoders())
def test_every_setting_that_a_check_accepts_is_accepted_by_a_conversion(
    name: str, tmp_path: Path
) -> None:
    names = shipped_names()
    keys = {*schema_of(model_class(name)).parameters, *published_fields(name)} - {"name"}
    accepted = set()
    for key in sorted(keys):
        for value in VALUES:
            content = run_of({"name": name, **REQUIRED, key: value})
            try:
                check_config(from_plain(content, FilePosition("the file")), names)
            except ConfigError:
                continue
            accepted.add(key)
            path = tmp_path / "params.yaml"
            path.write_text(to_yaml(content))
            settings = find_settings(tmp_path, path, models_in)
            assert isinstance(settings, ModelSettings), (key, value)
            assert settings.settings.hidden_size == (2 if key == "hidden_size" else 16)
    inert = {key for key, one in published_fields(name).items() if one.is_inert}
    assert inert
    assert accepted > inert | {"dropout_rate", "moe"}


def test_settings_without_effect_are_left_out_and_numbers_are_converted(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(
        "trainer: {init: {callbacks: [], model: {name: LlamaModel, vocab_size: 1e3, hidden_size: "
        "16, num_hidden_layers: 1, num_heads: 2, max_position_embeddings: 1_024, "
        "boundary_casting: true}}}\n"
    )
    assert models_in(path, "")[0] == (
        {
            "name": "llama",
            "vocab_size": 1000,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_heads": 2,
            "max_position_embeddings": 1024,
        },
        [],
    )


def test_a_model_in_a_file_of_the_older_layout_is_found() -> None:
    content = {
        "model": {"model_name": "gpt2", **REQUIRED, "mixed_precision": True},
        "runconfig": {"max_steps": 10, "nonsense": 1},
    }
    assert found(content) == {"name": "gpt2", **REQUIRED}


@pytest.mark.parametrize(
    "model",
    [
        {"name": "gpt2", **REQUIRED, "hidden_sise": 1},
        {"name": "dpo", "policy_model": {"name": "gpt2", **REQUIRED, "hidden_sise": 1}},
    ],
)
def test_a_misspelt_setting_is_refused_with_its_place(model: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"the file: .*hidden_sise: .*'hidden_size'"):
        found(run_of(model))


@pytest.mark.parametrize(
    "model",
    [
        {"name": "tests.config.nothing_here.Model", "width": 1},
        {"name": "dpo", "policy_model": {"name": "tests.config.nothing_here.Model"}},
        {"tests.config.nothing_here.Model": {"width": 1}},
    ],
)
def test_a_class_that_is_not_shipped_is_not_imported(model: dict[str, Any]) -> None:
    assert found(run_of(model)) == model


def test_a_model_of_transformers_is_not_looked_for() -> None:
    model = {"name": "hf_causal_lm", "pretrained_model_name_or_path": "nowhere/at/all"}
    assert found(run_of(model)) == model


def test_a_model_of_another_kind_is_refused_by_a_conversion(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(to_yaml(run_of({"name": "fc_mnist", "hidden_sizes": [4]})))
    with pytest.raises(ConfigError, match="'fc_mnist' is not a decoder"):
        find_settings(tmp_path, path, models_in)
    path.write_text(to_yaml(run_of({"name": "hf_causal_lm", "config": {}})))
    assert isinstance(find_settings(tmp_path, path, models_in), RootSettings)
