import numpy as np
import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback, ConfigError, TrainingLoop
from modelzoo_trainer.callbacks.dump_activations import DumpActivations

DEVICES = pytest.mark.parametrize("device", ["cpu", "fake"])


def files(trainer):
    folder = trainer.model_dir / "act_dumps"
    return {path.name: dict(np.load(path)) for path in sorted(folder.iterdir())}


class Expected(Callback):
    """Compute each step's output of the first layer, its gradient, and that of its weight."""

    def __init__(self):
        self.outputs, self.grads, self.weights = [], [], []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        first = model.layers[0](batch[0])
        output = first
        for layer in model.layers[1:]:
            output = layer(torch.tanh(output))
        loss = ((model.head(torch.tanh(output)) - batch[1]) ** 2).mean()
        self.outputs.append(first.detach().numpy())
        grad, weight = torch.autograd.grad(loss, [first, model.layers[0].weight])
        self.grads.append(grad.numpy())
        self.weights.append(weight.numpy())


@DEVICES
def test_each_step_has_its_tensors(make, batches, device):
    expected = Expected()
    trainer = make(expected, DumpActivations(), device=device)
    trainer.fit(batches, batches[:1])
    [(name, arrays)] = files(trainer).items()
    assert name == "act_dumps.npz"
    assert arrays["step"].tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(arrays["layers.0.fwd"], expected.outputs, rtol=1e-6)
    np.testing.assert_allclose(arrays["layers.0.bwd"], expected.grads, rtol=1e-5)
    np.testing.assert_allclose(arrays["layers.0.weight.grad"], expected.weights, rtol=1e-5)
    assert arrays["Net.fwd.scores"].shape == (4, 8, 1)
    assert arrays["Net.fwd.loss"].shape == (4,)
    assert arrays["Net.bwd.loss"].tolist() == [1.0] * 4


@DEVICES
@pytest.mark.parametrize(
    ("buffer_steps", "steps"),
    [(1, [[1], [2], [3], [4], [5]]), (2, [[1, 2], [3, 4], [5]]), (9, [[1, 2, 3, 4, 5]])],
)
@pytest.mark.slow_cases(every=4)
def test_a_file_holds_so_many_steps(make, batches, device, buffer_steps, steps):
    trainer = make(DumpActivations(buffer_steps=buffer_steps), device=device, max_steps=5)
    trainer.fit(batches)
    found = files(trainer)
    assert [arrays["step"].tolist() for arrays in found.values()] == steps
    names = ["act_dumps.npz", *(f"act_dumps_{number}.npz" for number in range(1, len(steps)))]
    assert set(found) == set(names)


def test_the_batches_of_a_step_count_as_one(make, batches):
    loop = TrainingLoop(max_steps=3, grad_accum_steps=2)
    trainer = make(DumpActivations(buffer_steps=2), loop=loop)
    trainer.fit(batches)
    found = files(trainer)
    assert found["act_dumps.npz"]["step"].tolist() == [1, 1, 2, 2]
    assert found["act_dumps_1.npz"]["step"].tolist() == [3, 3]


def test_other_shapes_begin_another_file(make, batches):
    batches[2] = tuple(part[:3] for part in batches[2])
    trainer = make(DumpActivations())
    trainer.fit(batches)
    steps = [arrays["step"].tolist() for arrays in files(trainer).values()]
    assert sorted(steps) == [[1, 2], [3], [4]]


