"""The schema for editors says what the checks say, as far as JSON Schema can."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.json_schema import json_schema
from modelzoo_trainer.config.json_schema.components import argument_texts
from modelzoo_trainer.config.loader import read_file, read_text
from modelzoo_trainer.config.positions import to_plain
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.errors import ConfigError
from tests.compat.corpus_here import CONFIGURATIONS

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
NAMELESS = "multimodal_simple_config.yaml"  # prepares data; its model has no name
DIGITS = CONFIGS / "digits_mlp.yaml"

# Where any key is right: options of devices, and what is checked by functions of its own.
FREE = (("trainer", "init", "backend"), ("trainer", "init", "sparsity"))

FILE = """\
trainer:
  init:
    model: {name: tiny_net, hidden_size: 4}
    optimizer: {AdamW: {lr: 1}}
    %s
  fit:
    train_dataloader: {data_processor: Digits, batch_size: 2}
"""
MODEL = "model: {name: tiny_net, hidden_size: 4}"
OPTIMIZER = "optimizer: {AdamW: {lr: 1}}"
LOADER = "train_dataloader: {data_processor: Digits, batch_size: 2}"
LINEAR = "{LinearLR: {initial_learning_rate: 0, end_learning_rate: 1, total_iters: 3}}"
COMPLETE = "\n    ".join(
    [
        "device: CPU",
        "backend: {backend_type: cpu}",
        "schedulers: [SequentialLR: {schedulers: [$LINEAR]}]",
        "precision: {enabled: true, fp16_type: float16, loss_scaling_factor: 2.0}",
        "loop: {max_steps: 3, eval_frequency: 1}",
        "checkpoint: {steps: 3, checkpoint_root: ./x}",
        "logging: {log_steps: 3}",
        "callbacks: [{EarlyStopping: {monitor: loss, keys: [a]}}, {CheckLoss: }]",
        "loggers: [ProgressLogger: {summary_dir: ./x}]",
    ]
)
RIGHT = [
    "device: null",
    "device: CPU",
    "backend: {backend_type: cpu, flag: [1]}",
    "backend: null",
    "model_dir: ./x",
    "seed: null",
    "precision: {loss_scaling_factor: dynamic}",
    "precision: {loss_scaling_factor: 2}",
    "loop: {eval_frequency: 0.5, max_steps: null}",
    "loop: null",
    "logging: null",
    "schedulers: null",
    "schedulers: []",
    "schedulers: [$LINEAR, {linearlr: {initial_learning_rate: 0.5, end_learning_rate: 1, "
    "total_iters: 3}}]",
    "schedulers: [SequentialLR: {schedulers: [$LINEAR, $LINEAR]}]",
    "schedulers: [torch.optim.lr_scheduler.StepLR: {step_size: 3}]",
    "callbacks: null",
    "callbacks: [CheckLoss: null]",
    "callbacks: [CHECKLOSS: , RateProfiler: {}]",
    "callbacks: [EarlyStopping: {monitor: loss, mode: max, keys: [a, b]}]",
    "callbacks: [GlobalFlags: {anything.at.all: 1}]",
    "callbacks: [collections.Counter: {a: 1}]",
    "loggers: [ProgressLogger: null]",
    "loggers: [progresslogger: {summary_dir: ./x}]",
    MODEL.replace("tiny_net", "TINY_Net"),
    "model: {model_name: tiny_net, hidden_size: 4}",
    "model: {name: collections.Counter, a: 1}",
    "model: {collections.Counter: {a: 1}}",
    "model: {collections.Counter: null}",
    "model: {Tiny_Net: {hidden_size: 4}}",
    "optimizer: {adamw: null}",
    "optimizer: {ADAMW: {betas: [0.5, 0.5]}}",
    "optimizer: {torch.optim.SGD: {lr: 1}}",
    LOADER + "\n    val_dataloader: null\n    ckpt_path: null",
    LOADER + "\n    val_dataloader: [{data_processor: Digits, batch_size: 2}]",
    "train_dataloader: {data_processor: digits, batch_size: 2, split: val}",
    "train_dataloader: {data_processor: collections.Counter, a: 1}",
    LOADER + "\n  validate: null\n  validate_all: null",
    LOADER + "\n  validate_all: {}",
    LOADER + "\n  validate_all: {ckpt_paths: [a, b], val_dataloaders: null}",
]
WRONG = [
    "device: 3",
    "backend: [cpu]",
    "backend: {backend_type: 3}",
    "model_dir: 3",
    "seed: 1.5",
    "seed: '1'",
    "precision: {loss_scaling_factor: dinamic}",
    "precision: {enabled: 1}",
    "precision: true",
    "loop: {max_steps: 1.5}",
    "loop: {max_step: 1}",
    "loop: []",
    "logging: {}",
    "schedulers: $LINEAR",
    "schedulers: [LinearLR: {initial_learning_rate: 0, end_learning_rate: 1, total_iter: 3}]",
    "schedulers: [SequentialLR: {schedulers: [{LinearLR: {total_iters: 3}}]}]",
    "schedulers: [SequentialLR: {schedulers: $LINEAR}]",
    "schedulers: [null]",
    "callbacks: {CheckLoss: {}}",
    "callbacks: [CheckLoss]",
    "callbacks: [CheckLos: {}]",
    "callbacks: [{CheckLoss: {}, RateProfiler: {}}]",
    "callbacks: [{}]",
    "callbacks: [EarlyStopping: null]",
    "callbacks: [EarlyStopping: {}]",
    "callbacks: [EarlyStopping: {monitor: loss, mode: Max}]",
    "callbacks: [EarlyStopping: {monitor: loss, keys: [1]}]",
    "callbacks: [CheckLoss: {x: 1}]",
    "callbacks: [CheckLoss: 1]",
    "callbacks: [ProgressLogger: {}]",
    "loggers: [CheckLoss: {}]",
    "model: null",
    "model: tiny_net",
    "model: {}",
    "model: {hidden_size: 4, dropout: 0.1}",
    "model: {name: tiny_net}",
    "model: {name: 3}",
    "model: {name: tiny_net, hidden_size: 4, dropot: 0.1}",
    "model: {name: tiny_net, model_name: tiny_net, hidden_size: 4}",
    "model: {tiny_net: {hidden_size: 4, name: tiny_net}}",
    "model: {tiny_net: {hidden_size: '4'}}",
    "model: {collections.Counter: 3}",
    "optimizer: AdamW",
    "optimizer: {AdamWx: {}}",
    "optimizer: {AdamW: {learning_rat: 1}}",
    "optimizer: {AdamW: {betas: [0.5]}}",
    "optimizer: {AdamW: {betas: [0.5, 0.5, 0.5]}}",
    "train_dataloader: null",
    "train_dataloader: {batch_size: 2}",
    "train_dataloader: {data_processor: Digits}",
    "train_dataloader: {data_processor: Digits, batch_sizes: 2}",
    "train_dataloader: [{data_processor: Digits, batch_size: 2}]",
    LOADER + "\n    val_dataloader: [null]",
    LOADER + "\n    ckpt_path: 3",
    LOADER + "\n  validate: {}",
    LOADER + "\n  validate: {val_dataloader: [{data_processor: Digits, batch_size: 2}]}",
    LOADER + "\n  validate_all: {ckpt_paths: [3]}",
    LOADER + "\n  validate_al: {}",
]


def written(change: str) -> str:
    """Return a file with one part replaced, or a line added."""
    for part in (MODEL, OPTIMIZER, LOADER):
        if change.startswith(part.partition(" ")[0]):
            return (FILE % "seed: 1").replace(part, change)
    return FILE % change.replace("$LINEAR", LINEAR)


def content(text: str) -> Any:
    return json.loads(json.dumps(to_plain(read_text(text, "params.yaml"))))


def content_of(path: Path) -> Any:
    return json.loads(json.dumps(to_plain(read_file(path))))


def complaints(validator: Draft202012Validator, value: Any) -> list[str]:
    return [f"{error.json_path}: {error.message[-200:]}" for error in validator.iter_errors(value)]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value, from the outside in."""
    yield path
    steps = value.items() if isinstance(value, dict) else ()
    steps = enumerate(value) if isinstance(value, list) else steps
    for step, inner in steps:
        yield from places(inner, (*path, step))


