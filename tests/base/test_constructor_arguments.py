"""The arguments of shipped components, kept for the record of a run."""

import copy
import inspect
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from modelzoo_trainer import Callback, Checkpoint
from modelzoo_trainer import callbacks as shipped
from modelzoo_trainer.base.constructor_arguments import arguments_of, plain
from modelzoo_trainer.callbacks import KeepNCheckpoints, LogOptimizerParamGroup, SaveBest


def test_arguments_are_kept_with_their_defaults():
    found = arguments_of(SaveBest("loss", k=3))
    assert found.keys() == inspect.signature(SaveBest).parameters.keys()
    assert (found["metric"], found["k"], found["mode"]) == ("loss", 3, None)
    assert arguments_of(Checkpoint(epochs=2))["epochs"] == 2


def test_every_shipped_callback_with_a_constructor_keeps_its_arguments():
    classes = [getattr(shipped, name) for name in shipped.__all__]
    classes = [one for one in classes if inspect.isclass(one)]
    own = [one for one in classes if issubclass(one, Callback) and "__init__" in vars(one)]
    assert len(own) > 30
    for one in own:
        made = one.__new__(one)
        with pytest.raises(Exception):  # noqa: B017, PT011  # each refuses it in its own way
            one.__init__(made, *[object()] * 30)
        names = list(inspect.signature(one).parameters.values())
        named = {name.name for name in names if name.kind is not name.VAR_KEYWORD}
        assert named <= arguments_of(made).keys()


def test_a_subclass_has_the_arguments_for_the_base_class():
    class Keep(KeepNCheckpoints):
        def __init__(self, extra):
            super().__init__(n=extra + 1)

    assert arguments_of(Keep(1)) == {"n": 2}


def test_a_copy_has_the_arguments_too():
    assert arguments_of(pickle.loads(pickle.dumps(copy.deepcopy(KeepNCheckpoints(3))))) == {"n": 3}


def test_a_class_of_a_user_keeps_nothing():
    class Own(Callback):
        def __init__(self, limit):
            pass

    assert arguments_of(Own(1)) == arguments_of(object()) == {}


def function():
    pass


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (None, None),
        ((1, 2.5, True), [1, 2.5, True]),
        ({"a": {1: [Path("x")]}}, {"a": {"1": ["x"]}}),
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (torch.bfloat16, "torch.bfloat16"),
        (function, "function"),
        (torch.nn.Linear, "Linear"),
        (torch.nn.Linear(1, 1), "Linear"),
        (torch.zeros(2), "Tensor"),
        (iter([1]), "list_iterator"),
        ([0] * 1000, "1000 items"),
    ],
)
def test_what_is_not_plain_is_named(value, kept):
    found = plain(value)
    assert (found, type(found)) == (kept, type(kept))


def test_long_texts_large_collections_and_sets_have_a_short_form():
    assert len(plain("a" * 5000)) == 1000
    assert plain(dict.fromkeys(range(5000))) == "5000 items"
    assert plain({"b", "c", "a"}) == ["a", "b", "c"]


def test_a_value_without_a_text_is_kept_by_its_class():
    class Odd(str):
        def __str__(self):
            raise ValueError

    assert arguments_of(LogOptimizerParamGroup([Odd("lr")]))["keys"] == "list"
