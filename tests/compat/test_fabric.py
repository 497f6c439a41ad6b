"""What Lightning Fabric's callbacks do, in our spelling: FB-01 to FB-24."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback, HookError, Hooks
from modelzoo_trainer.hooks import plugins
from tests.doubles import Scale, TinyModel, constant_batches, sgd, tiny_batches


class Seen:
    """Notes what its one method gets; no base class."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def on_it(self, *args: Any, **kwargs: Any) -> None:
        self.got.append((args, kwargs))


class Ordered:
    def __init__(self, order: list[Any]) -> None:
        self.order = order

    def on_it(self) -> None:
        self.order.append(self)


@pytest.fixture(params=["own loop", "trainer"])
def calling(request, trainer_of) -> Any:
    """A function that gives callbacks to a loop of one's own, or to a trainer: its `call`."""
    if request.param == "own loop":
        return lambda *callbacks: Hooks(callbacks).call
    return lambda *callbacks: trainer_of(*callbacks).call


def test_fb_01_single_or_list() -> None:
    seen = Seen()
    assert list(Hooks(seen)) == list(Hooks([seen])) == [seen]
    assert list(Hooks(None)) == list(Hooks([])) == []


def test_fb_02_call_order(calling) -> None:
    order: list[Any] = []
    members = [Ordered(order) for _ in range(3)]
    calling(*members)("on_it")
    assert order == members


def test_fb_03_args_and_kwargs_forwarded(calling) -> None:
    seen = Seen()
    calling(seen)("on_it", 1, 2, three=3)
    assert seen.got == [((1, 2), {"three": 3})]


def test_fb_04_missing_hook(calling) -> None:
    class Without:
        def on_other(self) -> None: ...

    seen = Seen()
    calling(Without(), seen)("on_it")
    assert len(seen.got) == 1


def test_fb_05_non_callable(calling) -> None:
    class Number:
        on_it = 1

    seen = Seen()
    call = calling(Number(), seen)
    with pytest.warns(UserWarning, match=r"^Number\.on_it is 1, which is not a method"):
        call("on_it")
    assert len(seen.got) == 1


def test_fb_06_none_attribute(calling) -> None:
    class Nothing:
        on_it = None

    seen = Seen()
    calling(Nothing(), seen)("on_it")
    assert len(seen.got) == 1


def test_fb_07_kwargs_filtering(calling) -> None:
    class One:
        def on_it(self, loss):
            self.got = loss

    class Bare:
        def on_it(self):
            self.got = "called"

    one, bare, seen = One(), Bare(), Seen()
    calling(one, bare, seen)("on_it", loss=1, batch=2)
    assert (one.got, bare.got) == (1, "called")
    assert seen.got == [((), {"loss": 1, "batch": 2})]


def test_fb_08_uninspectable_signature(calling, monkeypatch) -> None:
    def refuse(*args: Any) -> None:
        raise ValueError("no signature found")

    seen = Seen()
    call = calling(seen)
    monkeypatch.setattr(inspect, "signature", refuse)
    call("on_it", 0, loss=1, batch=2)
    assert seen.got == [((0,), {"loss": 1, "batch": 2})]


def test_fb_09_positional_surplus(calling) -> None:
    class One:
        def on_it(self, loss): ...

    call = calling(One())
    with pytest.raises(TypeError, match=r"^One\.on_it takes \(loss\), but the call passes 2 "):
        call("on_it", 1, 2)
    with pytest.raises(HookError, match=r"^One\.on_it gets 'loss' twice: as argument 1 of the cal"):
        call("on_it", 1, loss=2)


def test_fb_10_missing_required(calling) -> None:
    class Placed:
        def on_it(self, loss, /, batch): ...

    call = calling(Placed())
    with pytest.raises(
        TypeError, match=r"^Placed\.on_it requires 'batch', but the call passes \(l"
    ):
        call("on_it", 1)
    with pytest.raises(
        TypeError, match=r"^Placed\.on_it requires 'loss', but the call passes \(lo"
    ):
        call("on_it", loss=1, batch=2)


def test_fb_11_exception(calling) -> None:
    class Fails:
        def on_it(self) -> None:
            raise LookupError("lost")

    seen = Seen()
    with pytest.raises(LookupError, match="lost"):
        calling(Fails(), seen)("on_it")
    assert seen.got == []


def test_fb_12_return(calling) -> None:
    class Returns:
        def on_it(self) -> str:
            return "something"

    assert calling(Returns())("on_it") is None


