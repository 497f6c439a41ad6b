"""The length that a report tells, against runs that are counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelzoo_trainer.config.build import check_config
from modelzoo_trainer.config.loader import read_text
from modelzoo_trainer.config.printout.length import EventSteps, RunLength, length_lines
from modelzoo_trainer.config.shipped import shipped_names
from tests.doubles import History, Recorder, tiny_batches

FILE = """\
trainer:
  init:
    model: {name: fc_mnist, hidden_sizes: [4]}
    optimizer: {SGD: {lr: 0.1}}
    loop: {LOOP}
    checkpoint: {CHECKPOINT}
    logging: {LOGGING}
    callbacks: [CALLBACKS]
  fit:
    train_dataloader: {data_processor: SyntheticProcessor, num_features: 3, batch_size: 4}
    val_dataloader: {data_processor: SyntheticProcessor, num_features: 3, batch_size: 4}
"""
DATA = "{data_processor: SyntheticProcessor, num_features: 3, batch_size: 4}"


@pytest.fixture(scope="module")
def names():
    return shipped_names()


@pytest.fixture
def plan(names):
    """Return a function from sections to a plan."""

    def make(
        loop="max_steps: 10",
        *,
        checkpoint="",
        logging="log_steps: 1",
        callbacks="",
        fit="",
        mode="train_and_eval",
        val=DATA,
    ):
        text = FILE.replace("LOOP", loop).replace("CHECKPOINT", checkpoint)
        text = text.replace("LOGGING", logging).replace("CALLBACKS", callbacks) + fit
        text = text.replace(f"val_dataloader: {DATA}", f"val_dataloader: {val}")
        return check_config(read_text(text, "params.yaml"), names, mode)[0]

    return make


@pytest.fixture
def told(plan):
    """Return a function from sections to the lines on the length."""

    def tell(*arguments, **sections):
        return [" ".join(line.split()) for line in length_lines(plan(*arguments, **sections))]

    return tell


def steps_of(positions, end):
    """Return all steps of positions, one after the other; none of None."""
    return [] if positions is None else [positions.at(i, end) for i in range(positions.count(end))]


LOOPS = [
    "max_steps: 7, eval_frequency: 2",
    "max_steps: 6, eval_frequency: 2",
    "max_steps: 6, eval_frequency: 1",
    "max_steps: 6, eval_frequency: 9",
    "max_steps: 7, eval_frequency: 0.3",
    "max_steps: 10, eval_frequency: 0.1",
    "max_steps: 3, eval_frequency: 0.001",
    "max_steps: 7, eval_frequency: 1.0",
    "max_steps: 7",
    "max_steps: 7, eval_frequency: null",
    "max_steps: 7, eval_frequency: 0",
    "num_steps: 5, max_steps: 90, eval_frequency: 0.5",
    "num_steps: 5, eval_frequency: 3, grad_accum_steps: 2",
    "max_steps: 5, steps_per_epoch: 2, eval_frequency: 4, grad_accum_steps: 3",
]
SECTIONS = [
    ("", "log_steps: 1"),
    ("steps: 3", "log_steps: 3"),
    ("steps: 2, save_initial_checkpoint: true", "log_steps: 0"),
    ("steps: 50, save_initial_checkpoint: true", "log_steps: 50"),
    ("steps: 0", "log_steps: 2"),
]


# CI: no checkpoints, and fewer than one, with two of the lengths.
@pytest.mark.soak_cases(
    "steps: 50*",
    "steps: 0*",
    "!*-max_steps: 7, eval_frequency: 2",
    "!*-max_steps: 5, steps_per_epoch*",
)
@pytest.mark.slow_cases(
    "steps: *",
    "!steps: [23]*-max_steps: 7, eval_frequency: *",
    "!steps: 3-*-max_steps: 5*",
    every=4,
)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("checkpoint", "logging"), SECTIONS)
def test_the_steps_that_are_told_are_those_of_a_run(plan, trainer_of, loop, checkpoint, logging):
    made = plan(loop, checkpoint=checkpoint, logging=logging)
    validated, saved, logger = [], [], History()

    def watch(name, passed):
        if name == "on_validate_start":
            validated.append(passed[0].global_step)
        if name == "on_after_save_checkpoint":
            saved.append(passed[0].global_step)

    sections = {key: made.init[key].make() for key in ("loop", "checkpoint", "logging")}
    trainer = trainer_of(Recorder(watch), loggers=logger, **sections)
    trainer.fit(tiny_batches(4), tiny_batches(1))

    length = RunLength.of(made)
    assert length.end == trainer.global_step
    assert steps_of(length.validations, length.end) == validated
    assert steps_of(length.checkpoints, length.end) == saved
    losses = [step for step, metrics in logger.lines if "loss" in metrics]
    assert steps_of(length.log_lines, length.end) == losses


@pytest.mark.parametrize(
    ("positions", "end", "text"),
    [
        (EventSteps(every=None), 9, "1, at step 9"),
        (EventSteps(every=3), 9, "3, at steps 3, 6, 9"),
        (EventSteps(every=3), 10, "4, at steps 3, 6, 9, 10"),
        (EventSteps(every=1), 5, "5, at steps 1, 2, 3, 4, 5"),
        (EventSteps(every=1), 6, "6, at steps 1, 2, 3, ..., 6"),
        (EventSteps(every=3, first=0), 15, "6, at steps 0, 3, 6, ..., 15"),
        (EventSteps(every=7), 10**15, "142857142857143, at steps 7, 14, 21, ..., 1000000000000000"),
        (EventSteps(every=3), None, "every 3 steps, and the end"),
        (EventSteps(every=1), None, "at every step, and the end"),
        (EventSteps(every=None), None, "at the end"),
        (EventSteps(every=3, first=0), None, "at step 0, every 3 steps, and the end"),
    ],
)
def test_positions_are_told_by_their_first_and_their_last(positions, end, text):
    assert positions.describe(end) == text


def test_a_run_of_a_number_of_steps_is_told_in_full(told):
    assert told("max_steps: 600, eval_frequency: 200, eval_steps: 1", checkpoint="steps: 300") == [
        "steps: 600; each with 1 batch of 4 samples",
        "validations: 3, at steps 200, 400, 600; 1 batch of one dataloader",
        "checkpoints: 2, at steps 300, 600",
        "log lines: 600, at steps 1, 2, 3, ..., 600",
    ]


@pytest.mark.parametrize(
    ("loop", "line"),
    [
        (
            "num_epochs: 3",
            "steps: 3 epochs; the number of steps depends on the data; each with 1 batch of "
            "4 samples",
        ),
        (
            "grad_accum_steps: 2",
            "steps: 1 epoch; the number of steps depends on the data; each with 2 batches "
            "of 4 samples: 8",
        ),
        (
            "num_epochs: 3, max_steps: 90",
            "steps: 3 epochs; the number of steps depends on the data, at most 90 in total; "
            "each with 1 batch of 4 samples",
        ),
        (
            "num_epochs: 3, steps_per_epoch: 9",
            "steps: 3 epochs; the number of steps depends on the data, at most 9 per epoch, "
            "at most 27 in total; each with 1 batch of 4 samples",
        ),
    ],
)
def test_the_number_of_steps_of_passes_depends_on_the_data(told, loop, line):
    text = " ".join(told(loop, checkpoint="steps: 20"))
    assert text.startswith(f"{line} validations: at the end; all batches of one dataloader")
    assert "checkpoints: every 20 steps, and the end" in text
    assert "log lines: at every step, and the end" in text


@pytest.mark.parametrize(
    ("loop", "text"),
    [
        ("eval_frequency: 0.25", "after each 25% of the steps, and at the end"),
        ("eval_frequency: 0.125", "after each 12.5% of the steps, and at the end"),
        ("eval_frequency: 50", "every 50 steps, and the end"),
        ("eval_frequency: epoch", "at the end of each epoch, and of the run"),
    ],
)
def test_validations_of_a_run_of_unknown_length_are_told_as_they_are_given(told, loop, text):
    [found] = [line for line in told(loop) if line.startswith("validations: ")]
    assert found == f"validations: {text}; all batches of one dataloader"


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"mode": "train"}, "none (mode train)"),
        ({"loop": "max_steps: 1, eval_frequency: null"}, "none (eval_frequency: null)"),
        ({"loop": "max_steps: 1, eval_frequency: 0"}, "none (eval_frequency: 0)"),
        ({"val": "null"}, "none (no val_dataloader)"),
        ({"val": f"[{DATA}]"}, "1, at step 10; all batches of one dataloader"),
        ({"val": f"[{DATA}, {DATA}]"}, "1, at step 10; all batches of 2 dataloaders each"),
    ],
)
def test_what_is_validated_is_told(told, sections, text):
    assert told(**sections)[1] == f"validations: {text}"


@pytest.mark.parametrize(
    ("checkpoint", "callbacks", "text"),
    [
        ("", "", "none"),
        ("save_initial_checkpoint: true", "", "only the initial one (checkpoint.steps is not set)"),
        ("save_final_checkpoint: true", "", "at the end"),
        ("steps: 0", "", "none"),
        ("steps: 5", "", "2, at steps 5, 10"),
        ("steps: 5", "KeepNCheckpoints: {n: 2}", "2, at steps 5, 10; keeps the newest 2"),
        ("steps: 5", "KeepNCheckpoints: {n: 1}", "2, at steps 5, 10; keeps only the newest"),
        ("steps: 5", "KeepNCheckpoints: {}", "2, at steps 5, 10"),
    ],
)
def test_the_checkpoints_that_stay_are_told(told, checkpoint, callbacks, text):
    assert told(checkpoint=checkpoint, callbacks=callbacks)[2] == f"checkpoints: {text}"


@pytest.mark.parametrize(
    ("loop", "callbacks", "lines"),
    [
        (
            "max_steps: 10, eval_frequency: 4",
            "",
            [
                "steps: 10, including those before the checkpoint; each with 1 batch of 4 samples",
                "validations: every 4 steps, and the end; all batches of one dataloader",
                "checkpoints: every 5 steps, and the end",
                "log lines: every 3 steps, and the end",
            ],
        ),
        (
            "num_steps: 10, eval_frequency: 0.5",
            "",
            [
                "steps: 10 more; each with 1 batch of 4 samples",
                "validations: after each 50% of the steps, and at the end; all batches of one "
                "dataloader",
                "checkpoints: every 5 steps, and the end",
                "log lines: every 3 steps, and the end",
            ],
        ),
        (
            "num_steps: 10",
            "LoadCheckpointStates: {load_checkpoint_states: model}",
            [
                "steps: 10; each with 1 batch of 4 samples",
                "validations: 1, at step 10; all batches of one dataloader",
                "checkpoints: 2, at steps 5, 10",
                "log lines: 4, at steps 3, 6, 9, 10",
            ],
        ),
        (
            "num_steps: 10",
            "LoadCheckpointStates: {load_checkpoint_states: 'model,global_step'}",
            [
                "steps: 10 more; each with 1 batch of 4 samples",
                "validations: at the end; all batches of one dataloader",
                "checkpoints: every 5 steps, and the end",
                "log lines: every 3 steps, and the end",
            ],
        ),
    ],
)
def test_a_run_from_a_checkpoint_has_its_steps_after_those_of_that(
    told, loop, callbacks, lines, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("runs/checkpoint_4").mkdir(parents=True)
    text = told(
        loop,
        checkpoint="steps: 5, save_initial_checkpoint: true",
        logging="log_steps: 3",
        callbacks=callbacks,
        fit="    ckpt_path: runs/checkpoint_4\n",
    )
    joined = " ".join(text)
    assert joined == " ".join(
        [
            *lines,
            "hint: checkpoint.save_initial_checkpoint: no effect, as the run starts from a "
            "checkpoint",
        ]
    )


SIZE = "csx.performance.micro_batch_size"


@pytest.mark.parametrize(
    ("callbacks", "lines"),
    [
        (
            f"ScopedTrainFlags: {{{SIZE}: 3}}",
            ["training: at most 3 samples each; 2 per batch of 4"],
        ),
        (
            f"ScopedValidateFlags: {{{SIZE}: 1}}",
            ["validation: at most 1 sample each; 4 per batch of 4"],
        ),
        (
            f"GlobalFlags: {{{SIZE}: 8}}",
            [
                "training: at most 8 samples each; 1 per batch of 4",
                "validation: at most 8 samples each; 1 per batch of 4",
            ],
        ),
        (f"GlobalFlags: {{{SIZE}: auto}}", []),
        (
            f"GlobalFlags: {{{SIZE}: 8}}, ScopedValidateFlags: {{{SIZE}: auto}}",
            ["training: at most 8 samples each; 1 per batch of 4"],
        ),
    ],
)
def test_micro_batches_are_told(told, callbacks, lines):
    found = [line for line in told(callbacks=callbacks) if line.startswith("micro-batches")]
    assert found == [f"micro-batches: {line}" for line in lines]


@pytest.mark.parametrize(
    ("loop", "checkpoint", "logging", "hints"),
    [
        (
            "max_steps: 10, eval_frequency: 11",
            "steps: 12",
            "log_steps: 13",
            [
                "loop.eval_frequency is 11, but the run has 10 steps, so it gives only one "
                "validation, at the end",
                "checkpoint.steps is 12, but the run has 10 steps, so it gives only one "
                "checkpoint, at the end",
                "logging.log_steps is 13, but the run has 10 steps, so it gives only one log line, "
                "at the end",
            ],
        ),
        (
            "num_epochs: 1, max_steps: 10, eval_frequency: 11",
            "steps: 10",
            "log_steps: 10",
            [
                "loop.eval_frequency is 11, but the run has at most 10 steps, so it gives only "
                "one validation, at the end"
            ],
        ),
        (
            "max_steps: 10, eval_frequency: 1",
            "",
            "log_steps: 0",
            ["loop.eval_frequency: 1 validates after every step, 1.0 once at the end"],
        ),
        ("max_steps: 1, eval_frequency: 1", "steps: 1", "log_steps: 1", []),
        ("max_steps: 10, eval_frequency: 10", "steps: 10", "log_steps: 10", []),
        ("num_epochs: 2, eval_frequency: 10000", "steps: 10000", "log_steps: 10000", []),
    ],
)
def test_what_never_happens_is_worth_a_hint(told, loop, checkpoint, logging, hints):
    lines = " ".join(told(loop, checkpoint=checkpoint, logging=logging))
    assert lines.split(" hint: ")[1:] == hints


@pytest.mark.parametrize(
    ("checkpoint", "line"),
    [
        ("minutes: 30", "checkpoints: at the end; every 30 minutes"),
        ("epochs: 1", "checkpoints: at the end; every epoch"),
        ("steps: 5, epochs: 2", "; every 2 epochs"),
        ("steps: 5, asynchronous: true", "; written in the background"),
    ],
)
def test_other_times_of_checkpoints_are_told(told, checkpoint, line):
    assert line in " ".join(" ".join(told("max_steps: 10", checkpoint=checkpoint)).split())


def test_a_time_limit_is_told(told):
    assert "at most '01:00:00' of wall-clock time" in " ".join(
        told('max_steps: 10, max_time: "01:00:00"')
    )


def test_callbacks_that_shorten_passes_or_validate_more_often_are_counted(told):
    limited = "LimitBatches: {num_batches: 5}"
    lines = told("num_epochs: 3, grad_accum_steps: 2, eval_frequency: 1.0", callbacks=limited)
    assert "at most 3 per epoch, at most 9 in total" in " ".join(lines)
    more = "StepBasedEvaluation: {every_n_steps: 3}"
    for frequency in ("null", "1.0", "6"):
        lines = told(f"max_steps: 9, eval_frequency: {frequency}", callbacks=more)
        assert "3, at steps 3, 6, 9" in " ".join(lines)


@pytest.mark.parametrize(
    ("loop", "sections", "facts"),
    [
        ("max_steps: 10", {}, ["only once", 'to "epoch"']),
        ("num_epochs: 1", {}, ["only once", "a smaller number of steps"]),
        ("max_steps: 10, eval_frequency: 10", {}, ["only once"]),
        ("max_steps: 10, eval_frequency: null", {}, ["no effect", 'to "epoch"']),
        ("max_steps: 10", {"val": "null"}, ["no effect", "Pass val_dataloader"]),
        ("max_steps: 10", {"mode": "train"}, None),
        ("num_epochs: 2, eval_frequency: epoch", {}, None),
        ("max_steps: 10, eval_frequency: 5", {}, None),
        ("max_steps: 10, eval_frequency: 0.5", {}, None),
    ],
)
def test_a_watched_metric_that_is_logged_once_or_never_is_worth_a_hint(told, loop, sections, facts):
    callbacks = "EarlyStopping: {metric: validate_0/loss}"
    lines = " ".join(told(loop, callbacks=callbacks, **sections))
    hints = [hint for hint in lines.split(" hint: ")[1:] if "EarlyStopping" in hint]
    assert len(hints) == (facts is not None)
    assert all(fact in hints[0] for fact in facts or ())


@pytest.mark.parametrize(
    "callbacks",
    [
        "EarlyStopping: {metric: validate_0/loss}, tests.doubles.Recorder: {}",
        "EarlyStopping: {metric: validate_0/loss, reset_on_fit: false}",
    ],
)
def test_no_hint_at_it_where_others_may_validate_or_several_fits_follow(told, callbacks):
    assert "EarlyStopping: validate_0" not in " ".join(told("max_steps: 9", callbacks=callbacks))


def test_no_hint_at_it_beside_step_based_evaluation(told):
    both = "EarlyStopping: {metric: validate_0/loss}, StepBasedEvaluation: {every_n_steps: 3}"
    assert "EarlyStopping: validate_0" not in " ".join(told("max_steps: 9", callbacks=both))
