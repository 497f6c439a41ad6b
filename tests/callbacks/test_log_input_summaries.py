import pytest
import torch

from modelzoo_trainer import Callback, TrainingLoop
from modelzoo_trainer.callbacks.log_metrics import LogInputSummaries

DEVICES = pytest.mark.parametrize("device", ["cpu", "fake"])


@DEVICES
def test_each_tensor_of_the_batch_is_logged(make, batches, history, device):
    make(LogInputSummaries(), device=device, log_steps=2).fit(batches)
    for part in (0, 1):
        found = history.of(f"input.{part}")
        assert [step for step, _ in found] == [2, 4]
        assert torch.equal(found[0][1], batches[1][part])
        assert torch.equal(found[1][1], batches[3][part])


@DEVICES
def test_keys_lead_to_nested_tensors_as_they_were_before_the_model(
    make, batches, net, history, device
):
    class Nested(net):
        def forward(self, batch):
            hidden, target = batch["x"]["hidden"], batch["y"][0]
            outputs = super().forward((hidden.clone(), target))
            hidden.zero_()
            return outputs

    nested = [
        {"x": {"hidden": hidden, "count": torch.tensor(3)}, "y": [target], "name": "a"}
        for hidden, target in batches
    ]
    before = batches[0][0].clone()
    make(LogInputSummaries(), model=Nested, device=device).fit(nested)
    names = {name for _, line in history.lines for name in line if name.startswith("input")}
    assert names == {"input.x.hidden", "input.x.count", "input.y.0"}
    assert torch.equal(history.of("input.x.hidden")[0][1], before)
    assert history.of("input.x.count")[0][1] == 3


def test_a_tensor_alone_has_no_key(make, batches, history):
    class Head(torch.nn.Linear):
        def forward(self, batch):
            return super().forward(batch).square().mean()

    make(LogInputSummaries(), model=lambda: Head(4, 1)).fit([batch[0] for batch in batches])
    assert torch.equal(history.of("input")[0][1], batches[0][0])


def test_a_validation_has_its_prefix(make, batches, history):
    trainer = make(LogInputSummaries(), loop=TrainingLoop(max_steps=2))
    trainer.fit(batches, batches[5:6])
    [(step, value)] = history.of("validate_0/input.0")
    assert step == 2
    assert torch.equal(value, batches[5][0])


def test_what_a_callback_has_put_in_is_not_the_batch(make, batches, history):
    class Double(Callback):
        def on_before_forward(self, trainer, model, batch, args, kwargs):
            args[0] = (batch[0] * 2, batch[1])

    make(Double(), LogInputSummaries()).fit(batches)
    assert torch.equal(history.of("input.0")[0][1], batches[0][0])
