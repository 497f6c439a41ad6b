import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from modelzoo_trainer import Callback, ConfigError, MixedPrecision, TrainingLoop
from modelzoo_trainer.callbacks import ComputeNorm
from modelzoo_trainer.zoo.callbacks.compute_norm_gns import ComputeNormGNS

ALL = ["Linear", "LayerNorm", "Embedding"]


def values(history, name):
    return [value for _, value in history.of(name)]


class OneAtATime(Callback):
    """Compute the gradient of each example of a step separately, before the update."""

    def __init__(self, num_batches=1):
        self.num_batches = num_batches
        self.pending, self.steps = [], []

    def on_train_batch_start(self, trainer, model, batch, batch_idx):
        self.pending.append(batch)
        if len(self.pending) < self.num_batches and not trainer.data.is_last:
            return
        examples = [[part[i : i + 1] for part in b] for b in self.pending for i in range(len(b[0]))]
        self.pending = []
        params = dict(model.named_parameters())
        grads = {name: [] for name in params}
        for example in examples:
            loss = model(tuple(example))["loss"]
            found = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
            for name, param, grad in zip(params, params.values(), found, strict=True):
                grads[name].append(torch.zeros_like(param) if grad is None else grad)
        stacked = {name: torch.stack(each).double().flatten(1) for name, each in grads.items()}
        self.steps.append((len(examples), stacked))

    def per_layer(self, layer, of):
        return [
            sum(of(grads) for name, grads in step.items() if name.rpartition(".")[0] == layer)
            for _, step in self.steps
        ]

    def pegsqnorm(self, layer):
        return self.per_layer(layer, lambda grads: grads.square().sum(1).mean().item())

    def gsqnorm(self, layer):
        return self.per_layer(layer, lambda grads: grads.mean(0).square().sum().item())

    def noise_scale(self):
        """The trace of the sample covariance over the unbiased squared norm of the mean."""
        found = []
        for num, step in self.steps:
            grads = torch.cat(list(step.values()), 1)
            trace = grads.var(0, unbiased=True).sum()
            sqnorm = grads.mean(0).square().sum() - trace / num
            found.append((trace.item(), sqnorm.item(), (trace / sqnorm).item()))
        return found


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, batch):
        inputs, target = batch
        return {"loss": ((self.head(inputs) - target) ** 2).mean()}


def test_a_linear_model_has_the_closed_form(make, batches, history):
    """The gradient of an example is 2 (w x + b - y) (x, 1)."""
    seen = []

    class Closed(Callback):
        def on_train_batch_start(self, trainer, model, batch, batch_idx):
            inputs, target = batch
            with torch.no_grad():
                error = 2 * (model.head(inputs) - target)
            grads = torch.cat([error * inputs, error], 1).double()
            seen.append((grads.square().sum(1).mean().item(), grads.mean(0).square().sum().item()))

    make(Closed(), ComputeNormGNS("Linear"), model=Regression).fit(batches)
    assert values(history, "pegsqnorm/head") == pytest.approx([small for small, _ in seen])
    assert values(history, "gsqnorm/head") == pytest.approx([big for _, big in seen])
    trace = [8 / 7 * (small - big) for small, big in seen]
    sqnorm = [(8 * big - small) / 7 for small, big in seen]
    assert values(history, "gradient_noise_trace") == pytest.approx(trace, rel=1e-4)
    assert values(history, "gradient_sqnorm") == pytest.approx(sqnorm, rel=1e-4, abs=1e-5)


class Words(nn.Module):
    """A model with all kinds of layers; one is called twice, and two share a weight."""

    def __init__(self, shares=False, padding_idx=None, width=4):
        super().__init__()
        self.table = nn.Embedding(6, width, padding_idx=padding_idx)
        self.norm = nn.LayerNorm(width)
        self.grid_norm = nn.LayerNorm((3, width))
        self.twice = nn.Linear(width, width)
        self.once = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, 6, bias=not shares)
        if shares:
            self.out.weight = self.table.weight

    def forward(self, batch):
        ids, target = batch
        hidden = self.table(ids)
        hidden = hidden + self.twice(self.norm(hidden))
        hidden = self.once(self.grid_norm(torch.tanh(self.twice(hidden))))
        loss = nn.functional.cross_entropy(self.out(hidden).transpose(1, 2), target)
        return {"loss": loss}