def changed(value: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    """Return a copy in which the container at the end of `path` was changed."""
    result = copy.deepcopy(value)
    inside = result
    for step in path[:-1]:
        inside = inside[step]
    change(inside, path[-1])
    return result


def with_value(given: Any, value: Any) -> list[Any]:
    """Return copies, each with `value` at another place."""
    return [
        changed(given, path, lambda inside, key: inside.__setitem__(key, value))
        for path in places(given)
        if path
    ]


def misspell(container: Any, key: str) -> None:
    items = [(f"{old}x" if old == key else old, value) for old, value in container.items()]
    container.clear()
    container.update(items)


def accepts(names: Any, value: Any) -> bool:
    try:
        check_config(read_text(json.dumps(value), "params.yaml"), names)
    except ConfigError:
        return False
    return True


@pytest.fixture(scope="module")
def shipped() -> Draft202012Validator:
    return Draft202012Validator(json_schema(shipped_names()))


@pytest.fixture
def small(names) -> Draft202012Validator:
    return Draft202012Validator(json_schema(names))


@pytest.mark.slow
def test_the_schema_is_one_of_draft_2020_12(shipped):
    Draft202012Validator.check_schema(shipped.schema)
    assert shipped.schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_every_reference_leads_to_a_definition_and_every_definition_is_in_use(shipped):
    text = json.dumps(shipped.schema)
    referred = {part.partition('"')[0] for part in text.split('"$ref": "#/$defs/')[1:]}
    pointers = {one.replace("/", "~1") for one in shipped.schema["$defs"]}
    assert referred == pointers


def test_the_schema_is_the_same_every_time(shipped):
    assert json.dumps(json_schema(shipped_names())) == json.dumps(shipped.schema)


def test_the_committed_schema_is_that_of_the_code(shipped):
    committed = (CONFIGS / "schema.json").read_text(encoding="utf-8")
    is_current = committed == json.dumps(shipped.schema, indent=1) + "\n"
    assert is_current, "Make it again: modelzoo-trainer schema > configs/schema.json"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_shipped_configuration_names_the_schema_in_its_first_line(path):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first == "# yaml-language-server: $schema=schema.json"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_shipped_configuration_fits(shipped, path):
    assert complaints(shipped, content_of(path)) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
@pytest.mark.slow_cases(every=4)
def test_a_misspelt_key_is_refused_wherever_it_is(shipped, path):
    given = content_of(path)
    keys = [
        place
        for place in places(given)
        if place
        and isinstance(place[-1], str)
        and not any(place[: len(one)] == one for one in FREE)
    ]
    accepted = [key for key in keys if shipped.is_valid(changed(given, key, misspell))]
    assert len(keys) > 30
    assert accepted == []


def test_a_key_of_the_format_that_is_not_supported_fits(shipped):
    given = {"name": "llama", "memory_tokens": {"num": 8}, "use_sink_token": True}
    assert complaints(shipped, {"trainer": {"init": {"model": given}}}) == []
    given["memory_tokns"] = {"num": 8}
    assert complaints(shipped, {"trainer": {"init": {"model": given}}})


@pytest.mark.corpus
def test_the_published_configurations_fit(shipped):
    paths = [path for path in sorted(CONFIGURATIONS.rglob("*.yaml")) if path.name != NAMELESS]
    found = {path.name: complaints(shipped, content_of(path)) for path in paths}
    assert len(found) > 50
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("init", "device"), 3),
        (("init", "model", "dropout"), "0.1"),
        (("init", "model", "hidden_sizes"), 128),
        (("init", "model", "hidden_sizes"), [128, 1.5]),
        (("init", "model", "activation_fn"), "rely"),
        (("init", "optimizer", "AdamW", "weight_decay"), None),
        (
            ("init", "schedulers", 0, "SequentialLR", "schedulers", 0, "LinearLR", "total_iters"),
            0.5,
        ),
        (("init", "loop", "max_steps"), "600"),
        (("init", "checkpoint", "steps"), [300]),
        (("init", "callbacks", 0, "ModelEvalMetrics"), []),
        (("init", "callbacks", 0), None),
        (("fit", "train_dataloader", "drop_last"), "yes"),
        (("fit", "val_dataloader", "split"), "test"),
        (("validate", "val_dataloader"), []),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_at_its_place(shipped, place, value):
    path = ("trainer", *place)
    given = changed(content_of(DIGITS), path, lambda inside, key: inside.__setitem__(key, value))
    assert path in [tuple(error.absolute_path) for error in shipped.iter_errors(given)]


