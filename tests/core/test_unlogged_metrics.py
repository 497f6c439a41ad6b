"""Metrics that a model returns in a validation: a hint if nothing logs them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from modelzoo_trainer import Callback
from modelzoo_trainer.callbacks import EarlyStopping, ModelEvalMetrics
from modelzoo_trainer.summaries import summarize_scalar
from tests.doubles import Scale, constant_batches


class Scored(Scale):
    """Returns metrics, a tensor with dimensions, and a number of items."""

    def forward(self, batch: Tensor) -> dict[str, Any]:
        loss = super().forward(batch)
        score = batch.mean()
        return {"loss": loss, "score": score, "logits": batch, "num_items": score * 0 + 2}


class Summarized(Scored):
    """Logs its metric by itself."""

    def forward(self, batch: Tensor) -> dict[str, Any]:
        outputs = super().forward(batch)
        summarize_scalar("score", outputs["score"])
        return outputs


class Reads(Callback):
    """A user's callback that gets the output."""

    def on_validate_batch_end(self, trainer, model, outputs, batch, batch_idx):
        assert "loss" in outputs


@pytest.fixture
def hints_of(trainer_of, caplog) -> Callable[..., list[str]]:
    """Run a fit with three validations, and return the hints."""
    caplog.set_level(logging.INFO)

    def fit(*callbacks: Any, model: Any = Scored) -> list[str]:
        trainer = trainer_of(*callbacks, model=model, max_steps=3, eval_frequency=1)
        trainer.fit(constant_batches(1, 2, 3), constant_batches(1, 2))
        return [text for text in caplog.messages if "ModelEvalMetrics" in text]

    return fit


def test_a_run_says_once_which_metrics_of_the_model_are_not_logged(hints_of) -> None:
    [hint] = hints_of()
    assert "score" in hint
    assert "validate_0/score" in hint
    assert "\n" not in hint
    assert not any(name in hint for name in ("logits", "num_items", "loss"))


@pytest.mark.parametrize(
    ("callbacks", "model"),
    [([ModelEvalMetrics], Scored), ([Reads], Scored), ([], Summarized), ([], Scale)],
    ids=["averaged", "read", "summarized", "none"],
)
def test_no_hint_where_they_are_used(hints_of, callbacks, model) -> None:
    assert hints_of(*(kind() for kind in callbacks), model=model) == []


def test_the_hint_follows_a_validation_and_a_test_too(trainer_of, caplog) -> None:
    caplog.set_level(logging.INFO)
    trainer = trainer_of(model=Scored)
    trainer.test(constant_batches(1))
    trainer.validate(constant_batches(1))
    assert [text for text in caplog.messages if "test/score" in text] != []
    assert not any("validate_0/score" in text for text in caplog.messages)


# ---- metrics that are no scalars


class Misshapen(Scale):
    """Compares shapes that broadcast; its other outputs are not named like metrics."""

    def forward(self, batch: Tensor) -> dict[str, Any]:
        same = batch.unsqueeze(0) == batch.unsqueeze(1)
        return {
            "loss": super().forward(batch),
            "accuracy": same.float(),
            "f1": batch.mean().reshape(1),
            "feature_maps": batch,
            "logits": batch,
        }


class NotLogged(Callback):
    """Expects a metric, as EarlyStopping does."""

    def on_validate_end(self, trainer, model, loop):
        raise RuntimeError("no metric 'validate_0/accuracy'")


@pytest.fixture
def shapes_of(trainer_of, caplog) -> Callable[..., list[str]]:
    """Run a fit with three validations, and return what is said of shapes."""

    def fit(*callbacks: Any, model: Any = Misshapen) -> list[str]:
        trainer = trainer_of(*callbacks, model=model, max_steps=3, eval_frequency=1)
        with suppress(Exception):
            trainer.fit(constant_batches(1, 2, 3), constant_batches(1, 2))
        return [text for text in caplog.messages if "scalar tensor" in text]

    return fit


@pytest.mark.parametrize(
    "callback",
    [None, ModelEvalMetrics, partial(EarlyStopping, "validate_0/accuracy"), NotLogged],
    ids=["none", "averaged", "expected", "refused"],
)
def test_a_metric_with_dimensions_is_named_once_with_its_shape(shapes_of, callback) -> None:
    size = len(constant_batches(1)[0])
    [hint] = shapes_of(*([] if callback is None else [callback()]))
    assert f"accuracy ({size}, {size})" in hint
    assert "f1 (1,)" in hint
    assert not any(name in hint for name in ("loss", "logits", "feature_maps"))


@pytest.mark.parametrize(("callbacks", "model"), [([Reads], Misshapen), ([], Scored)])
def test_no_word_of_shapes_where_nothing_is_lost(shapes_of, callbacks, model) -> None:
    assert shapes_of(*(kind() for kind in callbacks), model=model) == []


def test_predictions_may_have_any_shape(trainer_of, caplog) -> None:
    trainer_of(model=Misshapen).predict(constant_batches(1))
    assert not any("scalar tensor" in text for text in caplog.messages)
