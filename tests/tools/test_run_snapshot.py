"""What a snapshot of a run puts back."""

from __future__ import annotations

from collections import deque

import torch
from torch import nn

from modelzoo_trainer.tools.checkpoints.compare import compare
from modelzoo_trainer.tools.run_snapshot import RunSnapshot
from tests.doubles import TinyModel, make_trainer, tiny_batches


class Rich(TinyModel):
    """Keeps values of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = self.head.weight
        self.buffers_of_mine = {"a": [torch.ones(2)], "b": (torch.zeros(1), {1, 2})}
        self.queue = deque([1], maxlen=4)
        self.itself = [self.queue]
        self.itself.append(self.itself)


def test_all_kinds_of_values_come_back_in_the_same_objects(tmp_path) -> None:
    with make_trainer(tmp_path, model=Rich, max_steps=2) as trainer:
        model = trainer.model
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        kept = model.buffers_of_mine, model.buffers_of_mine["a"][0], model.queue, model.head.weight
        snapshot = RunSnapshot(trainer)
        trainer.fit(tiny_batches(), ckpt_path=None)
        model.buffers_of_mine["a"][0].add_(3)
        model.buffers_of_mine["a"].append(torch.ones(1))
        model.buffers_of_mine["b"][1].add(3)
        model.buffers_of_mine["c"] = 4
        model.queue.append(2)
        model.added = 5
        model.head = nn.Linear(4, 1)
        random = torch.get_rng_state()
        snapshot.restore()
        assert compare(weights, dict(model.state_dict())) == []
        assert (model.buffers_of_mine, model.buffers_of_mine["a"][0]) == (kept[0], kept[1])
        assert model.queue is kept[2]
        assert model.head.weight is kept[3] is model.tied
        assert model.buffers_of_mine["a"][0].tolist() == [1.0, 1.0]
        assert (len(model.buffers_of_mine["a"]), list(model.buffers_of_mine)) == (1, ["a", "b"])
        assert model.buffers_of_mine["b"][1] == {1, 2}
        assert list(model.queue) == [1]
        assert model.itself[1] is model.itself
        assert not hasattr(model, "added")
        assert not torch.equal(torch.get_rng_state(), random)


def test_the_state_of_the_optimizer_comes_back(tmp_path) -> None:
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.1)

    with make_trainer(tmp_path, optimizer=adam, max_steps=2) as trainer:
        empty = RunSnapshot(trainer)
        trainer.fit(tiny_batches())
        used = RunSnapshot(trainer)
        state = trainer.optimizer.state_dict()
        before = {name: one.clone() for name, one in state["state"][0].items()}
        trainer.optimizer.param_groups[0]["lr"] = 7.0
        for entries in trainer.optimizer.state.values():
            entries["exp_avg"].zero_()
            entries["more"] = 1
        used.restore()
        assert compare(before, trainer.optimizer.state_dict()["state"][0]) == []
        assert trainer.optimizer.param_groups[0]["lr"] == 0.1
        empty.restore()
        assert trainer.optimizer.state_dict()["state"] == {}