@pytest.mark.parametrize("change", RIGHT)
def test_what_the_check_accepts_fits(small, names, change):
    value = content(written(change))
    assert accepts(names, value)
    assert complaints(small, value) == []


@pytest.mark.parametrize("change", WRONG)
def test_what_the_check_refuses_does_not_fit(small, names, change):
    value = content(written(change))
    assert not accepts(names, value)
    assert not small.is_valid(value)


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("trainer: [{trainer: %s}, {trainer: %s}]", True),
        ("trainer: [%s]", False),
        ("trainer: [{trainer: %s, x: 1}]", False),
        ("trainer: []", False),
        ("trainer: [null]", False),
        ("trainer: null", False),
        ("trainer: {}", False),
        ("trainer: {init: null}", False),
        ("{trainer: %s, model: {}}", False),
        ("[]", False),
    ],
)
def test_a_file_is_one_trainer_or_a_list_of_them(small, names, text, fits):
    one = json.dumps(content(FILE % "seed: 1")["trainer"])
    value = content(text.replace("%s", one))
    assert (small.is_valid(value), accepts(names, value)) == (fits, fits)


@pytest.mark.slow_cases("0.5", "True", "{}")
@pytest.mark.parametrize("value", [None, "x", 3, 0.5, True, [], {}], ids=repr)
def test_no_value_that_the_check_accepts_is_refused_anywhere(small, names, value):
    found = [
        spoilt for spoilt in with_value(content(written(COMPLETE)), value) if accepts(names, spoilt)
    ]
    assert found
    assert [complaints(small, one) for one in found if not small.is_valid(one)] == []


