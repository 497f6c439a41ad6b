import json

import numpy as np
import pytest
import torch

from modelzoo_trainer import Callback, Checkpoint, StopTraining, TrainingLoop
from modelzoo_trainer.callbacks import (
    CheckLoss,
    KeepNCheckpoints,
    LogOptimizerParamGroup,
    SaveBest,
)
from modelzoo_trainer.loading.seeded_sampler import SeededSampler
from modelzoo_trainer.loggers import JsonlLogger, ProgressLogger
from modelzoo_trainer.loggers import run_record as module
from modelzoo_trainer.optim.composed import SequentialLR
from modelzoo_trainer.optim.decay import ConstantLR, LinearLR
from modelzoo_trainer.optim.weight_decay import LinearWD


def events(trainer):
    text = (trainer.artifact_dir / "events.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def kinds(trainer):
    return [(one["event"], one["step"]) for one in events(trainer) if one["event"] != "memory"]


def facts(trainer):
    return json.loads((trainer.artifact_dir / "run.json").read_text())


def test_a_fit_notes_what_its_time_went_to(make, batches):
    loop = TrainingLoop(num_epochs=2, eval_frequency=5)
    trainer = make(JsonlLogger(), loop=loop, checkpoint=Checkpoint(steps=5))
    trainer.fit(batches[:5], batches[:2])
    assert kinds(trainer) == [
        *(("start", 0), ("train_start", 0), ("save", 5), ("epoch", 5), ("train_end", 5)),
        *(("validate", 5), ("train_start", 5), ("save", 10), ("epoch", 10), ("train_end", 10)),
        *(("validate", 10), ("end", 10)),
    ]
    by_kind = {one["event"]: one for one in events(trainer)}
    assert by_kind["end"]["outcome"] == "finished"
    assert by_kind["train_start"]["steps_per_epoch"] == 5
    assert by_kind["train_start"]["total_steps"] == 10
    assert (by_kind["epoch"]["epoch"], by_kind["save"]["name"]) == (2, "checkpoint_10")
    assert by_kind["validate"]["seconds"] > 0
    assert by_kind["memory"]["host_peak_bytes"] > 2**20
    times = [one["time"] for one in events(trainer)]
    assert max(times) - min(times) < 60


def test_a_validation_alone_is_noted(make, batches):
    trainer = make(JsonlLogger())
    trainer.validate(batches[:2])
    assert kinds(trainer) == [("start", 0), ("validate", 0), ("end", 0)]


def test_each_fit_has_its_events_and_the_facts_are_written_once(make, batches):
    trainer = make(JsonlLogger(), loop=TrainingLoop(num_steps=2))
    trainer.fit(batches)
    written = (trainer.artifact_dir / "run.json").stat().st_mtime_ns
    trainer.fit(batches)
    found = [kind for kind, _ in kinds(trainer)]
    assert found == ["start", "train_start", "train_end", "end"] * 2
    assert (trainer.artifact_dir / "run.json").stat().st_mtime_ns == written


def test_the_settings_are_those_of_the_newest_fit_and_not_of_a_validation(make, batches):
    def loader(num_workers):
        data = list(batches)
        return torch.utils.data.DataLoader(data, batch_size=None, num_workers=num_workers)

    trainer = make(JsonlLogger(), loop=TrainingLoop(num_steps=2))
    trainer.validate(loader(0))
    trainer.fit(loader(1))
    assert facts(trainer)["settings"]["data"]["num_workers"] == 1
    trainer.validate(loader(0))
    assert facts(trainer)["settings"]["data"]["num_workers"] == 1
    trainer.fit(loader(0))
    assert facts(trainer)["settings"]["data"]["num_workers"] == 0


class Fail(Callback):
    def __init__(self, error):
        self.error = error

    def on_step_boundary(self, trainer):
        if trainer.global_step == 2:
            raise self.error


@pytest.mark.parametrize(
    ("error", "outcome", "cause"),
    [
        (ValueError("bad data"), "failed", "ValueError: bad data"),
        (ValueError("https://me:word@host"), "failed", "ValueError: https://***@host"),
        (KeyboardInterrupt(), "stopped", "KeyboardInterrupt"),
    ],
)
def test_the_end_of_a_fit_says_why(error, outcome, cause, make, batches):
    trainer = make(Fail(error), JsonlLogger())
    with pytest.raises(type(error)):
        trainer.fit(batches)
    last = events(trainer)[-1]
    assert (last["event"], last["outcome"], last["cause"]) == ("end", outcome, cause)


def test_a_run_from_python_notes_its_settings(make, batches, monkeypatch):
    monkeypatch.setattr(module.sys, "argv", ["train.py", "--api_key=abc123def"])
    loader = torch.utils.data.DataLoader(list(batches), batch_size=None)
    trainer = make(CheckLoss(), JsonlLogger(), loop=TrainingLoop(max_steps=3))
    trainer.fit(loader)
    found = facts(trainer)
    assert found["settings"]["optimizer"]["SGD"]["lr"] == 0.1
    assert found["settings"]["loop"]["TrainingLoop"]["max_steps"] == 3
    assert found["settings"]["data"] == {
        "class": "DataLoader",
        "dataset": "list",
        "drop_last": False,
        "num_workers": 0,
        "shuffle": False,
    }
    assert found["model"] == {"class": "Net", "parameters": 45, "trainable": 45}
    assert found["settings"]["model"] == {"class": "Net", "parameters": 45}
    assert found["overridden"] == []
    assert found["environment"]["command"] == "train.py --api_key=***"
    assert "torch" in found["environment"]["versions"]
    assert found["environment"]["processes"] == 1


class Wide(torch.nn.Linear):
    def __init__(self, width, depth, api_key):
        super().__init__(4, width)
        self.depth, self.api_key = depth, api_key

    def forward(self, batch):
        return super().forward(batch[0]).square().mean()


def test_the_arguments_of_a_model_are_noted_with_its_size(make, batches):
    trainer = make(JsonlLogger(), model=lambda: Wide(16, 3, "abc123def"), max_steps=1)
    trainer.fit(batches)
    assert facts(trainer)["settings"]["model"] == {
        "class": "Wide",
        "depth": 3,
        "in_features": 4,
        "out_features": 16,
        "parameters": 80,
    }


def test_all_arguments_of_shipped_parts_are_noted(make, batches):
    class Mine(Callback):
        def __init__(self, limit):
            self.limit = limit

    parts = [KeepNCheckpoints(2), SaveBest("loss", k=3), LogOptimizerParamGroup(["lr"]), Mine(5)]
    trainer = make(*parts, JsonlLogger(), max_steps=1, checkpoint=Checkpoint(epochs=4))
    trainer.fit(batches, batches[:1])
    found = facts(trainer)["settings"]
    keep, best, groups, mine = found["callbacks"][1:5]  # the first one is the trainer's
    assert keep == {"KeepNCheckpoints": {"n": 2}}
    assert (best["SaveBest"]["metric"], best["SaveBest"]["k"]) == ("loss", 3)
    assert groups == {"LogOptimizerParamGroup": {"keys": ["lr"]}}
    assert mine == {"Mine": {"limit": 5}}
    assert found["checkpoint"]["Checkpoint"]["epochs"] == 4


@pytest.mark.parametrize("has_params", [False, True])
def test_the_sizes_of_the_data_are_noted_for_every_run(has_params, make, batches):
    loop = TrainingLoop(max_steps=2, eval_frequency=2, eval_steps=3)
    trainer = make(JsonlLogger(), loop=loop)
    if has_params:
        (trainer.artifact_dir / "params.yaml").write_text("trainer: {}\n")
    trainer.fit(batches[:5], [batches[:2], lambda: iter(batches), batches])
    assert facts(trainer)["sizes"] == {
        "data": {"batches_per_epoch": 5, "samples_per_batch": 8},
        "validation": {"batches": [2, 3, 3]},
    }
    trainer.fit(batches[:4], batches[:1])
    assert facts(trainer)["sizes"]["data"]["batches_per_epoch"] == 4
    assert facts(trainer)["sizes"]["validation"] == {"batches": 1}


@pytest.mark.parametrize(("options", "noted"), [({}, [2, 3]), ({"eval_steps": 1}, [1, 1])])
def test_a_validation_of_unknown_length_is_counted(options, noted, make, batches):
    loop = TrainingLoop(max_steps=2, eval_frequency=2, **options)
    trainer = make(JsonlLogger(), loop=loop)
    trainer.fit(lambda: iter(batches), [lambda: iter(batches[:2]), lambda: iter(batches[:3])])
    assert facts(trainer)["sizes"] == {"validation": {"batches": noted}}


def test_sizes_that_are_not_known_are_left_out(make, batches):
    trainer = make(JsonlLogger(), loop=TrainingLoop(max_steps=2))
    trainer.fit(lambda: iter(batches))
    assert facts(trainer).get("sizes", {}) == {}


class Backwards(torch.utils.data.Sampler):
    def __init__(self, num):
        self.num = num

    def __len__(self):
        return self.num

    def __iter__(self):
        return iter(range(self.num - 1, -1, -1))


class Whole(Backwards):
    def __iter__(self):
        return iter([[idx] for idx in range(self.num)])


@pytest.mark.parametrize(
    ("options", "noted"),
    [
        ({"shuffle": True}, {"shuffle": True}),
        ({"batch_size": 1}, {"shuffle": False}),
        ({"batch_size": None, "shuffle": True}, {"shuffle": True}),
        ({"sampler": SeededSampler(4, seed=1)}, {"shuffle": True}),
        ({"sampler": Backwards(4)}, {"sampler": "Backwards"}),
        ({"batch_sampler": Whole(4)}, {"sampler": "Whole"}),
    ],
)
def test_the_order_of_the_data_and_the_seed_are_noted(options, noted, make, batches):
    is_batched = options.get("batch_size", 1) is not None
    collate = (lambda rows: rows[0]) if is_batched else None
    loader = torch.utils.data.DataLoader(list(batches[:4]), collate_fn=collate, **options)
    trainer = make(JsonlLogger(), seed=7, max_steps=1)
    trainer.fit(loader)
    found = facts(trainer)["settings"]
    assert found["seed"] == 7
    assert {key: found["data"].get(key) for key in noted} == noted
    assert len({"shuffle", "sampler"} & set(found["data"])) == 1


def test_the_learning_rate_is_noted_as_it_was_given_and_not_as_a_warm_up_begins(make, batches):
    def warm_up(optimizer):
        return torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=3)

    trainer = make(JsonlLogger(), schedulers=warm_up, max_steps=1)
    trainer.fit(batches)
    found = facts(trainer)["settings"]
    assert found["optimizer"]["SGD"]["lr"] == 0.1
    noted = {"start_factor": 0.25, "end_factor": 1.0, "total_iters": 3}
    assert found["schedulers"] == [{"LinearLR": noted}]
    assert facts(trainer)["overridden"] == []  # it scales the learning rate


