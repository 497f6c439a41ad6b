"""`trainer.predict` and `trainer.test` in one process: what they return, log and leave alone."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from modelzoo_trainer import (
    Callback,
    Checkpoint,
    ConfigError,
    PredictionError,
    Predictions,
    StopTraining,
    Trainer,
)
from modelzoo_trainer.base.shown_path import shown_path
from modelzoo_trainer.callbacks import LimitBatches, ScopedValidateFlags
from modelzoo_trainer.loading.seeded_sampler import SeededSampler
from modelzoo_trainer.zoo.data import PadLastBatch
from tests.doubles import (
    History,
    Recorder,
    Scale,
    TinyModel,
    constant_batches,
    differing,
    sgd,
    tiny_batches,
    weights_of,
)

ROWS = torch.arange(20.0).reshape(10, 2)


class Echo(nn.Module):
    """Returns what the test gives it a function for; the batch is (rows,)."""

    def __init__(self, returns: Any = lambda rows: {"rows": rows}) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.returns = returns

    def forward(self, batch: Any) -> Any:
        return self.returns(batch[0] if isinstance(batch, (tuple, list)) else batch)


def loader(size: int = 4, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(ROWS), batch_size=size, **options)


def predicted(trainer_of: Any, returns: Any, *callbacks: Any, **arguments: Any) -> Predictions:
    trainer = trainer_of(*callbacks, model=lambda: Echo(returns), optimizer=None)
    return trainer.predict(loader(), **arguments)


# ---- what is returned


@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("size", [1, 3, 4, 10, 64])
def test_there_is_a_row_for_each_sample_in_the_order_of_the_data(trainer_of, device, size) -> None:
    trainer = trainer_of(model=Echo, optimizer=None, device=device)
    found = trainer.predict(loader(size))
    assert list(found) == ["rows"]
    assert torch.equal(found["rows"], ROWS)
    assert found["rows"].device.type == "cpu"
    assert (found.is_complete, found.num_samples, found.path) == (True, 10, None)


@pytest.mark.parametrize(
    ("returns", "expected"),
    [
        (lambda rows: rows, {"output": ROWS}),
        (lambda rows: rows[:, 0], {"output": ROWS[:, 0]}),
        (lambda rows: (rows.mean(), rows), {"logits": ROWS}),
        (lambda rows: [None, rows], {"logits": ROWS}),
        (lambda rows: (rows, rows[:, 1]), {"output_0": ROWS, "output_1": ROWS[:, 1]}),
        (lambda rows: (rows, rows, rows.sum()), {"output_0": ROWS, "output_1": ROWS}),
        (lambda rows: {"loss": rows.mean(), "logits": rows, "num_items": 3}, {"logits": ROWS}),
        (lambda rows: {"loss": rows[:, 0]}, {"loss": ROWS[:, 0]}),
        (lambda rows: {"h": (rows, {"x": rows[:, 0]})}, {"h.0": ROWS, "h.1.x": ROWS[:, 0]}),
        (lambda rows: {"long": rows.long(), "half": rows.bfloat16(), "flag": rows > 5},
         {"long": ROWS.long(), "half": ROWS.bfloat16(), "flag": ROWS > 5}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("arguments", [{}, {"max_in_memory": 1}], ids=["memory", "files"])
@pytest.mark.slow_cases(every=4)
def test_outputs_have_names_and_all_but_numbers_are_kept(
    trainer_of, returns, expected, arguments
) -> None:
    found = predicted(trainer_of, returns, **arguments)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_a_last_batch_of_one_sample_is_no_loss(trainer_of) -> None:
    trainer = trainer_of(model=lambda: Echo(lambda rows: rows[:, 0]), optimizer=None)
    assert trainer.predict(loader(3))["output"].tolist() == ROWS[:, 0].tolist()


@pytest.mark.parametrize("arguments", [{}, {"max_in_memory": 1}], ids=["memory", "files"])
def test_rows_of_different_shapes_are_a_list_with_one_for_each_sample(
    trainer_of, arguments
) -> None:
    found = predicted(
        trainer_of, lambda rows: {"x": rows[:, : len(rows) // 2], "y": rows}, **arguments
    )
    assert [row.tolist() for row in found["x"]] == [
        *ROWS[:8].tolist(),
        *ROWS[8:, :1].tolist(),
    ]
    assert torch.equal(found["y"], ROWS)


def test_what_the_model_returns_later_does_not_change_what_was_kept(trainer_of) -> None:
    buffer = torch.zeros(2, 2)

    def reuse(rows: Tensor) -> Tensor:
        buffer.copy_(rows)
        return buffer

    trainer = trainer_of(model=lambda: Echo(reuse), optimizer=None)
    assert torch.equal(trainer.predict(loader(2))["output"], ROWS)


def test_no_loss_is_needed_and_none_is_computed(tmp_path) -> None:
    class Own(Trainer):
        def compute_loss(self, outputs, batch):
            raise AssertionError

        def compute_predictions(self, outputs, batch):
            return {"class": outputs["logits"].argmax(-1), "size": torch.tensor(len(batch[0]))}

    model = Echo(lambda rows: {"logits": rows})
    with Own(model=model, model_dir=tmp_path / "run") as trainer:
        found = trainer.predict(loader())
    assert list(found) == ["class"]
    assert found["class"].tolist() == [1] * 10


def test_outputs_that_are_losses_alone_are_refused(trainer_of) -> None:
    with pytest.raises(ConfigError, match=r"Echo returned no predictions: .*: loss, n\)"):
        predicted(trainer_of, lambda rows: {"loss": rows.mean(), "n": 3})


def test_an_output_of_another_kind_is_refused(trainer_of) -> None:
    with pytest.raises(ConfigError, match="returned a str"):
        predicted(trainer_of, lambda rows: "text")


def test_outputs_that_change_their_names_are_refused(trainer_of) -> None:
    with pytest.raises(ConfigError, match="batch 2 has b, earlier batches have a"):
        predicted(trainer_of, lambda rows: {"a" if len(rows) == 4 else "b": rows})


# ---- how it runs


def test_it_runs_in_evaluation_mode_without_gradients_and_changes_nothing(trainer_of) -> None:
    trainer = trainer_of(max_steps=3)
    trainer.fit(tiny_batches(3))
    before = weights_of(trainer)
    seen = []

    class Look(Callback):
        def on_after_forward(self, trainer, model, outputs, batch):
            seen.append((model.training, torch.is_grad_enabled(), outputs["logits"].requires_grad))

    trainer.model.train()
    with Look():
        trainer.predict(tiny_batches(2))
    assert seen == [(False, False, False)] * 2
    assert trainer.model.training
    assert differing(before, weights_of(trainer)) == []
    trainer.fit(tiny_batches(3))
    assert trainer.global_step == 3


def test_a_fit_is_bit_for_bit_the_same_with_predictions_in_between(trainer_of, tmp_path) -> None:
    class Each(Callback):
        def on_train_epoch_end(self, trainer, epoch):
            trainer.predict(tiny_batches(2), ckpt_path=None)

    found = []
    for name, callbacks in (("plain", ()), ("predicting", (Each(),))):
        trainer = trainer_of(
            *callbacks, model=lambda: TinyModel(0.5), num_epochs=3, model_dir=tmp_path / name
        )
        trainer.fit(tiny_batches(4), tiny_batches(1))
        found.append(weights_of(trainer))
    assert differing(*found) == []


def test_its_hooks_are_called_in_order(trainer_of) -> None:
    recorder = Recorder()
    trainer = trainer_of(recorder, model=Echo, optimizer=None)
    recorder.names.clear()
    trainer.predict(loader(8), ckpt_path=None)
    batch = [
        "on_predict_batch_start",
        "on_predict_step_start",
        "on_before_forward",
        "on_after_forward",
        "on_predict_step_end",
        "on_predict_batch_end",
    ]
    assert recorder.names == [
        "on_enter_validate",
        "on_before_load_checkpoint",
        "on_predict_start",
        *batch,
        *batch,
        "on_predict_end",
    ]


def test_a_hook_may_change_the_outputs(trainer_of) -> None:
    class Double(Callback):
        def on_after_forward(self, trainer, model, outputs, batch):
            outputs["rows"] = 2 * outputs["rows"]

    found = predicted(trainer_of, lambda rows: {"rows": rows}, Double())
    assert torch.equal(found["rows"], 2 * ROWS)


def test_predict_logs_nothing_and_neither_shifts_the_names_of_validations(trainer_of) -> None:
    history = History()
    trainer = trainer_of(loggers=history)
    trainer.predict(tiny_batches(1))
    trainer.test(tiny_batches(2))
    trainer.validate(tiny_batches(3))
    assert [list(metrics) for _, metrics in history.lines] == [["test/loss"], ["validate_0/loss"]]


def test_metrics_that_a_callback_logs_have_a_prefix(trainer_of) -> None:
    class Count(Callback):
        def on_predict_end(self, trainer, model, loop):
            trainer.log_metrics(num=3)

    history = History()
    trainer_of(Count(), model=Echo, optimizer=None, loggers=history).predict(loader())
    assert history.lines == [(0, {"predict/num": 3})]


def test_micro_batches_are_put_together(trainer_of) -> None:
    flags = ScopedValidateFlags(**{"csx.performance.micro_batch_size": 3})
    sizes = []

    def look(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return rows

    assert torch.equal(predicted(trainer_of, look, flags)["output"], ROWS)
    assert sizes == [3, 1, 3, 1, 2]


def test_eval_steps_of_the_loop_do_not_cut_it_short_but_its_own_do(trainer_of) -> None:
    trainer = trainer_of(model=Echo, optimizer=None, eval_steps=1)
    assert trainer.predict(loader()).num_samples == 10
    found = trainer.predict(loader(), eval_steps=2)
    assert torch.equal(found["rows"], ROWS[:8])
    assert found.is_complete


def test_a_limit_of_batches_holds(trainer_of) -> None:
    assert predicted(trainer_of, lambda rows: rows, LimitBatches(1)).num_samples == 4


@pytest.mark.parametrize("arguments", [{}, {"max_in_memory": 1}], ids=["memory", "files"])
@pytest.mark.parametrize("raises", [True, False])
def test_one_that_is_stopped_says_so(trainer_of, caplog, arguments, raises) -> None:
    class Stop(Callback):
        def on_predict_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if batch_idx == 1:
                if raises:
                    raise StopTraining("enough")
                trainer.early_exit.stop("enough")

    trainer = trainer_of(Stop(), model=Echo, optimizer=None)
    found = trainer.predict(loader(), **arguments)
    assert not found.is_complete
    assert torch.equal(found["rows"], ROWS[:8])
    assert "batches with predictions: 2." in caplog.text


@pytest.mark.parametrize("method", ["predict", "test", "validate", "validate_all"])
@pytest.mark.parametrize(
    ("model", "optimizer", "levels"),
    [
        (TinyModel, None, {logging.WARNING}),
        (lambda: TinyModel(), sgd, {logging.WARNING}),
        (TinyModel(), sgd, {logging.WARNING, logging.INFO}),  # a warning only in predict
        (TinyModel(), None, {logging.INFO}),
    ],
    ids=["class", "callable", "object and optimizer", "object"],
)
@pytest.mark.slow_cases(every=4)
def test_untrained_weights_are_reported_once(
    trainer_of, tmp_path, caplog, method, model, optimizer, levels
) -> None:
    caplog.set_level(logging.INFO)
    checkpoint = Checkpoint(checkpoint_root=tmp_path / "saved")
    trainer = trainer_of(checkpoint=checkpoint, model=model, optimizer=optimizer)
    for _ in range(2):
        getattr(trainer, method)(tiny_batches(1))
    [record] = [one for one in caplog.records if "untrained" in one.message]
    assert f"no checkpoint in {shown_path(tmp_path / 'saved')}" in record.message
    level = {"predict": max(levels)}.get(method, min(levels))
    assert record.levelno == level


def test_a_warning_of_untrained_weights_follows_a_message_of_a_lower_level(
    trainer_of, caplog
) -> None:
    caplog.set_level(logging.INFO)
    trainer = trainer_of(model=TinyModel(), optimizer=sgd)
    for method in ("validate", "predict", "validate", "predict"):
        getattr(trainer, method)(tiny_batches(1))
    levels = [one.levelno for one in caplog.records if "untrained" in one.message]
    assert levels == [logging.INFO, logging.WARNING]


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({"checkpoint_name": "step_{step}"}, "is named like 'step_{step}'"),
        ({"autoload_last_checkpoint": False}, "autoload_last_checkpoint is false"),
    ],
)
def test_why_no_weights_are_loaded_is_part_of_it(trainer_of, caplog, settings, fact) -> None:
    trainer_of(max_steps=1, checkpoint=Checkpoint(steps=1)).fit(tiny_batches(1))
    trainer_of(checkpoint=Checkpoint(**settings)).predict(tiny_batches(1))
    assert fact in caplog.text


def test_trained_or_chosen_weights_are_not_warned_of(trainer_of, tmp_path, caplog) -> None:
    trainer = trainer_of(max_steps=1, checkpoint=Checkpoint(steps=1))
    trainer.fit(tiny_batches(1))
    trainer.predict(tiny_batches(1))
    trainer.close()
    trainer_of().predict(tiny_batches(1))
    trainer_of(model_dir=tmp_path / "other").predict(tiny_batches(1), ckpt_path=None)
    trainer_of(max_steps=1, model_dir=tmp_path / "fitted").fit(tiny_batches(1), tiny_batches(1))
    assert "untrained" not in caplog.text


def test_the_same_weights_are_used_as_in_a_validation(trainer_of, tmp_path, caplog) -> None:
    caplog.set_level(logging.INFO, "modelzoo_trainer")
    batches = tiny_batches(3)
    first = trainer_of(max_steps=3, checkpoint=Checkpoint(steps=3))
    first.fit(batches)
    expected = first.predict(batches)["logits"]
    assert "the current weights" in caplog.text
    first.close()
    caplog.clear()
    newest = trainer_of().predict(batches)["logits"]
    assert "checkpoint_3" in caplog.text
    fresh = trainer_of(seed=5).predict(batches, ckpt_path=None)["logits"]
    named = trainer_of(model_dir=tmp_path / "other").predict(
        batches, ckpt_path=first.model_dir / "checkpoint_3"
    )["logits"]
    assert torch.equal(newest, expected)
    assert torch.equal(named, expected)
    assert not torch.equal(fresh, expected)


def test_twice_is_the_same(trainer_of) -> None:
    trainer = trainer_of(model=Echo, optimizer=None)
    first, second = trainer.predict(loader()), trainer.predict(loader(3))
    assert torch.equal(first["rows"], second["rows"])


def test_after_an_error_the_next_one_works(trainer_of) -> None:
    broken = True

    def fail(rows: Tensor) -> Tensor:
        if broken and len(rows) == 2:
            raise RuntimeError("broken")
        return rows

    trainer = trainer_of(model=lambda: Echo(fail), optimizer=None)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.predict(loader(), max_in_memory=1)
    assert list((trainer.model_dir / "predictions").iterdir()) == []
    broken = False
    assert torch.equal(trainer.predict(loader())["output"], ROWS)
    assert not trainer.predicting.is_active


def test_within_a_prediction_there_is_no_other(trainer_of) -> None:
    class Again(Callback):
        def on_predict_batch_end(self, trainer, model, outputs, batch, batch_idx):
            trainer.predict(loader())

    with pytest.raises(ConfigError, match="predict is already running"):
        predicted(trainer_of, lambda rows: rows, Again())


# ---- dataloaders


@pytest.mark.parametrize("method", ["predict", "test"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "^dataloader got None"),
        ([], r"^dataloader yields no batch\."),
        (TensorDataset(ROWS), "^dataloader got .*TensorDataset"),
        ([loader(), loader()], "^dataloader got a list of 2 dataloaders"),
    ],
    ids=["None", "empty", "dataset", "several"],
)
def test_what_is_no_dataloader_is_refused(trainer_of, method, given, message) -> None:
    trainer = trainer_of(model=Echo, optimizer=None)
    with pytest.raises(ConfigError, match=message):
        getattr(trainer, method)(given)


@pytest.mark.parametrize(
    "given", [lambda: loader(), lambda: iter(loader()), list(loader()), ROWS.split(4)]
)
def test_any_iterable_of_batches_will_do(trainer_of, given) -> None:
    trainer = trainer_of(model=Echo, optimizer=None)
    assert torch.equal(trainer.predict(given)["rows"], ROWS)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shuffle": True}, "shuffles"),
        ({"sampler": SeededSampler(6, seed=1)}, "shuffles"),
        ({"drop_last": True}, "drop_last"),
    ],
)
def test_a_loader_that_shuffles_or_drops_samples_is_warned_of(
    trainer_of, caplog, options, told
) -> None:
    trainer_of(model=Echo, optimizer=None).predict(loader(**options))
    texts = [one.getMessage() for one in caplog.records if one.name == "modelzoo_trainer.predict"]
    assert [told in text for text in texts].count(True) == 1


def test_rows_that_pad_a_batch_are_dropped(trainer_of) -> None:
    data = [{"rows": row} for row in ROWS]
    collate = PadLastBatch(4, weight="weight")
    trainer = trainer_of(
        model=lambda: Echo(lambda batch: {"rows": batch["rows"], "all": batch["rows"].T}),
        optimizer=None,
    )
    found = trainer.predict(DataLoader(data, 4, collate_fn=collate))
    assert torch.equal(found["rows"], ROWS)
    assert found["all"].shape == (6, 4)  # no rows of samples: as it is


def test_rows_that_pad_a_batch_without_a_mark_are_refused(trainer_of) -> None:
    collate = PadLastBatch(4, {0: -1.0})
    trainer = trainer_of(model=Echo, optimizer=None)
    with pytest.raises(ConfigError, match="PadLastBatch"):
        trainer.predict(loader(collate_fn=collate))


# ---- files


def test_what_is_larger_than_memory_is_in_files(trainer_of) -> None:
    found = predicted(trainer_of, lambda rows: {"rows": rows}, max_in_memory=32)
    names = sorted(path.name for path in found.path.iterdir())
    assert names == [
        "predictions.json",
        "predictions_00000.safetensors",
        "predictions_00001.safetensors",
        "predictions_00002.safetensors",
    ]
    assert [len(part) for part in found.parts("rows")] == [4, 4, 2]
    assert torch.equal(found["rows"], ROWS)
    assert torch.equal(Predictions.load(found.path)["rows"], ROWS)


def test_what_fits_into_memory_leaves_no_file(trainer_of) -> None:
    trainer = trainer_of(model=Echo, optimizer=None)
    assert trainer.predict(loader(), max_in_memory=80).path is None
    assert not (trainer.model_dir / "predictions").exists()
    assert trainer.predict(loader(), max_in_memory=79).path == trainer.model_dir / "predictions"


def test_output_dir_has_all_of_them(trainer_of, tmp_path) -> None:
    folder = tmp_path / "some" / "where"
    found = predicted(trainer_of, lambda rows: rows, output_dir=folder)
    assert found.path == folder
    assert len(list(folder.glob("*.safetensors"))) == 1
    assert torch.equal(Predictions.load(str(folder))["output"], ROWS)


def test_files_are_of_the_library_s_format(trainer_of, tmp_path) -> None:
    from safetensors.torch import load_file

    found = predicted(trainer_of, lambda rows: rows, output_dir=tmp_path / "out")
    [path] = found.path.glob("*.safetensors")
    assert torch.equal(load_file(path)["output"], ROWS)


def test_an_earlier_prediction_is_replaced_and_is_not_mistaken(trainer_of, tmp_path) -> None:
    trainer = trainer_of(model=Echo, optimizer=None)
    earlier = trainer.predict(loader(), output_dir=tmp_path / "out", max_in_memory=16)
    later = trainer.predict([ROWS[:3] + 1], output_dir=tmp_path / "out")
    assert torch.equal(later["rows"], ROWS[:3] + 1)
    with pytest.raises(PredictionError, match="replaced"):
        earlier["rows"]
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1


def test_one_that_fails_leaves_the_earlier_one(trainer_of, tmp_path) -> None:
    fails = False

    def model(rows: Tensor) -> Tensor:
        if fails:
            raise RuntimeError("broken")
        return rows

    trainer = trainer_of(model=lambda: Echo(model), optimizer=None)
    earlier = trainer.predict(loader(), output_dir=tmp_path / "out")
    fails = True
    with pytest.raises(RuntimeError, match="broken"):
        trainer.predict(loader(), output_dir=tmp_path / "out")
    assert torch.equal(earlier["output"], ROWS)


@pytest.mark.parametrize("arguments", [{"max_in_memory": -1}, {"max_in_memory": 1.5}])
def test_a_size_that_is_none_is_refused(trainer_of, arguments) -> None:
    with pytest.raises(ConfigError, match=r"^max_in_memory must be "):
        predicted(trainer_of, lambda rows: rows, **arguments)


# ---- test


def test_a_test_takes_all_batches_whatever_the_loop_says(trainer_of) -> None:
    history = History()
    trainer = trainer_of(model=Scale, optimizer=sgd, eval_steps=1, loggers=history)
    trainer.test(constant_batches(1, 2, 6))
    trainer.test(constant_batches(1, 2, 6), eval_steps=2)
    assert history.of("test/loss") == [(0, 3.0), (0, 1.5)]


def test_a_test_calls_the_hooks_of_a_validation(trainer_of) -> None:
    recorder = Recorder()
    trainer = trainer_of(recorder, model=Scale, optimizer=None)
    recorder.names.clear()
    trainer.test(constant_batches(1))
    assert recorder.names[0] == "on_enter_validate"
    assert "on_validate_end" in recorder.names
    assert not [name for name in recorder.names if "predict" in name]


@pytest.mark.parametrize("method", ["predict", "test"])
def test_functions_around_them_are_called(trainer_of, method) -> None:
    calls = []

    def before(self) -> None:
        calls.append("pre")

    trainer = trainer_of((f"pre-{method}", before), model=TinyModel, optimizer=None)
    getattr(trainer, method)(tiny_batches(1))
    assert calls == ["pre"]
