"""Every argument of every shipped class, given odd values: taken or refused, and nothing else."""

from __future__ import annotations

import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from modelzoo_trainer.config.arguments import Schema, schema_of
from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_text, to_yaml
from modelzoo_trainer.config.names import Names
from modelzoo_trainer.config.positions import Problems
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.errors import ConfigError
from tests.config.attempts import patience
from tests.config.shapes import fits

NUMBERS = [1, 2, 0.5, 0, -1, 1.5, 10**40, -(10**40), 1e308, 5e-324, True, False]
BEYOND = [float("inf"), float("-inf"), float("nan"), "nan", None]
TEXTS = ["x", "", "*", "/", "\x00", "a\nb"]
LISTS = [[], [0], [1, 2], ["x"], [None], [[1]], [{}]]
MAPPINGS = [{}, {"x": 1}, {"name": "normal"}, {"a": {"b": []}}]
VALUES = [*NUMBERS, *BEYOND, *TEXTS, *LISTS, *MAPPINGS]
INJECTED = {"optimizers": 1, "schedulers": 1}  # leading arguments that the program gives
KINDS = ("models", "optimizers", "schedulers", "callbacks", "loggers", "processors", "sections")
MU = "mup_base_hidden_size: 2, mup_base_filter_size: 2"


@pytest.fixture(scope="module")
def names():
    return shipped_names()


def classes(names: Names) -> Iterator[tuple[str, str, Schema]]:
    """Yield the kind and name of each shipped class with what it takes."""
    for kind in KINDS:
        table = getattr(names, kind)
        for name in table if kind == "sections" else table.names:
            target = table[name] if kind == "sections" else table.load(name)
            yield kind, name, schema_of(target, INJECTED.get(kind, 0))


def tree(kind: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a file with a class in its place."""
    init: dict[str, Any] = {
        "model": {"name": "fc_mnist", "depth": 1, "hidden_size": 2},
        "optimizer": {"SGD": {"lr": 0.1}},
    }
    loader = {"data_processor": "DigitsProcessor", "batch_size": 2}
    if kind == "models":
        init["model"] = {"name": name, **arguments}
    elif kind == "optimizers":
        init["optimizer"] = {name: arguments}
    elif kind == "processors":
        loader = {"data_processor": name, **arguments}
    elif kind == "sections":
        init[name] = arguments
    else:
        init[kind] = [{name: arguments}]
    return {"trainer": {"init": init, "fit": {"train_dataloader": loader}}}


def cases(names: Names, one_in: int) -> Iterator[dict[str, Any]]:
    """Yield files, of which each gives one argument of one class one of `VALUES`."""
    for kind, name, schema in classes(names):
        required = {
            key: next((value for value in VALUES if fits(one, value)), 1)
            for key, one in schema.parameters.items()
            if one.is_required
        }
        for key in schema.parameters:
            for idx, value in enumerate(VALUES):
                if zlib.crc32(f"{name} {key} {idx}".encode()) % one_in == 0:
                    yield tree(kind, name, {**required, key: value})


def outcomes(names: Names, one_in: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for given in cases(names, one_in):
        message = refusal(names, given)
        assert not message or message.startswith("f.yaml:"), given
        found["refused" if message else "planned"] += 1
    return found


def refusal(names: Names, given: dict[str, Any]) -> str:
    try:
        with patience():
            check_config(read_text(to_yaml(given), "f.yaml"), names, None, Problems())
    except ConfigError as error:
        return str(error)
    except Exception as error:
        error.add_note(f"raised by {given}")
        raise
    return ""


@pytest.mark.slow
def test_odd_values_are_planned_or_refused(names):
    found = outcomes(names, 12)
    assert found["planned"] > 50
    assert found["refused"] > 500


@pytest.mark.soak
def test_every_argument_takes_or_refuses_every_odd_value(names, capsys):
    found = outcomes(names, 1)
    with capsys.disabled():
        sys.stdout.write(f"\n{found.total()} odd values: {dict(found)}\n")
    assert found["planned"] > 1000
    assert found["refused"] > 10_000


@pytest.mark.parametrize(
    "text",
    [
        "fit: {train_dataloader: &a {data_processor: DigitsProcessor, batch_size: x}}\n"
        "  validate: {val_dataloader: *a}",
        "fit: {train_dataloader: &a {data_processor: TextFileProcessor, data_dir: {a: 1}, "
        "batch_size: 2, max_sequence_length: 2}}\n  validate: {val_dataloader: *a}",
    ],
)
def test_a_wrong_value_that_an_alias_repeats_is_refused_once(names, text):
    init = "init: {model: {name: fc_mnist, depth: 1, hidden_size: 2}, optimizer: {SGD: {lr: 0.1}}}"
    with pytest.raises(ConfigError, match=r"^f\.yaml:3:\d+: [^\n]*: expected [^\n]*, got [^\n]*$"):
        check_config(read_text(f"trainer:\n  {init}\n  {text}\n", "f.yaml"), names)


def test_a_wrong_scheduler_that_an_alias_repeats_is_refused_once(names):
    given = "schedulers: [&a {ConstantLR: {learning_rate: x}}, *a]"
    init = f"init: {{model: {{name: fc_mnist, depth: 1, hidden_size: 2}}, {given}}}"
    with pytest.raises(ConfigError, match=r"^f\.yaml:2:\d+: [^\n]*: expected [^\n]*, got [^\n]*$"):
        check_config(read_text(f"trainer:\n  {init}\n", "f.yaml"), names, None)


def test_a_wrong_model_that_an_alias_repeats_is_refused_for_what_is_wrong_only(names):
    text = "- trainer: &a\n    init: {model: {name: fc_mnist, depth: x}}\n- trainer: *a\n"
    with pytest.raises(ConfigError) as caught:
        check_config(read_text(f"trainer:\n{text}", "f.yaml"), names)
    assert "depth is None" not in str(caught.value)


@pytest.mark.parametrize("value", ["wrong", "{a: 1}", "[1]", "true", "-1"])
@pytest.mark.parametrize("more", ["", f", {MU}"])
def test_a_wrong_value_of_an_initializer_is_refused_in_its_line(names, value, more):
    model = (
        "name: gpt2, vocab_size: 4, hidden_size: 4, filter_size: 4, num_heads: 1, "
        f"num_hidden_layers: 1, max_position_embeddings: 4{more}"
    )
    text = (
        f"trainer:\n  init:\n    model: {{{model},\n      initializer:\n"
        f"        {{name: truncated_normal, std: {value}}}}}\n"
    )
    with pytest.raises(ConfigError, match=r"f\.yaml:[45]:\d+: .*initializer.*std"):
        check_config(read_text(text, "f.yaml"), names, None)
