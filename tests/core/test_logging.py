"""Which steps are logged, and how metrics come to loggers and to on_metrics."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch

from modelzoo_trainer import Callback, ConfigError, Logging, StopTraining, TrainingLoop
from modelzoo_trainer.core.parts.run_log import RunLog
from tests.doubles import History, Scale, constant_batches, tiny_batches


class Metrics(Callback):
    """Writes down what `on_metrics` gets."""

    def __init__(self) -> None:
        self.lines = []

    def on_metrics(self, trainer, metrics, step):
        self.lines.append((step, dict(metrics)))


class Resting(Scale):
    """Like `Scale`, whose loss is the mean of the batch, whatever is trained."""

    def forward(self, batch):
        return super().forward(batch) / self.weight.detach()


@pytest.mark.parametrize(
    ("log_steps", "steps"),
    [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (100, [5]), (0, [5])],
)
def test_every_so_many_steps_are_logged_and_the_last(trainer_of, log_steps, steps) -> None:
    history = History()
    trainer_of(loggers=history, logging=Logging(log_steps=log_steps)).fit(tiny_batches(5))
    assert history.steps == steps


def test_the_last_step_of_a_run_of_unknown_length_is_logged(trainer_of) -> None:
    history = History()
    trainer_of(loggers=history, logging=Logging(log_steps=0)).fit(iter(tiny_batches(5)))
    assert history.steps == [5]


def test_metrics_reach_loggers_and_on_metrics_with_their_steps(trainer_of) -> None:
    history, metrics = History(), Metrics()
    trainer_of(metrics, loggers=history, model=Resting).fit(constant_batches(1, 2, 3))
    assert metrics.lines == [(1, {"loss": 1.0}), (2, {"loss": 2.0}), (3, {"loss": 3.0})]
    assert history.lines == metrics.lines


def test_the_metrics_of_a_step_arrive_as_one_mapping(trainer_of) -> None:
    class Logs(Callback):
        def on_before_forward(self, trainer, model, batch, args, kwargs):
            trainer.log_metrics(first=1)

        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            trainer.log_metrics(last=torch.tensor(3.0))

    history = History()
    trainer_of(Logs(), loggers=history, model=Resting).fit(constant_batches(2))
    assert history.lines == [(1, {"first": 1, "loss": 2.0, "last": 3.0})]


def test_the_loss_of_a_window_is_its_mean_by_samples(trainer_of) -> None:
    history = History()
    batches = [torch.tensor([1.0, 1.0, 1.0]), torch.tensor([5.0]), torch.tensor([7.0])]
    trainer_of(loggers=history, model=Resting, grad_accum_steps=2).fit(batches)
    assert history.lines == [(1, {"loss": 2.0}), (2, {"loss": 7.0})]


def test_metrics_of_a_window_are_logged_once_with_its_step(trainer_of) -> None:
    class Logs(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            trainer.log_metrics(batch_idx=batch_idx)

    history = History()
    trainer_of(Logs(), loggers=history, grad_accum_steps=2).fit(tiny_batches(5))
    assert history.of("batch_idx") == [(1, 1), (2, 3), (3, 4)]


def test_a_tensor_is_read_as_it_was_when_it_was_logged(trainer_of) -> None:
    class Logs(Callback):
        def on_train_step_end(self, trainer, model, outputs, batch):
            value = torch.tensor(trainer.data.num_batches)
            trainer.log_metrics(value=value.clone())

    history = History()
    trainer_of(Logs(), loggers=history).fit(tiny_batches(3))
    assert history.of("value") == [(1, 1), (2, 2), (3, 3)]


def test_name_scopes_are_put_before_names(trainer_of) -> None:
    class Logs(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            with trainer.name_scope("outer"), trainer.name_scope("inner"):
                trainer.log_metrics(value=batch_idx)
            trainer.log_metrics(value=-1)

    history = History()
    trainer_of(Logs(), loggers=history).fit(tiny_batches(1))
    assert history.of("outer/inner/value") == [(1, 0)]
    assert history.of("value") == [(1, -1)]


def test_a_name_scope_is_closed_by_an_exception(trainer_of) -> None:
    trainer = trainer_of()
    with pytest.raises(LookupError), trainer.name_scope("outer"):
        raise LookupError
    assert trainer.name_scope_path == ""


def test_what_is_given_off_log_steps_is_dropped_and_at_the_end_of_training_logged(
    trainer_of,
) -> None:
    class Steps(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            trainer.log_metrics(at=trainer.global_step)

        def on_train_epoch_end(self, trainer, epoch):
            trainer.log_metrics(epoch=epoch)

        def on_train_end(self, trainer, model, loop, loop_idx):
            trainer.log_metrics(stage=loop_idx)

        def on_fit_end(self, trainer, loop):
            trainer.log_metrics(fit=1)

    history = History()
    logging = Logging(log_steps=2)
    trainer = trainer_of(Steps(), loggers=history, logging=logging, num_epochs=2)
    trainer.fit(tiny_batches(3))
    assert [value for _, value in history.of("at")] == [2, 4, 6]
    assert history.of("epoch") == [(6, 1)]  # the first one ended with step 3
    assert history.of("stage") == [(6, 0)]
    assert history.of("fit") == [(6, 1)]


def test_metrics_outside_of_batches_are_always_logged(trainer_of) -> None:
    class Logs(Callback):
        def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
            trainer.log_metrics(start=loop_idx)

        def on_train_end(self, trainer, model, loop, loop_idx):
            trainer.log_metrics(end=loop_idx)

    history = History()
    trainer_of(Logs(), loggers=history, logging=Logging(log_steps=100), max_steps=2).fit(
        tiny_batches(5)
    )
    assert history.of("start") == [(0, 0)]
    assert history.of("end") == [(2, 0)]


def test_metrics_may_go_to_one_logger_alone(trainer_of) -> None:
    class Other(History):
        pass

    history, other, metrics = History(), Other(), Metrics()
    trainer = trainer_of(metrics, loggers=[history, other])
    trainer.log_metrics_dict({"value": 3}, step=7, dest="Other")
    trainer.drain()
    assert (history.lines, other.lines, metrics.lines) == ([], [(7, {"value": 3})], [])


def test_an_unknown_logger_is_refused(trainer_of) -> None:
    with pytest.raises(ValueError, match=r"^dest: there is no logger 'Histoy'\. Known: History"):
        trainer_of(loggers=History()).log_metrics_dict({"value": 3}, dest="Histoy")


def test_a_removed_destination_gets_what_is_meant_for_it_alone(trainer_of) -> None:
    history = History()
    trainer = trainer_of(loggers=history)
    trainer.remove_logger_destination("History")
    trainer.log_metrics(value=3)
    trainer.log_metrics_dict({"value": 4}, dest="History")
    trainer.drain()
    assert history.lines == [(0, {"value": 4})]


def test_metrics_that_were_cut_off_are_not_logged_later(trainer_of) -> None:
    class Raising(Callback):
        def on_train_step_end(self, trainer, model, outputs, batch):
            trainer.log_metrics(value=3)
            raise LookupError

    history = History()
    trainer = trainer_of(Raising(), loggers=history)
    with pytest.raises(LookupError):
        trainer.fit(tiny_batches(1))
    num_before = len(history.lines)
    trainer.remove_callback(trainer.get_callback(Raising))
    trainer.fit(tiny_batches(1))
    assert [list(metrics) for _, metrics in history.lines[num_before:]] == [["loss"]]


# ---- messages


def test_messages_of_a_run_are_in_its_folder(trainer_of) -> None:
    class Says(Callback):
        def on_fit_start(self, trainer, train_dataloader, val_dataloader, loop):
            trainer.logger.info("here we go")

    trainer = trainer_of(Says())
    trainer.fit(tiny_batches(1))
    assert "INFO: here we go" in (trainer.artifact_dir / "run.log").read_text()


def full_disk(path):
    path.symlink_to("/dev/full")


def pipe_without_reader(path):
    os.mkfifo(path)


def folder(path):
    path.mkdir()


def folder_that_is_a_file(path):
    path.parent.rmdir()
    path.parent.write_text("")


class Talks(Callback):
    def __init__(self, *, raises):
        self.raises = raises

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        trainer.logger.warning("words " * 1000)
        if self.raises and trainer.global_step == 2:
            raise LookupError("the cause")


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("fault", [full_disk, pipe_without_reader, folder, folder_that_is_a_file])
def test_a_log_that_cannot_be_written_ends_no_run(trainer_of, caplog, capfd, fault, raises) -> None:
    trainer = trainer_of(Talks(raises=raises))
    fault(trainer.artifact_dir / "run.log")
    if raises:
        with pytest.raises(LookupError, match="the cause"):
            trainer.fit(tiny_batches(3))
    else:
        trainer.fit(tiny_batches(3))
        assert trainer.global_step == 3
    assert caplog.text.count("run.log") == caplog.text.count("Training continues") == 1
    assert "Traceback" not in capfd.readouterr().err


def test_a_character_that_cannot_be_encoded_is_written_as_its_number(tmp_path, capfd) -> None:
    handler = RunLog(tmp_path / "run.log")
    record = logging.LogRecord(
        "name", logging.INFO, "", 0, "bytes of a path: %s", ("\udcff",), None
    )
    handler.handle(record)  # pytest's own handlers cannot send it to its main process
    handler.close()
    assert (tmp_path / "run.log").read_text() == "bytes of a path: \\udcff\n"
    assert not capfd.readouterr().err


def test_a_run_leaves_the_loggers_of_the_program_as_they_were(trainer_of) -> None:
    package = logging.getLogger("modelzoo_trainer")
    before = (package.level, list(package.handlers), list(logging.getLogger().handlers))
    trainer_of().fit(tiny_batches(1), tiny_batches(1))
    assert (package.level, list(package.handlers), list(logging.getLogger().handlers)) == before


@pytest.mark.parametrize(("level", "logged"), [("NOTSET", ["late"]), ("INFO", ["saved", "late"])])
def test_other_processes_log_no_information_to_handlers_of_the_program(
    trainer_of, monkeypatch, caplog, level, logged
) -> None:
    package = logging.getLogger("modelzoo_trainer")
    caplog.set_level(logging.INFO)
    caplog.set_level(level, logger=package.name)
    trainer = trainer_of()
    monkeypatch.setattr(type(trainer.backend.comm), "is_main", False)
    with ExitStack() as stack:
        trainer.logging.open_handlers(trainer, stack)
        package.getChild("checkpoint").info("saved")
        package.getChild("checkpoint").warning("late")
    assert caplog.messages == logged
    assert package.level == logging.getLevelName(level)


class Begins(Callback):
    """Notes the steps whose start it hears of: those that are logged."""

    log_step_hooks = frozenset({"on_train_batch_start", "on_train_batch_end"})

    def __init__(self) -> None:
        self.starts, self.ends = [], []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.starts.append(trainer.logging.step)

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        self.ends.append(trainer.logging.step)


def test_the_first_hook_of_a_log_step_is_one_of_its_hooks(trainer_of) -> None:
    begins = Begins()
    trainer_of(begins, logging=Logging(log_steps=2)).fit(tiny_batches(5))
    assert begins.starts == begins.ends == [2, 4, 5]


def test_of_accumulated_batches_the_last_one_of_a_log_step_is_logged(trainer_of) -> None:
    begins = Begins()
    loop = TrainingLoop(max_steps=4, grad_accum_steps=2)
    trainer_of(begins, loop=loop, logging=Logging(log_steps=2)).fit(tiny_batches(8))
    assert begins.starts == begins.ends == [2, 4]


def test_a_step_keeps_its_hook_table_and_log_steps_have_one(trainer_of) -> None:
    class Sees(Callback):
        def note(self, trainer):
            tables[trainer.logging.step].append(kind(trainer))

        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            tables[trainer.logging.step] = []
            self.note(trainer)

        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            self.note(trainer)

        def on_step_committed(self, trainer):
            self.note(trainer)

        def on_train_end(self, trainer, model, loop, loop_idx):
            tables["end"] = [kind(trainer)]

    def kind(trainer):
        names = ("log_hooks", "quiet_hooks")
        return next(name for name in names if trainer.hooks is getattr(trainer.callbacks, name))

    tables: dict[int | str, list[str]] = {}
    loop = TrainingLoop(max_steps=6, eval_frequency=3)
    trainer_of(Sees(), loop=loop, logging=Logging(log_steps=2)).fit(tiny_batches(6))
    log, quiet = ["log_hooks"], ["quiet_hooks"]
    assert tables == {
        **{step: (quiet, log)[step % 2 == 0] * 3 for step in range(1, 7)},
        "end": log,
    }


def test_a_callback_that_leaves_within_a_step_makes_it_no_log_step(trainer_of) -> None:
    class Leaves(Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            trainer.remove_callback(self)

    begins = Begins()
    trainer_of(Leaves(), begins, logging=Logging(log_steps=2)).fit(tiny_batches(3))
    assert begins.ends == [2, 3]


@pytest.mark.parametrize("others", [[], [Begins()]], ids=["alone", "with others"])
def test_a_logger_that_stops_the_run_between_steps_lets_the_next_one_end(
    trainer_of, others
) -> None:
    class Epochs(Callback):
        def on_train_epoch_end(self, trainer, epoch):
            trainer.log_metrics(epoch=epoch)

    class Stops(History):
        def log_metrics(self, metrics, step):
            if "epoch" in metrics:
                raise StopTraining("enough")

    loop = TrainingLoop(num_epochs=2)
    trainer = trainer_of(Epochs(), *others, loggers=Stops(), loop=loop)
    trainer.fit(tiny_batches(3))
    assert trainer.global_step == 4


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_log_steps_that_do_not_fit_are_refused(value) -> None:
    given = str(value).lower()
    with pytest.raises(ConfigError, match=rf"^logging\.log_steps: .* integer >= 0, got {given}"):
        Logging(log_steps=value)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^logging\.log_level: .* DEBUG, INFO, WA.*, got 'LOUD'"):
        Logging(log_level="LOUD")


@dataclass
class Equal(History):
    """Equal to every other one."""

    def __post_init__(self) -> None:
        super().__init__()


def test_loggers_that_are_equal_are_two(trainer_of) -> None:
    first, second = Equal(), Equal()
    trainer_of(first, loggers=[second, first], logging=Logging()).fit(tiny_batches(2))
    assert first.steps == second.steps == [1, 2]
