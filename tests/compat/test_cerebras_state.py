"""The Model Zoo's callbacks for data and checkpoints, and what of it is not here."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from modelzoo_trainer import Callback, Checkpoint, __version__, callbacks
from modelzoo_trainer import checkpointing as files
from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.shipped import shipped_names
from modelzoo_trainer.errors import ConfigError
from tests.doubles import Scale as OneWeight
from tests.doubles import constant_batches, tiny_batches, weights_of


class Firsts(Callback):
    def __init__(self):
        self.found = []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.found.append(batch[0].item())


def test_c_samples_streamed_info__says_how_to_get_past_a_failure(trainer_of, caplog):
    info = callbacks.SamplesStreamedInfo()
    watched = [callbacks.CheckLoss(), info]
    trainer = trainer_of(*watched, model=OneWeight, checkpoint=Checkpoint(steps=2), max_steps=4)
    with pytest.raises(FloatingPointError):
        trainer.fit(constant_batches(1, 2, float("nan"), 4))
    assert info.num_samples == 6
    assert "after 6 samples, 2 of them since the newest checkpoint" in caplog.text
    assert "SkipSamples(n=2)" in caplog.text


def test_c_skip_samples__goes_past_them_once(trainer_of, tmp_path):
    batches = constant_batches(1, 2, 3, 4, 5, 6)

    def firsts(max_steps, *own):
        seen = Firsts()
        trainer = trainer_of(
            seen, *own, model=OneWeight, checkpoint=Checkpoint(steps=1), max_steps=max_steps
        )
        trainer.fit(batches)
        trainer.close()
        return seen.found

    assert firsts(2) == [1, 2]
    assert firsts(3, callbacks.SkipSamples(2)) == [4]
    assert firsts(4, callbacks.SkipSamples(2)) == [5]
    with pytest.raises(ValueError, match=r"n: expected .*, got 0"):
        callbacks.SkipSamples(0)


# ---- checkpoints


def test_c_model_zoo_params_metadata__is_in_checkpoints_and_comes_back(trainer_of, tmp_path):
    params = {"trainer": {"init": {"model": {"name": "tiny"}}}}
    saving = trainer_of(
        callbacks.ModelZooParamsMetadata(params), checkpoint=Checkpoint(steps=3), max_steps=3
    )
    saving.fit(tiny_batches())
    path = saving.model_dir / "checkpoint_3"
    expected = [{"version": __version__, "model_name": "tiny", "params": params}]
    assert files.load(path)["__metadata__"] == expected
    loading = trainer_of(callbacks.ModelZooParamsMetadata(), model_dir=tmp_path / "other")
    loading.load_checkpoint(path)
    assert loading.metadata == expected


def test_c_load_checkpoint_states__model_alone_begins_at_step_0(trainer_of, tmp_path):
    first = trainer_of(checkpoint=Checkpoint(steps=3), max_steps=3)
    first.fit(tiny_batches())
    loading = trainer_of(callbacks.LoadCheckpointStates("model"), model_dir=tmp_path / "second")
    loading.load_checkpoint(first.model_dir / "checkpoint_3")
    assert loading.global_step == 0
    expected = weights_of(first)
    assert all(torch.equal(value, expected[key]) for key, value in weights_of(loading).items())
    unknown = trainer_of(callbacks.LoadCheckpointStates("weights"), model_dir=tmp_path / "third")
    with pytest.raises(RuntimeError, match="weights"):
        unknown.load_checkpoint(first.model_dir / "checkpoint_3")


def test_c_save_checkpoint_state__writes_a_part_beside_every_kth(trainer_of):
    own = callbacks.SaveCheckpointState(k=2, checkpoint_states=["model"])
    metadata = callbacks.ModelZooParamsMetadata({"a": 1})
    trainer = trainer_of(own, metadata, checkpoint=Checkpoint(steps=1), max_steps=5)
    trainer.fit(tiny_batches())
    found = sorted(path.name for path in trainer.model_dir.glob("model_checkpoint_*"))
    assert found == ["model_checkpoint_2", "model_checkpoint_4", "model_checkpoint_5"]
    state = files.load(trainer.model_dir / found[0])
    assert {"model", "__metadata__"} <= state.keys()
    assert not {"optimizer", "global_step"} & state.keys()


def test_c_keep_n_checkpoints__also_deletes_those_of_the_run_before(trainer_of):
    for max_steps in (2, 4):
        trainer = trainer_of(
            callbacks.KeepNCheckpoints(2), checkpoint=Checkpoint(steps=1), max_steps=max_steps
        )
        trainer.fit(tiny_batches())
        trainer.close()
    found = sorted(path.name for path in trainer.model_dir.glob("checkpoint_*"))
    assert found == ["checkpoint_3", "checkpoint_4"]


def test_c_hf_cache_dir__is_told_to_the_libraries_while_the_trainer_is(
    trainer_of, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HOME", "/before")
    trainer = trainer_of(callbacks.HFCacheDir(str(tmp_path)))
    assert os.environ["HF_HOME"] == str(tmp_path)
    trainer.close()
    assert os.environ["HF_HOME"] == "/before"


def test_c_eleuther_eval_harness__names_its_extra_where_lm_eval_is_missing(trainer_of, monkeypatch):
    """What it computes is in tests/zoo/hugging_face/test_evaluation.py, with the library."""
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    harness = callbacks.EleutherEvalHarness({"tasks": "a"}, pretrained_model_name_or_path="a")
    with pytest.raises(ConfigError, match=r"modelzoo-trainer\[eval\]"):
        trainer_of(harness)


# ---- what is not part of this package

YAML = """\
trainer:
  init:
    model: {{name: fc_mnist, hidden_sizes: [4]}}
    callbacks: [{{{name}: {given}}}]
"""


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("BigCodeEvalHarness", "{bigcode_args: {tasks: humaneval}}"),
        ("RunSchedule", "{}"),
    ],
)
def test_what_is_not_here_is_told_before_anything_is_built(name, given):
    text = YAML.format(name=name, given=given)
    with pytest.raises(ValueError, match=f"callback '{name}' is not part of this package"):
        check_config(read_text(text, "params.yaml"), shipped_names())
