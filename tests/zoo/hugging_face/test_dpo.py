"""Preferences with a policy of `transformers`: its loss, its reference, and runs."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from backends.deferred_init import materialize
from modelzoo_trainer.callbacks import HuggingFaceCheckpoint, LoadCheckpointStates, Lora, ModelEma
from modelzoo_trainer.cli.command import main
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.conversion.hugging_face import plan_import
from modelzoo_trainer.zoo.models.dpo import Dpo
from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm
from modelzoo_trainer.zoo.models.hugging_face.policy import Adapters
from modelzoo_trainer.zoo.models.registry import model_class
from tests.zoo.hugging_face.dpo_cases import (
    LLAMA,
    PEFT,
    POLICIES,
    batch_of,
    sums,
    trainer_of,
    weights,
)
from tests.zoo.hugging_face.hf_cases import config_of, language_batch
from tests.zoo.rows.toys import byte_tokenizer

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("peft", reason="needs peft")
pytestmark = pytest.mark.slow


def make(seed: int = 0, dpo: Any = None, **policy: Any) -> Dpo:
    torch.manual_seed(seed)
    return Dpo(policy_model={**LLAMA, **policy}, dpo=dpo)


def stir(model: Any) -> None:
    """Change the trained weights."""
    torch.manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(0.3 * torch.randn_like(param))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    HfCausalLm(config=LLAMA["config"]).save_pretrained(path)
    return path


def from_folder(folder: Path) -> dict[str, Any]:
    return {"config": None, "pretrained_model_name_or_path": str(folder)}


# ---- the loss and the reference


def test_losses_are_those_of_the_same_decoder(folder: Path) -> None:
    theirs = make(**from_folder(folder))
    plan = plan_import(folder, key="test")
    ours = Dpo(policy_model={"name": "llama", **plan.arguments})
    state = ours.complete_state(dict(plan.plan.tensors()))
    ours.load_state_dict(state)

    losses = []
    for model in (theirs, ours):
        optimizer = torch.optim.SGD(model.policy_model.parameters(), lr=0.5)
        found = []
        for seed in range(3):
            outputs = model(batch_of(seed=seed))
            outputs["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(
                {name: float(torch.as_tensor(one).detach()) for name, one in outputs.items()}
            )
        losses.append(found)
    assert losses[0][0]["loss"] == pytest.approx(math.log(2))
    assert losses[0][2]["rewards_margins"] != pytest.approx(0, abs=1e-3)
    for left, right in zip(*losses, strict=True):
        assert left == pytest.approx(right, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("mode", [True, False])
def test_the_reference_has_the_log_probabilities_of_the_first_model(
    kind: str, mode: bool, folder: Path
) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    model = make(dpo={"beta": 1.0}, **from_folder(folder), **POLICIES[kind]).train(mode)
    assert (model.ref_model is None) == (kind == "adapters")
    stir(model)

    batch = batch_of()
    outputs = model(batch)
    with torch.no_grad():
        for answer in ("chosen", "rejected"):
            expected = sums(base, batch, answer)
            reference = outputs[f"logps_{answer}"] - outputs[f"rewards_{answer}"]
            torch.testing.assert_close(reference, expected.mean(), rtol=1e-5, atol=1e-5)
            theirs: Any = copy.deepcopy(model.policy_model.model)
            policy = sums(theirs.eval(), batch, answer)
            torch.testing.assert_close(outputs[f"logps_{answer}"], policy.mean())
            assert (policy - expected).abs().min() > 1e-3
    outputs["loss"].backward()
    trained = {name for name, one in model.named_parameters() if one.grad is not None}
    assert trained == {name for name, one in model.named_parameters() if one.requires_grad}
    assert all("lora_" in name for name in trained) == (kind == "adapters")
    assert not any(name.startswith("ref_model") for name in trained)


def test_the_reference_has_no_dropout_although_the_policy_has() -> None:
    model = make(
        dpo={"beta": 1.0, "disable_dropout": False},
        config=LLAMA["config"] | {"attention_dropout": 0.5},
        peft_config=PEFT | {"lora_dropout": 0.5},
    ).train()
    stir(model)
    found = [model(batch_of()) for _ in range(2)]
    references = [one["logps_chosen"] - one["rewards_chosen"] for one in found]
    torch.testing.assert_close(*references, rtol=1e-6, atol=1e-5)
    assert found[0]["logps_chosen"] != found[1]["logps_chosen"]
    assert all(module.training for module in model.modules())
    config: Any = model.policy_model.config
    assert config.attention_dropout == 0.5


DROPOUTS = {
    "gpt2": dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.5),
    "falcon": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
    "gpt_neox": {"attention_dropout": 0.5, "hidden_dropout": 0.5},
    "gptj": dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.5),
    "opt": {
        **dict.fromkeys(("dropout", "attention_dropout", "layerdrop"), 0.5),
        "ffn_dim": 64,
        "word_embed_proj_dim": 32,
    },
}


@pytest.mark.parametrize("kind", DROPOUTS)
def test_the_policy_has_no_dropout_and_that_is_said(kind: str) -> None:
    given: dict[str, Any] = {"config": config_of(kind) | DROPOUTS[kind]}
    if kind == "opt":
        del given["config"]["intermediate_size"], given["config"]["num_key_value_heads"]
    with pytest.warns(UserWarning, match="has no effect: dpo trains without dropout") as said:
        model = make(**given).train()
    assert len(said) == sum("drop" in key for key in DROPOUTS[kind])
    assert torch.equal(model(batch_of())["logps_chosen"], model(batch_of())["logps_chosen"])
    random = make(dpo={"disable_dropout": False}, **given).train()
    assert not torch.equal(random(batch_of())["logps_chosen"], random(batch_of())["logps_chosen"])


def test_adapters_have_no_dropout() -> None:
    with pytest.warns(UserWarning, match=r"peft_config\.lora_dropout \(0\.5\) has no effect"):
        model = make(peft_config=PEFT | {"lora_dropout": 0.5}).train()
    stir(model)
    assert torch.equal(model(batch_of())["logps_chosen"], model(batch_of())["logps_chosen"])


def test_a_loss_of_experts_is_not_used() -> None:
    with pytest.warns(UserWarning, match="output_router_logits.*no effect"):
        make(config=config_of("mixtral") | {"output_router_logits": True})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shift_labels": True}, r"policy_model\.shift_labels: .*loss of its own"),
        ({"peft_cofig": {}}, r"policy_model\.peft_cofig: .*'peft_config'"),
        ({"peft_config": PEFT | {"bias": "all"}}, r"peft_config\.bias: 'all'"),
        ({"peft_config": PEFT | {"init_lora_weights": "pissa"}}, "init_lora_weights: 'pissa'"),
        ({"peft_config": {"peft_type": "LORA", "rank": 3}}, r"policy_model: peft_config\.rank"),
        ({"config": None}, "policy_model: pretrained_model_name_or_path.*neither"),
    ],
)
def test_invalid_settings(given: dict[str, Any], message: str) -> None:
    for call in (Dpo, Dpo.check_arguments):
        with pytest.raises(ConfigError, match=message):
            call(policy_model={**LLAMA, **given})


def test_adapters_that_cannot_be_switched_off_are_refused() -> None:
    model: Any = make(**POLICIES["adapters"]).policy_model
    next(param for param in model.parameters() if not param.requires_grad).requires_grad_()
    with pytest.raises(ConfigError, match=r"trains 'model\.embed_tokens\.weight'.*outside"):
        Adapters(model.model)
    with pytest.raises(ConfigError, match="no adapters that can be switched off"):
        Adapters(HfCausalLm(config=LLAMA["config"]).requires_grad_(False))


def test_settings_of_the_other_loss_have_no_effect_and_that_is_said() -> None:
    with pytest.warns(UserWarning, match=r"policy_model\.loss_scaling .*no effect"):
        make(loss_scaling="batch_size")


@pytest.mark.parametrize("kind", POLICIES)
def test_what_others_ask_of_a_model(kind: str) -> None:
    model = make(**POLICIES[kind])
    ids = language_batch()["input_ids"]
    assert (model.vocab_size, model.max_position_embeddings) == (100, 64)
    found = model.generate(ids, 2, temperature=0.0)
    assert torch.equal(found, model.policy_model.generate(ids, 2, temperature=0.0))
    for name in ("tensor_plan", "lr_adjustment_groups", "published_name"):
        assert getattr(model, name, None) is None


# ---- initial values


@pytest.mark.parametrize("kind", [*POLICIES, "tied"])
def test_a_model_that_is_built_on_meta_copies_its_policy_last(kind: str) -> None:
    tied = {"config": LLAMA["config"] | {"tie_word_embeddings": True}}
    model = make(init_device="meta", **POLICIES.get(kind, tied))
    materialize(model, torch.device("cpu"))
    check_copy(model)
    assert model(batch_of())["loss"].item() == pytest.approx(math.log(2))
    model.to_empty(device="cpu")
    model.reset_parameters()
    check_copy(model)
    theirs: Any = model.policy_model.model
    head, embedding = theirs.lm_head.weight, theirs.get_input_embeddings().weight
    assert (head is embedding) == (kind == "tied")


def check_copy(model: Dpo) -> None:
    assert not any(value.isnan().any() for value in model.state_dict().values())
    if model.ref_model is None:
        return
    pairs: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = [
        (dict(model.policy_model.named_parameters()), dict(model.ref_model.named_parameters())),
        (dict(model.policy_model.named_buffers()), dict(model.ref_model.named_buffers())),
    ]
    for policy, reference in pairs:
        assert policy.keys() == reference.keys()
        assert all(torch.equal(value, reference[name]) for name, value in policy.items())
    assert not any(param.requires_grad for param in model.ref_model.parameters())


# ---- runs


BATCHES = [batch_of(seed=seed) for seed in range(4)]


def fit(folder: Path, steps: int, ckpt_path: Any = None, callbacks: Any = (), **given: Any) -> Dpo:
    trainer = trainer_of(
        folder,
        lambda: make(seed=9, **given),
        steps,
        callbacks=list(callbacks),
        backend=given.pop("backend", {}),
    )
    trainer.fit(BATCHES, ckpt_path=ckpt_path)
    assert isinstance(trainer.model, Dpo)
    return trainer.model


def split(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what is trained, and what stays; the names of the latter without their model."""
    has_copy = any(name.startswith("ref_model.") for name in state)
    part = "ref_model." if has_copy else "policy_model."
    trained = {
        name: value
        for name, value in state.items()
        if not name.startswith("ref_model.") and (has_copy or ".lora_" in name)
    }
    kept = {
        name.removeprefix(part).replace(".base_layer.", "."): value
        for name, value in state.items()
        if name.startswith(part) and ".lora_" not in name
    }
    return trained, kept


