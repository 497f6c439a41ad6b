"""Sparse runs that are interrupted and resumed."""

import logging

import pytest
import torch

from modelzoo_trainer import Checkpoint
from modelzoo_trainer.callbacks import LoadCheckpointStates
from modelzoo_trainer.checkpointing import load
from modelzoo_trainer.core.sparsity import Sparsity
from modelzoo_trainer.errors import CheckpointMismatch
from modelzoo_trainer.optim.sparsity import GMP, SET, RigL, Static

ALGORITHMS = {
    "static": lambda: Static(0.5),
    "gmp": lambda: GMP({"type": "cubic", "final": 0.75, "steps": 5}),
    "set": lambda: SET(0.5, update={"steps": [2, 4, 5]}),
    "rigl": lambda: RigL(
        0.5, update={"freq": 2}, drop_fraction={"type": "cosine", "init": 0.5, "half_period": 6}
    ),
}


def masks(trainer):
    return {one.name: ~one.pruned for one in trainer.get_callback(Sparsity).params}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("seed", [0, None])
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.slow_cases(every=4)
def test_a_run_that_was_cut_off_ends_with_the_same_bits(make, batches, tmp_path, name, seed):
    def run(folder, max_steps):
        settings = {"model_dir": tmp_path / folder, "checkpoint": Checkpoint(steps=3)}
        trainer = make(ALGORITHMS[name](), max_steps=max_steps, seed=seed, **settings)
        trainer.fit(batches)
        trainer.close()
        return trainer

    torch.manual_seed(5)
    whole = run("whole", 6)
    torch.manual_seed(5)
    run("parts", 3)
    torch.manual_seed(7)
    rest = run("parts", 6)
    assert rest.global_step == 6
    assert same(masks(whole), masks(rest))
    assert same(whole.model.state_dict(), rest.model.state_dict())
    states = [load(tmp_path / folder / "checkpoint_6") for folder in ("whole", "parts")]
    moments = [state["optimizer"]["state"] for state in states]
    assert all(same(moments[0][key], moments[1][key]) for key in moments[0])


def test_a_checkpoint_has_the_masks_by_name(make, batches, tmp_path):
    trainer = make(0.5, checkpoint=Checkpoint(steps=3))
    trainer.fit(batches)
    saved = load(tmp_path / "run" / "checkpoint_6")["sparsity"]["masks"]
    assert list(saved) == ["body.weight", "head.weight"]
    assert saved["body.weight"].dtype is torch.bool
    assert same(saved, masks(trainer))
    assert not [name for name in trainer.model.state_dict() if "mask" in name]


@pytest.fixture
def dense(make, batches, tmp_path):
    """The path of a checkpoint of a run without sparsity."""
    settings = {"model_dir": tmp_path / "dense", "checkpoint": Checkpoint(steps=3)}
    trainer = make(None, max_steps=3, **settings)
    trainer.fit(batches)
    trainer.close()
    return tmp_path / "dense" / "checkpoint_3"


def test_a_run_without_masks_is_not_gone_on_with(make, batches, dense):
    with pytest.raises(CheckpointMismatch, match=r"has no masks.*LoadCheckpointStates"):
        make(0.5).fit(batches, ckpt_path=dense)


def test_masks_are_made_from_the_weights_that_a_run_begins_with(make, batches, dense, caplog):
    trainer = make(Static(0.75, init_method="topk"), LoadCheckpointStates("model"))
    trainer.fit(batches, ckpt_path=dense)
    before = load(dense)["model"]["body.weight"]
    expected = torch.zeros(96, dtype=torch.bool)
    expected[before.abs().flatten().topk(24).indices] = True
    assert torch.equal(masks(trainer)["body.weight"], expected.reshape(12, 8))
    assert "The checkpoint has no sparsity masks" in caplog.text


