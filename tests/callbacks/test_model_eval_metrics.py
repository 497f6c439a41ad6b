from types import SimpleNamespace

import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback
from modelzoo_trainer.callbacks import ModelEvalMetrics
from modelzoo_trainer.zoo.models.decoder_names import Gpt2
from tests.distributed.perplexities import SETTINGS, direct, rows


def test_an_output_without_dimensions_is_averaged_by_samples(make, history):
    ones = (torch.zeros(6, 4), torch.ones(6, 1))
    zeros = (torch.zeros(2, 4), torch.zeros(2, 1))
    make(ModelEvalMetrics()).validate([ones, zeros])
    assert history.of("validate_0/accuracy") == [(0, 0.75)]
    assert history.of("validate_0/scores") == []
    assert len(history.of("validate_0/loss")) == 1


def test_items_weigh_where_the_model_counts_them(make, history, net):
    class Counting(net):
        def forward(self, batch):
            return super().forward(batch) | {"num_items": batch[1].sum()}

    threes = (torch.zeros(1, 4), torch.full((1, 1), 3.0))
    mixed = (torch.zeros(2, 4), torch.tensor([[1.0], [0.0]]))
    make(ModelEvalMetrics(), model=Counting).validate([threes, mixed])
    assert history.of("validate_0/accuracy") == [(0, (3 * 1.0 + 1 * 0.5) / 4)]
    assert history.of("validate_0/num_items") == []


@pytest.mark.parametrize("scaling", [{}, {"loss_scaling": "batch_size", "loss_weight": 0.3}])
def test_perplexity_and_accuracy_of_a_decoder_are_those_of_all_tokens(make, history, scaling):
    data = rows(7)
    batches = [{name: part[cut] for name, part in data.items()} for cut in (slice(3), slice(3, 7))]

    trainer = make(ModelEvalMetrics(), model=lambda: Gpt2(**SETTINGS, **scaling))
    trainer.validate(batches)

    accuracy, perplexity = direct(trainer.model, data)
    [(_, found)] = history.of("validate_0/lm_perplexity")
    assert found == pytest.approx(perplexity, rel=1e-6)
    [(_, found)] = history.of("validate_0/accuracy")
    assert found == pytest.approx(accuracy, rel=1e-6)


def test_without_a_known_cross_entropy_there_is_no_perplexity(make, history):
    model = Gpt2(**SETTINGS, loss_scaling="batch_size", loss_weight=0.0)
    make(ModelEvalMetrics(), model=model).validate([rows(2)])
    assert history.of("validate_0/lm_perplexity") == []
    assert len(history.of("validate_0/accuracy")) == 1


def test_a_second_validation_begins_again(make, history):
    trainer = make(ModelEvalMetrics())
    trainer.validate([(torch.zeros(2, 4), torch.ones(2, 1))])
    trainer.validate([(torch.zeros(2, 4), torch.zeros(2, 1))])
    values = [v for name in ("validate_0", "validate_1") for _, v in history.of(f"{name}/accuracy")]
    assert values == [1.0, 0.0]


def test_training_logs_none(make, batches, history):
    make(ModelEvalMetrics()).fit(batches)
    assert history.of("accuracy") == []


class Highest(nn.Module):
    """A metric in the style of torchmetrics."""

    def __init__(self):
        super().__init__()
        self.reset()

    def reset(self):
        self.value = torch.tensor(-1.0)

    def update(self, values):
        self.value = torch.maximum(self.value, values.detach().max())

    def compute(self):
        return self.value


class Both(Highest):
    def compute(self):
        return {"top": self.value, "twice": 2 * self.value}


@pytest.fixture
def measured(net):
    class Measured(net):
        def __init__(self):
            super().__init__()
            self.highest, self.both = Highest(), Both()

        def forward(self, batch):
            self.highest.update(batch[1])
            self.both.update(batch[1])
            return super().forward(batch)

    return Measured


def test_a_metric_module_is_computed_for_the_validation_alone(make, history, measured):
    trainer = make(ModelEvalMetrics(), model=measured, max_steps=1)
    trainer.fit(
        [(torch.zeros(2, 4), torch.full((2, 1), 9.0))],
        [
            (torch.zeros(2, 4), torch.full((2, 1), 3.0)),
            (torch.zeros(2, 4), torch.full((2, 1), 2.0)),
        ],
    )
    assert history.of("validate_0/highest") == [(1, 3.0)]
    assert history.of("validate_0/both/top") == [(1, 3.0)]
    assert history.of("validate_0/both/twice") == [(1, 6.0)]
    assert trainer.model.highest.value == -1


class StopAfter(Callback):
    def __init__(self, num):
        self.num = num

    def on_validate_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if batch_idx + 1 == self.num:
            trainer.early_exit.stop("enough")


@pytest.mark.parametrize(("num", "logged"), [(1, 0), (2, 1)])
def test_a_validation_that_was_cut_short_logs_none(make, history, measured, num, logged):
    trainer = make(StopAfter(num), ModelEvalMetrics(), model=measured)
    trainer.validate([(torch.zeros(2, 4), torch.ones(2, 1)) for _ in range(2)])
    assert len(history.of("validate_0/accuracy")) == logged
    assert len(history.of("validate_0/highest")) == logged
    assert trainer.model.highest.value == -1


def test_buffers_of_a_metric_stay_where_others_look_for_them_after_a_padding_batch():
    class Total(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def compute(self):
            return self.total

        def reset(self) -> None:
            self.total.zero_()

    metric, means = Total(), ModelEvalMetrics()
    model, table = nn.Sequential(metric), metric._buffers
    trainer = SimpleNamespace(model=model, is_padding=True)
    means.on_validate_step_start(trainer, model, None)
    metric.total += 7
    means.on_validate_step_end(trainer, model, {}, None)
    assert metric._buffers is table
    assert metric.total == table["total"] == 0