def test_settings_are_noted_as_given_and_not_as_our_schedules_begin(make, batches):
    trainer = make(
        JsonlLogger(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.5),
        schedulers=[
            lambda optimizer: LinearLR(optimizer, 0.0, 1e-2, 2),
            lambda optimizer: LinearWD(optimizer, 0.0, 1.0, 2),
        ],
        loop=TrainingLoop(num_steps=2),
    )
    trainer.fit(batches)
    found = facts(trainer)["settings"]["optimizer"]["AdamW"]
    assert (found["lr"], found["weight_decay"]) == (3e-3, 0.5)
    assert facts(trainer)["overridden"] == ["optimizer.AdamW.lr", "optimizer.AdamW.weight_decay"]
    trainer.fit(batches)  # the schedules have ended
    assert facts(trainer)["settings"]["optimizer"]["AdamW"] == found


def ours(optimizer):
    members = [lambda _: LinearLR(None, 0.0, 0.1, 2), lambda _: LinearLR(None, 0.1, 0.0, 8)]
    return SequentialLR(optimizer, members)


def of_torch(optimizer):
    kinds = torch.optim.lr_scheduler
    members = [kinds.LinearLR(optimizer, 0.5, total_iters=2), kinds.ExponentialLR(optimizer, 0.9)]
    return kinds.SequentialLR(optimizer, members, milestones=[2])