class Again(nn.Module):
    """Call a layer twice, have one under two names, and return a pair and a parameter."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.other_name = self.first
        self.pair = Pair()

    def forward(self, batch):
        hidden = self.first(torch.relu_(self.other_name(batch[0])))
        outputs, (scale, _) = self.pair(hidden)
        return {"loss": (outputs["x"] * scale).mean()}


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, hidden):
        return {"x": hidden * 2}, [self.scale, "text"]


@DEVICES
def test_calls_and_parts_have_names_and_values_are_those_of_the_call(make, batches, device):
    expected = []

    class Look(Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            expected.append(model.first(batch[0]).detach().numpy())

    trainer = make(Look(), DumpActivations(), model=Again, device=device)
    trainer.fit(batches)
    [arrays] = files(trainer).values()
    assert set(arrays) == {
        *("step", "first.fwd", "first.bwd", "first.call1.fwd", "first.call1.bwd"),
        *("pair.fwd.0.x", "pair.bwd.0.x", "pair.fwd.1.0", "Again.fwd.loss", "Again.bwd.loss"),
        *("first.weight.grad", "first.bias.grad", "pair.scale.grad"),
    }
    np.testing.assert_allclose(arrays["first.fwd"], expected, rtol=1e-6)
    assert trainer.model.pair.scale._backward_hooks in (None, {})


def test_bfloat16_is_written_as_float32(make, batches):
    def model():
        return nn.Sequential(nn.Linear(4, 1, dtype=torch.bfloat16))

    class Cast(Callback):
        def on_before_forward(self, trainer, model, batch, args, kwargs):
            args[0] = batch[0].bfloat16()

        def on_after_forward(self, trainer, model, outputs, batch):
            outputs["loss"] = outputs["output"].float().mean()

    trainer = make(Cast(), DumpActivations(), model=model)
    trainer.fit(batches)
    [arrays] = files(trainer).values()
    assert arrays["0.fwd"].dtype == np.float32
    assert np.abs(arrays["0.fwd"]).sum() > 0


def test_what_was_collected_before_an_error_is_written(make, batches):
    class Fail(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if trainer.global_step == 2:
                raise RuntimeError("no")

    trainer = make(DumpActivations(), Fail())
    with pytest.raises(RuntimeError, match="no"):
        trainer.fit(batches)
    assert files(trainer)["act_dumps.npz"]["step"].tolist() == [1, 2]
    assert not any(module._forward_hooks for module in trainer.model.modules())


def test_no_file_is_overwritten(make, batches):
    trainer = make(DumpActivations(buffer_steps=2))
    trainer.fit(batches)
    before = files(trainer)
    trainer.fit(batches, ckpt_path=None)
    after = files(trainer)
    assert set(before) < set(after) or before.keys() == after.keys()
    assert all(np.array_equal(after[name]["step"], before[name]["step"]) for name in before)


def test_what_is_computed_again_is_not_a_second_call(make, batches):
    backend = {"activation_checkpointing": "full"}
    trainer = make(DumpActivations(), backend=backend)
    trainer.fit(batches)
    [arrays] = files(trainer).values()
    assert "layers.0.fwd" in arrays
    assert not any(".call1" in key for key in arrays)


def test_a_compiled_model_runs_as_it_is_written(make, batches, tmp_path):
    plain = make(DumpActivations(), model_dir=tmp_path / "plain")
    plain.fit(batches)
    trainer = make(DumpActivations(), backend={"compile": {"backend": "eager"}})
    trainer.fit(batches)
    [before], [after] = files(plain).values(), files(trainer).values()
    assert before.keys() == after.keys()
    assert np.array_equal(before["layers.0.bwd"], after["layers.0.bwd"])


def test_the_names_are_those_of_the_model_that_is_not_compiled(make, batches, net):
    model = torch.compile(net(), backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = make(DumpActivations(), model=model, optimizer=optimizer)
    trainer.fit(batches)
    [arrays] = files(trainer).values()
    assert {"layers.0.fwd", "head.weight.grad", "Net.fwd.loss"} <= arrays.keys()
    assert not any("_orig_mod" in key for key in arrays)


def test_without_values_there_are_no_files(make, batches):
    trainer = make(DumpActivations(), device="meta")
    trainer.fit(batches)
    assert files(trainer) == {}


def test_a_folder_that_cannot_be_made_is_refused(make, batches, tmp_path):
    (tmp_path / "file").write_text("")
    trainer = make(DumpActivations(outdir=tmp_path / "file" / "dumps"))
    with pytest.raises(
        ConfigError, match=r"DumpActivations\.outdir .* cannot be used: .* is a file, not a folder"
    ):
        trainer.fit(batches)


def test_a_file_that_cannot_be_written_is_reported_once(make, batches, tmp_path, caplog):
    (tmp_path / "out" / "act_dumps.tmp").mkdir(parents=True)
    trainer = make(DumpActivations(tmp_path / "out", buffer_steps=1))
    trainer.fit(batches)
    assert trainer.global_step == 4
    assert caplog.text.count("no more activations are dumped") == 1


@pytest.mark.parametrize("buffer_steps", [0, -1, 1.5, True])
def test_a_count_that_does_not_fit_is_refused(buffer_steps):
    with pytest.raises(ConfigError, match=r"DumpActivations\.buffer_steps: expected .*, got "):
        DumpActivations(buffer_steps=buffer_steps)


@pytest.mark.parametrize("outdir", [5, ""])
def test_what_is_no_folder_is_refused(outdir):
    with pytest.raises(ConfigError, match=r"DumpActivations\.outdir is .*; it must be a folder"):
        DumpActivations(outdir)
