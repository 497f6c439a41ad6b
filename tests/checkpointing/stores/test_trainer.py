"""A trainer whose folders are URLs does all that it does in a folder, on any machine."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from modelzoo_trainer import (
    Callback,
    Checkpoint,
    ConfigError,
    ObjectStore,
    Trainer,
    TrainingLoop,
    checkpointing,
)
from modelzoo_trainer.callbacks import (
    ExtraCheckpoint,
    KeepNCheckpoints,
    SaveBest,
)
from modelzoo_trainer.checkpointing.stores.lease import Lease
from modelzoo_trainer.checkpointing.stores.store import Store, open_store
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.errors import CheckpointError, StoreError
from modelzoo_trainer.loggers import JsonlLogger
from tests.doubles import Cut, TinyModel, differing, sgd, tiny_batches, weights_of

pytest.importorskip("obstore")

Make = Callable[..., Trainer]
_NUMBERS: Final = itertools.count()  # of buckets, which are kept in memory
_PARAMS = """
trainer:
  init:
    device: cpu
    model_dir: s3://bucket/runs/a
    model: {name: fc_mnist, hidden_sizes: [32], input_size: 64}
    optimizer: {AdamW: {lr: 0.001}}
    loop: {max_steps: 10}
    checkpoint: {steps: 5, checkpoint_root: "gs://other/checkpoints"}
    object_store: {cache_size: 3, options: {region: us-east-1}}
  fit:
    train_dataloader: {data_processor: DigitsProcessor, split: train, batch_size: 32}
    ckpt_path: s3://bucket/other/checkpoint_5