@pytest.mark.parametrize(
    ("schedulers", "noted"),
    [
        (ours, [("LinearLR", "end_learning_rate", 0.1), ("LinearLR", "end_learning_rate", 0.0)]),
        (of_torch, [("LinearLR", "start_factor", 0.5), ("ExponentialLR", "gamma", 0.9)]),
    ],
)
def test_the_schedules_in_a_schedule_are_noted(schedulers, noted, make, batches):
    trainer = make(JsonlLogger(), schedulers=schedulers, max_steps=1)
    trainer.fit(batches)
    (found,) = facts(trainer)["settings"]["schedulers"]
    members = found["SequentialLR"]["schedulers"]
    assert [one[kind][name] for one, (kind, name, _) in zip(members, noted, strict=True)] == [
        value for _, _, value in noted
    ]


def test_a_stream_has_no_order_to_note(make, batches):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(batches)

    trainer = make(JsonlLogger(), max_steps=1)
    trainer.fit(torch.utils.data.DataLoader(Stream(), batch_size=None))
    assert not {"shuffle", "sampler"} & set(facts(trainer)["settings"]["data"])


def test_the_environment_has_what_a_configuration_lacks(make, batches):
    trainer = make(JsonlLogger())
    (trainer.artifact_dir / "params.yaml").write_text("trainer: {}\n")
    trainer.fit(batches)
    found = facts(trainer)
    assert found["settings"]["loop"]["TrainingLoop"]
    assert set(found["environment"]) == {"device", "device_name", "host", "platform", "processes"}


