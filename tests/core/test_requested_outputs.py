"""Outputs that a model computes only where something reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from modelzoo_trainer import Callback, ConfigError, Trainer
from modelzoo_trainer.core.loop import TrainingLoop

NAME = "logits"


class Model(nn.Module):
    """Returns logits on request, as the language models do."""

    optional_outputs = (NAME,)
    requested_outputs: tuple[str, ...] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch: Tensor) -> dict[str, Tensor]:
        logits = self.layer(batch)
        found = {"loss": logits.logsumexp(-1).mean()}
        requested = self.requested_outputs
        is_wanted = not self.training if requested is None else NAME in requested
        return found | ({NAME: logits} if is_wanted else {})


class Always(Model):
    """Has no outputs on request."""

    optional_outputs = ()

    def forward(self, batch: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layer(batch).square().mean(), "more": batch}


class Keys(Callback):
    """Keeps the names of the outputs of each batch."""

    def __init__(self) -> None:
        self.found: list[tuple[str, list[str]]] = []

    def on_train_batch_end(
        self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.found.append(("train", sorted(outputs)))

    def on_validate_batch_end(
        self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.found.append(("validate", sorted(outputs)))

    @property
    def has_logits(self) -> bool:
        assert len({tuple(keys) for _, keys in self.found}) == 1
        assert {kind for kind, _ in self.found} == {"train", "validate"}
        return NAME in self.found[0][1]


class Reader(Keys):
    reads_outputs = (NAME,)


class Thief(Callback):
    """Reads without a request."""

    def on_train_batch_end(
        self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        outputs[NAME].sum()


DATA = [torch.ones(2, 4)] * 3


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Any]:
    def run(callbacks: Any = (), kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
        model = options.pop("model", None) or Model()
        trainer = kind(
            model=model,
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            loop=TrainingLoop(num_steps=2),
            callbacks=callbacks,
            model_dir=tmp_path,
            device="cpu",
            progress="none",
            **options,
        )
        trainer.fit(DATA, DATA)
        return trainer

    return run


def test_without_a_reader_they_are_left_out(fit: Callable[..., Any]) -> None:
    keys = Keys()
    trainer = fit(keys)

    assert not keys.has_logits
    assert trainer.model.requested_outputs is None  # as before
    trainer.validate(DATA)
    assert keys.found[-1] == ("validate", ["loss"])
    assert list(trainer.predict(DATA)) == [NAME]
    trainer.model.eval()
    assert NAME in trainer.model(DATA[0])


@pytest.mark.parametrize("given", [(NAME,), [NAME], NAME])
def test_a_reader_gets_them(fit: Callable[..., Any], given: Any) -> None:
    reader = Reader()
    reader.reads_outputs = given

    fit(reader)

    assert reader.has_logits


def test_a_global_callback_and_an_added_one_get_them(fit: Callable[..., Any]) -> None:
    with Reader() as reader:
        fit()
    assert reader.has_logits
    late = Reader()

    class Adds(Callback):
        def on_train_batch_start(
            self, trainer: Any, model: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 1:
                trainer.add_callback(late)

    fit(Adds())
    assert late.has_logits


def test_what_the_user_has_requested_stays(fit: Callable[..., Any]) -> None:
    keys, model = Keys(), Model()
    model.requested_outputs = (NAME,)

    fit(keys, model=model)

    assert keys.has_logits
    assert model.requested_outputs == (NAME,)


class OwnLoss(Trainer):
    def compute_loss(self, outputs: Any, batch: Any) -> Tensor:
        return functional.relu(outputs[NAME]).mean()


class OwnStep(Trainer):
    reads_outputs = ()

    def compute_loss(self, outputs: Any, batch: Any) -> Tensor:
        return 2 * outputs["loss"]


def test_a_trainer_with_a_loss_of_its_own_gets_all_unless_it_says_what_it_reads(
    fit: Callable[..., Any],
) -> None:
    keys, others = Keys(), Keys()

    fit(keys, OwnLoss)
    fit(others, OwnStep)

    assert keys.has_logits
    assert not others.has_logits


def test_an_interceptor_gets_all(fit: Callable[..., Any]) -> None:
    seen = []

    def after(trainer: Any, outputs: Any) -> Any:
        seen.append(NAME in outputs)
        return outputs

    fit([("post-forward", after)])

    assert seen
    assert all(seen)


def test_reading_without_a_request_says_what_to_set(fit: Callable[..., Any]) -> None:
    with pytest.raises(KeyError) as caught:
        fit(Thief())

    [note] = [one for one in caught.value.__notes__ if "reads_outputs" in one]
    assert f"reads_outputs = ('{NAME}',)" in note
    assert "Model computes" in note


def test_in_a_model_around_it_the_inner_one_is_named(fit: Callable[..., Any]) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()

        def forward(self, batch: Tensor) -> Tensor:
            found: Tensor = self.inner(batch)[NAME].mean()
            return found

    with pytest.raises(KeyError) as caught:
        fit(model=Outer())
    assert any("trainer.model.inner.requested_outputs" in one for one in caught.value.__notes__)
    outer = Outer()
    outer.inner.requested_outputs = (NAME,)
    fit(model=outer)


def test_a_model_that_lacks_what_a_callback_reads_is_an_error_before_the_first_step(
    fit: Callable[..., Any], tmp_path: Path
) -> None:
    model = Always()
    before = model.layer.weight.clone()

    with pytest.raises(ConfigError) as caught:
        fit(Reader(), model=model)

    assert "Reader reads outputs['logits']" in str(caught.value)
    assert "Always returned loss, more" in str(caught.value)
    assert torch.equal(model.layer.weight, before)
    trainer = Trainer(model=Always(), device="cpu", callbacks=Reader(), model_dir=tmp_path / "2")
    with pytest.raises(ConfigError, match="Reader reads"):
        trainer.validate(DATA)
