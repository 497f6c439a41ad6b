"""Names of other trainers, and the hints at ours."""

from __future__ import annotations

import inspect
import re
from importlib import import_module

import pytest

from modelzoo_trainer import (
    Callback,
    Checkpoint,
    ConfigError,
    HookError,
    Logging,
    MixedPrecision,
    Trainer,
    TrainingLoop,
    callbacks,
)
from modelzoo_trainer.base.foreign_names import (
    _OBJECTS,
    ARGUMENTS,
    ATTRIBUTES,
    CALLBACKS,
    TRAINER_ARGUMENTS,
)
from modelzoo_trainer.callbacks import EarlyStopping, SaveBest
from modelzoo_trainer.cli.command import main
from tests.doubles import TinyModel

OF = {
    "Checkpoint": Checkpoint,
    "EarlyStopping": EarlyStopping,
    "Logging": Logging,
    "MixedPrecision": MixedPrecision,
    "SaveBest": SaveBest,
    "TrainingLoop": TrainingLoop,
}
PAIRS = [(owner, name) for owner, table in ARGUMENTS.items() for name in table]


@pytest.mark.parametrize("name", sorted(TRAINER_ARGUMENTS))
def test_an_argument_of_another_trainer_is_refused_with_ours(name: str) -> None:
    with pytest.raises(TypeError) as caught:
        Trainer(model=TinyModel(), **{name: 1})
    assert repr(name) in str(caught.value)
    assert TRAINER_ARGUMENTS[name] in str(caught.value)


def test_what_the_hints_name_are_arguments_of_the_trainer() -> None:
    known = inspect.signature(Trainer).parameters
    for name, text in TRAINER_ARGUMENTS.items():
        assert name not in known
        outside = re.sub(r"\((?:[^()]|\([^()]*\))*\)", "", text)
        for ours in re.findall(r"(?:^|, | and )([a-z_]+)=", outside):
            assert ours in known, name


@pytest.mark.parametrize(("owner", "name"), PAIRS)
def test_an_argument_of_another_class_is_refused_with_ours(owner: str, name: str) -> None:
    cls, text = OF[owner], ARGUMENTS[owner][name]
    first = {"metric": "loss"} if "metric" in inspect.signature(cls).parameters else {}
    with pytest.raises(ConfigError) as caught:
        cls(**first, **{name: 1})
    assert f"{owner} has no argument {name!r}" in str(caught.value)
    assert text in str(caught.value)
    ours = re.match(r"([a-z_]+)=", text)
    assert ours is None or ours[1] in inspect.signature(cls).parameters


def test_a_misspelt_argument_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"SaveBest has no argument 'metrik'.*'metric'"):
        SaveBest(metrik="loss")

    class Mine(EarlyStopping):
        pass

    with pytest.raises(ConfigError, match=r"Mine has no argument 'monitor'. Use metric="):
        Mine(monitor="loss")


def test_a_subclass_with_other_arguments_takes_them() -> None:
    class Mine(EarlyStopping):
        def __init__(self, monitor: str) -> None:
            super().__init__(metric=monitor)

    assert Mine(monitor="loss").metric == "loss"


