"""Low-rank adapters."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from backends.deferred_init import materialize
from modelzoo_trainer import Callback, Checkpoint, TrainingLoop
from modelzoo_trainer.callbacks import GenerateText
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import OptimizerFactory, optimizer_class
from modelzoo_trainer.zoo.callbacks.lora import Lora, LoraConfig


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(4, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, hidden):
        return hidden + self.out(torch.tanh(self.q_proj(hidden)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 1)

    def forward(self, batch):
        hidden, target = batch
        for block in self.blocks:
            hidden = block(hidden)
        return ((self.head(self.norm(hidden)) - target) ** 2).mean()

    def generate(self, input_ids, max_new_tokens, **options):
        return input_ids.repeat(1, max_new_tokens)


@pytest.fixture
def make(make):
    def trainer(*callbacks, **settings):
        return make(*callbacks, **({"model": Net} | settings))

    return trainer


def trained(model):
    return [name for name, param in model.named_parameters() if param.requires_grad]


def state_of(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


# ---- adapted layers


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["Block", "q_proj"], ["blocks.0.q_proj", "blocks.1.q_proj"]),
        (["head"], ["head"]),
        (["Block", "Linear", "0"], ["blocks.0.q_proj", "blocks.0.out"]),
        (
            None,
            ["blocks.0.q_proj", "blocks.0.out", "blocks.1.q_proj", "blocks.1.out", "head"],
        ),
    ],
)
def test_layers_get_adapters_by_the_names_on_their_way(make, targets, expected):
    model = make(Lora({"r": 2, "target_modules": targets})).model
    kinds = ("lora_A", "lora_B")
    assert trained(model) == [
        f"{name}.{kind}.default.weight" for name in expected for kind in kinds
    ]
    assert isinstance(model, Net)


def test_an_embedding_has_adapters_too(make, batches):
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(3, 4)
            self.head = nn.Linear(4, 1)

        def forward(self, batch):
            return (self.head(self.words(torch.tensor([0, 1]))) ** 2).mean()

    trainer = make(Lora({"r": 2, "target_modules": ["Embedding"]}), model=Words)
    trainer.fit(batches)
    prefix = "words.lora_embedding"
    assert trained(trainer.model) == [f"{prefix}_A.default", f"{prefix}_B.default"]


def test_each_settings_are_for_layers_of_their_own(make, batches):
    first = {"r": 1, "alpha": 4, "target_modules": ["q_proj"]}
    second = LoraConfig(r=3, target_modules=["Block"])
    trainer = make(Lora([first, second]))
    block = trainer.model.blocks[0]
    assert block.q_proj.lora_A["default"].weight.shape == (1, 4)
    assert block.out.lora_A["default"].weight.shape == (3, 4)
    assert (block.q_proj.scaling["default"], block.out.scaling["default"]) == (4.0, 1 / 3)
    trainer.fit(batches)


def test_only_the_adapters_are_trained_and_the_layer_is_what_the_formula_says(make, batches):
    plain = make()
    trainer = make(Lora({"r": 2, "alpha": 6, "target_modules": ["head"]}))
    trainer.fit(batches)
    head = trainer.model.head
    assert [len(group["params"]) for group in trainer.optimizer.param_groups] == [2]
    assert torch.equal(head.base_layer.weight, plain.model.head.weight)
    down, up = head.lora_A["default"].weight, head.lora_B["default"].weight
    assert up.abs().max() > 0
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    expected = inputs @ (head.base_layer.weight + 3.0 * up @ down).T + head.base_layer.bias
    torch.testing.assert_close(head(inputs), expected)


def test_before_the_first_step_the_adapters_add_nothing(make, batches, history):
    for callbacks in ([], [Lora({"r": 2})]):
        make(*callbacks).validate(batches[:2])
    first, second = (value for _, value in history.of("validate_0/loss"))
    assert first == pytest.approx(second, rel=1e-6)


def test_shipped_optimizers_and_module_instances_do_as_well(make, batches):
    factory = OptimizerFactory(optimizer_class("AdamW"), {"lr": 0.01})
    trainer = make(Lora({"r": 2}), model=Net(), optimizer=factory)
    trainer.fit(batches)
    assert sum(len(group["params"]) for group in trainer.optimizer.param_groups) == 10


@pytest.mark.parametrize("device", ["meta", "fake"])
def test_it_runs_without_a_host_read_in_the_step(make, batches, device):
    lora = Lora({"r": 2, "dropout": 0.1, "merge_weights": True})
    trainer = make(lora, device=device, loop=TrainingLoop(max_steps=3, eval_frequency=2))
    trainer.fit(batches, batches[:2])
    assert trainer.backend.counters().get("host_reads", 0) == 0


# ---- merging


def test_weights_are_merged_in_a_validation_and_the_same_bits_after_it(make, batches, history):
    merged = []

    class Look(Callback):
        def on_validate_batch_start(self, trainer, model, batch, batch_idx):
            merged.append(model.head.merged)

    runs = []
    for merges in (True, False):
        lora = Lora({"r": 2, "merge_weights": merges})
        trainer = make(lora, Look(), loop=TrainingLoop(max_steps=4, eval_frequency=2))
        trainer.fit(batches, batches[:1], ckpt_path=None)
        runs.append(state_of(trainer))
    assert merged == [True, True, False, False]
    assert equal(*runs)
    losses = [value for _, value in history.of("validate_0/loss")]
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-5)


# ---- checkpoints


class Crash(Exception):
    pass


class CrashAt(Callback):
    def on_step_boundary(self, trainer):
        if trainer.global_step == 3:
            raise Crash


def test_a_run_that_resumes_is_the_unbroken_one(make, batches, tmp_path):
    def run(folder, *others):
        lora = Lora({"r": 2, "dropout": 0.3, "merge_weights": True})
        settings = {"checkpoint": Checkpoint(steps=2), "model_dir": tmp_path / folder}
        optimizer = OptimizerFactory(optimizer_class("AdamW"), {"lr": 0.01})
        return make(lora, *others, optimizer=optimizer, **settings)

    unbroken, broken = run("unbroken"), run("broken", CrashAt())
    unbroken.fit(batches)
    with pytest.raises(Crash):
        broken.fit(batches)
    broken.close()
    resumed = run("broken")
    resumed.fit(batches)
    assert resumed.global_step == 4
    assert equal(state_of(resumed), state_of(unbroken))


def test_weights_without_adapters_can_be_begun_with(make, batches, tmp_path):
    from safetensors.torch import save_file

    other = make(seed=7, model_dir=tmp_path / "other")
    save_file(dict(other.model.state_dict()), tmp_path / "base.safetensors")
    trainer = make(Lora({"r": 2, "target_modules": ["Block"]}))
    trainer.fit(batches, ckpt_path=tmp_path / "base.safetensors")
    block, base = trainer.model.blocks[0], other.model.blocks[0]
    assert torch.equal(block.out.base_layer.weight, base.out.weight)
    assert torch.equal(trainer.model.head.weight, other.model.head.weight)
    assert block.out.lora_B["default"].weight.abs().max() > 0


def test_text_is_generated_beside_it(make, batches):
    trainer = make(Lora({"r": 2}), GenerateText("a", 2))
    trainer.fit(batches)
    assert (trainer.artifact_dir / "sample.txt").read_text() == "aa"


# ---- invalid arguments


def test_a_target_that_is_not_there_is_refused_with_the_nearest_name(make):
    with pytest.raises(ConfigError, match=r"is \['q_prj'\].*Did you mean 'q_proj'"):
        make(Lora({"r": 2, "target_modules": ["q_prj"]}))


def test_settings_that_find_nothing_left_are_refused(make):
    with pytest.raises(ConfigError, match="Net has no other Linear or Embedding"):
        make(Lora([{"r": 2}, {"r": 1, "target_modules": ["head"]}]))


def test_an_optimizer_that_was_made_before_is_refused(make):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="created before the adapters"):
        make(Lora({"r": 2}), model=model, optimizer=optimizer)


def test_without_the_library_the_extra_is_named(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"pip install 'modelzoo-trainer\[lora\]'"):
        make(Lora({"r": 2}))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([], r"lora_params is empty"),
        (3, r"lora_params must .* {r: 8.* got 3"),
        ({}, r"lora_params\.r is missing"),
        ({"r": 0}, "lora_params.r: expected an integer > 0, got 0"),
        ({"r": 2, "alpha": 0}, "alpha: expected a finite number > 0, got 0"),
        ({"r": 2, "dropout": 1.0}, r"dropout: expected a number in \[0, 1\), got 1.0"),
        ({"r": 2, "target_modules": []}, r"target_modules: expected a list of names.*, got \[\]"),
        ({"r": 2, "target_modules": "head"}, "target_modules: .*, got 'head'"),
        ({"r": 2, "alhpa": 1}, r"has no setting 'alhpa'\. Did you mean 'alpha'"),
    ],
)
def test_an_argument_that_does_not_fit_is_refused(params, message):
    with pytest.raises(ConfigError, match=message):
        Lora(params)


class TiedNet(nn.Module):
    """An embedding whose weight is also that of the head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        scores = self.head(self.embedding(tokens))
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())


