"""The exponential moving average of the weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from modelzoo_trainer import Callback, Checkpoint, MixedPrecision, TrainingLoop, checkpointing
from modelzoo_trainer.callbacks import CheckLoss, SaveBest
from modelzoo_trainer.callbacks.model_ema import ModelEma, WeightAverage
from modelzoo_trainer.errors import ConfigError, StopTraining


class Steps(Callback):
    """Record the weights before the first step and after each step."""

    def __init__(self):
        self.weights = []

    def on_train_start(self, trainer, model, train_dataloader, loop, loop_idx):
        if not self.weights:
            self.note(model)

    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.should_run_optimizer_step:
            self.note(model)

    def note(self, model):
        self.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})


def by_hand(weights, decay):
    """Return the average of the weights in `Steps`, in float64."""
    first, *others = weights
    average = {name: value.double() for name, value in first.items()}
    for num, current in enumerate(others):
        factor = decay(num)
        for name, value in current.items():
            average[name] = factor * average[name] + (1 - factor) * value.double()
    return average


def averages(ema):
    return {name: value.clone() for name, value in ema.average.state_dict()["average"].items()}


def check_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-7)


# ---- the average


def test_one_update_from_zero_to_one_gives_a_tenth():
    model = nn.Linear(2, 1)
    nn.init.zeros_(model.weight)
    average = WeightAverage(model, 0.9)
    nn.init.ones_(model.weight)
    average.update()
    torch.testing.assert_close(average.state_dict()["average"]["weight"], torch.full((1, 2), 0.1))
    assert average.num_updates == 1


@pytest.mark.parametrize("launches_cost", [False, True])
def test_an_update_that_a_flag_takes_back_leaves_the_bits(net, launches_cost):
    model = net()
    average = WeightAverage(model, 0.9, launches_cost=launches_cost)
    before = {name: value.clone() for name, value in average.state_dict()["average"].items()}
    for param in model.parameters():
        nn.init.ones_(param)
    average.update(torch.tensor(False))
    found = average.state_dict()["average"]
    assert all(torch.equal(found[name], value) for name, value in before.items())
    assert average.num_updates == 0
    average.update(torch.tensor(True))
    torch.testing.assert_close(found["head.bias"], 0.9 * before["head.bias"] + 0.1)


def test_set_begins_again():
    model = nn.Linear(2, 1)
    average = WeightAverage(model, 0.9)
    nn.init.ones_(model.weight)
    average.update()
    average.set()
    assert torch.equal(average.state_dict()["average"]["weight"], torch.ones(1, 2))
    assert average.num_updates == 0


def test_steps_that_a_loss_scaler_skips_do_not_count(make, batches):
    ema = ModelEma(0.5)

    class Overflow(Callback):
        def on_after_backward(self, trainer, model, outputs):
            if trainer.data.num_batches == 1:
                model.head.weight.grad.fill_(float("inf"))

    trainer = make(Overflow(), ema, precision=MixedPrecision(enabled=False))
    trainer.precision.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    trainer.fit(batches)
    assert int(ema.average.num_updates) == 3


@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_it_follows_the_formula_step_by_step(make, batches, device, accumulate):
    steps, ema = Steps(), ModelEma(0.8)
    loop = TrainingLoop(max_steps=4, grad_accum_steps=accumulate)
    make(steps, ema, device=device, loop=loop).fit(batches)
    assert len(steps.weights) == 5
    assert ema.average.num_updates == 4
    check_close(averages(ema), by_hand(steps.weights, lambda num: 0.8))


@pytest.mark.parametrize("counts_on_device", [False, True])
@pytest.mark.parametrize("launches_cost", [False, True])
def test_with_a_warm_up_the_decay_rises(net, counts_on_device, launches_cost):
    model, steps = net(), Steps()
    generator = torch.Generator().manual_seed(1)
    average = WeightAverage(model, 0.25, warms_up=True, launches_cost=launches_cost)
    steps.note(model)
    for _ in range(6):
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn(param.shape, generator=generator))
        steps.note(model)
        average.update(counts_on_device=counts_on_device)
    expected = by_hand(steps.weights, lambda num: min(0.25, (1 + num) / (10 + num)))
    check_close(average.state_dict()["average"], expected)
    assert int(average.num_updates) == 6


def test_a_second_fit_continues(make, batches):
    steps, ema = Steps(), ModelEma(0.8)
    trainer = make(steps, ema, loop=TrainingLoop(num_steps=2))
    trainer.fit(batches)
    trainer.fit(batches)
    check_close(averages(ema), by_hand(steps.weights, lambda num: 0.8))


def test_half_types_are_averaged_in_float32(make, batches, net):
    class Half(net):
        def __init__(self):
            super().__init__()
            self.to(torch.bfloat16)

        def forward(self, batch):
            return super().forward(tuple(part.to(torch.bfloat16) for part in batch))

    steps, ema = Steps(), ModelEma(0.99)
    make(steps, ema, model=Half).fit(batches, batches[:1])
    assert {value.dtype for value in averages(ema).values()} == {torch.float32}
    check_close(averages(ema), by_hand(steps.weights, lambda num: 0.99))


def test_the_dtype_can_be_chosen(make, batches):
    ema = ModelEma(dtype="float64")
    make(ema).fit(batches)
    assert {value.dtype for value in averages(ema).values()} == {torch.float64}


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)
        self.register_buffer("table", torch.ones(3), persistent=False)

    def forward(self, batch):
        hidden, target = batch
        return ((self.head(self.norm(hidden)) - target) ** 2).mean()


def test_buffers_are_averaged_if_they_are_floats_and_part_of_the_state(make, batches):
    seen = []

    class Means(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            seen.append(model.norm.running_mean.double())

    ema = ModelEma(0.8)
    trainer = make(ema, Means(), model=Normed)
    trainer.fit(batches)
    found, expected = averages(ema), torch.zeros(4, dtype=torch.float64)
    for mean in seen:
        expected = 0.8 * expected + 0.2 * mean
    assert {"norm.running_mean", "norm.running_var"} <= found.keys()
    assert not {"norm.num_batches_tracked", "table"} & found.keys()
    torch.testing.assert_close(found["norm.running_mean"].double(), expected)
    with ema.swap():
        assert trainer.model.norm.num_batches_tracked == 4
        assert torch.equal(trainer.model.norm.running_mean, found["norm.running_mean"])


def test_buffers_can_be_left_alone(make, batches):
    ema = ModelEma(0.8, average_buffers=False)
    make(ema, model=Normed).fit(batches)
    assert averages(ema).keys() == {"norm.weight", "norm.bias", "head.weight", "head.bias"}


def test_what_is_frozen_has_no_average_until_it_is_trained(make, batches):
    ema = ModelEma(0.8)
    trainer = make(ema, loop=TrainingLoop(num_steps=2))
    frozen = trainer.model.layers[0].weight.requires_grad_(False)
    trainer.fit(batches)
    assert "layers.0.weight" not in averages(ema)
    before = frozen.detach().clone()
    frozen.requires_grad_(True)
    steps = Steps()
    trainer.add_callback(steps)
    trainer.fit(batches)
    expected = by_hand(steps.weights, lambda num: 0.8)["layers.0.weight"]
    torch.testing.assert_close(averages(ema)["layers.0.weight"].double(), expected)
    assert not torch.equal(before, frozen)


def test_lazy_parameters_are_averaged_once_they_have_values(make, batches):
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.LazyLinear(1)

        def forward(self, batch):
            return ((self.head(batch[0]) - batch[1]) ** 2).mean()

    ema = ModelEma(0.8)
    make(ema, model=Lazy).fit(batches)
    assert averages(ema)["head.weight"].shape == (1, 4)


# ---- skipped steps


@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("first", [True, False])
def test_a_step_that_is_skipped_does_not_count(make, batches, device, first):
    batches = [(inputs.clone(), target) for inputs, target in batches]
    batches[1][0][0] = float("nan")
    kept, ema = [], ModelEma(0.5, warmup=True)

    class Note(Callback):
        def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
            kept.append((int(ema.average.num_updates), averages(ema)))

    both = [ema, CheckLoss("skip")] if first else [CheckLoss("skip"), ema]
    trainer = make(*both, Note(), model=Normed, device=device)
    trainer.fit(batches)
    assert all(value.isfinite().all() for value in averages(ema).values())
    assert trainer.backend.counters().get("host_reads", 0) == 0
    assert [num for num, _ in kept] == [1, 1, 2, 3]
    assert all(torch.equal(value, kept[0][1][name]) for name, value in kept[1][1].items())
    assert not torch.equal(kept[1][1]["head.weight"], kept[2][1]["head.weight"])


# ---- validation


def test_the_average_is_validated_under_its_own_names(make, batches, history):
    ema = ModelEma(0.8)
    trainer = make(ema)
    trainer.fit(batches, batches[:2])
    [(_, own)], [(step, loss)] = history.of("validate_0/loss"), history.of("ema/validate_0/loss")
    other = copy.deepcopy(trainer.model)
    other.load_state_dict(averages(ema))
    with torch.no_grad():
        expected = sum(other(batch)["loss"] for batch in batches[:2]) / 2
    assert step == 4
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert loss != own


def test_the_weights_are_the_same_with_and_without(make, batches, tmp_path):
    loop = TrainingLoop(max_steps=4, eval_frequency=2)
    plain = make(loop=loop, model_dir=tmp_path / "plain")
    plain.fit(batches, batches[:2])
    watched = make(ModelEma(0.5), loop=TrainingLoop(max_steps=4, eval_frequency=2))
    watched.fit(batches, batches[:2])
    for before, after in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(before, after)


def test_every_nth_validation_and_the_last_can_be_enough(make, batches, history):
    loop = TrainingLoop(max_steps=5, eval_frequency=1)
    make(ModelEma(every_n_vals=2, name_scope="mean"), loop=loop).fit(batches, batches[:2])
    assert [step for step, _ in history.of("mean/validate_0/loss")] == [2, 4, 5]


def test_without_validation_there_is_none(make, batches, history):
    make(ModelEma(validate=False)).fit(batches, batches[:2])
    make(ModelEma()).fit(batches, ckpt_path=None)
    assert not history.of("ema/validate_0/loss")


def test_a_validation_before_any_training_has_no_average(make, batches, history):
    make(ModelEma()).validate_all(batches[:2])
    assert history.of("validate_0/loss")
    assert not history.of("ema/validate_0/loss")


def test_the_weights_are_restored_when_a_validation_fails(make, batches):
    class Fail(Callback):
        def on_validate_batch_start(self, trainer, model, batch, batch_idx):
            if trainer.name_scope_path.startswith("ema"):
                self.inside = model.head.weight.detach().clone()
                raise ValueError("no")

    steps, fail, ema = Steps(), Fail(), ModelEma(0.5)
    trainer = make(steps, ema, fail)
    with pytest.raises(ValueError, match="no"):
        trainer.fit(batches, batches[:2])
    assert torch.equal(trainer.model.head.weight, steps.weights[-1]["head.weight"])
    assert torch.equal(fail.inside, averages(ema)["head.weight"])


def test_a_stop_within_its_validation_ends_the_run_in_order(make, batches):
    class Stop(Callback):
        def on_validate_batch_end(self, trainer, model, outputs, batch, batch_idx):
            if trainer.name_scope_path.startswith("ema"):
                raise StopTraining("enough")

    trainer = make(ModelEma(), Stop(), loop=TrainingLoop(max_steps=4, eval_frequency=2))
    trainer.fit(batches, batches[:2])
    assert trainer.global_step == 2


def test_the_best_average_can_be_kept(make, batches):
    best = SaveBest("ema/validate_0/loss")
    loop = TrainingLoop(max_steps=4, eval_frequency=2)
    trainer = make(ModelEma(0.5), best, loop=loop)
    trainer.fit(batches, batches[:2])
    [entry] = best.best
    state = checkpointing.load(trainer.model_dir / entry["name"])
    assert state["callbacks"]["ModelEma"]["average"].keys() == state["model"].keys()


# ---- swap


def test_inside_swap_the_model_has_the_average_and_may_not_update_it(make, batches):
    ema = ModelEma(0.5)
    trainer = make(ema)
    trainer.fit(batches)
    own = trainer.model.head.weight.detach().clone()
    with ema.swap():
        assert torch.equal(trainer.model.head.weight, averages(ema)["head.weight"])
        with pytest.raises(RuntimeError, match=r"update\(\) was called inside .*swap"):
            ema.update()
        with pytest.raises(RuntimeError, match=r"swap\(\) is already active"), ema.swap():
            pass
    assert torch.equal(trainer.model.head.weight, own)
    ema.set()
    assert torch.equal(averages(ema)["head.weight"], own)


def test_before_a_fit_there_is_no_average(make):
    ema = ModelEma()
    make(ema)
    with pytest.raises(RuntimeError, match="no averaged weights yet"), ema.swap():
        pass


# ---- checkpoints


class Crash(Exception):
    pass


class CrashAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_boundary(self, trainer):
        if trainer.global_step == self.step:
            raise Crash


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.slow_cases(every=4)
def test_a_run_that_resumes_has_the_average_of_the_unbroken_one(
    make, batches, tmp_path, warmup, policy
):
    def run(folder, *others):
        ema = ModelEma(0.7, warmup=warmup)
        settings = {"loop": TrainingLoop(max_steps=6), "checkpoint": Checkpoint(steps=2)}
        check = CheckLoss(policy)
        return ema, make(check, ema, *others, model=Normed, model_dir=folder, **settings)

    unbroken, trainer = run(tmp_path / "unbroken")
    trainer.fit(batches)
    _, broken = run(tmp_path / "broken", CrashAt(5))
    with pytest.raises(Crash):
        broken.fit(batches)
    broken.close()
    resumed, trainer = run(tmp_path / "broken")
    trainer.fit(batches)
    expected, found = averages(unbroken), averages(resumed)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert int(resumed.average.num_updates) == 6


def test_validating_a_checkpoint_validates_its_average(make, batches, history):
    trainer = make(ModelEma(0.5), checkpoint=Checkpoint(steps=4))
    trainer.fit(batches, batches[:2])
    trainer.close()
    fresh = make(ModelEma(0.5), checkpoint=Checkpoint(steps=4))
    fresh.validate_all(batches[:2])
    first, second = (value for _, value in history.of("ema/validate_0/loss"))
    assert first == second


def test_other_weights_without_an_average_begin_a_new_one(make, batches, tmp_path):
    other = make(model_dir=tmp_path / "other", seed=5)
    other.fit(batches)
    path = other.save_checkpoint()
    ema, steps = ModelEma(0.5), Steps()
    trainer = make(ema, loop=TrainingLoop(num_steps=2))
    trainer.fit(batches)
    trainer.add_callback(steps)
    trainer.fit(batches, ckpt_path=path)
    check_close(averages(ema), by_hand(steps.weights, lambda num: 0.5))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decay": 1.0}, r"decay: expected .*\[0, 1\).*, got 1.0"),
        ({"decay": -0.1}, r"decay: expected .*, got -0.1"),
        ({"decay": True}, r"decay: expected .*, got true"),
        ({"dtype": "float8"}, r"dtype: expected .*float32.*float64.*bfloat16.*, got 'float8'"),
        ({"every_n_vals": 0}, r"every_n_vals: expected .*> 0.*, got 0"),
        ({"name_scope": ""}, "name_scope: expected a prefix such as 'ema', got ''"),
        ({"name_scope": "ema/"}, "name_scope: expected a prefix such as 'ema', got 'ema/'"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ModelEma(**arguments)


def test_two_that_validate_under_one_name_are_refused(make):
    with pytest.raises(ConfigError, match=r"Two ModelEma .* name_scope 'ema'"):
        make(ModelEma(0.9), ModelEma(0.99))
    make(ModelEma(0.9), ModelEma(0.99, name_scope="slow"))
    make(ModelEma(0.9), ModelEma(0.99, validate=False))