@pytest.mark.parametrize("name", sorted(CALLBACKS))
def test_a_callback_of_another_trainer_is_explained(name: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(f"from modelzoo_trainer.callbacks import {name}")
    assert repr(name) in str(caught.value)
    assert CALLBACKS[name] in str(caught.value)
    ours = re.match(r"[A-Z]\w+", CALLBACKS[name])
    assert ours is None or ours[0] == "Trainer" or hasattr(callbacks, ours[0])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SaveBest", "from modelzoo_trainer.callbacks import SaveBest"),
        ("CSVLogger", "from modelzoo_trainer.loggers import CSVLogger"),
        ("CosineDecayLR", "from modelzoo_trainer.optim import CosineDecayLR"),
        ("LearningRateMonitor", CALLBACKS["LearningRateMonitor"]),
    ],
)
def test_the_package_says_where_a_class_is(name: str, text: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(f"from modelzoo_trainer import {name}")
    assert repr(name) in str(caught.value)
    assert text in str(caught.value)


def made(module: str, *names: str) -> type:
    """Return the last of classes of a module that derive from each other."""
    kind: type = object
    for name in names:
        hooks = {"setup": lambda self, trainer, pl_module, stage: None, "__module__": module}
        kind = type(name, (kind,), hooks)
    return kind


@pytest.mark.parametrize(
    ("module", "names", "parts"),
    [
        (
            "lightning.pytorch.callbacks.early_stopping",
            ("Callback", "EarlyStopping"),
            ("Lightning's", "modelzoo_trainer.callbacks.EarlyStopping("),
        ),
        (
            "pytorch_lightning.loggers.csv_logs",
            ("Logger", "CSVLogger"),
            ("Lightning's", "modelzoo_trainer.loggers.CSVLogger()"),
        ),
        (
            "transformers.trainer_callback",
            ("TrainerCallback", "EarlyStoppingCallback"),
            ("Hugging Face's", "modelzoo_trainer.callbacks.EarlyStopping("),
        ),
        (
            "transformers.integrations",
            ("TrainerCallback", "KubeflowCallback"),
            ("Hugging Face's", "subclass of modelzoo_trainer.Callback"),
        ),
        ("lightning.pytorch", ("WeightAveraging", "EMA"), ("Lightning's", "ModelEma")),
        ("transformers", ("Other",), ("Hugging Face's", "subclass of modelzoo_trainer.Callback")),
    ],
)
def test_an_object_of_another_trainer_is_explained(module, names, parts) -> None:
    kind = made(module, *names)
    for given in (kind(), kind, type("Mine", (kind,), {})()):
        for where in ("callbacks", "loggers"):
            with pytest.raises(HookError) as caught:
                Trainer(model=TinyModel(), **{where: [given]})
            text = str(caught.value)
            assert text.startswith(f"{where}: ")
            assert f"{module}.{names[-1]}" in text
            assert [part for part in parts if part not in text] == []


def test_what_the_hints_for_objects_name_exists() -> None:
    for text in _OBJECTS.values():
        for home, name in re.findall(r"\b(modelzoo_trainer(?:\.[a-z_]+)*)\.([A-Z]\w+)", text):
            assert hasattr(import_module(home), name), text


def test_our_own_callback_may_derive_from_another_trainers_class(tmp_path) -> None:
    class Both(Callback, type("Mixin", (), {"__module__": "lightning.pytorch"})):
        pass

    Trainer(model=TinyModel(), model_dir=tmp_path, callbacks=Both())


def test_other_missing_names_are_attribute_errors() -> None:
    assert not hasattr(import_module("modelzoo_trainer.callbacks"), "Nothing")
    assert not hasattr(import_module("modelzoo_trainer"), "Nothing")
    assert not hasattr(import_module("modelzoo_trainer"), "nothing")


@pytest.mark.parametrize("name", sorted(ATTRIBUTES))
def test_an_attribute_of_another_trainer_is_explained(trainer_of, name: str) -> None:
    trainer = trainer_of()
    with pytest.raises(AttributeError) as caught:
        getattr(trainer, name)
    assert repr(name) in str(caught.value)
    assert ATTRIBUTES[name] in str(caught.value)
    path = re.match(r"trainer\.([a-z_]+(?:\.[a-z_]+)*)", ATTRIBUTES[name])
    found = trainer
    for part in path[1].split(".") if path else ():
        found = getattr(found, part) if found is not None else None  # result: no run yet


FILE = """\
trainer:
  init:
    model: {name: fc_mnist, input_size: 64}
    optimizer: {SGD: {lr: 0.1}}
    loop: {max_epochs: 1}
    callbacks:
    - EarlyStopping: {monitor: loss}
    - ModelCheckpoint: {}
    - modelzoo_trainer.callbacks.TQDMProgressBar: {}
  fit:
    train_dataloader: {data_processor: DigitsProcessor, batch_size: 64}
"""


def test_a_file_gets_the_same_hints(tmp_path, capsys) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(FILE)
    assert main(["check", str(path)]) == 2
    told = " ".join(capsys.readouterr())
    for line, text in (
        (5, "num_epochs="),
        (7, "metric="),
        (8, "SaveBest(metric=...)"),
        (9, 'Trainer(progress="bar")'),
    ):
        assert re.search(rf"params\.yaml:{line}:.*{re.escape(text)}", told), (line, told)