def test_fb_13_duck_typing(calling) -> None:
    class Plain:
        on_it = staticmethod(lambda x: got.append(x))

        @classmethod
        def on_whatever_i_like(cls, y):
            got.append((cls.__name__, y))

    got: list[Any] = []
    call = calling(Plain())
    call("on_it", x=1)
    call("on_whatever_i_like", y=2)
    assert got == [1, ("Plain", 2)]


def test_fb_14_tuple() -> None:
    order: list[Any] = []
    first, second = Ordered(order), Ordered(order)
    Hooks((first, second)).call("on_it")
    assert order == [first, second]


def test_fb_15_same_instance_twice(trainer_of) -> None:
    seen = Seen()
    Hooks([seen, seen]).call("on_it")
    with pytest.warns(UserWarning, match="the same Seen object was given twice; it runs once"):
        trainer = trainer_of(seen, seen)
    trainer.call("on_it")
    assert len(seen.got) == 2


def test_fb_16_users_list() -> None:
    seen = Seen()
    given = [seen]
    hooks = Hooks(given)
    hooks.add_model(nn.Linear(1, 1))
    hooks.add_callback(Seen())
    assert given == [seen]
    given.append(Seen())
    assert len(hooks.callbacks) == 2


@pytest.mark.parametrize("made", [0, 1, [1], 2], ids=["none", "one", "list of one", "many"])
def test_fb_17_entry_points(made, monkeypatch) -> None:
    class Entry:
        name, value, dist = "mine", "module:factory", None

        def load(self):
            number = made if isinstance(made, int) else 1
            callbacks = [Ordered(order) for _ in range(number)]
            if isinstance(made, list) or number > 1:
                return lambda: callbacks
            return lambda: callbacks[0] if callbacks else None

    order: list[Any] = []
    monkeypatch.setattr(plugins, "_installed", lambda path: [Entry()])
    mine = Ordered(order)
    Hooks(mine).call("on_it")
    assert order[0] is mine
    assert len(order) - 1 == (made if isinstance(made, int) else 1)


class Told(TinyModel):
    """A model that listens."""

    def __init__(self, order: list[Any]) -> None:
        super().__init__()
        self.order = order

    def on_it(self, value):
        self.order.append(value)


def test_fb_18_module_hooks() -> None:
    order: list[Any] = []
    model = Told(order)
    hooks = Hooks(Ordered(order))
    hooks.add_model(nn.DataParallel(model))
    hooks.add_model(model)
    hooks.call("on_it", value="model")
    assert order == [*hooks.callbacks, "model"]


def test_fb_19_plain_module(trainer_of) -> None:
    order: list[Any] = []
    trainer_of(model=lambda: Told(order)).call("on_it", value="plain nn.Module")
    assert order == ["plain nn.Module"]


def test_fb_20_on_after_setup(trainer_of) -> None:
    class After(Callback):
        def post_setup(self, trainer):
            seen.append((type(trainer.model).__name__, type(trainer.optimizer).__name__))

    seen: list[Any] = []
    trainer = trainer_of(After())
    trainer.fit(tiny_batches())
    assert seen == [("TinyModel", "SGD")]


def test_fb_21_on_after_optimizer_step(trainer_of) -> None:
    class Model(TinyModel):
        num = 0

        def on_after_optimizer_step(self, trainer, model, optimizer):
            assert model is self
            assert optimizer is trainer.optimizer
            self.num += 1

    trainer = trainer_of(model=Model, grad_accum_steps=2)
    trainer.fit(tiny_batches(6))
    assert (trainer.model.num, trainer.global_step) == (3, 3)


def test_fb_13_a_trainer_takes_an_object_with_an_event_of_its_own_alone(trainer_of) -> None:
    class Verify:
        def verify_train_batch(self, batch):
            got.append(batch)

    class Forgotten:
        def train_batch_end(self, trainer, model, outputs, batch, batch_idx): ...

    got: list[Any] = []
    trainer_of(Verify()).call("verify_train_batch", batch=3, batch_idx=0)
    assert got == [3]
    with pytest.raises(HookError, match=r"Forgotten\.train_batch_end.*'on_train_batch_end'"):
        trainer_of(Forgotten())
    with pytest.raises(HookError, match="which has no hook"):
        trainer_of(torch.optim.SGD(Scale().parameters(), lr=0.1))


