# ruff: noqa: RUF012  # lists on classes are what users write
"""What ArcticTraining's callbacks do, in our spelling: AT-01 to AT-52."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR

from modelzoo_trainer import (
    Callback,
    Checkpoint,
    ConfigError,
    Logging,
    MixedPrecision,
    Trainer,
    TrainingLoop,
)
from modelzoo_trainer.base.user_modules import import_module
from modelzoo_trainer.callbacks.extra_checkpoint import ExtraCheckpoint
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.names import NameTable
from modelzoo_trainer.config.positions import Place, Problems
from modelzoo_trainer.hooks.interceptors import Interceptable, event
from modelzoo_trainer.loggers import ProgressLogger
from modelzoo_trainer.zoo.data.digits import DigitsProcessor
from modelzoo_trainer.zoo.data.synthetic import SyntheticProcessor
from modelzoo_trainer.zoo.data.text_files import TextFileProcessor
from tests.doubles import (
    Crash,
    History,
    Interrupted,
    Scale,
    TinyModel,
    constant_batches,
    differing,
    sgd,
    tiny_batches,
    weights_of,
)


class Block(Interceptable):
    """Methods with all kinds of parameters."""

    @event("f")
    def f(self, a: int, b: int = 5, *, k: int = 7) -> tuple[int, int, int]:
        return a, b, k

    @event("one")
    def one(self, x: Any) -> Any:
        return x

    @event("none")
    def none(self) -> None:
        self.seen = [*getattr(self, "seen", []), "body"]

    @event("split")
    def split_data(self, data: int) -> int:
        return data


def block(*pairs: tuple[str, Callable[..., Any]]) -> Block:
    """Return a block of a class with these functions."""
    return type("Own", (Block,), {"callbacks": list(pairs)})()


def noting(order: list[str], what: str) -> Callable[..., None]:
    return lambda self: order.append(what)


def test_at_01_event_naming() -> None:
    assert block(("pre-split", lambda self, data: data + 1)).split_data(1) == 2
    with pytest.raises(ValueError, match="no event 'split-data'"):
        block(("pre-split-data", lambda self, data: data))


def test_at_02_class_list() -> None:
    class Doubled(Block):
        callbacks = [("post-one", lambda self, result: result * 2)]

    assert Doubled().one(4) == 8


def test_at_03_method_style() -> None:
    class OneArg(Interceptable):
        def pre_one_arg_callback(self, x):
            return x + 1

        @event("one-arg")
        def run(self, x: int) -> int:
            return x

    assert OneArg().run(1) == 2


def test_at_04_order_around_the_call() -> None:
    order: list[str] = []

    class Nested(Interceptable):
        callbacks = [
            (f"{side}-{name}", noting(order, f"{side} {name}"))
            for name in ("train", "epoch")
            for side in ("pre", "post")
        ]

        @event("train")
        def train(self) -> None:
            self.epoch()

        @event("epoch")
        def epoch(self) -> None:
            order.append("body")

    Nested().train()
    assert order == ["pre train", "pre epoch", "body", "post epoch", "post train"]


def test_at_05_an_override_keeps_its_functions() -> None:
    order: list[str] = []

    class Parent(Block):
        callbacks = [("post-none", noting(order, "post"))]

    class Child(Parent):
        def none(self) -> None:
            order.append("child")

    Child().none()
    assert order == ["child", "post"]


def test_at_06_an_override_that_calls_super_has_them_once() -> None:
    order: list[str] = []

    class Parent(Block):
        callbacks = [("pre-none", noting(order, "pre")), ("post-none", noting(order, "post"))]

        def none(self) -> None:
            order.append("parent")

    class Child(Parent):
        def none(self) -> None:
            super().none()
            order.append("child")
            super().none()

    Child().none()
    assert order == ["pre", "parent", "child", "parent", "post"]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda self, b: b + 1, (1, 3, 7)),
        (lambda self, b, a: (b * 10, a * 10), (10, 20, 7)),
        (lambda self, k: k + 1, (1, 2, 8)),
        (lambda self: None, (1, 2, 7)),
    ],
)
def test_at_07_any_subset_of_the_arguments(function, expected) -> None:
    assert block(("pre-f", function)).f(1, 2) == expected


def test_at_08_what_was_taken_is_returned_in_its_order() -> None:
    assert block(("pre-f", lambda self, b, a: (b * 2, a + 1))).f(1, 5) == (2, 10, 7)


def test_at_09_defaults_are_seen() -> None:
    seen = []

    def look(self, b):
        seen.append(b)
        return b

    block(("pre-f", look)).f(1)
    assert seen == [5]


def test_at_10_functions_before_see_each_others_arguments() -> None:
    both = block(("pre-one", lambda self, x: x + 1), ("pre-one", lambda self, x: x * 10))
    assert both.one(2) == 30


def test_at_11_functions_after_see_each_others_results() -> None:
    both = block(("post-one", lambda self, x: x + 1), ("post-one", lambda self, x: x * 10))
    assert both.one(2) == 30


def test_at_12_a_function_that_takes_nothing_returns_nothing() -> None:
    with pytest.raises(ValueError, match="got 5"):
        block(("pre-one", lambda self: 5)).one(1)


def test_at_13_one_argument_is_taken_as_it_is() -> None:
    assert block(("pre-one", lambda self, x: (x, x))).one(1) == (1, 1)


@pytest.mark.parametrize("returned", [(1, 2, 3), (1,), "ab", {"a": 1, "b": 2}, None, 4])
def test_at_14_the_number_of_returned_values_is_checked(returned) -> None:
    with pytest.raises(ValueError, match=r"must return 2: \(a, b\)"):
        block(("pre-f", lambda self, a, b: returned)).f(1)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda self, a=1: a, "default of parameter 'a'"),
        (lambda self, *a: a, "without"),
        (lambda self, **a: a, "without"),
        (lambda self, z: z, "'z', which is not an argument of f"),
        (lambda: None, "takes no parameters"),
    ],
)
def test_at_15_functions_before_are_checked_when_an_object_is_made(function, said) -> None:
    own = type("Own", (Block,), {"callbacks": [("pre-f", function)]})
    with pytest.raises(ValueError, match=said):
        own()


def test_at_16_an_unknown_event() -> None:
    with pytest.raises(ValueError, match="Events: f, init, none, one, split"):
        block(("pre-nosuch", lambda self: None))
    with pytest.raises(ValueError, match="Did you mean 'pre-split'"):
        block(("pre-splitt", lambda self: None))


def test_at_17_after_a_method_with_a_result() -> None:
    assert block(("post-one", lambda self, any_name: any_name * 12)).one(2) == 24


def test_at_18_after_a_method_without_a_result() -> None:
    made = block(("post-none", lambda self: self.seen.append("post")))
    made.none()
    assert made.seen == ["body", "post"]
    with pytest.raises(ValueError, match=r"must take only \(self\)"):
        block(("post-none", lambda self, result: result))


@pytest.mark.parametrize("function", [lambda self: 1, lambda self, x, y: 1])
def test_at_19_functions_after_take_the_result_alone(function) -> None:
    with pytest.raises(ValueError, match=r"must take \(self, result\)"):
        block(("post-one", function))


def test_at_20_a_method_without_annotation(caplog) -> None:
    class Bare(Interceptable):
        callbacks = [("post-go", lambda self, result: result + 1)]

        @event("go")
        def go(self):
            return 1

    with caplog.at_level(logging.WARNING, "modelzoo_trainer.interceptors"):
        assert Bare().go() == 2
    assert "go has no return annotation" in caplog.text


def test_at_21_lists_are_inherited_base_first() -> None:
    order: list[str] = []

    class Parent(Block):
        callbacks = [("post-none", noting(order, "parent"))]

    class Child(Parent):
        callbacks = [("post-none", noting(order, "child"))]

    Child().none()
    assert order == ["parent", "child"]


@pytest.mark.parametrize("parent_is_made_first", [True, False])
def test_at_22_method_functions_are_chained(parent_is_made_first) -> None:
    order: list[str] = []

    class Parent(Block):
        def post_none_callback(self):
            order.append("parent's method")

    if parent_is_made_first:
        Parent()

    class Child(Parent):
        callbacks = [("post-none", noting(order, "child's list"))]

        def post_none_callback(self):
            order.append("child's method")

    class Grandchild(Child):
        def post_none_callback(self):
            super().post_none_callback()
            order.append("grandchild's method")

    Child().none()
    assert order == ["parent's method", "child's list", "child's method"]
    order.clear()
    Grandchild().none()
    assert order == [
        "parent's method",
        "child's list",
        "child's method",
        "grandchild's method",
    ]


def test_at_23_a_child_that_overrides_nothing() -> None:
    class Parent(Block):
        def pre_one_callback(self, x):
            return x + 1

    class Child(Parent): ...

    assert Child().one(1) == 2


def test_at_24_what_is_inherited_is_not_had_twice() -> None:
    add = ("pre-one", lambda self, x: x + 1)

    class Parent(Block):
        callbacks = [add]

    class Child(Parent):
        callbacks = [add]

    class Twice(Block):
        callbacks = [add, add]

    assert (Child().one(0), Twice().one(0)) == (1, 2)


def test_at_25_appending_to_the_list_of_an_object() -> None:
    mine, other = Block(), Block()
    mine.callbacks.append(("pre-one", lambda self, x: x + 1))

    class Later(Block): ...

    assert (mine.one(0), other.one(0), Block().one(0), Later().one(0)) == (1, 0, 0, 0)


def test_at_25_a_pair_is_added_to_a_trainer(trainer_of) -> None:
    order: list[str] = []
    trainer = trainer_of()
    trainer.add_callback(("pre-step", noting(order, "step")))
    trainer.fit(tiny_batches(1))
    assert order == ["step"]


def test_at_26_adding_at_run_time() -> None:
    mine = Block()
    handle = mine.add_function("pre-one", lambda self, x: x + 1)
    Block()
    assert mine.one(0) == 1
    handle.remove()
    assert mine.one(0) == 0


class Sized(Interceptable):
    """What constructors are tested on."""

    def __init__(self, size: int, name: str = "") -> None:
        self.size = size
        self.name = name


def test_at_27_functions_of_the_constructor() -> None:
    class Own(Sized):
        callbacks = [
            ("pre-init", lambda self, size: size * 2),
            ("post-init", lambda self: setattr(self, "told", self.size)),
        ]

    made = Own(3, name="x")
    assert (made.size, made.name, made.told) == (6, "x", 6)


def test_at_28_constructor_functions_run_once_after_the_outermost() -> None:
    order: list[str] = []

    class Parent(Sized):
        callbacks = [("pre-init", noting(order, "pre")), ("post-init", noting(order, "post"))]

        def __init__(self, size: int) -> None:
            super().__init__(size)
            order.append("parent")

    class Child(Parent):
        def __init__(self) -> None:
            super().__init__(1)
            order.append("child")

    Parent(1)
    order.clear()
    Child()
    assert order == ["pre", "parent", "child", "post"]


def test_at_29_exceptions_go_through() -> None:
    def fail(self):
        raise KeyError("mine")

    before = block(("pre-none", fail), ("post-none", lambda self: self.seen.append("post")))
    with pytest.raises(KeyError) as caught:
        before.none()
    assert not hasattr(before, "seen")
    assert "'pre-none' of Own" in caught.value.__notes__[0]
    after = block(("post-none", fail))
    with pytest.raises(KeyError):
        after.none()
    assert after.seen == ["body"]

    order: list[str] = []

    class Failing(Block):
        callbacks = [("post-none", noting(order, "post"))]

        def none(self) -> None:
            raise KeyError("body")

    with pytest.raises(KeyError, match="body"):
        Failing().none()
    assert order == []


# What each event of a trainer and its parts takes, and whether it has a result.
OF_A_TRAINER = {
    "fit": ("train_dataloader, val_dataloader, ckpt_path", False),
    "epoch": ("", False),
    "step": ("batch", True),
    "forward": ("batch", True),
    "loss": ("outputs, batch", True),
    "backward": ("outputs, batch", False),
    "optimizer-step": ("", False),
    "optimizer-zero-grad": ("", False),
    "schedulers-step": ("", False),
    "validate": ("val_dataloader, ckpt_path, loop", False),
    "validation-step": ("batch, loop, batch_idx", True),
    "save-checkpoint": ("wait", True),
    "load-checkpoint": ("ckpt_path", False),
    "create-model": ("", True),
    "create-optimizer": ("model", True),
    "create-scheduler": ("optimizer, scheduler", True),
    "save": ("trainer, state, wait", True),
    "load": ("trainer, path", True),
}


def watching(seen: list[str], name: str, takes: str, has_result: bool) -> list[Any]:
    """Return functions for both sides of an event that note its name and change nothing."""
    parameters = f", {takes}" if takes else ""
    result = ", result" if has_result else ""
    scope = {"seen": seen}
    before = eval(f"lambda self{parameters}: (seen.append('pre-{name}'), ({takes}))[1]", scope)
    after = eval(f"lambda self{result}: (seen.append('post-{name}'){result})[-1]", scope)
    return [
        (f"pre-{name}", before if takes else lambda self: seen.append(f"pre-{name}")),
        (f"post-{name}", after if has_result else lambda self: seen.append(f"post-{name}")),
    ]


def test_at_30_events_of_a_trainer_and_its_parts(trainer_of) -> None:
    seen: list[str] = []
    pairs = [
        pair
        for name, (takes, has_result) in OF_A_TRAINER.items()
        for pair in watching(seen, name, takes, has_result)
    ]
    trainer = trainer_of(
        *pairs,
        *watching(seen, "validate-all", "val_dataloaders, ckpt_paths, loop", False),
        max_steps=2,
        eval_frequency=2,
        checkpoint=Checkpoint(steps=1),
        schedulers=lambda optimizer: ConstantLR(optimizer, 1.0),
    )
    trainer.fit(tiny_batches(2), tiny_batches(1))
    trainer.validate_all(tiny_batches(1), trainer.model_dir / "checkpoint_2")
    names = [*OF_A_TRAINER, "validate-all"]
    assert sorted(set(seen)) == sorted(
        f"{side}-{name}" for name in names for side in ("pre", "post")
    )
    others = {"train", "evaluate", "checkpoint"}  # second names
    assert set(Trainer.events()) - set(names) == others | {"test", "predict"}
    assert seen.count("pre-step") == seen.count("post-optimizer-step") == 2
    assert seen.count("post-save") == 2


def test_at_30_epochs_with_the_inheritance_of_the_seeds_example(trainer_of, tmp_path) -> None:
    order: list[str] = []

    class Parent(Trainer):
        def post_epoch_callback(self):
            order.append(f"parent {self.data.epoch}")

    class Child(Parent):
        callbacks = [
            ("pre-epoch", noting(order, "before")),
            ("pre-train", noting(order, "train")),
            ("post-epoch", noting(order, "child's list")),
        ]

        def post_epoch_callback(self):
            order.append("child")

    loop = TrainingLoop(num_epochs=2, eval_frequency=2)  # a validation within each epoch
    settings = {"device": "cpu", "model_dir": tmp_path, "model": TinyModel, "optimizer": sgd}
    with Child(loop=loop, **settings) as trainer:
        trainer.fit(tiny_batches(3), tiny_batches(1))
    each = ["before", "parent {}", "child's list", "child"]
    assert order == ["train", *(word.format(epoch) for epoch in range(2) for word in each)]


def test_at_30_an_epoch_that_was_over_at_a_restart_ends_once(trainer_of) -> None:
    order: list[str] = []
    pairs = ("pre-epoch", noting(order, "pre")), ("post-epoch", noting(order, "post"))
    settings = {"checkpoint": Checkpoint(steps=1), "num_epochs": 2}
    with pytest.raises(Interrupted):
        trainer_of(*pairs, Crash(2), **settings).fit(tiny_batches(2))
    trainer_of(*pairs, **settings).fit(tiny_batches(2))
    assert order == ["pre", "post", "pre", "post"]


def test_at_30_functions_of_a_trainer_class_reach_its_parts(tmp_path) -> None:
    order: list[Any] = []

    def listed(self, model):
        order.append(("list", type(self).__name__))
        return model

    class Parent(Trainer):
        callbacks = [("post-create-model", listed)]

        def post_create_model_callback(self, model):
            order.append(("parent", self))
            model.head.bias.data.fill_(7.0)
            return model

        def pre_create_optimizer_callback(self, model):
            order.append(("optimizer", self))
            return model

    class Child(Parent):
        def post_create_model_callback(self, model):
            order.append(("child", self))
            return super().post_create_model_callback(model)

    settings = {"device": "cpu", "model_dir": tmp_path, "model": TinyModel, "optimizer": sgd}
    with Child(callbacks=[("post-create-model", listed)], **settings) as trainer:
        own = [(what, trainer) for what in ("parent", "child")]
        listed_once = ("list", "ModelCallback")
        assert order == [listed_once, *own, listed_once, ("optimizer", trainer)]
        assert trainer.model.head.bias.item() == 7.0

    class Wrong(Trainer):
        callbacks = [("pre-create-modle", listed)]

    with pytest.raises(ConfigError, match=r"'create-modle'.*'pre-create-model'"):
        Wrong(**settings)


def test_at_30_second_names_of_events(trainer_of) -> None:
    seen: list[str] = []
    names = ("train", "evaluate", "checkpoint")
    pairs = [(f"pre-{name}", noting(seen, name)) for name in names]
    trainer = trainer_of(*pairs, checkpoint=Checkpoint(steps=1))
    trainer.fit(tiny_batches(1), tiny_batches(1))
    assert seen == ["train", "checkpoint", "evaluate"]


def test_at_30_events_of_data_processors(tmp_path) -> None:
    seen: list[str] = []
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text("to be or not to be " * 9)

    def watched(cls: Any, **takes: str) -> Any:
        pairs = [p for n, t in takes.items() for p in watching(seen, n.replace("_", "-"), t, True)]
        return cls.with_functions(*pairs)

    text = watched(
        TextFileProcessor,
        create_tokenizer="tokenizer_file_path, eos_token",
        load="data_dir, pattern",
        process="documents",
        create_dataloader="",
    )(
        data_dir=str(tmp_path),
        max_sequence_length=8,
        batch_size=2,
        cache_dir=str(tmp_path / "cache"),
    )
    text.create_dataloader()
    steps = ["create-tokenizer", "load", "process", "create-dataloader"]
    assert seen == [f"{side}-{name}" for name in steps for side in ("pre", "post")]
    seen.clear()
    watched(SyntheticProcessor, load="", process="rows")(batch_size=2, num_samples=4)
    assert seen == ["pre-load", "post-load", "pre-process", "post-process"]
    assert DigitsProcessor.events() == ("create-dataloader", "load", "process", "split")


def test_at_30_functions_of_a_processor_change_its_data() -> None:
    half = SyntheticProcessor.with_functions(
        ("post-load", lambda self, rows: tuple(part[:4] for part in rows)),
        ("pre-process", lambda self, rows: (rows[0] * 0, rows[1])),
    )
    [batch] = half(batch_size=8, num_samples=8).create_dataloader()
    assert batch[0].shape == (4, 16)
    assert not batch[0].any()


def test_at_30_a_model_and_its_optimizer_can_be_replaced(trainer_of) -> None:
    trainer = trainer_of(
        ("post-create-model", lambda self, model: torch.nn.Sequential(model)),
        ("post-create-optimizer", lambda self, made: torch.optim.Adam(made.param_groups)),
    )
    trainer.fit(tiny_batches(1))
    assert type(trainer.model) is torch.nn.Sequential
    assert type(trainer.optimizer) is torch.optim.Adam


def test_at_30_step_and_loss(tmp_path) -> None:
    told: list[Any] = []

    class Own(Trainer):
        callbacks = [
            ("pre-step", lambda self, batch: batch * 2),
            ("post-loss", lambda self, loss: loss + 1),
        ]

        def post_loss_callback(self, loss):
            told.append((self.global_step, loss.item()))
            return loss

    Own(
        model=Scale(),
        optimizer=sgd,
        loop=TrainingLoop(max_steps=2),
        model_dir=tmp_path,
    ).fit(constant_batches(1, 1))
    # The weight is 1, and after a step 1 - 0.1 * 2.
    assert told == [(0, 3.0), (1, pytest.approx(0.8 * 2 + 1))]


def test_at_31_an_abstract_method_is_intercepted_where_it_is_implemented() -> None:
    class Base(Interceptable):
        @event("go")
        @abstractmethod
        def go(self) -> int: ...

    class Real(Base):
        callbacks = [("post-go", lambda self, result: result + 1)]

        def go(self) -> int:
            return 1

    assert Real().go() == 2


def test_at_32_objects_do_not_add_up() -> None:
    class Own(Block):
        callbacks = [("pre-one", lambda self, x: x + 1)]

        def post_one_callback(self, result):
            return result * 10

    assert [Own().one(0) for _ in range(3)] == [10, 10, 10]


def test_at_33_variadic_arguments_pass_through() -> None:
    class Var(Interceptable):
        callbacks = [("pre-go", lambda self, a: a + 1)]

        @event("go")
        def go(self, a: int, *args: int, **kwargs: int) -> Any:
            return a, args, kwargs

    assert Var().go(1, 2, 3, z=4) == (2, (2, 3), {"z": 4})


def test_at_34_an_event_with_pre_in_its_name() -> None:
    class Data(Interceptable):
        callbacks = [("post-preprocess", lambda self, result: result + 1)]

        def pre_preprocess_callback(self, x):
            return x * 10

        @event("preprocess")
        def preprocess(self, x: int) -> int:
            return x

    assert Data().preprocess(1) == 11


def test_at_35_functions_without_a_name() -> None:
    class Adding:
        def __call__(self, block, x):
            return x + 1

        def method(self, block, x):
            return x * 3

    scaled = partial(lambda self, x, by: x * by, by=5)
    first = partial(lambda offset, self, x: x + offset, 100)
    made = block(
        ("pre-one", Adding()),
        ("pre-one", scaled),
        ("pre-one", first),
        ("post-one", Adding().method),
    )
    assert made.one(1) == (2 * 5 + 100) * 3


# ---- the trainer


def test_at_36_the_loss_is_logged_every_so_many_steps(trainer_of, caplog) -> None:
    history = History()
    trainer = trainer_of(loggers=history, logging=Logging(log_steps=2), max_steps=6)
    trainer.fit(tiny_batches(6))
    assert [step for step, _ in history.of("loss")] == [2, 4, 6]
    off = trainer_of(progress="none", model_dir=trainer.model_dir / "off")
    caplog.clear()
    with caplog.at_level(logging.INFO, "modelzoo_trainer.progress"):
        off.fit(tiny_batches(2))
        assert caplog.text == ""
        loud = trainer_of(loggers=ProgressLogger(0.0), model_dir=trainer.model_dir / "on")
        loud.fit(tiny_batches(2))
    assert "loss" in caplog.text


def _at_a_step(trainer: Trainer) -> None:
    trainer.early_exit.register(lambda: trainer.global_step >= 2)


def _by_file(trainer: Trainer) -> None:
    (trainer.model_dir / "stop").touch()


def _by_hand(trainer: Trainer) -> None:
    trainer.early_exit.stop("told to")


class AtFirstBatch(Callback):
    def __init__(self, deed: Callable[[Trainer], None]) -> None:
        self.deed = deed

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if batch_idx == 0:
            self.deed(trainer)


@pytest.mark.parametrize(
    ("deed", "steps", "reason"),
    [
        (lambda trainer: None, 4, ""),
        (_at_a_step, 2, "a registered condition holds"),
        (_by_file, 1, "stop file"),
        (_by_hand, 1, "told to"),
    ],
)
def test_at_37_ways_to_end_early(trainer_of, deed, steps, reason) -> None:
    trainer = trainer_of(AtFirstBatch(deed), max_steps=4, checkpoint=Checkpoint(steps=100))
    trainer.fit(tiny_batches(9))
    assert trainer.global_step == steps
    assert trainer.early_exit.reason == reason
    assert (trainer.model_dir / f"checkpoint_{steps}").exists()


def names_in(folder: Any, start: str) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(start))


def test_at_38_several_checkpoint_writers_with_their_own_intervals(trainer_of) -> None:
    trainer = trainer_of(
        ExtraCheckpoint(steps=3, file_format="safetensors", folder="weights"),
        ExtraCheckpoint(steps=2, folder="models"),
        checkpoint=Checkpoint(steps=4),
        max_steps=6,
    )
    trainer.fit(tiny_batches(6))
    assert names_in(trainer.model_dir, "checkpoint_") == ["checkpoint_4", "checkpoint_6"]
    weights = names_in(trainer.model_dir / "weights", "extra_")
    assert weights == ["extra_3.safetensors", "extra_6.safetensors"]
    models = names_in(trainer.model_dir / "models", "extra_")
    assert models == ["extra_2", "extra_4", "extra_6"]
    again = trainer_of(model_dir=trainer.model_dir, max_steps=6)
    again.fit(tiny_batches(6))  # goes on from the one that the run itself wrote
    assert again.checkpoint.is_own
    assert again.global_step == 6


def test_at_39_a_checkpoint_holds_as_many_updates_as_its_name_says(trainer_of) -> None:
    trainer = trainer_of(
        model=Scale(),
        num_epochs=2,
        grad_accum_steps=2,
        checkpoint=Checkpoint(steps=2, epochs=1),
    )
    trainer.fit(constant_batches(*[1] * 6))
    names = names_in(trainer.model_dir, "checkpoint_")
    assert names == ["checkpoint_2", "checkpoint_3", "checkpoint_4", "checkpoint_6"]
    for name in names:
        other = trainer_of(model=Scale(), model_dir=trainer.model_dir / f"of_{name}")
        other.load_checkpoint(trainer.model_dir / name)
        updates = int(name.rpartition("_")[2])
        assert other.model.weight.item() == pytest.approx(1 - 0.1 * updates)


def test_at_40_a_resumed_run_equals_the_unbroken_one(trainer_of, tmp_path) -> None:
    def run(folder: str, *callbacks: Any) -> tuple[Trainer, History]:
        history = History()
        trainer = trainer_of(
            ("post-loss", lambda self, loss: loss * 2),
            *callbacks,
            model=lambda: TinyModel(dropout=0.5),
            optimizer=lambda model: torch.optim.Adam(model.parameters()),
            loggers=history,
            max_steps=20,
            checkpoint=Checkpoint(steps=10),
            model_dir=tmp_path / folder,
        )
        return trainer, history

    batches = tiny_batches(7)
    whole, unbroken = run("whole")
    whole.fit(batches)
    first, before = run("parts", Crash(10))
    with pytest.raises(Interrupted):
        first.fit(batches)
    first.close()
    second, after = run("parts")
    second.fit(batches)
    assert before.of("loss") + after.of("loss") == unbroken.of("loss")
    assert differing(weights_of(whole), weights_of(second)) == []


def test_at_41_a_metric_is_recorded_once_a_batch(trainer_of) -> None:
    trainer = trainer_of(
        ("post-step", lambda self, outputs: (self.log_metrics(twice=1), outputs)[1]),
        ("post-step", lambda self, outputs: (self.log_metrics(twice=2), outputs)[1]),
    )
    with pytest.raises(ValueError, match="'twice' was logged twice"):
        trainer.fit(tiny_batches(1))


def test_at_42_validation_inside_training(trainer_of) -> None:
    modes: list[tuple[str, bool]] = []
    trainer = trainer_of(
        ("pre-loss", lambda self: modes.append(("loss", self.model.training))),
        ("post-validate", lambda self: modes.append(("validated", self.model.training))),
        num_steps=4,
        eval_frequency=2,
    )
    trainer.fit(tiny_batches(4), tiny_batches(1))
    stage = [("loss", True), ("loss", True), ("loss", False), ("validated", True)]
    assert modes == stage * 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("trainer:\n  init: {modeel: null}\n", "no such key"),
        ("trainer:\n  init: {seed: 1, seed: 2}\n", "seed"),
        ("trainer:\n  init: {seed: 1K}\n", "seed"),
    ],
)
def test_at_43_configurations_are_strict(text, said) -> None:
    from modelzoo_trainer.config.build import check_config
    from modelzoo_trainer.config.shipped import shipped_names

    with pytest.raises(ConfigError, match=said):
        check_config(read_text(text, "f.yaml"), shipped_names(), None)


@pytest.fixture
def own_package(tmp_path, monkeypatch) -> str:
    """Return a module of the user's whose class needs a sibling."""
    package = tmp_path / "at_own_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text("BASE = 3\n")
    (package / "blocks.py").write_text(
        "from .parts import BASE\nclass Mine:\n    base = BASE\nclass Known: ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "at_own_package.blocks"


class Known: ...


def found(name: str, module: str) -> tuple[Any, list[str]]:
    table = NameTable(
        kind="callback",
        names=("Known",),
        load={"Known": Known}.__getitem__,
        modules=(import_module(module),),
    )
    problems = Problems()
    return table.find(name, Place.root(read_text("x", "f.yaml")), problems), problems.lines()


def test_at_45_a_class_is_available_by_name_once_it_is_defined(own_package) -> None:
    assert found("Mine", own_package)[0].__name__ == "Mine"
    assert "in modelzoo_trainer and in at_own_package" in found("Known", own_package)[1][0]
    assert "Known: Known, Mine" in found("Nosuch", own_package)[1][0]
    assert "Did you mean 'Mine'? Known: Known, Mine" in found("Mien", own_package)[1][0]


def test_at_46_modules_of_the_user_import_their_siblings(own_package) -> None:
    assert found(f"{own_package}.Mine", own_package)[0].base == 3


def test_at_47_tokens_are_made_without_training(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be " * 50)
    TextFileProcessor(
        data_dir=str(tmp_path / "a.txt"),
        max_sequence_length=4,
        batch_size=1,
        cache_dir=str(tmp_path / "cache"),
    )
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".npy"]


def test_at_48_training_on_one_batch(trainer_of) -> None:
    seen: list[Any] = []
    trainer = trainer_of(
        ("pre-step", lambda self, batch: (seen.append(batch), batch)[1]), max_steps=5
    )
    first, *_ = tiny_batches(3)
    trainer.fit([first])
    assert len(seen) == 5
    assert all(torch.equal(batch[0], first[0]) for batch in seen)


def test_at_49_data_are_repeated_until_the_steps_are_done(trainer_of) -> None:
    trainer = trainer_of(max_steps=8)
    trainer.fit(tiny_batches(3))
    assert trainer.global_step == 8


def test_at_51_a_length_that_is_left_out_is_the_model_s(trainer_of, tmp_path, caplog) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be " * 50)
    model = TinyModel()
    model.max_position_embeddings = 6
    shapes: list[Any] = []

    def data() -> Any:
        kept = {"data_dir": str(tmp_path / "a.txt"), "cache_dir": str(tmp_path / "cache")}
        return TextFileProcessor(batch_size=2, **kept).create_dataloader()

    def step(self: Any, batch: Any) -> Any:
        shapes.append(batch["input_ids"].shape)
        return tiny_batches(1)[0]

    trainer = trainer_of(("pre-step", step), model=model, max_steps=1)
    with caplog.at_level(logging.INFO, "modelzoo_trainer.data"):
        trainer.fit(data)
    assert shapes == [(2, 6)]
    assert "max_sequence_length is 6, max_position_embeddings of the model" in caplog.text


@pytest.mark.parametrize("alias", ["bf16", "BFLOAT16", "torch.bfloat16", torch.bfloat16])
def test_at_52_aliases_of_a_data_type_are_equal(alias) -> None:
    assert MixedPrecision(fp16_type=alias).fp16_type == MixedPrecision().fp16_type


def test_the_block_of_the_page_works() -> None:
    page = Path(__file__).parents[2] / "docs" / "from_arctic_training.md"
    [code] = [
        part.partition("```")[0]
        for part in page.read_text(encoding="ascii").split("```python")
        if "class Filter" in part
    ]
    scope: dict[str, Any] = {}
    exec(code, scope)
    names = [f"{number:02d}" for number in range(30, 0, -1)]
    assert scope["chosen"].choose(names) == sorted(names[:20])
    assert scope["Filter"]().choose(names) == names[:10]