@pytest.fixture
def texts():
    """Ten batches of four examples of three words."""
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(6, (2, 4, 3), generator=generator).unbind()) for _ in range(10)]


@pytest.mark.parametrize(
    "settings", [{}, {"shares": True}, {"padding_idx": 1}, {"width": 16}], ids=str
)
@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.slow_cases(every=4)
def test_the_norms_are_those_of_examples_taken_one_at_a_time(
    make, texts, history, settings, device
):
    expected = OneAtATime()
    make(expected, ComputeNormGNS(ALL), model=lambda: Words(**settings), device=device).fit(texts)
    shared = {"out"} if settings.get("shares") else set()
    for layer in {"table", "norm", "grid_norm", "twice", "once", "out"} - shared:
        small, big = expected.pegsqnorm(layer), expected.gsqnorm(layer)
        assert values(history, f"pegsqnorm/{layer}") == pytest.approx(small, rel=1e-4)
        assert values(history, f"gsqnorm/{layer}") == pytest.approx(big, rel=1e-4)
    traces, sqnorms, scales = zip(*expected.noise_scale(), strict=True)
    assert values(history, "gradient_noise_trace") == pytest.approx(traces, rel=1e-3)
    assert values(history, "gradient_sqnorm") == pytest.approx(sqnorms, rel=1e-3, abs=1e-5)
    assert values(history, "gradient_noise_scale") == pytest.approx(scales, rel=1e-2)


def test_the_batches_of_a_step_are_as_one_even_where_they_are_uneven(make, texts, history):
    texts = [(ids[: 4 - i % 3], target[: 4 - i % 3]) for i, (ids, target) in enumerate(texts)]
    expected = OneAtATime(num_batches=3)
    loop = TrainingLoop(max_steps=3, grad_accum_steps=3)
    make(expected, ComputeNormGNS(ALL), model=Words, loop=loop).fit(texts)
    small, big = expected.pegsqnorm("twice"), expected.gsqnorm("twice")
    assert len(small) == 3
    assert values(history, "pegsqnorm/twice") == pytest.approx(small, rel=1e-4)
    assert values(history, "gsqnorm/twice") == pytest.approx(big, rel=1e-4)


def test_a_loss_scale_changes_nothing(make, texts, history, tmp_path):
    make(ComputeNormGNS(ALL), model=Words, device="fake").fit(texts)
    plain = values(history, "pegsqnorm/table")
    history.lines.clear()
    precision = MixedPrecision(fp16_type="float16", loss_scaling_factor=128.0)
    scaled = {"precision": precision, "model_dir": tmp_path / "scaled"}
    make(ComputeNormGNS(ALL), model=Words, device="fake", **scaled).fit(texts)
    assert values(history, "pegsqnorm/table") == pytest.approx(plain, rel=0.05)


def test_what_compute_norm_logs_is_logged_once(make, batches, history, tmp_path):
    make(ComputeNorm(), model_dir=tmp_path / "plain").fit(batches)
    plain = values(history, "model_wise_grad_norm")
    for names, callbacks in (
        ("alone", [ComputeNormGNS(ALL)]),
        ("before", [ComputeNormGNS(ALL), ComputeNorm()]),
        ("after", [ComputeNorm(), ComputeNormGNS(ALL)]),
    ):
        history.lines.clear()
        make(*callbacks, model_dir=tmp_path / names).fit(batches)
        assert values(history, "model_wise_grad_norm") == plain
        assert len(values(history, "pegsqnorm/head")) == 4


def test_a_step_of_one_example_has_norms_and_no_noise(make, batches, history):
    make(ComputeNormGNS(ALL)).fit([tuple(part[:1] for part in batch) for batch in batches])
    assert values(history, "pegsqnorm/head") == pytest.approx(values(history, "gsqnorm/head"))
    assert not values(history, "gradient_noise_scale")


@pytest.mark.slow
def test_a_compiled_model_has_the_same_norms(make, batches, history, tmp_path):
    make(ComputeNormGNS(ALL), log_steps=2).fit(batches)
    plain = values(history, "pegsqnorm/layers.1")
    history.lines.clear()
    compiled = {"backend": {"compile": {"backend": "eager"}}, "model_dir": tmp_path / "compiled"}
    make(ComputeNormGNS(ALL), log_steps=2, **compiled).fit(batches)
    assert values(history, "pegsqnorm/layers.1") == pytest.approx(plain)
    assert len(plain) == 2