@pytest.mark.parametrize("has_steps", [True, False])
def test_fb_18_the_steps_of_a_lightning_module_are_not_called_and_that_is_said(
    trainer_of, caplog, has_steps
) -> None:
    class Lit(Scale):
        if has_steps:

            def training_step(self, batch, batch_idx):
                raise AssertionError("never called")

            def configure_optimizers(self):
                raise AssertionError("never called")

    trainer_of(model=Lit).fit(constant_batches(1))
    told = "Lit.training_step and configure_optimizers are not called"
    assert (told in caplog.text) == has_steps


def test_fb_22_spike_detection_is_refused_without_a_trainer() -> None:
    from modelzoo_trainer.callbacks.spike_detection import SpikeDetection

    with pytest.raises(HookError, match=r"SpikeDetection .*Trainer"):
        Hooks(SpikeDetection())


def test_fb_22_spike_detection(trainer_of, tmp_path) -> None:
    from modelzoo_trainer import TrainingSpike
    from modelzoo_trainer.callbacks.spike_detection import SpikeDetection

    path = tmp_path / "skip.json"
    trainer = trainer_of(
        SpikeDetection(window=3, warmup=1, rtol=2.0, exclude_batches_path=str(path)),
        model=Scale,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
    )
    with pytest.raises(TrainingSpike):
        trainer.fit(constant_batches(1, 1, 1, 9, 1))
    assert path.is_file()
    trainer_of(SpikeDetection(window=3), model=Scale, model_dir=tmp_path / "even").fit(
        constant_batches(1, 1, 1, 1)
    )


IN_A_BATCH = [
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_optimizer_zero_grad",
    "on_train_batch_end",
]
IN_A_VALIDATION = [
    "on_validate_start",
    "on_validate_batch_start",
    "on_validate_batch_end",
    "on_validate_end",
]


def test_fb_23_trainer_template_hooks(trainer_of) -> None:
    from tests.doubles import Recorder

    recorder = Recorder()
    trainer_of(recorder).fit(tiny_batches(2), tiny_batches(1))
    theirs = {*IN_A_BATCH, *IN_A_VALIDATION, "on_train_epoch_start", "on_train_epoch_end"}
    assert [name for name in recorder.names if name in theirs] == [
        "on_train_epoch_start",
        *IN_A_BATCH,
        *IN_A_BATCH,
        "on_train_epoch_end",
        *IN_A_VALIDATION,
    ]


@pytest.mark.parametrize(("num", "window"), [(5, 2), (6, 3), (4, 1), (7, 4)])
def test_fb_24_accumulation(trainer_of, num, window) -> None:
    trainer = trainer_of(grad_accum_steps=window, optimizer=sgd)
    trainer.fit(tiny_batches(num))
    assert trainer.global_step == math.ceil(num / window)


# ---- the examples of documentations


def test_the_example_of_the_page_runs(capsys) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "from_fabric.md"
    code = page.read_text(encoding="utf-8").partition("## Keep your own loop")[2]
    exec(code.split("```python\n")[1].split("```")[0], {})
    assert capsys.readouterr().out == "loss 4.00\nloss 0.64\n"


def test_the_documented_call_of_two_callbacks() -> None:
    class Losses:
        def on_train_batch_end(self, loss):
            said.append(f"Ended a batch with loss {loss}")

    class Batches:
        def on_train_epoch_start(self):
            said.append("An epoch starts")

        def on_train_batch_end(self, loss, batch_idx):
            said.append(f"Batch {batch_idx}")

    said: list[str] = []
    hooks = Hooks([Losses(), Batches()])
    hooks.call("on_train_epoch_start")
    for batch_idx, loss in enumerate([0.5, 0.25]):
        hooks.call("on_train_batch_end", loss=loss, batch_idx=batch_idx)
    assert said == [
        "An epoch starts",
        *("Ended a batch with loss 0.5", "Batch 0"),
        *("Ended a batch with loss 0.25", "Batch 1"),
    ]


def test_the_documented_event_that_verifies_batches(trainer_of) -> None:
    class Verifies(Callback):
        def verify_train_batch(self, trainer, inputs, targets):
            assert inputs.shape[0] == targets.shape[0]
            self.num = getattr(self, "num", 0) + 1

    class Fires(Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            trainer.call("verify_train_batch", inputs=batch[0], targets=batch[1])

    verifies = Verifies()
    trainer_of(verifies, Fires()).fit(tiny_batches(3))
    assert verifies.num == 3
    inputs, targets = tiny_batches(1)[0]
    with pytest.raises(AssertionError):
        trainer_of(verifies, Fires()).fit([(inputs, targets[1:])])