"""


@pytest.fixture
def url() -> str:
    return f"memory://trainer-{next(_NUMBERS)}/runs/a"


@pytest.fixture
def store(url: str) -> Store:
    return open_store(url)


@pytest.fixture
def run_on(tmp_path: Path, url: str) -> Iterator[Make]:
    """Return a function that makes a trainer of the run on a machine of a name."""
    made: list[Trainer] = []

    def make(machine: str, num_steps: int = 6, **options: Any) -> Trainer:
        for other in made:
            other.close()
        wait_s = options.pop("wait_seconds", 30.0)
        loop = TrainingLoop(num_steps=num_steps, eval_frequency=options.pop("eval_frequency", None))
        options.setdefault("checkpoint", Checkpoint(steps=2))
        options.setdefault("model_dir", url)
        options.setdefault("progress", "none")
        made.append(
            Trainer(
                model=lambda: TinyModel(dropout=0.5),
                optimizer=sgd,
                loop=loop,
                seed=1,
                object_store=ObjectStore(cache_dir=tmp_path / machine, wait_seconds=wait_s),
                **options,
            )
        )
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def cut(batches: list[Any], num: int) -> list[Any]:
    """Return batches of which one raises an error when it is used."""
    return [*batches[:num], Bad(), *batches[num + 1 :]]


class Bad:
    def __iter__(self) -> Iterator[Any]:
        raise Cut


def stored(store: Store) -> set[str]:
    names = {one.name for one in store.list("")}
    return {name.removesuffix("/manifest.json") for name in names if name.endswith("manifest.json")}


def test_run_is_in_the_store_when_it_has_ended(
    run_on: Make, url: str, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = run_on("one", loggers=[JsonlLogger()], progress="lines")
    trainer.fit(tiny_batches(6))
    assert f"{url} (local copy: " in " ".join(caplog.text.split())
    assert stored(store) == {"checkpoint_2", "checkpoint_4", "checkpoint_6"}
    assert b'"loss"' in store.read("metrics.jsonl")[0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_resumes_exactly_on_a_machine_with_an_empty_cache(
    run_on: Make, tmp_path: Path, asynchronous: bool
) -> None:
    whole = run_on("whole", model_dir=tmp_path / "whole", num_steps=9)
    whole.fit(tiny_batches(9))
    expected = weights_of(whole)
    first = run_on("one", checkpoint=Checkpoint(steps=2, asynchronous=asynchronous), num_steps=9)
    with pytest.raises(Cut):
        first.fit(cut(tiny_batches(9), 5))
    second = run_on("other", num_steps=9)
    second.fit(tiny_batches(9))
    assert second.checkpoint.begun_with[1] == 4
    assert second.global_step == 9
    assert differing(weights_of(second), expected) == []


def test_old_checkpoints_are_deleted_from_the_store(run_on: Make, store: Store) -> None:
    run_on("one", callbacks=[KeepNCheckpoints(2)], num_steps=6).fit(tiny_batches(20))
    assert stored(store) == {"checkpoint_4", "checkpoint_6"}
    run_on("other", callbacks=[KeepNCheckpoints(2)], num_steps=4).fit(tiny_batches(20))
    assert stored(store) == {"checkpoint_8", "checkpoint_10"}
    assert not [one.name for one in store.list("checkpoint_4")]


def test_best_checkpoint_is_found_on_another_machine(run_on: Make, store: Store) -> None:
    best = SaveBest("validate_0/loss")
    first = run_on("one", callbacks=[best], eval_frequency=2)
    first.fit(tiny_batches(6), tiny_batches(2))
    assert best.best_path is not None
    assert best.best_path.name in stored(store)
    second = run_on("other")
    second.validate(tiny_batches(2), ckpt_path="best")
    expected = checkpointing.load(best.best_path)["model"]
    assert differing(weights_of(second), dict(expected)) == []


def test_side_checkpoints_and_weights_are_uploaded(run_on: Make, store: Store) -> None:
    trainer = run_on("one", callbacks=[ExtraCheckpoint(steps=3, folder="extra")])
    trainer.fit(tiny_batches(6))
    names = {one.name for one in store.list("extra")}
    assert names


def test_checkpoint_root_alone_is_a_url(
    run_on: Make, url: str, store: Store, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    for machine, num_steps in (("one", 4), ("other", 2)):
        checkpoint = Checkpoint(steps=2, checkpoint_root=url)
        trainer = run_on(machine, checkpoint=checkpoint, model_dir=home, num_steps=num_steps)
        trainer.fit(tiny_batches(6))
    assert stored(store) == {"checkpoint_2", "checkpoint_4", "checkpoint_6"}
    assert (home / "logs").is_dir()
    assert trainer.result is not None


def test_ckpt_path_is_a_url(run_on: Make, url: str, tmp_path: Path) -> None:
    first = run_on("one")
    first.fit(tiny_batches(6))
    second = run_on("other", model_dir=tmp_path / "new")
    second.validate(tiny_batches(1), ckpt_path=f"{url}/checkpoint_6")
    assert differing(weights_of(first), weights_of(second)) == []
    with pytest.raises(CheckpointError, match=r"runs/a/checkpoint_5 does not exist"):
        second.validate(tiny_batches(1), ckpt_path=f"{url}/checkpoint_5")


def test_validates_all_checkpoints_of_a_store(run_on: Make, url: str) -> None:
    run_on("one").fit(tiny_batches(6))
    trainer = run_on("other")
    trainer.validate_all([lambda: tiny_batches(1)], ckpt_paths=trainer.checkpoint.all_of(trainer))
    assert trainer.result is not None


class Down:
    """A store that answers no request to write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_down = False
        for name in ("put", "create"):
            real = getattr(Store, name)

            def call(store: Store, *args: Any, _real: Any = real, **options: Any) -> Any:
                if self.is_down and not str(args[0]).startswith("."):
                    raise StoreError("the store is down", is_temporary=True)
                return _real(store, *args, **options)

            monkeypatch.setattr(Store, name, call)


def test_training_goes_on_while_the_store_is_down(
    run_on: Make, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    down = Down(monkeypatch)
    trainer = run_on("one")

    class Outage(Callback):
        def on_step_committed(self, trainer: Trainer) -> None:
            down.is_down = trainer.global_step < 5

    trainer.add_callback(Outage())
    trainer.fit(tiny_batches(6))
    assert stored(store) == {"checkpoint_2", "checkpoint_4", "checkpoint_6"}


@pytest.mark.slow
def test_end_of_a_run_says_what_could_not_be_uploaded(
    run_on: Make, url: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = Down(monkeypatch)
    trainer = run_on("one", wait_seconds=1.0)
    down.is_down = True
    with pytest.raises(CheckpointError) as raised:
        trainer.fit(tiny_batches(6))
    text = str(raised.value)
    assert f"checkpoint upload {trainer.model_dir}" in text
    assert "checkpoint_6, checkpoint_4, checkpoint_2" in text
    assert "the store is down" in text
    assert url in text
    trainer.close()
    assert stored(store) == set()
    down.is_down = False
    again = run_on("one")
    again.validate(tiny_batches(1))
    again.close()
    assert stored(store) == {"checkpoint_2", "checkpoint_4", "checkpoint_6"}


def test_second_run_on_a_prefix_is_refused(run_on: Make, url: str) -> None:
    first = run_on("one")
    lease = first.object_store._sessions[0].lease
    with pytest.raises(ConfigError, match="in use by process"):
        Lease(open_store(url)).take()
    assert lease.is_held
    first.close()
    Lease(open_store(url)).take()
    with pytest.raises(ConfigError, match="in use by process"):
        run_on("other")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("s4://bucket/run", r"model_dir: 's4://' is not a known scheme"),
        ("s3://", r"model_dir: 's3://' names no bucket"),
        (Path("s3://bucket/run"), r"model_dir: .* one slash"),
        ("s3://key:secret@bucket/run", r"model_dir: s3://\.\.\. contains a user name"),
    ],
)
def test_invalid_urls_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(model=TinyModel(), model_dir=given)