@pytest.mark.parametrize(("kind", "device"), [("copy", "cpu"), ("adapters", "meta")])
def test_a_resumed_run_keeps_its_reference(
    kind: str, device: str, folder: Path, tmp_path: Path
) -> None:
    given = {**from_folder(folder), **POLICIES[kind], "init_device": device}
    whole = weights(fit(tmp_path / "whole", 4, **given))
    fit(tmp_path / "parts", 2, **given)
    resumed = weights(fit(tmp_path / "parts", 4, ckpt_path="last", **given))
    first = HfCausalLm(pretrained_model_name_or_path=str(folder)).state_dict()

    assert resumed.keys() == whole.keys()
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    trained, kept = split(whole)
    assert kept.keys() == first.keys()
    assert all(torch.equal(value, first[name]) for name, value in kept.items())
    assert trained
    if kind == "copy":
        moved = [
            name for name in first if not torch.equal(trained[f"policy_model.{name}"], first[name])
        ]
        assert len(moved) == len(first)


@pytest.mark.parametrize(
    ("kind", "start"), [("copy", "checkpoint"), ("adapters", "folder"), ("callback", "folder")]
)
def test_a_run_starts_from_the_weights_of_a_policy(
    kind: str, start: str, folder: Path, tmp_path: Path
) -> None:
    path: Path = folder
    if start == "checkpoint":
        first = trainer_of(tmp_path / "sft", lambda: HfCausalLm(**from_folder(folder)), 2)
        first.fit([language_batch()] * 2)
        path = tmp_path / "sft" / "checkpoint_2"
        expected = first.model.state_dict()
    else:
        expected = HfCausalLm(pretrained_model_name_or_path=str(folder)).state_dict()
    callbacks: list[Any] = [LoadCheckpointStates("model")]
    if kind == "callback":
        callbacks.append(Lora({"r": 4, "target_modules": ["q_proj"]}))
    model = fit(tmp_path / "run", 2, path, callbacks, **POLICIES.get(kind, {}))
    _, kept = split(weights(model))
    assert kept.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in kept.items())


