"""Sparse training with the trainer."""

import logging
from itertools import pairwise

import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback, Checkpoint, MixedPrecision, TrainingLoop
from modelzoo_trainer.callbacks import CheckLoss
from modelzoo_trainer.core.sparsity import Sparsity
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim.sparsity import GMP, SET, RigL, Static

DYNAMIC = {
    "gmp": lambda: GMP({"type": "cubic", "final": 0.75, "steps": 5}),
    "set": lambda: SET(0.5, update={"freq": 2}),
    "rigl": lambda: RigL(0.5, update={"freq": 2}),
}
ALL = {"static": lambda: Static(0.5)} | DYNAMIC


def masks(trainer):
    """Return which weights of each sparse parameter are nonzero."""
    return {one.name: ~one.pruned for one in trainer.get_callback(Sparsity).params}


class Watch(Callback):
    """Record weights, gradients, masks and the optimizer state after each step."""

    def __init__(self):
        self.masks = []

    def on_after_optimizer_step(self, trainer, model, optimizer):
        found = masks(trainer)
        self.masks.append({name: mask.clone() for name, mask in found.items()})
        params = dict(model.named_parameters())
        for name, mask in found.items():
            assert (params[name].detach()[~mask] == 0).all()
            assert (params[name].grad[~mask] == 0).all()
            for value in optimizer.state[params[name]].values():
                if value.shape == mask.shape:
                    assert (value[~mask] == 0).all()


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5)


def momentum(model):
    return torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    )


@pytest.mark.parametrize("optimizer", [adamw, momentum])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.slow_cases(every=4)
def test_what_is_masked_stays_zero_in_weights_gradients_and_state(make, batches, name, optimizer):
    watch = Watch()
    trainer = make(ALL[name](), watch, optimizer=optimizer)
    trainer.fit(batches)
    assert len(watch.masks) == 6
    share = 0.75 if name == "gmp" else 0.5
    assert (trainer.model.body.weight == 0).sum() >= share * 96
    assert (~watch.masks[-1]["body.weight"]).sum() == share * 96
    assert (~watch.masks[-1]["head.weight"]).sum() == share * 12
    assert (trainer.model.body.bias != 0).all()


