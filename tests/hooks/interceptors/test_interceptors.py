# ruff: noqa: RUF012  # lists on classes are what users write
"""Interceptors: the mechanism, on small classes and in a trainer."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch

import modelzoo_trainer
from modelzoo_trainer import (
    Callback,
    Checkpoint,
    ConfigError,
    StopTraining,
    Trainer,
    TrainingLoop,
    register_global_callback,
)
from modelzoo_trainer.hooks.interceptors import Interceptable, event
from tests.doubles import (
    Scale,
    TinyModel,
    constant_batches,
    make_trainer,
    sgd,
    tiny_batches,
    weights_of,
)


class Oven(Interceptable):
    """A class with a few methods."""

    @event("bake")
    def bake(self, dough: str, minutes: int = 5) -> str:
        return f"{dough} {minutes}"

    @event("clean-up")
    def clean_up(self) -> None:
        self.is_clean = True

    @event("pack")
    def pack(self, first: str, /, *rest: str, ribbon: str = "", **labels: str) -> str:
        return f"{first} {rest} {ribbon} {labels}"


def more(self, minutes):
    return minutes * 10


def loud(self, result):
    return result.upper()


# ---- no cost


def test_a_block_without_functions_has_the_methods_of_its_class() -> None:
    assert vars(Oven()) == {}
    assert inspect.isfunction(Oven.bake)


def test_only_the_method_of_the_event_is_replaced() -> None:
    oven = Oven()
    oven.add_function("pre-bake", more)
    assert {"bake"} == {name for name in vars(oven) if not name.startswith("_")}


def test_a_block_whose_functions_were_removed_is_as_it_was() -> None:
    oven = Oven()
    handle = oven.add_function("post-bake", loud)
    handle.remove()
    handle.remove()
    assert vars(oven) == {}


def test_a_trainer_without_functions_has_none_of_its_methods_replaced(trainer_of) -> None:
    trainer = trainer_of()
    trainer.fit(tiny_batches(1))
    assert not {"fit", "training_step", "forward", "backward"} & vars(trainer).keys()


# ---- what a method is


def test_a_method_with_functions_keeps_its_name_signature_and_docstring() -> None:
    oven = Oven()
    plain = inspect.signature(oven.bake)
    oven.add_function("pre-bake", more)
    assert inspect.signature(oven.bake) == plain
    assert oven.bake.__name__ == "bake"


@pytest.mark.parametrize("name", ["", "Bake", "init", "-bake"])
def test_an_event_has_a_name_of_its_own(name) -> None:
    with pytest.raises(ConfigError, match="lower case"):
        event(name)


def test_only_plain_methods_are_events() -> None:
    async def late(self) -> None: ...

    with pytest.raises(ConfigError, match="plain method"):
        event("late")(late)
    with pytest.raises(ConfigError, match="plain method"):
        event("still")(staticmethod(lambda: None))


def test_two_methods_cannot_have_one_event() -> None:
    with pytest.raises(ConfigError, match=r"Two\.roast .* 'bake'.* method bake"):

        class Two(Oven):
            @event("bake")
            def roast(self) -> None: ...


def test_an_override_cannot_have_another_event() -> None:
    with pytest.raises(ConfigError, match=r"Other\.bake .* 'roast'.* overrides .* 'bake'"):

        class Other(Oven):
            @event("roast")
            def bake(self, dough: str, minutes: int = 5) -> str: ...


def test_an_event_may_have_a_second_name() -> None:
    class Both(Interceptable):
        @event("new", "old")
        def run(self, x: int) -> int:
            return x

    both = Both()
    both.add_function("pre-old", lambda self, x: x + 1)
    both.add_function("pre-new", lambda self, x: x * 10)
    assert both.run(1) == 20


def test_an_event_may_be_written_with_underscores() -> None:
    oven = Oven()
    oven.add_function("post_clean_up", lambda self: setattr(self, "seen", True))
    oven.clean_up()
    assert oven.seen


# ---- arguments and results


def test_arguments_that_no_function_takes_are_passed_as_they_are() -> None:
    oven = Oven()
    oven.add_function("pre-pack", lambda self, first: first + "!")
    oven.add_function("pre-pack", lambda self, ribbon: "red")
    assert oven.pack("a", "b", "c", to="you") == "a! ('b', 'c') red {'to': 'you'}"


@pytest.mark.parametrize("name", ["rest", "labels"])
def test_variadic_arguments_cannot_be_taken(name) -> None:
    with pytest.raises(ConfigError, match=f"'{name}', which is not an argument of pack"):
        Oven().add_function("pre-pack", eval(f"lambda self, {name}: {name}"))


def test_keyword_only_parameters_of_functions_are_filled() -> None:
    oven = Oven()
    oven.add_function("pre-bake", lambda self, *, minutes, dough: (minutes + 1, dough + "y"))
    oven.add_function("post-bake", lambda self, *, baked: baked + ".")
    assert oven.bake("rye") == "ryey 6."


def test_a_function_whose_first_parameter_is_an_argument_has_forgotten_self() -> None:
    with pytest.raises(ConfigError, match=r"receives the Oven.*'dough'.*\(self, dough"):
        Oven().add_function("pre-bake", lambda dough: dough)


def test_a_function_that_forgets_its_return_is_refused() -> None:
    oven = Oven()
    oven.add_function("pre-bake", lambda self, dough: None)
    with pytest.raises(ValueError, match="returned None instead of 'dough'") as caught:
        oven.bake("rye")
    assert "'pre-bake' of Oven" in caught.value.__notes__[0]
    oven.callbacks.clear()
    oven.add_function("post-bake", lambda self, result: None)
    with pytest.raises(ValueError, match="returned None instead of the result"):
        oven.bake("rye")


def test_none_may_take_the_place_of_what_may_be_none() -> None:
    class Loading(Interceptable):
        @event("load")
        def load(self, path: str | None) -> str | None:
            return path

    loading = Loading()
    loading.add_function("pre-load", lambda self, path: None)
    assert loading.load("here") is None
    loading.callbacks[:] = [("post-load", lambda self, result: None)]
    assert loading.load("here") is None


class OwnLoss(Trainer):
    """Return a loss from what the model returns."""

    def compute_loss(self, outputs, batch):
        return outputs["output"].mean()


@pytest.mark.parametrize(
    ("kind", "model", "batch"),
    [
        (Trainer, TinyModel, tiny_batches(1)[0]),
        (OwnLoss, lambda: torch.nn.Linear(3, 1), torch.ones(2, 3)),
    ],
)
def test_a_function_after_the_loss_that_forgets_its_return_is_refused(
    tmp_path, kind, model, batch
) -> None:
    def doubled(self, loss):
        loss * 2

    pairs = [("post-loss", doubled)]
    trainer = kind(model=model, optimizer=sgd, model_dir=tmp_path, callbacks=pairs)
    told = rf"doubled, 'post-loss' of {kind.__name__}, returned None"
    with trainer, pytest.raises(ValueError, match=told):
        trainer.fit([batch])


def test_what_a_function_of_a_method_without_result_returns_is_nothing() -> None:
    oven = Oven()
    oven.add_function("post-clean-up", lambda self: 5)
    assert oven.clean_up() is None


def test_an_override_without_annotation_has_that_of_its_parent(caplog) -> None:
    class Steam(Oven):
        def bake(self, dough, minutes=5):
            return "steamed"

        def clean_up(self):
            return None

    steam = Steam()
    steam.add_function("post-bake", loud)
    steam.add_function("post-clean-up", lambda self: None)
    assert steam.bake("rye") == "STEAMED"
    assert caplog.text == ""


# ---- calls within calls


def test_a_call_within_a_call_belongs_to_it() -> None:
    class Twice(Interceptable):
        @event("go")
        def go(self, n: int) -> int:
            return n if n > 100 else self.go(n * 10)

    twice = Twice()
    twice.add_function("pre-go", lambda self, n: n + 1)
    assert twice.go(10) == 110


def test_two_threads_have_their_functions_called_each() -> None:
    inside = threading.Barrier(2, timeout=60)

    class Waiting(Interceptable):
        @event("go")
        def go(self, n: int) -> int:
            inside.wait()
            return n

    waiting = Waiting()
    waiting.add_function("pre-go", lambda self, n: n + 1)
    found = []
    threads = [threading.Thread(target=lambda: found.append(waiting.go(1))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [2, 2]


def test_a_function_that_calls_its_parents_does_not_run_that_twice() -> None:
    class Parent(Oven):
        def pre_bake_callback(self, dough, minutes):
            return dough + "a", minutes + 1

        def post_bake_callback(self, result):
            return result + "p"

    class Child(Parent):
        def pre_bake_callback(self, dough, minutes):
            dough, minutes = super().pre_bake_callback(dough=dough, minutes=minutes)
            return dough + "b", minutes * 2

        def post_bake_callback(self, result):
            return super().post_bake_callback(result) + "c"

    assert Child().bake("x", 1) == "xab 4pc"
    assert Child().post_bake_callback("y") == "ypc"  # called by hand, both


# ---- where functions come from


def test_functions_of_plain_mix_ins_count() -> None:
    class Mix:
        callbacks = [("pre-bake", more)]

        def post_bake_callback(self, result):
            return result + " mixed"

    class Mixed(Mix, Oven): ...

    assert Mixed().bake("rye", 1) == "rye 10 mixed"


def test_the_list_of_a_class_is_fixed_when_it_is_defined() -> None:
    class Quick(Oven):
        callbacks = [("pre-bake", more)]

    assert Quick.callbacks == (("pre-bake", more),)
    with pytest.raises(AttributeError):
        Quick.callbacks.append(("post-bake", loud))


def test_the_list_of_an_object_can_be_changed_like_any_other() -> None:
    class Quick(Oven):
        callbacks = [("pre-bake", more)]

    quick = Quick()
    quick.callbacks += [("post-bake", loud)]
    assert quick.bake("rye", 1) == "RYE 10"
    quick.callbacks.remove(("pre-bake", more))
    assert quick.bake("rye", 1) == "RYE 1"
    quick.callbacks = [("pre-bake", more), ("pre-bake", more)]
    assert quick.bake("rye", 1) == "rye 100"
    quick.callbacks[0] = ("post-bake", loud)
    assert repr(quick.callbacks) == repr([("post-bake", loud), ("pre-bake", more)])
    del quick.callbacks[:]
    assert len(quick.callbacks) == 0
    assert quick.bake("rye", 1) == "rye 1"


def test_a_change_that_does_not_fit_changes_nothing() -> None:
    oven = Oven()
    oven.callbacks.append(("pre-bake", more))
    with pytest.raises(ConfigError):
        oven.callbacks.extend([("pre-nosuch", more)])
    assert list(oven.callbacks) == [("pre-bake", more)]


def test_a_handle_outlives_changes_of_the_list() -> None:
    oven = Oven()
    handle = oven.add_function("pre-bake", more)
    oven.callbacks.insert(0, ("post-bake", loud))
    del oven.callbacks[0]
    handle.remove()
    assert oven.bake("rye", 1) == "rye 1"


def test_a_class_can_be_used_with_functions_from_its_constructor_on() -> None:
    class Small(Oven):
        def __init__(self, size: int) -> None:
            self.size = size
            self.first = self.bake("first")

    made = Small.with_functions(("pre-init", lambda self, size: size + 1), ("post-bake", loud))(2)
    assert (made.size, made.first) == (3, "FIRST 5")
    assert type(made).__name__ == "Small"
    assert isinstance(made, Small)
    assert Small(2).first == "first 5"


def test_constructor_functions_work_on_dataclasses() -> None:
    @dataclass
    class Sized(Oven):
        size: int

        def pre_init_callback(self, size):
            return size * 2

    assert Sized(4).size == 8
    assert list(inspect.signature(Sized).parameters) == ["size"]


def test_a_class_without_constructor_takes_no_arguments() -> None:
    with pytest.raises(TypeError, match=r"takes no constructor arguments; got \[3\]"):
        Oven(3)


def test_what_is_late_for_the_constructor_is_refused() -> None:
    with pytest.raises(ConfigError, match="already exists"):
        Oven().add_function("post-init", lambda self: None)


async def later(self: Oven, result: str) -> str:
    return result


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (("bake", more), "write 'pre-bake' or 'post-bake'"),
        (("pre-bake", 3), "is not callable"),
        (("pre-bkae", more), "Did you mean 'pre-bake'"),
        (("pre-nosuch", more), "Events: bake, clean-up, init, pack"),
        ("pre-bake", "Pass pairs of an event and a function"),
        (("post-bake", max), "signature"),
        (("post-bake", later), "async functions are not supported"),
    ],
)
def test_what_is_no_function_of_an_event_is_refused(pair, said) -> None:
    with pytest.raises(ConfigError, match=said):
        Oven().callbacks.append(pair)


def test_a_method_style_function_must_be_a_plain_method() -> None:
    class Still(Oven):
        @staticmethod
        def pre_bake_callback(dough):
            return dough

    with pytest.raises(ConfigError, match=r"Still\.pre_bake.*def pre_bake_callback\(self"):
        Still()


# ---- copies


class Kept(Oven):
    """At the top of a module, so that it can be pickled."""

    callbacks = [("pre-bake", more)]


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda kept: pickle.loads(pickle.dumps(kept))]
)
def test_a_copy_has_functions_of_its_own(copied: Callable[[Any], Any]) -> None:
    kept = Kept()
    kept.name = "kept"
    kept.add_function("post-bake", loud)
    other = copied(kept)
    kept.callbacks.clear()
    assert other.name == "kept"
    assert other.bake("rye", 1) == "RYE 10"
    assert other.bake.owner is other


def test_a_method_that_was_replaced_by_hand_is_kept() -> None:
    oven = Oven()
    oven.bake = lambda dough: dough + " by hand"
    handle = oven.add_function("pre-bake", lambda self, dough: dough * 2)
    assert oven.bake("x") == "xx by hand"
    handle.remove()
    assert oven.bake("x") == "x by hand"


# ---- in a trainer


def test_a_trainer_takes_pairs_beside_callbacks(trainer_of) -> None:
    order = []

    class Noting(Callback):
        def on_before_forward(self, trainer, model, batch, args, kwargs):
            order.append("on_before_forward")

    def note(self, batch):
        order.append("pre-forward")
        return batch

    trainer = trainer_of(("pre-forward", note), Noting())
    trainer.fit(tiny_batches(2))
    assert order == ["pre-forward", "on_before_forward"] * 2


def test_a_single_pair_is_accepted(tmp_path) -> None:
    seen = []
    trainer = Trainer(
        model=Scale(),
        model_dir=tmp_path,
        callbacks=("pre-validate", lambda self: seen.append(self.global_step)),
    )
    trainer.validate(constant_batches(1))
    assert seen == [0]


def test_a_pair_that_nobody_has_is_refused_before_anything_is_made(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'post-forward'.*Events: backward"):
        Trainer(
            model=Scale(),
            model_dir=tmp_path / "run",
            callbacks=[("post-froward", lambda self, outputs: outputs)],
        )
    assert not (tmp_path / "run").exists()


def test_constructor_functions_of_a_trainer_belong_to_its_class(trainer_of) -> None:
    with pytest.raises(ConfigError, match="is too late"):
        trainer_of(("post-init", lambda self: None))


def test_a_pair_is_for_every_part_that_has_its_event(trainer_of, monkeypatch) -> None:
    from modelzoo_trainer.core.model import ModelCallback
    from modelzoo_trainer.core.optimizer import OptimizerCallback

    for part in (ModelCallback, OptimizerCallback):
        monkeypatch.setattr(part, "both", _both, raising=False)
    seen = []
    trainer = trainer_of(("post-both", lambda self: seen.append(type(self).__name__)))
    trainer.callbacks["model"].both()
    trainer.callbacks["optimizer"].both()
    assert seen == ["ModelCallback", "OptimizerCallback"]


@event("both")
def _both(self) -> None:
    pass


def test_a_pair_added_to_a_trainer_can_be_taken_back(trainer_of) -> None:
    seen = []
    trainer = trainer_of(max_steps=4)
    handle = trainer.add_callback(("post-optimizer-step", lambda self: seen.append(1)))
    trainer.fit(tiny_batches(4), None)
    handle.remove()
    handle.remove()
    trainer.training_step(tiny_batches(1)[0])
    assert seen == [1] * 4
    assert "optimizer_step" not in vars(trainer)


def test_a_handle_takes_out_its_own_pair_and_remove_callback_all_that_are_equal(trainer_of) -> None:
    seen = []
    pair = ("post-backward", lambda self: seen.append(1))
    trainer = trainer_of(pair)
    handle = trainer.add_callback(pair)
    handle.remove()
    handle.remove()
    trainer.fit(tiny_batches(1))
    assert seen == [1]
    trainer.add_callback(pair)
    trainer.remove_callback(tuple(pair))
    trainer.fit(tiny_batches(1))
    assert seen == [1]


def test_a_trainers_constructor_may_have_functions(tmp_path) -> None:
    class Seeded(Trainer):
        callbacks = [
            ("pre-init", lambda self, seed: 5),
            ("post-init", lambda self: setattr(self, "told", self.global_step)),
        ]

    trainer = Seeded(model=Scale(), model_dir=tmp_path)
    assert trainer.callbacks["reproducibility"].seed == 5
    assert trainer.told == 0


def test_a_pair_that_does_not_fit_is_not_added(trainer_of) -> None:
    trainer = trainer_of(("post-forward", lambda self, outputs: outputs))
    with pytest.raises(ConfigError, match="must take"):
        trainer.add_callback(("post-forward", lambda self: None))
    trainer.fit(tiny_batches(1))
    assert len(trainer.forward.post) == 1


def test_global_pairs_are_for_all_trainers_and_come_last(trainer_of, tmp_path) -> None:
    order = []
    before = trainer_of()
    handle = register_global_callback(("post-backward", lambda self: order.append("global")))
    try:
        after = trainer_of(
            ("post-backward", lambda self: order.append("own")), model_dir=tmp_path / "b"
        )
        before.fit(tiny_batches(1))
        after.fit(tiny_batches(1))
    finally:
        handle.remove()
    after.fit(tiny_batches(1))
    assert order == ["global", "own", "global", "own"]
    assert "backward" not in vars(before)


def test_a_global_pair_is_called_once_on_a_part_that_trainers_share(trainer_of, tmp_path) -> None:
    saved = []
    checkpoint = Checkpoint(steps=1)
    first = trainer_of(checkpoint=checkpoint)
    second = trainer_of(checkpoint=checkpoint, model_dir=tmp_path / "b")
    handle = register_global_callback(("pre-save", lambda self: saved.append("x")))
    try:
        first.fit(tiny_batches(1))
        second.fit(tiny_batches(1))
    finally:
        handle.remove()
    assert saved == ["x", "x"]
    assert "write" not in vars(checkpoint)


def test_a_global_pair_is_taken_from_a_shared_part_when_its_first_trainer_is_gone(
    trainer_of, tmp_path
) -> None:
    saved = []
    checkpoint = Checkpoint(steps=1)
    first = make_trainer(tmp_path / "a", checkpoint=checkpoint)
    handle = register_global_callback(("pre-save", lambda self: saved.append("x")))
    try:
        second = trainer_of(checkpoint=checkpoint, model_dir=tmp_path / "b")
        first.close()
        del first
        gc.collect()
    finally:
        handle.remove()
    second.fit(tiny_batches(1))
    assert saved == []


def test_the_same_pair_given_twice_is_called_twice(trainer_of) -> None:
    order = []
    pair = ("post-backward", lambda self: order.append("own"))
    trainer_of(pair, pair).fit(tiny_batches(1))
    assert order == ["own", "own"]


def test_a_global_pair_that_does_not_fit_the_trainers_is_taken_back(trainer_of) -> None:
    trainer = trainer_of(("post-backward", lambda self: None))
    with pytest.raises(ConfigError, match="no event 'nosuch'"):
        register_global_callback(("post-nosuch", lambda self: None))
    with pytest.raises(ConfigError, match="must start with 'pre-' or 'post-'"):
        register_global_callback(("backward", lambda self: None))
    trainer.fit(tiny_batches(1))
    assert trainer.global_step == 1


def test_functions_change_nothing_but_what_they_rewrite(trainer_of, tmp_path) -> None:
    plain = trainer_of(num_epochs=2)
    plain.fit(tiny_batches(3))
    same = [(f"pre-{name}", lambda self: None) for name in Trainer.events()]
    seen = trainer_of(*same, num_epochs=2, model_dir=tmp_path / "seen")
    seen.fit(tiny_batches(3))
    for name, value in weights_of(plain).items():
        assert torch.equal(value, weights_of(seen)[name])


@pytest.mark.parametrize(
    "pair",
    [
        ("post-forward", lambda self, outputs: _stop()),
        ("pre-optimizer-step", lambda self: _stop()),
        ("post-optimizer-step", lambda self: _stop()),
        ("pre-step", lambda self, batch: _stop()),
        ("post-step", lambda self, outputs: _stop()),
    ],
)
def test_a_stop_that_a_function_asks_for_comes_when_the_step_is_done(trainer_of, pair) -> None:
    trainer = trainer_of(pair, max_steps=3)
    trainer.fit(tiny_batches(3))
    assert trainer.global_step == 1
    assert trainer.early_exit.reason == "seen enough"


def _stop() -> Any:
    raise StopTraining("seen enough")


def test_a_stop_before_a_run_goes_through(trainer_of) -> None:
    trainer = trainer_of(("pre-fit", lambda self: _stop()))
    with pytest.raises(StopTraining):
        trainer.fit(tiny_batches(3))
    assert trainer.global_step == 0


def test_a_stop_before_the_validation_of_a_stage_ends_the_run(trainer_of) -> None:
    trainer = trainer_of(("pre-validate", lambda self: _stop()), num_epochs=2, eval_frequency=1)
    trainer.fit(tiny_batches(3), tiny_batches(1))
    assert trainer.global_step == 1


def test_a_trainer_with_functions_can_be_collected(tmp_path) -> None:
    trainer = Trainer(
        model=Scale(), model_dir=tmp_path, callbacks=[("post-forward", lambda self, out: out)]
    )
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("device", ["fake", "meta"])
def test_functions_inside_the_step_run_where_nothing_is_read(device, trainer_of) -> None:
    trainer = trainer_of(
        ("pre-forward", lambda self, batch: batch),
        ("post-loss", lambda self, loss: loss * 2),
        ("pre-backward", lambda self, outputs: outputs),
        device=device,
    )
    trainer.fit(tiny_batches(2))
    assert trainer.global_step == 2


def test_an_overridden_loss_makes_one_where_the_model_has_none(tmp_path) -> None:
    class Squares(Trainer):
        def compute_loss(self, outputs, batch):
            return outputs["output"].square().mean()

    squares = Squares(
        model=torch.nn.Linear(2, 3),
        optimizer=sgd,
        loop=TrainingLoop(max_steps=1),
        model_dir=tmp_path,
        seed=0,
    )
    before = squares.model.weight.clone()
    squares.fit([torch.ones(4, 2)])
    assert not torch.equal(before, squares.model.weight)


def test_an_abstract_event_can_be_given_functions_on_its_class() -> None:
    class Base(Interceptable):
        callbacks = [("post-go", lambda self, result: result + 1)]

        @event("go")
        @abstractmethod
        def go(self) -> int: ...

    class Real(Base):
        def go(self):
            return 1

    assert Real().go() == 2


def test_the_old_names_still_work() -> None:
    old = import_module("modelzoo_trainer.hooks.advice")
    assert old.Advised is modelzoo_trainer.Advised is Interceptable
    assert old.event is event
