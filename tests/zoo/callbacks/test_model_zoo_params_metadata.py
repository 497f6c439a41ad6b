"""Metadata of the run in its checkpoints."""

import pytest

from modelzoo_trainer import Checkpoint, __version__, checkpointing
from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.callbacks.model_zoo_params_metadata import ModelZooParamsMetadata

PATH = "modelzoo_trainer.zoo.callbacks.model_zoo_params_metadata.ModelZooParamsMetadata"
YAML = """\
trainer:
  init:
    model_dir: {folder}
    model: {{name: fc_mnist, hidden_sizes: [4]}}
    callbacks: [{{{path}: {given}}}]
    loggers: [{{ProgressLogger: {{interval_s: .inf}}}}]
"""


def test_a_checkpoint_has_it_and_gives_it_back(make, batches, tmp_path):
    params = {"trainer": {"init": {"model": {"name": "gpt2", "dropout": None}}}, "k": [1, 2.5]}
    make(ModelZooParamsMetadata(params), checkpoint=Checkpoint(steps=4)).fit(batches)
    expected = [{"version": __version__, "model_name": "gpt2", "params": params}]
    assert checkpointing.load(tmp_path / "run/checkpoint_4")["__metadata__"] == expected
    trainer = make(ModelZooParamsMetadata())
    assert trainer.metadata is None
    trainer.load_checkpoint(tmp_path / "run/checkpoint_4")
    assert trainer.metadata == expected


def test_without_params_the_model_has_the_name_of_its_class(make, batches, tmp_path):
    make(ModelZooParamsMetadata(), checkpoint=Checkpoint(steps=4)).fit(batches)
    (entry,) = checkpointing.load(tmp_path / "run/checkpoint_4")["__metadata__"]
    assert (entry["model_name"], entry["params"]) == ("Net", None)


def test_a_checkpoint_without_it_has_none(make, batches, tmp_path):
    make(ModelZooParamsMetadata({"a": 1}), checkpoint=Checkpoint(steps=4)).fit(batches)
    make(model_dir=tmp_path / "plain", checkpoint=Checkpoint(steps=4)).fit(batches)
    trainer = make(ModelZooParamsMetadata())
    trainer.load_checkpoint(tmp_path / "run/checkpoint_4")
    trainer.load_checkpoint(tmp_path / "plain/checkpoint_4")
    assert trainer.metadata is None


def test_a_trainer_without_the_callback_loads_such_a_checkpoint(make, batches, tmp_path):
    make(ModelZooParamsMetadata({"a": 1}), checkpoint=Checkpoint(steps=4)).fit(batches)
    trainer = make()
    trainer.load_checkpoint(tmp_path / "run/checkpoint_4")
    assert trainer.global_step == 4


def test_what_is_given_is_copied(make, batches, tmp_path):
    params = {"a": [1]}
    callback = ModelZooParamsMetadata(params)
    params["a"].append(2)
    assert callback.params == {"a": [1]}


def plan_of(tmp_path, given):
    text = YAML.format(folder=tmp_path / "run", path=PATH, given=given)
    (plan,) = check_config(read_text(text, "p.yaml"), shipped_names(), mode=None)
    return plan


def test_a_file_gives_itself(tmp_path):
    plan = plan_of(tmp_path, "{}")
    plan.resolved["trainer"]["init"]["hub_token"] = "secret"
    with plan.build() as trainer:
        callback = trainer.get_callback(ModelZooParamsMetadata)
        init = callback.params["trainer"]["init"]
        assert init["model"] == {"name": "fc_mnist", "hidden_sizes": [4]}
        assert init["loggers"] == [{"ProgressLogger": {"interval_s": "inf"}}]
        assert "hub_token" not in init


def test_what_a_file_gives_goes_before_it(tmp_path):
    with plan_of(tmp_path, "{params: {mine: 1}}").build() as trainer:
        assert trainer.get_callback(ModelZooParamsMetadata).params == {"mine": 1}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"a": {"b": [object]}}, r"ModelZooParamsMetadata.params.a.b\[0\] is <class 'object'>"),
        ({"a": {1: 2}}, "ModelZooParamsMetadata.params.a has the key 1; keys must be strings"),
        ({"a": float("nan")}, "ModelZooParamsMetadata.params.a is nan; numbers must be finite."),
        ([1], r"ModelZooParamsMetadata.params is \[1\]; it must be a mapping."),
    ],
)
def test_what_cannot_be_saved_is_refused(params, message):
    with pytest.raises(ConfigError, match=message):
        ModelZooParamsMetadata(params)