@pytest.mark.slow
@pytest.mark.parametrize("value", [None, 3, []], ids=repr)
def test_no_value_that_the_shipped_classes_accept_is_refused_anywhere(shipped, value):
    names = shipped_names()
    found = [one for one in with_value(content_of(DIGITS), value) if accepts(names, one)]
    assert found
    assert [complaints(shipped, one) for one in found if not shipped.is_valid(one)] == []


def test_a_model_that_is_not_known_may_have_any_argument(shipped):
    value = content_of(DIGITS)
    value["trainer"]["init"]["model"] = {"name": "gpt_backbone", "anything": [1]}
    value["trainer"]["fit"]["train_dataloader"] = {"data_processor": "Theirs", "anything": 1}
    assert complaints(shipped, value) == []


def test_a_published_class_that_is_not_shipped_may_have_any_argument(names):
    table = replace(names.callbacks, published_names=lambda kind: ("Harness", "checkloss"))
    validator = Draft202012Validator(json_schema(replace(names, callbacks=table)))
    right = content(written("callbacks: [HARNESS: {x: [1]}, Harness: null]"))
    wrong = content(written("callbacks: [Harness: 3, Harnes: {}, checkloss: {x: 1}]"))
    assert complaints(validator, right) == []
    assert [error.json_path for error in validator.iter_errors(wrong)] == [
        "$.trainer.init.callbacks[0].Harness",
        "$.trainer.init.callbacks[1]",
        "$.trainer.init.callbacks[2].checkloss",
    ]