def test_only_log_steps_are_watched_and_the_hooks_go_with_them(make, batches, history):
    trainer = make(ComputeNormGNS(ALL), log_steps=3, max_steps=7)
    trainer.fit(batches)
    assert [step for step, _ in history.of("gradient_noise_scale")] == [3, 6, 7]
    assert not any(module._forward_hooks for module in trainer.model.modules())


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(3, 4)
        self.out = nn.Linear(4, 6)

    def forward(self, batch):
        ids, target = batch
        hidden = self.places(torch.arange(3, device=ids.device)).expand(len(ids), 3, 4)
        return {"loss": nn.functional.cross_entropy(self.out(hidden).transpose(1, 2), target)}


def test_a_layer_that_knows_no_examples_is_skipped_and_reported(make, texts, history, caplog):
    make(ComputeNormGNS(ALL), model=Positions).fit(texts)
    assert caplog.text.count("ignores the layer 'places'") == 1
    assert len(values(history, "pegsqnorm/out")) == 4
    assert not values(history, "pegsqnorm/places")


def test_frozen_parameters_do_not_count(make, texts, history):
    def model():
        words = Words()
        words.twice.requires_grad_(False)
        words.out.weight.requires_grad_(False)
        return words

    make(ComputeNormGNS(ALL), model=model).fit(texts)
    assert not values(history, "pegsqnorm/twice")
    assert len(values(history, "pegsqnorm/out")) == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], r"grad_norms: expected 'Embedding', 'LayerNorm', 'Linear' or a list .*, got \[\]"),
        (3, "per_example_grad_norms: .*, got 3"),
        ({"Linear": 1}, "per_example_grad_norms: .*, got a mapping"),
        ([["Linear"]], r"\[0\]: expected .*, got \['Linear'\]"),
        ("Linaer", r"expected .*, got 'Linaer'. Did you mean 'Linear'\?"),
        (["Linear", "Conv2d"], r"\[1\]: expected .*, got 'Conv2d'"),
    ],
)
def test_an_unknown_kind_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        ComputeNormGNS(given)


def test_a_model_without_such_layers_is_refused(make):
    with pytest.raises(ConfigError, match="Net has no layer of type Embedding"):
        make(ComputeNormGNS("Embedding"))


def test_an_embedding_that_mixes_examples_is_refused(make):
    def model():
        return nn.Sequential(nn.Embedding(3, 2, scale_grad_by_freq=True))

    with pytest.raises(ConfigError, match="'0': with scale_grad_by_freq"):
        make(ComputeNormGNS("Embedding"), model=model)


class Twice(nn.Module):
    """Call a layer on the batch, and on a tensor without examples."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, batch):
        hidden = self.layer(batch[0]) + self.layer(torch.ones(1, 4))
        return {"loss": (self.head(hidden) - batch[1]).square().mean()}


def test_a_layer_of_which_one_call_has_no_examples_is_skipped(make, batches, history, caplog):
    make(ComputeNormGNS("Linear"), model=Twice).fit(batches)
    assert len(values(history, "pegsqnorm/head")) == 4
    assert values(history, "pegsqnorm/layer") == []
    for small, big, sqnorm in zip(
        values(history, "pegsqnorm/head"),
        values(history, "gsqnorm/head"),
        values(history, "gradient_sqnorm"),
        strict=True,
    ):
        assert sqnorm == pytest.approx((8 * big - small) / 7, rel=1e-5)
    assert "ignores the layer 'layer'" in caplog.text


class Checkpointed(nn.Module):
    """One layer is recomputed in the backward pass."""

    def __init__(self):
        super().__init__()
        self.inner, self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.teacher = nn.Linear(4, 4)

    def forward(self, batch):
        with torch.no_grad():
            self.teacher(batch[0])
        hidden = checkpoint(self.layer, self.inner(batch[0]), use_reentrant=True)
        return {"loss": (self.head(hidden) - batch[1]).square().mean()}


def test_a_layer_in_a_reentrant_checkpoint_is_reported(make, batches, history, caplog):
    make(ComputeNormGNS("Linear"), model=Checkpointed).fit(batches)
    assert len(values(history, "pegsqnorm/inner")) == 4
    assert values(history, "pegsqnorm/layer") == []
    assert "ignores the layer 'layer'" in caplog.text
    assert "teacher" not in caplog.text