def test_file_url_is_a_plain_path(tmp_path: Path) -> None:
    trainer = Trainer(model=TinyModel(), model_dir=f"file://{tmp_path}/run", progress="none")
    assert trainer.model_dir == tmp_path / "run"
    trainer.close()


def test_prefixes_in_one_another_are_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are in one another"):
        Trainer(
            model=TinyModel(),
            model_dir=url,
            checkpoint=Checkpoint(checkpoint_root=f"{url}/checkpoints"),
            object_store=ObjectStore(cache_dir=tmp_path),
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_size": -1}, "object_store.cache_size: expected a finite number >= 0 or null"),
        ({"sync_seconds": 0}, "object_store.sync_seconds: .*, got 0"),
        ({"options": {"endpoind": "x"}}, r"options.endpoind: memory://\S+ has no options"),
    ],
)
def test_invalid_settings_are_refused(
    url: str, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(
            model=TinyModel(),
            model_dir=url,
            object_store=ObjectStore(cache_dir=tmp_path, **settings),
        )


def test_what_ran_nothing_leaves_nothing_in_the_store(run_on: Make, store: Store) -> None:
    run_on("one").close()
    assert {one.name for one in store.list("")} <= {".lock"}


def test_takeover_stops_uploads_and_saves(run_on: Make, store: Store) -> None:
    trainer = run_on("one", num_steps=4)

    class Thief(Callback):
        def on_step_committed(self, trainer: Trainer) -> None:
            if trainer.global_step == 3:
                lease = trainer.object_store._sessions[0].lease
                lease._winner = "process 1 on other (since today)"

    trainer.add_callback(Thief())
    with pytest.raises(ConfigError, match="process 1 on other"):
        trainer.fit(tiny_batches(4))
    assert stored(store) <= {"checkpoint_2"}


def test_half_deleted_checkpoint_is_skipped(
    run_on: Make, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    run_on("one", num_steps=4).fit(tiny_batches(4))
    store.delete(one.name for one in store.list("checkpoint_4") if "state.json" in one.name)
    second = run_on("other", num_steps=4)
    second.fit(tiny_batches(4))
    assert second.checkpoint.begun_with[1] == 2
    assert "is not complete" in caplog.text


def test_unreachable_store_is_no_reason_to_fall_back(
    run_on: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on("one", num_steps=4).fit(tiny_batches(4))
    second = run_on("other", num_steps=4)

    def fail(*args: Any) -> None:
        raise StoreError("the store is down", is_temporary=True)

    monkeypatch.setattr(Store, "download", fail)
    with pytest.raises(StoreError, match="is down"):
        second.fit(tiny_batches(4))
    assert second.global_step == 0


def test_no_space_for_a_download_is_named(run_on: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run_on("one", num_steps=4).fit(tiny_batches(4))
    second = run_on("other", num_steps=4)
    monkeypatch.setattr("modelzoo_trainer.checkpointing.stores.cache._free", lambda mirror: 0)
    with pytest.raises(StoreError, match=r"GB are needed.*cache_dir to another disk"):
        second.fit(tiny_batches(4))


def test_check_uses_neither_network_nor_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(Store, "_run", lambda *args: pytest.fail("a request"))
    params = tmp_path / "params.yaml"
    params.write_text(_PARAMS, encoding="utf-8")
    assert main(["check", str(params)]) == 0
    assert "model_dir:     s3://bucket/runs/a" in capsys.readouterr().out
    assert not (tmp_path / "home").exists()
    params.write_text(_PARAMS.replace("s3:", "s4:", 1), encoding="utf-8")
    assert main(["check", str(params)]) == 2
    assert "model_dir: 's4://' is not a known scheme" in capsys.readouterr().err


def test_links_of_an_upload_that_was_killed_are_removed(run_on: Make) -> None:
    first = run_on("one", num_steps=2)
    first.fit(tiny_batches(2))
    left = first.model_dir / ".store/upload-0123456789abcdef/checkpoint_1"
    left.mkdir(parents=True)
    first.close()
    run_on("one")
    assert not left.parent.exists()