def test_the_classes_of_an_imported_module_are_known(tmp_path, monkeypatch):
    (tmp_path / "mine_for_schema.py").write_text(
        "class Mine:\n    def __init__(self, size: int) -> None: ...\n"
        "    def finalize(self) -> None: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__("mine_for_schema")
    validator = Draft202012Validator(json_schema(shipped_names([module])))
    value = content_of(DIGITS)
    value["trainer"]["init"]["callbacks"] = [{"Mine": {"size": 3}}, {"mine": {"size": "3"}}]
    (error,) = validator.iter_errors(value)
    assert error.json_path == "$.trainer.init.callbacks[1].mine.size"


def test_an_editor_is_offered_the_names_as_the_classes_have_them(shipped):
    definitions = shipped.schema["$defs"]
    assert "AdamW" in definitions["optimizer"]["properties"]
    assert "SequentialLR" in definitions["scheduler"]["properties"]
    assert "CheckLoss" in definitions["callback"]["properties"]
    assert "gpt2" in definitions["model"]["properties"]["name"]["anyOf"][0]["enum"]


def arguments_of(schema, name):
    """Return what an editor shows for the arguments of a class: references are followed."""
    definitions = schema["$defs"]
    given = definitions[name]["properties"]
    return {
        key: definitions[one["$ref"].removeprefix("#/$defs/")] if {*one} == {"$ref"} else one
        for key, one in given.items()
        if isinstance(one, dict)
    }


def test_an_editor_is_told_what_an_argument_means_and_its_default(shipped):
    arguments = arguments_of(shipped.schema, "model.gpt2")
    assert arguments["hidden_size"] == {
        "description": "Width of the model; a multiple of `num_heads`.",
        "type": ["integer", "string"],
        "pattern": "^[-+]?[0-9]+(_[0-9]+)+$",  # 1_000
        "exclusiveMinimum": 0,
        "default": 768,
    }
    assert {"type": "null"} in arguments["rotary_dim"]["anyOf"]
    assert arguments["norm_type"]["enum"][:2] == ["layernorm", "rmsnorm"]


def test_an_editor_is_told_what_a_class_is_for(shipped):
    sections = shipped.schema["$defs"]["init"]["properties"]
    assert sections["checkpoint"]["title"] == "Checkpoint"
    assert sections["checkpoint"]["description"].startswith("Write checkpoints")
    assert [key for key in ("device", "model", "seed") if "description" not in sections[key]] == []


def test_the_schema_is_small_enough_for_an_editor(shipped):
    assert len(json.dumps(shipped.schema, indent=1)) < 500_000


def test_an_argument_that_classes_have_alike_is_written_once(shipped):
    definitions = shipped.schema["$defs"]
    names = ("model.bert", "model.bert/classifier")
    found = [definitions[name]["properties"]["hidden_size"] for name in names]
    assert found == [{"$ref": "#/$defs/argument.hidden_size"}] * 2


def test_an_argument_has_the_description_and_the_default_of_its_own_class(shipped):
    table = shipped_names().processors
    num_checked = 0
    for name in table.names:
        target = table.load(name)
        definition = f"data_processor.{name}"
        if definition not in shipped.schema["$defs"]:
            continue  # another name of a class
        shown, texts = arguments_of(shipped.schema, definition), argument_texts(target)
        for key, parameter in inspect.signature(target).parameters.items():
            if type(parameter.default) in (bool, int, str):
                assert shown[key]["default"] == parameter.default, (name, key)
                assert shown[key].get("description") == texts.get(key), (name, key)
                num_checked += 1
    assert num_checked > 100
