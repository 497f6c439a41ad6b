"""Synchronized batch normalization with one process, and with several simulated ones."""

from __future__ import annotations

from torch import nn

from modelzoo_trainer.zoo.callbacks.move_modules import ConvertSyncBatchNorm
from modelzoo_trainer.zoo.callbacks.sync_batch_norm import SharedBatchNorm


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)

    def forward(self, batch):
        return ((self.head(self.norm(batch[0])) - batch[1]) ** 2).mean()


class OfTwo(ConvertSyncBatchNorm):
    """Simulate a second process that has no data."""

    def pre_setup(self, trainer):
        comm = trainer.backend.comm
        comm.data_shard = (0, 2)
        try:
            super().pre_setup(trainer)
        finally:
            comm.data_shard = (0, 1)


def test_one_process_leaves_the_model_as_it_is(make, batches):
    trainer = make(ConvertSyncBatchNorm(), model=Net)
    trainer.fit(batches)
    assert type(trainer.model.norm) is nn.BatchNorm1d


def test_of_several_each_has_shared_layers(make, batches):
    for model in (Net, Net()):
        trainer = make(OfTwo(), model=model)
        trainer.fit(batches, batches[:1])
        assert type(trainer.model.norm) is SharedBatchNorm