def test_adapters_of_another_training_are_refused(tmp_path: Path) -> None:
    first = trainer_of(
        tmp_path / "sft", lambda: HfCausalLm(config=LLAMA["config"], peft_config=PEFT), 2
    )
    first.fit([language_batch()] * 2)
    path = tmp_path / "sft" / "checkpoint_2"
    with pytest.raises(
        ConfigError, match=r"adapters.*not be part of the reference.*save_pretrained"
    ):
        fit(tmp_path / "run", 2, path, [LoadCheckpointStates("model")], **POLICIES["adapters"])


DECODER: dict[str, Any] = {
    "name": "gpt2",
    "vocab_size": 100,
    "hidden_size": 16,
    "max_position_embeddings": 16,
    "num_hidden_layers": 1,
    "num_heads": 2,
    "filter_size": 16,
    "share_embedding_weights": False,
}


@pytest.mark.parametrize(("policy", "meta"), [(DECODER, False), (LLAMA, True)])
def test_the_callback_lora_leaves_the_reference_alone(
    policy: dict[str, Any], meta: bool, tmp_path: Path
) -> None:
    def build() -> Dpo:
        with torch.device("meta" if meta else "cpu"):
            return Dpo(policy_model=policy)

    lora = Lora({"r": 2, "target_modules": ["Linear"] if meta else None})
    trainer = trainer_of(tmp_path, build, 2, callbacks=[lora])
    model: Any = trainer.model
    before = weights(model)
    trainer.fit(BATCHES)
    after = weights(model)
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved
    assert all(name.startswith("policy_model.") and ".lora_" in name for name in moved)
    assert not any(".lora_" in name for name in after if name.startswith("ref_model."))
    for name, value in after.items():
        if name.startswith("ref_model."):
            plain = {one.replace(".base_layer.", "."): one for one in after}
            assert torch.equal(value, after[plain[name.replace("ref_", "policy_")]])
    again = trainer_of(tmp_path, build, 3, callbacks=[lora])
    again.fit(BATCHES, ckpt_path="last")


