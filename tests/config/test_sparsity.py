"""The sparsity section: checked whole, and made into algorithms."""

import pytest

from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.positions import Place, Problems
from modelzoo_trainer.config.sparsity import check_sparsity
from modelzoo_trainer.optim.sparsity import GMP, SET, RigL, Static


def check(text):
    problems = Problems()
    component = check_sparsity(Place.root(read_text(text, "f.yaml")).key("sparsity"), problems)
    return problems, component


def made(text):
    problems, component = check(f"sparsity: {text}")
    assert problems.lines() == []
    return component.build().leaves()


RIGHT = {
    "a fraction": "0.9",
    "static": "{sparsity: 0.75, init_method: random, param_filter: ['*.weight']}",
    "rigl": "{algorithm: rigl, sparsity: 0.75, drop_fraction: {type: cosine, init: 0.3, "
    "half_period: 10}, update: {freq: 100, stop: 3584}, param_filter: '*'}",
    "set": "{algorithm: SET, sparsity: 0.5, update: {steps: [1, 2]}, drop_fraction: 0.2}",
    "gmp": "{algorithm: gmp, schedule: {type: exp, init: 0, final: 0.9, gamma: 0.01}}",
    "one of two, the other null": "{algorithm: gmp, sparsity: null, schedule: 0.3}",
    "several": "[{sparsity: 0.5, param_filter: a}, {sparsity: 0.9, param_filter: b}]",
    "a group": "{algorithm: group, groups: [{sparsity: 0.5}, {algorithm: gmp, sparsity: 0.1}]}",
}


KINDS = {
    "a fraction": [Static],
    "static": [Static],
    "rigl": [RigL],
    "set": [SET],
    "gmp": [GMP],
    "one of two, the other null": [GMP],
    "several": [Static, Static],
    "a group": [Static, GMP],
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_makes_algorithms_without_a_note(name):
    assert [type(leaf) for leaf in made(RIGHT[name])] == KINDS[name]
    assert check(f"sparsity: {RIGHT[name]}")[0].notes == ()


def test_the_arguments_reach_the_algorithm():
    (rigl,) = made(RIGHT["rigl"])
    assert rigl.fraction_at(0) == 0.75
    assert rigl.param_filter == ("*",)
    assert [rigl.is_due(step) for step in (0, 99, 100, 200, 3500, 3600)] == [0, 0, 1, 1, 1, 0]
    assert rigl.num_surviving(5, 400) == 70  # of 100, 0.3 dropped


def test_each_of_several_has_its_own_filter():
    assert [leaf.param_filter for leaf in made(RIGHT["several"])] == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("much", "1:11: sparsity: expected a number in [0, 1), got 'much'."),
        ("1.0", "1:11: sparsity: expected a number in [0, 1), got 1.0."),
        ("-0.1", "1:11: sparsity: expected a number in [0, 1), got -0.1."),
        ("{}", "1:1: sparsity.sparsity: missing; static sparsity requires it"),
        ("{sparsity: 0.1, init_metod: topk}", "1:27: sparsity.init_metod: no such argument of st"),
        (
            "{sparsity: 0.1, init_method: top}",
            "1:40: sparsity.init_method: expected 'random', 'topk', 'from_zeros' or"
            " 'checkerboard', got 'top'. Did you mean 'topk'?",
        ),
        ("{algorithm: riggl, sparsity: 0}", "1:23: sparsity.algorithm: 'riggl' is not known. Did"),
        (
            "{algorithm: rigl, sparsity: 0}",
            "1:1: sparsity.update: missing; rigl sparsity requires i",
        ),
        (
            "{algorithm: set, update: {frq: 1}, sparsity: 0}",
            "1:37: sparsity.update.frq: no such argument of update. Did you mean 'freq'?",
        ),
        (
            "{algorithm: set, update: {freq: 1}, sparsity: 0, schedule: 0}",
            "1:1: sparsity: sparsity and schedule are both given",
        ),
        ("{algorithm: gmp}", "1:1: sparsity.sparsity: missing; write sparsity or schedule."),
        (
            "{algorithm: gmp, sparsity: {type: cosin, init: 1}}",
            "1:45: sparsity.sparsity.type: 'cosin' is not known. Did you mean 'cosine'?",
        ),
        (
            "{algorithm: gmp, sparsity: {type: linear, init: 1, slop: 0}}",
            "1:62: sparsity.sparsity.slop: no such argument of a curve of type linear.",
        ),
        (
            "{algorithm: rigl, sparsity: 0, update: {freq: 0}}",
            "1:57: sparsity.update.freq: expected an integer > 0, got 0.",
        ),
        (
            "[{sparsity: 0.1}, {sparsity: 1.5}]",
            "1:40: sparsity[1].sparsity: expected a number in [0, 1), got 1.5.",
        ),
        (
            "{sparsity: 0.1, param_filter: {a: b}}",
            "1:41: sparsity.param_filter: expected a glob, a list of globs or null, got a mapping.",
        ),
        (
            "{algorithm: group, groups: 3}",
            "1:38: sparsity.groups: expected a list of mappings, got 3.",
        ),
        ("[]", "1:1: sparsity: Group.groups: expected a list of algorithms, got []."),
        ("[{sparsity: 0.1}, 3]", "1:29: sparsity[1]: expected a mapping with algorithm, got 3."),
    ],
)
def test_what_is_wrong_is_reported_at_its_place(text, message):
    lines = check(f"sparsity: {text}")[0].lines()
    assert any(line.startswith(f"f.yaml:{message}") for line in lines), lines
