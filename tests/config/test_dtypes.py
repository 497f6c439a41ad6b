"""Every usual alias of a data type is accepted wherever one is an argument, in any case."""

from __future__ import annotations

import argparse
from typing import Any

import jsonschema
import pytest
import torch

from backends.dtypes import ALIASES
from backends.parallel.config import ParallelSettings
from modelzoo_trainer import ConfigError, MixedPrecision
from modelzoo_trainer.base.dtypes import dtype_name, torch_dtype
from modelzoo_trainer.callbacks import HuggingFaceCheckpoint, ModelEma
from modelzoo_trainer.cli import converting
from modelzoo_trainer.config.arguments import check_arguments, schema_of
from modelzoo_trainer.config.json_schema.components import TypeSchemas
from modelzoo_trainer.config.loader import read_text, to_yaml
from modelzoo_trainer.config.positions import Place, Problems
from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm
from modelzoo_trainer.zoo.models.hugging_face.model import HfModel

ARGUMENTS = [
    (MixedPrecision, "fp16_type", ("bfloat16", "float16")),
    (HuggingFaceCheckpoint, "dtype", ("float32", "float16", "bfloat16")),
    (ModelEma, "dtype", ("float32", "float64", "bfloat16")),
    (HfCausalLm, "dtype", ("float32", "float16", "bfloat16")),
    (HfModel, "dtype", ("float32", "float16", "bfloat16")),
]
TINY = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 8}
REQUIRED: dict[Any, dict[str, Any]] = {
    HfCausalLm: {"config": TINY},
    HfModel: {"config": TINY, "auto_class": "AutoModel"},
}


def spellings(name: str) -> list[str]:
    plain = [name, *ALIASES[name]]
    return [given for one in plain for given in (one, one.upper(), f"torch.{one}")]


EVERY = [(name, given) for name in ALIASES for given in spellings(name)]
cases = pytest.mark.parametrize(
    ("cls", "key", "names"), [pytest.param(*case, id=case[0].__name__) for case in ARGUMENTS]
)


def from_file(cls: type, arguments: dict[str, Any]) -> tuple[Any, list[str]]:
    problems = Problems()
    place = Place.root(read_text(to_yaml(arguments), "f.yaml"))
    return check_arguments(place, schema_of(cls), problems), problems.lines()


@cases
@pytest.mark.slow_cases(every=4)
def test_every_alias_from_a_file_is_the_name(cls, key, names) -> None:
    schema = TypeSchemas().of(schema_of(cls).parameters[key].adapter)
    for name in names:
        for given in spellings(name):
            read, said = from_file(cls, REQUIRED.get(cls, {}) | {key: given})
            assert not said
            assert read[key] == name
            jsonschema.validate(given, schema)


@cases
@pytest.mark.slow_cases(every=4)
def test_every_alias_in_python_is_the_type(cls, key, names) -> None:
    if cls in REQUIRED:
        pytest.importorskip("transformers")
    for name in names:
        for given in (*spellings(name), getattr(torch, name)):
            made = cls(**REQUIRED.get(cls, {}), **{key: given})
            if cls in REQUIRED:
                assert {one.dtype for one in made.parameters()} == {getattr(torch, name)}
            else:
                assert str(getattr(made, key)).removeprefix("torch.") == name


@cases
@pytest.mark.parametrize("given", ["float8", "int8", "bf61", torch.int8])
def test_another_type_is_refused_with_those_that_fit(cls, key, names, given) -> None:
    with pytest.raises(ConfigError) as refused:
        cls(**REQUIRED.get(cls, {}), **{key: given})
    assert all(repr(name) in str(refused.value) for name in names)
    schema = TypeSchemas().of(schema_of(cls).parameters[key].adapter)
    assert not jsonschema.Draft202012Validator(schema).is_valid(str(given))


@pytest.mark.parametrize(("name", "given"), EVERY)
def test_every_alias_of_a_name(name, given) -> None:
    assert dtype_name(given) == dtype_name(getattr(torch, name)) == name
    assert torch_dtype(given) is getattr(torch, name)


@pytest.mark.parametrize(("name", "given"), EVERY)
def test_every_alias_for_sharding(name, given) -> None:
    options = {"parallel": {"shard": 2}, "sharding": {"param_dtype": given}}
    assert ParallelSettings.from_options(options).param_dtype is getattr(torch, name)


@pytest.mark.parametrize(("name", "given"), EVERY)
def test_every_alias_on_the_command_line(name, given) -> None:
    parser = argparse.ArgumentParser()
    converting.add_command(lambda *_: parser)
    options = parser.parse_args(["a", "b", "--from", "cerebras", "--dtype", given])
    assert options.dtype == name
