import pytest
import torch

from modelzoo_trainer import Callback, ConfigError, TrainingLoop
from modelzoo_trainer.callbacks.dump_available_tensor_names import DumpAvailableTensorNames
from modelzoo_trainer.callbacks.parts.tensor_listeners import (
    NormTensorListener,
    SummaryTensorListener,
)

DEVICES = pytest.mark.parametrize("device", ["cpu", "fake"])


class Expected(Callback):
    def __init__(self):
        self.outputs, self.weights, self.grads = [], [], []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.outputs.append(model.layers[0](batch[0]).detach())
        self.weights.append(model.head.weight.detach().clone())

    def on_before_optimizer_step(self, trainer, model, optimizer):
        self.grads.append(model.head.weight.grad.clone())


def norms(tensors):
    return [tensor.double().norm().item() for tensor in tensors]


@DEVICES
def test_tensors_are_logged_as_they_were(make, batches, history, device):
    expected = Expected()
    names = ["layers.0.fwd", "head.weight", "head.weight.grad"]
    make(expected, SummaryTensorListener("seen", names), device=device).fit(batches)
    found = {name: [value for _, value in history.of(f"seen/{name}")] for name in names}
    kept = dict(zip(names, (expected.outputs, expected.weights, expected.grads), strict=True))
    for name in names:
        assert len(found[name]) == 4
        for value, tensor in zip(found[name], kept[name], strict=True):
            torch.testing.assert_close(value, tensor)


@DEVICES
def test_norms_are_those_of_each_and_of_all(make, batches, history, device):
    expected = Expected()
    listener = NormTensorListener("size", ["layers.0.fwd", "head.weight*"])
    make(expected, listener, device=device).fit(batches)
    outputs, weights = norms(expected.outputs), norms(expected.weights)
    grads = norms(expected.grads)
    assert [value for _, value in history.of("size/layers.0.fwd")] == pytest.approx(outputs)
    assert [value for _, value in history.of("size/head.weight")] == pytest.approx(weights)
    assert [value for _, value in history.of("size/head.weight.grad")] == pytest.approx(grads)
    together = [
        sum(n**2 for n in each) ** 0.5 for each in zip(outputs, weights, grads, strict=True)
    ]
    assert [value for _, value in history.of("size/__all__")] == pytest.approx(together)


@pytest.mark.parametrize("listener", [SummaryTensorListener, NormTensorListener])
def test_only_log_steps_are_looked_at(make, batches, history, listener):
    trainer = make(listener("x", "head.bwd"), log_steps=3, max_steps=7)
    trainer.fit(batches)
    assert [step for step, _ in history.of("x/head.bwd")] == [3, 6, 7]
    assert not any(module._forward_hooks for module in trainer.model.modules())


def test_a_validation_has_outputs_and_no_gradients(make, batches, history):
    listener = NormTensorListener("x", ["layers.*.fwd", "*.grad", "*.bwd"])
    make(listener, loop=TrainingLoop(max_steps=2, eval_frequency=1)).fit(batches, batches[:2])
    names = {name for _, metrics in history.lines for name in metrics if "validate" in name}
    assert {name for name in names if "/x/" in name} == {
        f"validate_0/x/{name}" for name in ("layers.0.fwd", "layers.1.fwd", "__all__")
    }


def test_accumulated_gradients_are_whole(make, batches, history):
    expected = Expected()
    loop = TrainingLoop(max_steps=2, grad_accum_steps=2)
    make(expected, SummaryTensorListener("x", "head.weight.grad"), loop=loop).fit(batches)
    values = [value for _, value in history.of("x/head.weight.grad")]
    assert len(values) == 2
    assert all(map(torch.equal, values, expected.grads))


def test_the_run_is_not_changed(make, batches, tmp_path):
    plain = make(model_dir=tmp_path / "plain")
    listened = make(SummaryTensorListener("x", "*"), NormTensorListener("y", "*"))
    plain.fit(batches)
    listened.fit(batches)
    for before, after in zip(plain.model.parameters(), listened.model.parameters(), strict=True):
        assert torch.equal(before, after)


