"""Settings of exchanged optimizers, schedules and callbacks."""

import pytest

from modelzoo_trainer.tools.report.sessions import flattened
from modelzoo_trainer.tools.report.settings import compared

LINEAR = {"LinearLR": {"end_learning_rate": 0.1, "total_iters": 30}}
COSINE = {"CosineDecayLR": {"initial_learning_rate": 0.1, "total_iters": 570}}
TORCH = {"LinearLR": {"start_factor": 0.1}}


def of_yaml(**init):
    return {"trainer": {"init": {"seed": 1, **init}}}


def of_python(**settings):
    return {"seed": 1, **settings}


def result(*runs):
    found = compared([flattened(run) for run in runs])
    return found, {row.name: row.cells for row in found.differing}


@pytest.mark.parametrize("make", [of_yaml, of_python])
def test_an_exchanged_optimizer_is_one_row_and_equal_values_are_the_same(make):
    found, differing = result(
        make(optimizer={"AdamW": {"lr": 0.1, "weight_decay": 0.5, "betas": [0.9, 0.99]}}),
        make(optimizer={"SGD": {"lr": 0.2, "weight_decay": 0.5, "momentum": 0.9}}),
    )
    assert next(iter(differing)) == "optimizer"
    assert differing["optimizer"] == ("AdamW", "SGD")
    assert [row.cells for row in found.differing[1:]] == [("0.1", "0.2 <small>(&times; 2)</small>")]
    assert found.differing[1].path.endswith("optimizer.SGD.lr")
    assert "optimizer.AdamW.lr | " in found.differing[1].path
    assert [row.path.rpartition(".")[2] for row in found.partial] == ["betas", "momentum"]
    assert [row.path.rpartition(".")[2] for row in found.same] == ["seed", "weight_decay"]


@pytest.mark.parametrize("make", [of_yaml, of_python])
def test_exchanged_schedules_are_one_row_and_are_compared_by_class(make):
    first = make(schedulers=[{"SequentialLR": {"schedulers": [LINEAR, COSINE]}}])
    cosine = {"CosineDecayLR": {"initial_learning_rate": 0.1, "total_iters": 600}}
    found, differing = result(first, make(schedulers=[cosine]))
    assert differing["schedulers"] == ("SequentialLR(LinearLR, CosineDecayLR)", "CosineDecayLR")
    assert [row.name for row in found.differing] == ["schedulers", "CosineDecayLR.total_iters"]
    assert "schedulers[0].CosineDecayLR.total_iters" in found.differing[1].path
    assert "schedulers[1].CosineDecayLR.total_iters" in found.differing[1].path
    assert [row.name for row in found.partial] == [
        "LinearLR.end_learning_rate",
        "LinearLR.total_iters",
    ]
    assert any(row.name.endswith("CosineDecayLR.initial_learning_rate") for row in found.same)


@pytest.mark.parametrize("none", [{}, {"schedulers": []}, {"schedulers": None}])
@pytest.mark.parametrize("make", [of_yaml, of_python])
def test_schedules_of_one_run_alone_are_one_row(make, none):
    _, differing = result(make(schedulers=[LINEAR, COSINE]), make(**none))
    assert differing == {"schedulers": ("LinearLR, CosineDecayLR", "none")}


def test_settings_that_are_named_otherwise_are_not_said_to_be_none():
    _, differing = result(of_yaml(schedulers=[LINEAR]), of_python(schedulers=[TORCH]))
    assert differing == {}
    _, differing = result(of_yaml(optimizer={"SGD": {"lr": 1}}), of_yaml(optimizer={"lr": 1}))
    assert differing == {}


def test_members_of_the_same_class_are_told_apart():
    two = [{"SequentialLR": {"schedulers": [LINEAR, {"LinearLR": {"total_iters": 70}}]}}]
    found, _ = result(of_yaml(schedulers=two), of_yaml(schedulers=[LINEAR]))
    assert [row.cells for row in found.partial] == [("70", None)]
    assert "schedulers[1].LinearLR.total_iters" in found.partial[0].path


def test_several_optimizers_are_compared_by_name():
    runs = [
        of_python(optimizers={"first": {"SGD": {"lr": 1}}, "second": {kind: {"lr": 1}}})
        for kind in ("SGD", "Adam")
    ]
    assert result(*runs)[1] == {"optimizers.second": ("SGD", "Adam")}


@pytest.mark.parametrize("make", [of_yaml, of_python])
def test_a_callback_before_others_changes_no_row_of_theirs(make):
    last = {"CheckLoss": {"every": 3}}
    found, differing = result(
        make(callbacks=[last]), make(callbacks=[{"RunHistory": {}}, {"Report": {"a": 1}}, last])
    )
    assert differing == {}
    assert [row.cells for row in found.partial] == [(None, "{}"), (None, "1")]
    assert any(row.name.endswith("CheckLoss.every") for row in found.same)


def test_another_order_of_callbacks_is_a_row():
    callbacks = [{"A": {"x": 1}}, {"B": {}}]
    _, differing = result(of_yaml(callbacks=callbacks), of_yaml(callbacks=callbacks[::-1]))
    assert differing == {"callbacks": ("A, B", "B, A")}


def test_equal_classes_keep_their_paths():
    found, _ = result(*(of_yaml(schedulers=[LINEAR], optimizer={"SGD": {"lr": n}}) for n in (1, 2)))
    assert [row.path for row in found.differing] == ["trainer.init.optimizer.SGD.lr"]
    assert "trainer.init.schedulers[0].LinearLR.total_iters" in [row.path for row in found.same]