def test_the_callback_lora_starts_from_a_decoder(tmp_path: Path) -> None:
    arguments = {key: value for key, value in DECODER.items() if key != "name"}
    decoder = model_class("gpt2")(**arguments)
    first = trainer_of(tmp_path / "sft", lambda: decoder, 2)
    first.fit([language_batch()] * 2)
    trainer = trainer_of(
        tmp_path / "run",
        lambda: Dpo(policy_model=DECODER),
        2,
        callbacks=[Lora({"r": 2}), LoadCheckpointStates("model")],
    )
    trainer.fit(BATCHES, ckpt_path=tmp_path / "sft" / "checkpoint_2")
    model: Any = trainer.model
    _, kept = split(weights(model))
    assert kept.keys() == decoder.state_dict().keys()
    assert all(torch.equal(value, decoder.state_dict()[name]) for name, value in kept.items())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("copy", {"activation_checkpointing": "full"}),
        ("adapters", {"activation_checkpointing": "full"}),
        ("adapters", {"compile": {"target": "model", "backend": "eager", "fullgraph": True}}),
        ("adapters", {"compile": {"target": "blocks", "backend": "eager", "fullgraph": True}}),
    ],
)
def test_weights_are_the_same_however_the_model_runs(
    kind: str, backend: dict[str, Any], tmp_path: Path
) -> None:
    plain = weights(fit(tmp_path / "plain", 2, **POLICIES[kind]))
    other = weights(fit(tmp_path / "other", 2, backend=backend, **POLICIES[kind]))
    for name, value in plain.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", POLICIES)