def test_an_optimizer_that_mixes_weights_leaves_the_masked_ones_at_zero(make, batches):
    class Mixing(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for param in group["params"]:
                    param.data.add_(1)

    trainer = make(0.5, optimizer=lambda model: Mixing(model.parameters(), lr=0.1))
    trainer.fit(batches)
    assert (trainer.model.body.weight == 0).sum() == 48


@pytest.mark.parametrize("name", DYNAMIC)
def test_masks_change_at_the_updates_alone(make, batches, name):
    watch = Watch()
    make(DYNAMIC[name](), watch).fit(batches)
    weight = [found["body.weight"] for found in watch.masks]
    changed = [not torch.equal(one, other) for one, other in pairwise(weight)]
    every = name == "gmp"
    assert changed == [every, True, every, True, every]


def test_the_first_step_trains_what_rigl_grows(make, batches):
    class Grown(Callback):
        def on_before_optimizer_step(self, trainer, model, optimizer):
            if trainer.global_step == 2:
                self.grad = model.body.weight.grad.clone()
                self.weight = model.body.weight.detach().clone()

        def on_after_optimizer_step(self, trainer, model, optimizer):
            if trainer.global_step == 2:
                self.after = model.body.weight.detach().clone()

    watch, grown = Watch(), Grown()
    make(RigL(0.5, update={"steps": [2]}), watch, grown, optimizer=momentum).fit(batches)
    new = watch.masks[2]["body.weight"] & ~watch.masks[1]["body.weight"]
    assert 0 < new.sum() <= 14  # 0.3 of 48 are dropped, and some come back
    assert (grown.weight[new] == 0).all()
    assert torch.allclose(grown.after[new], -0.1 * 1.9 * grown.grad[new], atol=1e-7)


def test_rigl_grows_where_the_gradient_of_the_whole_window_is_greatest(make, batches, net):
    class Dense(Callback):
        """Compute the gradient of an accumulation window without a mask."""

        def on_train_step_start(self, trainer, model, batch):
            if trainer.global_step == 1:
                loss = model(batch)
                (grad,) = torch.autograd.grad(loss, [model.body.weight])
                self.grad = getattr(self, "grad", 0) + grad

    dense, watch = Dense(), Watch()
    loop = TrainingLoop(max_steps=2, grad_accum_steps=2)
    algorithm = RigL(0.5, update={"steps": [1]}, drop_fraction=0.25, param_filter="body.weight")
    make(algorithm, dense, watch, loop=loop).fit(batches)
    before, after = (found["body.weight"] for found in watch.masks)
    candidates = dense.grad.abs().masked_fill(before & after, -1).flatten()
    grown = (after & ~before).flatten().nonzero().flatten()
    assert 0 < len(grown) <= 12
    assert set(grown.tolist()) <= set(candidates.topk(12).indices.tolist())


def test_gradients_are_masked_before_they_are_clipped(make, batches):
    class Norms(Callback):
        def __init__(self):
            self.norms = []

        def on_after_optimizer_step(self, trainer, model, optimizer):
            grads = [param.grad.flatten() for param in model.parameters()]
            self.norms.append(torch.cat(grads).norm().item())

    norms = Norms()
    make(0.9, norms, precision=MixedPrecision(enabled=False, max_gradient_norm=0.01)).fit(batches)
    assert norms.norms == pytest.approx([0.01] * 6, rel=1e-3)


class Spoil(Callback):
    """Make a gradient infinite in a step."""

    def on_after_backward(self, trainer, model, outputs):
        if trainer.global_step == 2:
            model.body.weight.grad[0, 0] = torch.inf


def test_an_update_of_gradients_that_are_not_finite_is_skipped(make, batches):
    watch = Watch()
    guard = CheckLoss("skip")
    make(RigL(0.5, update={"freq": 2}), Spoil(), guard, watch, max_steps=5).fit(batches)
    before, spoilt, _, after = watch.masks[1:5]
    assert all(torch.equal(before[name], spoilt[name]) for name in before)
    assert any(not torch.equal(after[name], spoilt[name]) for name in after)
    assert [mask.sum().item() for mask in after.values()] == [48, 6]


def test_a_scheduled_update_holds_in_a_step_that_is_skipped(make, batches):
    class Weights(Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            self.before = model.body.weight.detach().clone()

        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if trainer.global_step == 3:  # after the step that began at 2
                mask = masks(trainer)["body.weight"]
                assert mask.sum() == 24
                assert torch.equal(model.body.weight.detach(), self.before * mask)
                self.is_seen = True

    weights = Weights()
    algorithm = GMP({"type": "cycling", "values": [0.5, 0.75]}, update={"steps": [2]})
    make(algorithm, Spoil(), CheckLoss("skip"), weights, max_steps=4).fit(batches)
    assert weights.is_seen


def test_a_roll_back_takes_masks_back_as_well(make, batches):
    class SpoilOnce(Callback):
        is_done = False

        def on_after_backward(self, trainer, model, outputs):
            if trainer.global_step == 4 and not self.is_done:
                self.is_done = True
                model.body.weight.grad[0, 0] = torch.inf

        def on_after_optimizer_step(self, trainer, model, optimizer):
            self.masks.append(masks(trainer)["body.weight"].clone())

    spoil = SpoilOnce()
    spoil.masks = []
    algorithm = SET(0.5, update={"freq": 1})
    files = Checkpoint(steps=3)
    make(algorithm, spoil, CheckLoss("rollback"), checkpoint=files).fit(batches)
    assert len(spoil.masks) == 8  # steps 0 to 4, and from 3 on again
    assert torch.equal(spoil.masks[5], spoil.masks[3])
    assert not torch.equal(spoil.masks[5], spoil.masks[4])


def test_a_schedule_that_leaves_no_weight_is_reported_once(make, batches, caplog):
    make(GMP({"type": "linear", "init": 0, "slope": 0.5})).fit(batches)
    told = [record.message for record in caplog.records if "become zero" in record.message]
    assert told == ["sparsity: at global_step 2 all weights of 'body.weight' become zero."]


def test_a_weight_that_comes_back_keeps_its_step_size(make, batches):
    trainer = make(
        SET(0.5, update={"freq": 1}),
        optimizer=lambda model: torch.optim.Rprop(model.parameters(), lr=0.01),
        max_steps=3,
    )
    trainer.fit(batches)
    assert trainer.optimizer.state[trainer.model.body.weight]["step_size"].min() > 1e-3


# ---- which parameters


def test_biases_and_embeddings_are_dense_by_default(make):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 8)
            self.body = nn.Linear(8, 10)
            self.tied = nn.Linear(8, 10, bias=False)
            self.tied.weight = self.table.weight
            self.frozen = nn.Linear(8, 8).requires_grad_(False)
            self.stacked_bias = nn.Parameter(torch.ones(3, 8))

    assert list(masks(make(0.5, model=Words))) == ["body.weight"]


def test_a_filter_is_taken_at_its_word(make):
    assert list(masks(make(Static(0.5, param_filter=["*.bias", "head.*"])))) == [
        "body.bias",
        "head.weight",
        "head.bias",
    ]


def test_each_of_several_algorithms_has_its_parameters(make, batches):
    trainer = make(
        [
            {"sparsity": 0.25, "param_filter": "body.weight"},
            {
                "algorithm": "rigl",
                "sparsity": 0.75,
                "update": {"freq": 2},
                "param_filter": "head.*t",
            },
        ]
    )
    trainer.fit(batches)
    found = masks(trainer)
    assert [(~found[name]).sum().item() for name in ("body.weight", "head.weight")] == [24, 9]


@pytest.mark.parametrize(
    ("sparsity", "message"),
    [
        (
            Static(0.5, param_filter="bdy.weight"),
            r"matches no parameter. Did you mean 'body.weight'",
        ),
        ([0.5, 0.5], "'body.weight' is matched by both entry 0 and entry 1"),
        (RigL(0.5, update={"freq": 1}, balance_in_groups=5), "cannot be divided into 5 groups"),
        (
            Static(0.5, param_filter="*.x"),
            r"matches no parameter\. Known: body\.weight, head\.weigh",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused(make, sparsity, message):
    with pytest.raises(ConfigError, match=message):
        make(sparsity)


def test_the_second_name_of_a_tied_weight_is_led_to_the_first(make):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    with pytest.raises(ConfigError, match=r"Use '0\.weight': '1\.weight' is another name"):
        make(Static(0.5, param_filter="1.weight"), model=model)


def test_of_many_names_some_are_reported(make):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
    with pytest.raises(
        ConfigError, match=r"Names of parameters: 0\.weight, .*, 11\.weight, \.\.\.\n"
    ):
        make(Static(0.5, param_filter="*dense_layer.weight"), model=model)


def test_a_parameter_without_a_shape_stays_dense_and_is_reported(make, caplog):
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    trainer = make(0.5, model=model, optimizer=None)
    assert list(masks(trainer)) == ["1.weight"]
    assert "no shape yet, so they stay dense: '0.weight', '0.bias'." in caplog.text


def test_a_glob_that_means_nothing_among_others_is_reported(make, caplog):
    with caplog.at_level(logging.WARNING):
        make(Static(0.5, param_filter=["body.weight", "tail.*"]))
    assert "'tail.*' matches no parameter" in caplog.text


def test_gradients_in_a_sparse_layout_are_refused(make):
    model = nn.Sequential(nn.Embedding(4, 4, sparse=True))
    with pytest.raises(ConfigError, match=r"'0\.weight' has gradients in a sparse layout"):
        make(Static(0.5, param_filter="*"), model=model, optimizer=None)


def test_a_parameter_that_was_exchanged_is_masked_or_refused(make, batches):
    trainer = make(0.5, optimizer=None)
    trainer.model.body.weight = nn.Parameter(torch.ones(12, 8))
    sparsity = trainer.get_callback(Sparsity)
    sparsity.on_train_start(trainer, trainer.model, batches, None, 0)
    assert trainer.model.body.weight.sum() == 48
    trainer.model.body.weight = nn.Parameter(torch.ones(3, 8))
    with pytest.raises(ConfigError, match=r"'body.weight' was replaced"):
        sparsity.on_train_start(trainer, trainer.model, batches, None, 0)


# ---- cost and devices


def test_without_sparsity_no_hook_of_a_step_is_called():
    sparsity = Sparsity(None)
    own = {name for name in vars(Sparsity) if name.startswith("on_")} | {"setup"}
    assert own - sparsity.idle_hooks == {"on_load_checkpoint"}


@pytest.mark.parametrize("device", ["meta", "fake"])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.slow_cases(every=4)
def test_it_runs_without_a_host_read_in_the_step(make, batches, name, device):
    trainer = make(ALL[name](), device=device)
    trainer.fit(batches, batches[:2])
    assert trainer.global_step == 6
    assert trainer.backend.counters().get("host_reads", 0) == 0


@pytest.mark.parametrize("name", DYNAMIC)
def test_the_masks_of_a_device_are_those_of_the_host(make, batches, name, tmp_path):
    found = []
    for device in ("cpu", "fake"):
        trainer = make(DYNAMIC[name](), device=device, model_dir=tmp_path / device)
        trainer.fit(batches)
        found.append(masks(trainer))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_a_model_is_validated_as_it_is_sparse(make, batches, history):
    trainer = make(0.5, optimizer=None)
    trainer.validate(batches[:1])
    assert (trainer.model.body.weight == 0).sum() == 48
    ((_, loss),) = history.of("validate_0/loss")
    assert loss == pytest.approx(trainer.model(batches[0]).item())


class Replace(Callback):
    """Replace a sparse parameter, with other values, before the third step."""

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        if trainer.global_step == 2:
            model.body.weight = nn.Parameter(torch.ones(12, 8))
            params = trainer.optimizer.param_groups[0]["params"]
            params[:] = list(model.parameters())


def test_a_parameter_that_is_replaced_within_a_stage_is_masked(make, batches):
    make(Static(0.5), Replace(), Watch()).fit(batches)
