"""Metrics that a model returns in a validation: a hint if nothing logs them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from torch import Tensor

from modelzoo_trainer import Callback, ConfigError
from modelzoo_trainer.callbacks import EarlyStopping, ModelEvalMetrics, SaveBest
from modelzoo_trainer.core.parts.summaries import summarize_scalar
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
        return [text for text in caplog.messages if text.startswith("Not logged, because")]

    return fit


@pytest.mark.parametrize(
    "callback",
    [None, ModelEvalMetrics, partial(EarlyStopping, "validate_0/accuracy"), NotLogged],
    ids=["none", "averaged", "expected", "refused"],
)
def test_a_metric_with_dimensions_is_named_once_with_its_shape(shapes_of, callback) -> None:
    size = len(constant_batches(1)[0])
    [hint] = shapes_of(*([] if callback is None else [callback()]))
    assert f"accuracy (shape ({size}, {size}))" in hint
    assert "f1 (shape (1,))" in hint
    assert not any(name in hint for name in ("loss", "logits", "feature_maps"))


@pytest.mark.parametrize(("callbacks", "model"), [([Reads], Misshapen), ([], Scored)])
def test_no_word_of_shapes_where_nothing_is_lost(shapes_of, callbacks, model) -> None:
    assert shapes_of(*(kind() for kind in callbacks), model=model) == []


class Numbers(Scale):
    """Returns a metric and others as Python numbers."""

    def forward(self, batch: Tensor) -> dict[str, Any]:
        return {
            "loss": super().forward(batch),
            "accuracy": batch.mean().item(),
            "spread": 0.5,
            "top_1": 3,
            "num_items": 2,
            "num_tokens": 7,
            "is_full": True,
        }


@pytest.mark.parametrize("callbacks", [[], [ModelEvalMetrics]], ids=["none", "averaged"])
def test_a_metric_that_is_a_python_number_is_named_once(shapes_of, callbacks) -> None:
    [hint] = shapes_of(*(kind() for kind in callbacks), model=Numbers)
    assert all(fact in hint for fact in ("accuracy (float)", "top_1 (int)"))
    assert "spread" not in hint  # a number that is not named like a metric may be a setting
    assert ".item()" in hint
    assert "mean()" not in hint
    assert not any(name in hint for name in ("num_items", "num_tokens", "is_full"))


# ---- callbacks that watch such a metric


@pytest.mark.parametrize(
    ("model", "metric", "facts"),
    [
        (Numbers, "accuracy", ["float", ".item()"]),
        (Misshapen, "f1", ["shape (1,)", "mean()"]),
        (Scored, "score", ["ModelEvalMetrics()"]),
    ],
)
@pytest.mark.parametrize("watching", [EarlyStopping, SaveBest])
def test_a_callback_that_watches_it_says_why_it_gets_none(
    trainer_of, caplog, model, metric, facts, watching
) -> None:
    caplog.set_level(logging.INFO)
    name = f"validate_0/{metric}"
    trainer = trainer_of(watching(name, "max"), model=model, max_steps=2, eval_frequency=1)
    trainer.fit(constant_batches(1, 2), constant_batches(1))
    texts = [text for text in caplog.messages if repr(name) in text]
    first = next(idx for idx, text in enumerate(caplog.messages) if text.startswith("Not logged"))
    assert caplog.messages.index(texts[0]) > first
    for text in texts:
        assert all(fact in text for fact in facts)
        assert "Did you mean" not in text


def test_the_error_without_best_weights_says_why_too(trainer_of) -> None:
    best = SaveBest("validate_0/accuracy", load_best=True)
    trainer = trainer_of(best, model=Numbers, max_steps=1)
    with pytest.raises(ConfigError, match=r"never logged.*float.*\.item\(\)"):
        trainer.fit(constant_batches(1), constant_batches(1))


def test_predictions_may_have_any_shape(trainer_of, caplog) -> None:
    trainer_of(model=Misshapen).predict(constant_batches(1))
    assert not any("scalar tensor" in text for text in caplog.messages)
