import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback, Checkpoint, ConfigError
from modelzoo_trainer.callbacks import selective_grad
from modelzoo_trainer.callbacks.selective_grad import SelectiveGrad, outlier_mask


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


class Big(nn.Module):
    """A layer of which each column has one large weight."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)
        with torch.no_grad():
            self.layer.weight[torch.arange(4), torch.arange(4)] += 5

    def forward(self, batch):
        return {"loss": (self.head(torch.tanh(self.layer(batch[0]))) - batch[1]).square().mean()}


def test_outliers_are_as_defined():
    weight = torch.tensor([[1.0, 0.0], [-1.0, 1.0], [9.0, -1.0], [1.0, 0.0]])
    spread = [weight[:, column].abs().std().item() for column in (0, 1)]
    expected = [[abs(v) >= 2.25 * s for v, s in zip(row, spread, strict=True)] for row in weight]
    assert outlier_mask(weight).tolist() == [[bool(v) for v in row] for row in expected]
    assert outlier_mask(weight).any()


@pytest.mark.parametrize("shape", [(), (1,), (1, 4)])
def test_one_row_has_no_outliers(shape):
    assert not outlier_mask(torch.ones(shape)).any()


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_the_others_stay_bit_by_bit_under_weight_decay(make, batches, device):
    callback = SelectiveGrad({"param_filter": "layer.weight", "init_method": "outlier"})
    trainer = make(callback, model=Big, optimizer=adamw, device=device)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    mask = outlier_mask(before["layer.weight"])
    trainer.fit(batches)
    after = dict(trainer.model.named_parameters())
    assert mask.any()
    assert not mask.all()
    assert torch.equal(after["layer.weight"][~mask], before["layer.weight"][~mask])
    assert (after["layer.weight"][mask] != before["layer.weight"][mask]).all()
    assert (after["layer.bias"] != before["layer.bias"]).all()
    assert not torch.equal(after["head.weight"], before["head.weight"])


def test_gradients_are_zero_before_clipping(make, batches):
    seen = []

    class Look(Callback):
        def on_after_optimizer_step(self, trainer, model, optimizer):
            seen.append(model.layer.weight.grad.clone())

    callback = SelectiveGrad([{"param_filter": ["layer.*"]}])
    trainer = make(callback, Look(), model=Big)
    mask = outlier_mask(trainer.model.layer.weight)
    trainer.fit(batches)
    assert all(not grad[~mask].any() for grad in seen)
    assert all(grad[mask].any() for grad in seen)


def test_without_a_filter_all_are_chosen(make, batches):
    trainer = make(SelectiveGrad({}), model=Big)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.fit(batches)
    for name, param in trainer.model.named_parameters():
        mask = outlier_mask(before[name])
        assert torch.equal(param[~mask], before[name][~mask])


class Crash(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            raise RuntimeError("crash")


def saving(**more):
    return {"model": Big, "checkpoint": Checkpoint(steps=2), **more}


def test_a_run_that_was_broken_trains_the_same_weights(make, batches, tmp_path, monkeypatch):
    def settings(**more):
        return saving(optimizer=adamw, max_steps=6, **more)

    def chosen():
        return SelectiveGrad({"param_filter": ["layer.*", "head.*"]})

    whole = make(chosen(), model_dir=tmp_path / "whole", **settings())
    whole.fit(batches)
    with pytest.raises(RuntimeError, match="crash"):
        make(chosen(), Crash(5), **settings()).fit(batches)
    resumed = make(chosen(), **settings())
    monkeypatch.setitem(selective_grad._METHODS, "outlier", torch.ones_like)  # not called again
    resumed.fit(batches)
    for first, second in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(first, second)


def test_a_resumed_run_with_another_filter_is_refused(make, batches):
    make(SelectiveGrad({"param_filter": "head.*"}), **saving()).fit(batches)
    again = make(SelectiveGrad({"param_filter": "layer.*"}), **saving(max_steps=6))
    with pytest.raises(ConfigError, match=r"has no mask of shape .* for 'layer\.weight'"):
        again.fit(batches)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "param_filter and init_method, or a list"),
        ("head", "param_filter and init_method, or a list"),
        (["head"], "param_filter and init_method, got 'head'"),
        ({"param_fliter": "a"}, "'param_fliter' is not a valid key. Did you mean 'param_filter'"),
        ({"param_filter": []}, r"param_filter is \[\]; it must be a parameter name or"),
        ({"param_filter": 3}, "param_filter is 3; it must be a parameter name or"),
        ({"init_method": ["outlier"]}, r"init_method is \['outlier'\]. Did you mean"),
        ({"init_method": "outlayer"}, "init_method is 'outlayer'. Did you mean 'outlier'"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        SelectiveGrad(given)


def test_a_filter_that_fits_nothing_is_refused(make):
    with pytest.raises(
        ConfigError, match=r"'head\.wieght' matches no parameter. Did you mean 'head"
    ):
        make(SelectiveGrad({"param_filter": "head.wieght"}))


class Table(nn.Module):
    """Look up some rows, one of them twice; two weights of the table are large."""

    def __init__(self, is_sparse):
        super().__init__()
        self.table = nn.Embedding(8, 4, sparse=is_sparse)
        with torch.no_grad():
            self.table.weight.copy_((torch.arange(8) % 2).unsqueeze(1).expand(8, 4))
            self.table.weight[[1, 2], [0, 3]] = 9

    def forward(self, batch):
        rows = self.table(torch.tensor([1, 2, 1, 3]))
        return {"loss": (rows - batch[0][:4]).square().mean()}


def test_a_sparse_gradient_trains_the_same_weights(make, batches, tmp_path):
    models = []
    for is_sparse in (True, False):
        callback = SelectiveGrad({"param_filter": "table.weight"})
        folder = tmp_path / str(is_sparse)
        trainer = make(callback, model=lambda kind=is_sparse: Table(kind), model_dir=folder)
        before = trainer.model.table.weight.detach().clone()
        trainer.fit(batches)
        models.append(trainer.model.table.weight.detach())
    changed = (models[0] != before).nonzero().tolist()
    assert changed == [[1, 0], [2, 3]]
    assert torch.allclose(*models)


class Unfreeze(Callback):
    """Train the layer from the third step on, in a parameter of its own."""

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if trainer.global_step == 2 and not model.layer.weight.requires_grad:
            model.layer.weight = nn.Parameter(model.layer.weight.detach().clone())
            trainer.optimizer.param_groups[0]["params"][0] = model.layer.weight


def test_a_parameter_that_is_unfrozen_later_is_selected_then(make, batches):
    class Frozen(Big):
        def __init__(self):
            super().__init__()
            self.layer.weight.requires_grad_(False)

    callback = SelectiveGrad({"param_filter": "*.weight"})
    trainer = make(callback, Unfreeze(), model=Frozen)
    before = trainer.model.layer.weight.detach().clone()
    mask = outlier_mask(before)
    trainer.fit(batches)
    after = trainer.model.layer.weight
    assert torch.equal(after[~mask], before[~mask])
    assert (after[mask] != before[mask]).all()
