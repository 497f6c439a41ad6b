"""What tests of a family share: make a model there, convert it, and compare both ways."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelzoo_trainer.zoo.conversion.engine import InMemory as InMemory
from modelzoo_trainer.zoo.conversion.engine import TensorSource, plan_ours, plan_theirs, shapes_of
from modelzoo_trainer.zoo.conversion.family import Family, family_named
from modelzoo_trainer.zoo.models.decoder import Decoder


def saved(model: Any, folder: Path) -> tuple[dict[str, Any], InMemory]:
    """Return the config.json and the tensors that transformers saves for a model."""
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config, InMemory(load_file(folder / "model.safetensors"))


def ours_from(family: Family, config: dict[str, Any], source: TensorSource) -> Decoder:
    """Return our decoder with the weights of a model there, in eval mode."""
    arguments = family.read_config(config, "config.json")
    cls = family.model_class
    settings = cls.settings_of(**arguments)
    plan = plan_ours(
        family.rules(settings), source, shapes_of(cls, arguments), family, where="the model"
    )
    state = dict(plan.tensors())
    assert {name: (tuple(one.shape), one.dtype) for name, one in state.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in plan.specs.items()
    }
    model = cls(**arguments)
    if model.share_embedding_weights:
        state["lm_head.weight"] = state["token_embeddings.weight"]
    model.load_state_dict(state)
    return model.eval()


def theirs_from(family: Family, model: Decoder) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and the tensors there of our decoder."""
    config = json.loads(json.dumps(family.make_config(model)))
    arguments = {
        field.name: getattr(model, field.name)
        for field in fields(type(model).SETTINGS)
        if field.init
    }
    source = InMemory(dict(model.state_dict()))
    plan = plan_theirs(
        family.rules(model), source, shapes_of(type(model), arguments), where="the checkpoint"
    )
    tensors = dict(plan.tensors())
    assert {name: (tuple(one.shape), one.dtype) for name, one in tensors.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in plan.specs.items()
    }
    return config, tensors


def loaded(config: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> Any:
    """Return the model that transformers loads from a folder with these, in eval mode."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    auto: Any = AutoModelForCausalLM
    model, report = auto.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return model.eval()


def randomized(model: Any) -> Any:
    """Give all parameters other values than those they start with, norms and biases too."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def check_family(
    name: str, model: Any, folder: Path, *, length: int = 12, tolerance: float = 1e-5
) -> None:
    """Check a family on a model of transformers, in both directions.

    Theirs -> ours: equal logits. Ours -> theirs: transformers loads it without a warning, with
    equal logits. Ours -> theirs -> ours: equal bits.
    """
    family = family_named(name, where="the test")
    model = randomized(model)
    config, source = saved(model, folder / "theirs")
    ours = ours_from(family, config, source)
    torch.manual_seed(0)
    tokens = torch.randint(0, ours.vocab_size, (2, length))
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        found = ours.logits(tokens)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert expected.std() > 0.05  # else nothing is compared
    made_config, tensors = theirs_from(family, ours)
    again = loaded(made_config, tensors, folder / "again")
    with torch.no_grad():
        torch.testing.assert_close(
            again(input_ids=tokens).logits, expected, atol=tolerance, rtol=tolerance
        )
    back = ours_from(family, made_config, InMemory(tensors))
    for key, tensor in ours.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[key]), key