def test_a_name_that_fits_nothing_is_reported_with_what_is_near(make, batches, caplog):
    make(NormTensorListener("x", ["layer.0.fwd", "head.fwd"]), log_steps=2).fit(batches)
    assert caplog.text.count("'layer.0.fwd' matches no tensor of a step") == 1
    assert "Did you mean 'layers.0.fwd'?" in caplog.text
    assert "'head.fwd' is" not in caplog.text


def test_a_name_is_reported_in_a_validation_alone(make, batches, caplog):
    make(NormTensorListener("x", "zzz")).validate(batches[:1])
    assert "'zzz' matches no tensor of a step. Known: " in caplog.text


@pytest.mark.parametrize("listener", [SummaryTensorListener, NormTensorListener])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", "a"), "listener_name: .* not empty, got ''"),
        (
            ("a", ""),
            "tensor_names: .* such as 'layers.*.fwd' .*DumpAvailable.* or a list of names, got ''",
        ),
        (("a", []), r"tensor_names: .* a list of names, got \[\]"),
        (("a", 3), "tensor_names: .* a list of names, got 3"),
        (("a", {"b": 1}), "tensor_names: .* a list of names, got a mapping"),
        (("a", [1]), r"tensor_names\[0\]: expected a string, got 1"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(listener, arguments, message):
    with pytest.raises(ConfigError, match=f"{listener.__name__}.{message}"):
        listener(*arguments)


# ---- the names


@pytest.mark.parametrize("device", ["cpu", "fake", "meta"])
def test_the_names_are_listed_with_shapes_and_types(make, batches, device):
    trainer = make(DumpAvailableTensorNames(), device=device)
    trainer.fit(batches, batches[:1])
    path = trainer.artifact_dir / "available_tensor_names.txt"
    lines = path.read_text().splitlines()
    assert "layers.0.fwd\t[8, 4]\tfloat32" in lines
    assert "layers.0.bwd\t[8, 4]\tfloat32" in lines
    assert "Net.fwd.loss\t[]\tfloat32" in lines
    assert "head.weight\t[1, 4]\tfloat32" in lines
    assert "head.weight.grad\t[1, 4]\tfloat32" in lines
    assert len(lines) == len(set(lines))
    path = trainer.artifact_dir / "available_tensor_names_validate.txt"
    text = path.read_text()
    assert "layers.0.fwd\t[8, 4]\tfloat32\n" in text
    assert ".bwd" not in text
    assert ".grad" not in text


def test_every_listed_name_can_be_listened_to(make, batches, history):
    trainer = make(DumpAvailableTensorNames(), SummaryTensorListener("x", "*"))
    trainer.fit(batches)
    lines = (trainer.artifact_dir / "available_tensor_names.txt").read_text().splitlines()
    listed = {line.split("\t")[0] for line in lines}
    logged = {name for _, metrics in history.lines for name in metrics if name.startswith("x/")}
    assert logged == {f"x/{name}" for name in listed}


def test_only_the_first_step_is_listed(make, batches):
    trainer = make(DumpAvailableTensorNames(), loop=TrainingLoop(max_steps=2, grad_accum_steps=2))
    trainer.fit(
        [
            tuple(part[:size] for part in b)
            for b, size in zip(batches, range(8, 4, -1), strict=False)
        ]
    )
    text = (trainer.artifact_dir / "available_tensor_names.txt").read_text()
    assert "layers.0.fwd\t[7, 4]" in text
    assert "head.weight.grad" in text


def test_a_file_that_cannot_be_written_is_reported(make, batches, caplog):
    trainer = make(DumpAvailableTensorNames())
    (trainer.artifact_dir / "available_tensor_names.txt").mkdir()
    trainer.fit(batches)
    assert "available_tensor_names.txt: " in caplog.text