def test_weights_that_two_layers_have_are_not_merged(make, history):
    tokens = [torch.randint(0, 10, (4, 5), generator=torch.Generator().manual_seed(1))] * 4
    for merges in (True, False):
        lora = Lora({"r": 2, "alpha": 8, "merge_weights": merges})
        loop = TrainingLoop(max_steps=4, eval_frequency=2)
        make(lora, model=TiedNet, loop=loop).fit(tokens, tokens[:1], ckpt_path=None)
    losses = [value for _, value in history.of("validate_0/loss")]
    assert losses[:2] == losses[2:]


def test_adapters_on_adapters_are_refused(make):
    with pytest.raises(ConfigError, match="Net already has LoRA adapters"):
        make(Lora({"r": 2}), Lora({"r": 2}))
    model = Net()
    make(Lora({"r": 2}), model=model)
    with pytest.raises(ConfigError, match="Net already has LoRA adapters"):
        make(Lora({"r": 2}), model=model)


def test_alpha_is_finite():
    with pytest.raises(ConfigError, match="alpha: expected a finite number > 0, got inf"):
        Lora({"r": 2, "alpha": float("inf")})


@pytest.mark.parametrize("merges", [False, True])
def test_what_is_saved_in_a_validation_is_not_merged(make, batches, merges):
    class Save(Callback):
        def on_validate_end(self, trainer, model, loop):
            trainer.save_checkpoint()

    lora = Lora({"r": 2, "alpha": 8, "merge_weights": merges})
    first = make(lora, Save(), loop=TrainingLoop(max_steps=4, eval_frequency=4))
    first.fit(batches, batches[:1])
    other = make(Lora({"r": 2, "alpha": 8, "merge_weights": merges}))
    other.load_checkpoint(...)
    assert equal(state_of(first), state_of(other))


@pytest.mark.parametrize("merges", [False, True])
def test_a_validation_uses_the_adapters_of_the_checkpoint_that_it_loads(
    make, batches, history, merges
):
    settings = {"r": 2, "alpha": 8, "merge_weights": merges}
    first = make(Lora(settings), loop=TrainingLoop(max_steps=4, eval_frequency=4))
    first.fit(batches, batches[:1])
    first.save_checkpoint()
    other = make(Lora(settings))
    other.validate(batches[:1])
    assert equal(state_of(first), state_of(other))
    trained, again = (value for _, value in history.of("validate_0/loss"))
    assert again == pytest.approx(trained, rel=1e-5)


def test_adapters_of_a_model_that_was_built_on_meta_add_nothing_at_first() -> None:
    with torch.device("meta"):
        model = Lora({"r": 2, "target_modules": ["0"]})._adapted(nn.Sequential(nn.Linear(4, 4)))
    materialize(model, torch.device("cpu"))
    values = {name: param for name, param in model.named_parameters() if "lora" in name}
    assert [bool(value.any()) for value in values.values()] == [True, False]
