"""Direct preference optimization: loss, metrics, and the reference that stays."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.deferred_init import materialize
from modelzoo_trainer import Checkpoint, Trainer, TrainingLoop
from modelzoo_trainer.callbacks import LoadCheckpointStates, ModelEvalMetrics
from modelzoo_trainer.callbacks.model_ema import WeightAverage
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.optim import AdamW
from modelzoo_trainer.optim.param_groups import make_param_groups
from modelzoo_trainer.zoo.models.dpo import Dpo, DpoSettings, preference_loss
from modelzoo_trainer.zoo.models.registry import model_class
from tests.zoo.models.drawn_alike import check_drawn_alike

VOCAB, LENGTH = 20, 6
DECODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "max_position_embeddings": LENGTH,
    "num_hidden_layers": 2,
    "num_heads": 2,
    "filter_size": 16,
}
PAIRS = [(-3.0, -5.0, -4.0, -4.5), (-6.0, -2.0, -3.0, -3.0), (-1.0, -1.0, -1.0, -1.0)]


def make(seed: int = 0, **dpo: Any) -> Dpo:
    torch.manual_seed(seed)
    return Dpo(policy_model={"name": "gpt2", **DECODER}, dpo=dpo)


def batch_of(size: int = 3, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch = {}
    for answer in ("chosen", "rejected"):
        ids = torch.randint(VOCAB, (size, LENGTH + 1), generator=generator, dtype=torch.int32)
        mask = torch.zeros(size, LENGTH, dtype=torch.int32)
        mask[:, 2:5] = 1
        mask[0, 4] = 0
        named = {"input_ids": ids[:, :-1], "attention_mask": mask, "labels": ids[:, 1:]}
        batch |= {f"{answer}_{name}": value for name, value in named.items()}
    return batch


def log_probs(model: Any, batch: dict[str, Tensor], answer: str) -> list[float]:
    """Return what the model says of each answer, added up label by label."""
    with torch.no_grad():
        scores = model.logits(batch[f"{answer}_input_ids"]).double().log_softmax(-1)
    labels, mask = batch[f"{answer}_labels"], batch[f"{answer}_attention_mask"]
    return [
        sum(
            float(scores[row, place, int(labels[row, place])])
            for place in range(LENGTH)
            if mask[row, place]
        )
        for row in range(len(labels))
    ]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


EXPECTED = {
    "sigmoid": lambda d, c, rc: -math.log(sigmoid(0.2 * d)),
    "hinge": lambda d, c, rc: max(0.0, 1 - 0.2 * d),
    "ipo": lambda d, c, rc: (d - 1 / 0.4) ** 2,
    "dpop": lambda d, c, rc: -math.log(sigmoid(0.2 * (d - 3.0 * max(0.0, rc - c)))),
}


@pytest.mark.parametrize("loss_type", list(EXPECTED))
def test_each_loss_has_its_formula(loss_type: Any) -> None:
    settings = DpoSettings(beta=0.2, loss_type=loss_type, dpop_penalty_weight=3.0)

    found = preference_loss(*torch.tensor(PAIRS).T, settings)

    expected = [EXPECTED[loss_type]((c - r) - (rc - rr), c, rc) for c, r, rc, rr in PAIRS]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
@pytest.mark.parametrize("reference_free", [False, True])
def test_the_loss_and_metrics_are_those_of_the_two_models(
    loss_type: Any, reference_free: bool
) -> None:
    model, batch = make(loss_type=loss_type, reference_free=reference_free, beta=0.2), batch_of()
    with torch.no_grad():
        for param in model.policy_model.parameters():
            param.add_(0.3 * torch.randn_like(param))
    outputs = model(batch)
    num = [2, 3, 3] if loss_type == "ipo" else [1, 1, 1]
    models = [model.policy_model, model.ref_model] if model.ref_model else [model.policy_model]
    values = [
        [value / n for value, n in zip(log_probs(one, batch, answer), num, strict=True)]
        for one in models
        for answer in ("chosen", "rejected")
    ]
    chosen, rejected, ref_chosen, ref_rejected = (*values, [0.0] * 3, [0.0] * 3)[:4]
    margins = [
        (c - r) - (rc - rr)
        for c, r, rc, rr in zip(chosen, rejected, ref_chosen, ref_rejected, strict=True)
    ]
    losses = [EXPECTED[loss_type](margin, 0, 0) for margin in margins]
    assert outputs["num_items"] == 3
    assert outputs["loss"].item() == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert outputs["logps_chosen"].item() == pytest.approx(sum(chosen) / 3, rel=1e-5)
    assert outputs["logps_rejected"].item() == pytest.approx(sum(rejected) / 3, rel=1e-5)
    assert outputs["rewards_margins"].item() == pytest.approx(0.2 * sum(margins) / 3, rel=1e-4)
    better = [c > rc for c, rc in zip(margins, [0.0] * 3, strict=True)]
    assert outputs["rewards_accuracies"].item() == pytest.approx(sum(better) / 3)
    reward = sum(c - rc for c, rc in zip(chosen, ref_chosen, strict=True)) * 0.2 / 3
    assert outputs["rewards_chosen"].item() == pytest.approx(reward, rel=1e-4, abs=1e-6)


def test_labels_that_do_not_count_change_nothing() -> None:
    model, batch = make(), batch_of()
    before = model(batch)["logps_chosen"]
    batch["chosen_labels"] = batch["chosen_labels"].where(batch["chosen_attention_mask"] == 1, 0)
    assert torch.equal(model(batch)["logps_chosen"], before)


def test_the_reference_begins_as_the_policy_and_is_never_trained() -> None:
    model = make()
    model.train()
    assert model.ref_model is not None
    assert not any(module.training for module in model.ref_model.modules())
    assert not any(param.requires_grad for param in model.ref_model.parameters())
    outputs = model(batch_of())
    assert outputs["loss"].item() == pytest.approx(math.log(2))
    outputs["loss"].backward()
    assert all(param.grad is not None for param in model.policy_model.parameters())
    assert all(param.grad is None for param in model.ref_model.parameters())


def test_the_policy_has_no_dropout_unless_that_is_set() -> None:
    still, random = make(), make(disable_dropout=False)
    still.train()
    random.train()
    assert torch.equal(still(batch_of())["loss"], still(batch_of())["loss"])
    assert not torch.equal(random(batch_of())["loss"], random(batch_of())["loss"])


def test_without_a_reference_there_is_no_copy() -> None:
    model = make(reference_free=True)
    assert model.ref_model is None
    assert {name.split(".")[0] for name in model.state_dict()} == {"policy_model"}


@pytest.mark.parametrize("share", [True, False])
def test_a_model_that_is_built_without_memory_copies_its_policy_last(share: bool) -> None:
    given = {"name": "gpt2", **DECODER, "share_embedding_weights": share}
    torch.manual_seed(3)
    expected = Dpo(policy_model=given)
    torch.manual_seed(3)
    with torch.device("meta"):
        model = Dpo(policy_model=given)
    materialize(model, torch.device("cpu"))
    check_drawn_alike(model, expected)
    assert model.ref_model is not None
    own, reference = model.policy_model.state_dict(), model.ref_model.state_dict()
    for name, value in own.items():
        torch.testing.assert_close(value, reference[name], rtol=0, atol=0)
    again = make().reset_parameters
    again()


def test_a_reset_gives_both_the_same_weights() -> None:
    model = make()
    model.to_empty(device="cpu")
    model.reset_parameters()
    assert model.ref_model is not None
    policy, reference = model.policy_model.state_dict(), model.ref_model.state_dict()
    assert all(torch.equal(value, reference[name]) for name, value in policy.items())


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"loss_scaling": "batch_size"}, "loss_scaling"),
        (
            {"moe": {"num_experts": 2, "top_k": 1, "load_balancing_loss_coef": 0.1}},
            "moe.load_balancing_loss_coef",
        ),
        (
            {"moe_params": {"num_experts": 2, "top_k": 2, "load_balancing_loss_coef": 0.1}},
            "moe.load_balancing_loss_coef",
        ),
    ],
)
def test_settings_of_the_other_loss_have_no_effect_and_that_is_said(
    given: dict[str, Any], key: str
) -> None:
    with pytest.warns(UserWarning, match=rf"model\.policy_model\.{key} .*no effect"):
        model = Dpo(policy_model={"name": "gpt2", **DECODER, **given})
    model(batch_of())["loss"].backward()


def test_defaults_of_the_other_loss_are_no_reason_to_warn() -> None:
    given = {"loss_scaling": "num_tokens", "loss_weight": 1, "compute_eval_metrics": True}
    Dpo(policy_model={"name": "gpt2", **DECODER, **given})  # a warning would raise


def test_validation_metrics_can_be_switched_off() -> None:
    torch.manual_seed(0)
    model = Dpo(policy_model={"name": "gpt2", **DECODER}, compute_eval_metrics=False)
    assert "rewards_margins" in model(batch_of())  # in training
    model.eval()
    assert set(model(batch_of())) == {"loss", "num_items"}


def test_it_generates_with_its_policy() -> None:
    model, prompt = make(), torch.tensor([[1, 2]])
    found = model.generate(prompt, 2, temperature=0.0)
    assert torch.equal(found, model.policy_model.generate(prompt, 2, temperature=0.0))
    assert (model.vocab_size, model.max_position_embeddings) == (VOCAB, LENGTH)


def test_groups_and_plan_are_those_of_the_decoder() -> None:
    model = make()
    assert model.lr_adjustment_groups == model.policy_model.lr_adjustment_groups
    plan = model.tensor_plan
    assert plan["policy_model.lm_head"] == plan["ref_model.lm_head"] == "colwise_gather"
    assert all(model.get_submodule(name) for name in plan if "*" not in name)


@pytest.mark.parametrize(
    ("policy", "dpo", "message"),
    [
        ({}, {}, "policy_model.name is missing"),
        ({"name": "gpt"}, {}, r"policy_model\.name: 'gpt' is not a decoder.*'gpt\w'"),
        ({"name": "fc_mnist"}, {}, "'fc_mnist' is not a decoder"),
        ({"name": "dpo"}, {}, "'dpo' is not a decoder"),
        ({"name": "gpt2", "hiden_size": 8}, {}, r"policy_model: .*hiden_size.*'hidden_size'"),
        ({"name": "gpt2"}, {"betta": 1}, r"model\.dpo\.betta: .*'beta'"),
        ({"name": "gpt2"}, {"beta": 0}, r"model\.dpo\.beta: .*0"),
        ({"name": "gpt2"}, {"loss_type": "kto"}, r"model\.dpo\.loss_type: .*kto"),
    ],
)
def test_invalid_settings_are_refused_before_anything_is_built(
    policy: dict[str, Any], dpo: dict[str, Any], message: str
) -> None:
    for call in (Dpo, Dpo.check_arguments):
        with pytest.raises(ConfigError, match=message):
            call(policy_model=policy, dpo=dpo)


def test_a_batch_of_another_processor_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\['labels'\].*'chosen_input_ids'.*DpoHDF5"):
        make()({"labels": torch.zeros(1, 1)})


# ---- in a run


def trainer_of(folder: Any, model: Any, steps: int, **options: Any) -> Trainer:
    return Trainer(
        model=model,
        optimizer=lambda net: AdamW(net.parameters(), lr=0.01, weight_decay=0.1),
        loop=TrainingLoop(max_steps=steps),
        checkpoint=Checkpoint(steps=2),
        model_dir=folder,
        progress="none",
        seed=0,
        **options,
    )


BATCHES = [batch_of(seed=seed) for seed in range(6)]


def weights(model: Any, prefix: str) -> dict[str, Tensor]:
    state = model.state_dict().items()
    return {
        name.removeprefix(prefix): value.clone() for name, value in state if name.startswith(prefix)
    }


@pytest.mark.slow
def test_a_run_starts_from_a_decoder_and_keeps_it_as_reference_when_resumed(tmp_path: Any) -> None:
    torch.manual_seed(5)
    decoder = model_class("gpt2")(**DECODER)
    ids = torch.randint(VOCAB, (2, LENGTH), dtype=torch.int32)
    first = trainer_of(tmp_path / "decoder", decoder, 2)
    first.fit([{"input_ids": ids, "labels": ids}] * 2)
    trained = weights(first.model, "")
    start = tmp_path / "decoder" / "checkpoint_2"

    def fit(folder: Any, steps: int, ckpt_path: Any) -> Dpo:
        trainer = trainer_of(
            tmp_path / folder, make(seed=9), steps, callbacks=[LoadCheckpointStates("model")]
        )
        trainer.fit(BATCHES, ckpt_path=ckpt_path)
        assert isinstance(trainer.model, Dpo)
        return trainer.model

    whole = fit("whole", 6, start)
    fit("parts", 2, start)
    resumed = fit("parts", 6, "last")
    for model in (whole, resumed):
        reference = weights(model, "ref_model.")
        assert all(torch.equal(value, trained[name]) for name, value in reference.items())
    policy, expected = weights(resumed, "policy_model."), weights(whole, "policy_model.")
    assert all(torch.equal(value, expected[name]) for name, value in policy.items())
    assert any(not torch.equal(value, trained[name]) for name, value in policy.items())


def test_only_the_policy_is_optimized_and_averaged() -> None:
    model = make()
    groups = make_param_groups(model, weight_decay=0.1)
    held = {id(param) for group in groups for param in group["params"]}
    assert held == {id(param) for param in model.policy_model.parameters()}
    averaged = WeightAverage(model, 0.9).state_dict()["average"]
    assert {name.split(".")[0] for name in averaged} == {"policy_model"}


def test_validations_log_how_the_answers_compare(tmp_path: Any) -> None:
    trainer = trainer_of(tmp_path, make(), 2, callbacks=[ModelEvalMetrics()])
    result = trainer.fit(BATCHES, BATCHES[:2])
    names = {name.rpartition("/")[2] for name in result.metrics}
    assert {"rewards_margins", "rewards_accuracies", "logps_chosen"} <= names


def test_entries_of_a_policy_are_those_of_both() -> None:
    model = make()
    for prefix in ("", "policy_model."):
        found = model.complete_state({f"{prefix}a": 1, f"{prefix}b": 2})
        assert found == {
            "policy_model.a": 1,
            "policy_model.b": 2,
            "ref_model.a": 1,
            "ref_model.b": 2,
        }
    both = {"policy_model.a": 1, "ref_model.a": 2}
    assert model.complete_state(both) == both


def test_entries_of_a_policy_without_a_reference_are_its_own() -> None:
    model = make(reference_free=True)
    assert model.complete_state({"a": 1}) == {"policy_model.a": 1}