def test_memory_is_not_noted_at_every_step(make, batches):
    trainer = make(JsonlLogger(), max_steps=10)
    trainer.fit(batches)
    assert 1 <= [one["event"] for one in events(trainer)].count("memory") <= 4


def test_a_folder_that_cannot_be_written_is_one_warning(make, batches, caplog):
    trainer = make(JsonlLogger(), checkpoint=Checkpoint(steps=2))
    (trainer.artifact_dir / "events.jsonl").mkdir()
    trainer.fit(batches, batches[:1])
    told = [one.getMessage() for one in caplog.records if one.name.endswith("run_record")]
    assert [str(trainer.artifact_dir / "events.jsonl") in text for text in told] == [True]
    assert trainer.global_step == 4


def test_the_record_asks_nothing_of_the_device_in_a_step(make, batches):
    trainer = make(JsonlLogger(), device="fake", checkpoint=Checkpoint(steps=2))
    trainer.fit(batches, batches[:1])
    assert kinds(trainer)[-1] == ("end", 4)


class Fragile(Callback):
    def __init__(self, limit=1):
        pass

    @property
    def limit(self):
        raise RuntimeError("not now")


def test_a_property_that_fails_stops_nothing(make, batches, caplog):
    trainer = make(JsonlLogger(), callbacks=[Fragile()])
    trainer.fit(batches)
    assert [one.exc_info is not None for one in caplog.records if "not now" in one.message] == [
        True
    ]
    assert kinds(trainer)[-1] == ("end", 4)
    assert not (trainer.artifact_dir / "run.json").exists()


def test_several_optimizers_are_noted_by_name(make, batches):
    trainer = make(
        JsonlLogger(),
        optimizer=lambda model: {
            "first": torch.optim.SGD(model.layers.parameters(), lr=0.5),
            "second": torch.optim.Adam(model.head.parameters(), lr=0.25),
        },
    )
    trainer.validate(batches[:1])
    found = facts(trainer)["settings"]["optimizers"]
    assert found["first"]["SGD"]["lr"] == 0.5
    assert found["second"]["Adam"]["lr"] == 0.25


def too_short(num):
    def linear(optimizer):
        return LinearLR(optimizer, 0.1, 0.0, num)

    return {"schedulers": linear, "loop": TrainingLoop(max_steps=6)}


@pytest.mark.parametrize(("num", "steps"), [(2, ("step 2", "run at step 6")), (6, None)])
def test_hints_about_schedules_are_noted(num, steps, make, batches):
    trainer = make(JsonlLogger(), **too_short(num))
    trainer.fit(batches)
    hints = facts(trainer).get("hints", [])
    assert len(hints) == (0 if steps is None else 1)
    assert all(word in hint for hint in hints for word in ("LinearLR", *(steps or ())))


@pytest.mark.parametrize(("progress", "loggers"), [("none", 0), ("none", 1), ("lines", 1)])
def test_hints_are_in_run_log_whatever_shows_the_progress(progress, loggers, make, batches):
    own = [ProgressLogger()] * loggers
    trainer = make(*own, JsonlLogger(), progress=progress, **too_short(2))
    trainer.fit(batches)
    text = (trainer.artifact_dir / "run.log").read_text()
    assert text.count("the schedule ends at step 2") == 1
    assert ("WARNING: LinearLR" in text) == (progress == "none")


def test_the_end_of_a_fit_names_who_stopped_it(make, batches):
    class Enough(Callback):
        def on_step_boundary(self, trainer):
            if trainer.global_step == 2:
                raise StopTraining("good enough")

    trainer = make(Enough(), JsonlLogger())
    result = trainer.fit(batches)
    last = events(trainer)[-1]
    assert last["step"] == 2
    assert last["stopped_by"] == result.stopped_by
    assert "good enough" in last["stopped_by"]


def test_a_rate_of_numpy_beside_a_schedule_is_recorded(make, batches):
    def constant(optimizer):
        return ConstantLR(optimizer, learning_rate=0.1)

    trainer = make(
        JsonlLogger(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=np.float32(0.5)),
        schedulers=[constant],
        max_steps=1,
    )
    trainer.fit(batches)
    assert facts(trainer)["settings"]["optimizer"]["SGD"]["lr"] == 0.5
