"""Whether a smaller or a larger value of a metric is better, where nothing is set."""

import logging

import pytest

from modelzoo_trainer import Callback
from modelzoo_trainer.base.metric_direction import direction_of, is_better
from modelzoo_trainer.callbacks import EarlyStopping, SaveBest


class Score(Callback):
    """Log a metric whose direction its name does not tell."""

    def on_train_step_end(self, trainer, model, outputs, batch):
        trainer.log_metrics(score=1.0)


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("validate_0/loss", "min"),
        ("validate_0/Perplexity", "min"),
        ("validate_0/word_error", "min"),
        ("train_loss_epoch", "min"),
        ("mse", "min"),
        ("validate_0/accuracy", "max"),
        ("val_acc", "max"),
        ("top5", "max"),
        ("eval/f1", "max"),
        ("validate_0/macro_f1_score", "max"),
        ("validate_0/rougeL", "max"),
        ("validate_0/bitmap", None),
        ("validate_0/score", None),
        ("lr/0", None),
        ("avg_samples_per_sec", None),
    ],
)
def test_the_direction_of_a_metric_is_known_or_not(name, better):
    assert direction_of(name) == better


@pytest.mark.parametrize("kind", [EarlyStopping, SaveBest])
@pytest.mark.parametrize(
    ("name", "settings", "mode"),
    [
        ("validate_0/accuracy", {}, "max"),
        ("validate_0/accuracy", {"mode": "min"}, "min"),
        ("validate_0/loss", {}, "min"),
        ("validate_0/loss", {"mode": "max"}, "max"),
        ("validate_0/score", {}, "min"),
    ],
)
def test_the_default_direction_is_that_of_the_name(kind, name, settings, mode):
    assert kind(name, **settings).mode == mode


@pytest.mark.parametrize("kind", [EarlyStopping, SaveBest])
@pytest.mark.parametrize(
    ("name", "settings", "is_said"),
    [
        ("score", {}, True),
        ("score", {"mode": "min"}, False),
        ("loss", {}, False),
    ],
)
def test_a_guessed_direction_is_logged_once(make, batches, caplog, kind, name, settings, is_said):
    caplog.set_level(logging.INFO, "modelzoo_trainer.metrics")
    make(kind(name, **settings), Score()).fit(batches)
    said = [text for text in caplog.messages if "mode='max'" in text]
    assert len(said) == is_said
    assert all(kind.__name__ in text and name in text for text in said)


@pytest.mark.parametrize(
    ("value", "best", "mode", "min_delta", "is_one"),
    [
        (0.9166666682561239, 0.9166666650772095, "max", 0.0, False),  # 275 of 300, both
        (276 / 300, 275 / 300, "max", 0.0, True),
        (0.3332999, 0.3333, "min", 0.0, False),
        (0.33329, 0.3333, "min", 0.0, True),
        (0.5, 1.0, "max", 0.0, False),
        (0.5, 1.0, "min", 0.4, True),
        (0.6, 1.0, "min", 0.4, False),
        (-1.0, 0.0, "min", 0.0, True),
        (0.0, 0.0, "min", 0.0, False),
    ],
)
def test_a_value_is_better_unless_it_differs_by_rounding(value, best, mode, min_delta, is_one):
    assert is_better(value, best, mode, min_delta) == is_one


def test_an_average_that_is_rounded_differently_is_no_improvement(make, batches):
    values = iter([275 / 300, 0.9166666682561239, 0.9166666650772095, 1.0])

    class Accuracy(Callback):
        def on_train_step_end(self, trainer, model, outputs, batch):
            self.value = next(values)
            trainer.log_metrics(accuracy=self.value)

        def on_step_boundary(self, trainer):
            trainer.log_metrics(test_accuracy=self.value)

    stop, best = EarlyStopping("accuracy", patience=2), SaveBest("test_accuracy")
    trainer = make(Accuracy(), stop, best)
    result = trainer.fit(batches)
    assert (trainer.global_step, stop.best_step, result.best["accuracy"].step) == (3, 1, 1)
    assert [entry["step"] for entry in best.best] == [1]


def test_the_last_part_of_a_name_suffices_for_a_suggestion(make, batches, caplog):
    make(EarlyStopping("loss_of_val/loss")).fit(batches)
    assert "Did you mean 'loss'?" in caplog.text