def test_the_policy_is_written_with_merged_adapters(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    given = {**from_folder(folder), **POLICIES[kind]}
    model = fit(tmp_path / "run", 2, callbacks=[HuggingFaceCheckpoint()], **given)
    written = HfCausalLm(pretrained_model_name_or_path=str(tmp_path / "run" / "hf_2"))
    ids = language_batch()["input_ids"]
    policy: Any = model.policy_model
    torch.testing.assert_close(written.eval().logits(ids), policy.eval().logits(ids))


def test_the_average_is_that_of_the_adapters(tmp_path: Path) -> None:
    ema = ModelEma(0.5)
    plain = weights(fit(tmp_path / "plain", 3, **POLICIES["adapters"]))
    averaged = weights(fit(tmp_path / "ema", 3, callbacks=[ema], **POLICIES["adapters"]))
    assert all(torch.equal(value, averaged[name]) for name, value in plain.items())


# ---- the command line


@pytest.mark.parametrize(
    ("command", "kind"), [("check", "adapters"), ("plan", "copy"), ("fit", "adapters")]
)
def test_a_file(kind: str, command: str, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("datasets", reason="needs datasets")
    text = "".join(f'{{"prompt": "a {i}", "good": "b", "bad": "c {i}"}}\n' for i in range(8))
    (tmp_path / "data.jsonl").write_text(text)
    byte_tokenizer(tmp_path / "tokenizer")  # type: ignore[no-untyped-call]
    config = LLAMA["config"] | {"vocab_size": 512}
    torch.manual_seed(3)
    HfCausalLm(config=config).save_pretrained(tmp_path / "model")
    policy = {
        "name": "hf_causal_lm",
        "pretrained_model_name_or_path": str(tmp_path / "model"),
        **POLICIES[kind],
    }
    data = {
        "data_processor": "HuggingFaceDataProcessor",
        "path": "json",
        "data_files": str(tmp_path / "data.jsonl"),
        "split": "train",
        "task": "preference",
        "prompt_column": "prompt",
        "chosen_column": "good",
        "rejected_column": "bad",
        "tokenizer": str(tmp_path / "tokenizer"),
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        "max_sequence_length": 16,
        "batch_size": 4,
        "cache_dir": str(tmp_path / "cache"),
    }
    init = {
        "device": "cpu",
        "model_dir": str(tmp_path / "run"),
        "seed": 1,
        "model": {"name": "dpo", "policy_model": policy},
        "optimizer": {"AdamW": {"learning_rate": 0.01}},
        "loop": {"max_steps": 2},
        "checkpoint": {"steps": 2},
    }
    file = tmp_path / "params.yaml"
    file.write_text(yaml.safe_dump({"trainer": {"init": init, "fit": {"train_dataloader": data}}}))
    assert main([command, str(file)]) == 0, capsys.readouterr()