def test_a_dense_run_continues_sparse_where_strictness_is_off(make, batches, dense, tmp_path):
    lenient = Checkpoint(disable_strict_checkpoint_loading=True)
    schedule = {"type": "linear", "init": 0, "slope": 0.125}
    trainer = make(GMP(schedule, update={"freq": 2}), checkpoint=lenient, max_steps=4)
    trainer.fit(batches, ckpt_path=dense)
    assert (~masks(trainer)["body.weight"]).sum() == 24  # as after the update at step 2
    state = trainer.optimizer.state[trainer.model.body.weight]["exp_avg"]
    assert (state[~masks(trainer)["body.weight"]] == 0).all()


def test_a_validation_takes_dense_weights_as_they_are(make, batches, dense):
    trainer = make(0.5)
    trainer.validate(batches[:1], ckpt_path=dense)
    assert torch.equal(trainer.model.body.weight, load(dense)["model"]["body.weight"])


@pytest.fixture
def sparse(make, batches, tmp_path):
    """The path of a checkpoint of a sparse run."""
    settings = {"model_dir": tmp_path / "sparse", "checkpoint": Checkpoint(steps=3)}
    trainer = make(0.5, max_steps=3, **settings)
    trainer.fit(batches)
    trainer.close()
    return tmp_path / "sparse" / "checkpoint_3"


def test_a_dense_run_from_a_sparse_one_says_so(make, batches, sparse, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = make(None)
        trainer.fit(batches, ckpt_path=sparse)
    assert "this run has no sparsity" in caplog.text
    assert (trainer.model.body.weight != 0).all()


def test_masks_of_other_parameters_are_refused(make, batches, sparse):
    with pytest.raises(
        CheckpointMismatch, match=r"missing +body\.bias\n +unexpected +body\.weight"
    ):
        make(Static(0.5, param_filter="body.bias")).fit(batches, ckpt_path=sparse)


def test_without_strictness_the_masks_that_fit_are_taken(make, batches, sparse):
    lenient = Checkpoint(disable_strict_checkpoint_loading=True)
    trainer = make(Static(0.5, param_filter="body.*"), checkpoint=lenient, max_steps=4)
    trainer.fit(batches, ckpt_path=sparse)
    saved = load(sparse)["sparsity"]["masks"]["body.weight"]
    assert torch.equal(masks(trainer)["body.weight"], saved)
    assert (~masks(trainer)["body.bias"]).sum() == 6


def test_masks_continue_under_another_algorithm_and_that_is_reported(make, batches, sparse, caplog):
    trainer = make(RigL(0.5, update={"steps": [9]}), max_steps=5)
    trainer.fit(batches, ckpt_path=sparse)
    assert same(masks(trainer), load(sparse)["sparsity"]["masks"])
    (told,) = [record.message for record in caplog.records if "saved masks" in record.message]
    assert told.startswith(
        "sparsity: the settings have changed, and the saved masks of 'body.weight' (and 1 more) "
        "continue with the new ones. Checkpoint: Static(fraction=Constant(value=0.5), updates="
    )
    assert ". Now: RigL(drop_fraction=Constant(value=0.3), fraction=Constant(" in told
    assert "updates=UpdateAt(steps=[9])" in told


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.slow_cases(every=4)
def test_the_same_settings_are_not_reported(make, batches, tmp_path, caplog, name):
    for max_steps in (2, 4):
        trainer = make(ALGORITHMS[name](), max_steps=max_steps, checkpoint=Checkpoint(steps=2))
        trainer.fit(batches)
        trainer.close()
    assert trainer.global_step == 4
    assert "other settings" not in caplog.text


def test_a_validation_does_not_speak_of_settings(make, batches, sparse, caplog):
    make(Static(0.75)).validate(batches[:1], ckpt_path=sparse)
    assert "other settings" not in caplog.text


def test_a_state_of_another_program_has_no_masks(make, batches, sparse):
    state = load(sparse) | {"sparsity": {"schedule": 3}}
    trainer = make(0.5)
    trainer.is_resuming = True
    with pytest.raises(CheckpointMismatch, match="The checkpoint has no masks"):
        trainer.get_callback(Sparsity).on_load_checkpoint(trainer, state)
