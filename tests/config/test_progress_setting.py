"""`init.progress`, `--progress`, and a file that removes the `ProgressLogger`."""

from __future__ import annotations

import pytest

from modelzoo_trainer import ConfigError
from modelzoo_trainer.config.build import load_plans
from modelzoo_trainer.config.shipped import shipped_names

DATA = "{data_processor: SyntheticProcessor, num_features: 3, batch_size: 4}"
FILE = """\
trainer:
  init:
    model: {{name: fc_mnist, hidden_sizes: [4], input_size: 3}}
    optimizer: {{SGD: {{lr: 0.1}}}}
    loop: {{max_steps: 2}}
    model_dir: {folder}
    callbacks: [{callbacks}]
    loggers: [{loggers}]
    {more}
  fit:
    train_dataloader: {data}
"""


@pytest.fixture
def trainer(tmp_path):
    """A function that builds the trainer of a file; closed after the test."""
    made = []

    def make(loggers="", callbacks="", more="", option=None):
        path = tmp_path / "params.yaml"
        path.write_text(
            FILE.format(
                folder=tmp_path / "run", callbacks=callbacks, loggers=loggers, more=more, data=DATA
            )
        )
        [plan] = load_plans(path, shipped_names, options={"progress": option})
        made.append(plan.build())
        return made[-1]

    yield make
    for one in made:
        one.close()


def consoles(trainer) -> list[str]:
    return [one.name for one in trainer.loggers if one.name == "ProgressLogger"]


@pytest.mark.parametrize(
    ("loggers", "callbacks", "more", "option", "setting", "num"),
    [
        ("", "", "", None, None, 1),
        ("", "", "progress: lines", None, "lines", 1),
        ("", "", "progress: lines", "bar", "bar", 1),
        ("", "", "", "none", "none", 0),
        ("ProgressLogger: {interval_s: 1}", "", "", None, None, 1),
        ("ProgressLogger: null", "", "", None, "none", 0),
        ("ProgressLogger: null", "", "progress: bar", None, "bar", 1),  # the setting wins
        ("", "ProgressBar: {}", "", None, None, 0),
        ("", "PrintProgress: {}", "", None, None, 0),
        ("ProgressLogger: {}", "ProgressBar: {}", "", None, None, 1),
    ],
)
def test_one_at_most_and_none_if_something_else_draws(
    trainer, loggers, callbacks, more, option, setting, num
):
    made = trainer(loggers, callbacks, more, option)
    assert made.progress == setting
    assert len(consoles(made)) == num


def test_another_kind_is_refused(trainer):
    with pytest.raises(ConfigError, match=r"init\.progress.*'bar', 'lines'.*'bars'"):
        trainer(more="progress: bars")


def test_a_logger_that_comes_later_takes_the_place_of_the_default(trainer):
    from modelzoo_trainer.loggers import ProgressLogger

    made = trainer()
    own = ProgressLogger()
    handle = made.add_callback(own)
    assert [one for one in made.loggers if isinstance(one, ProgressLogger)] == [own]
    handle.remove()
    assert len(consoles(made)) == 1


def test_the_ends_of_schedules_are_told_as_by_check(trainer, caplog):
    caplog.set_level("INFO", "modelzoo_trainer")
    schedule = "schedulers: [CosineDecayLR: {initial_learning_rate: 1.0, "
    schedule += "end_learning_rate: 0.1, total_iters: 9}]"
    made = trainer(more=schedule)
    path = made.model_dir.parent / "params.yaml"
    [plan] = load_plans(path, shipped_names)
    plan.run(made)
    start = next(text for text in caplog.messages if text.startswith("Training"))
    assert "CosineDecayLR" in start
    assert "step 9" in start
