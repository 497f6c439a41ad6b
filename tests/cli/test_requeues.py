"""Jobs that are queued again without progress."""

from __future__ import annotations

import pytest

from modelzoo_trainer.cli.requeues import RequeueLimit
from modelzoo_trainer.core.checkpoint import Checkpoint
from modelzoo_trainer.errors import ConfigError
from tests.doubles import tiny_batches


def attempt(trainer_of, num, max_steps=1, steps=None):
    trainer = trainer_of(checkpoint=Checkpoint(steps=steps), max_steps=max_steps)
    trainer.autorestart.resume_run()
    trainer.add_callback(RequeueLimit(num))
    trainer.fit(tiny_batches(10))


def test_a_job_without_progress_ends_after_some_requeues(trainer_of) -> None:
    for num in (1, 2, 3, 4):
        attempt(trainer_of, num)
    with pytest.raises(ConfigError, match=r"again 4 times .* after step 0\. Give it more time"):
        attempt(trainer_of, 5)


def test_a_checkpoint_is_progress(trainer_of) -> None:
    for num in (1, 2, 3, 4):
        attempt(trainer_of, num)
    attempt(trainer_of, 4, max_steps=2, steps=2)
    for num in (5, 6, 7, 8):
        attempt(trainer_of, num, max_steps=3)


def test_a_new_job_begins_to_count_anew(trainer_of) -> None:
    for num in (1, 2, 3, 4):
        attempt(trainer_of, num)
    for num in (1, 2, 3, 4):
        attempt(trainer_of, num)
    with pytest.raises(ConfigError, match="queued again 4 times"):
        attempt(trainer_of, 5)


def test_a_record_that_cannot_be_written_ends_no_run(trainer_of, tmp_path, caplog) -> None:
    attempt(trainer_of, 1)
    (tmp_path / "run" / ".requeues.json").unlink()
    (tmp_path / "run" / ".requeues.json").mkdir()
    attempt(trainer_of, 2)
    assert caplog.text.count("Cannot write") == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": null, "requeues": 1}'])
def test_a_damaged_record_is_no_record(trainer_of, tmp_path, text) -> None:
    attempt(trainer_of, 1)
    (tmp_path / "run" / ".requeues.json").write_text(text)
    attempt(trainer_of, 9)
