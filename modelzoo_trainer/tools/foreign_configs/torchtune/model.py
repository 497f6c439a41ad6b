"""Models and adapters of torchtune, as models of the checkpoint's folder."""

from __future__ import annotations

from typing import Any, Final

from modelzoo_trainer.base.dtypes import dtype_name
from modelzoo_trainer.tools.foreign_configs.findings import FindingKind
from modelzoo_trainer.tools.foreign_configs.section import Section

_ATTENTION: Final = {
    "q_proj": "q_proj",
    "k_proj": "k_proj",
    "v_proj": "v_proj",
    "output_proj": "o_proj",
}
_MLP: Final = ("gate_proj", "up_proj", "down_proj")
_FUSED: Final = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Names of layers that Phi-3 has in one."""
_DTYPES: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_HF: Final = ("FullModelHFCheckpointer", "DistributedCheckpointer")


def convert_model(root: Section) -> dict[str, Any]:
    """Return the section `model`."""
    section = root.inside("model")
    builder = str(section.text("_component_"))
    model: dict[str, Any] = {
        "name": "hf_causal_lm",
        "pretrained_model_name_or_path": folder_of(root),
        "dtype": _dtype(root),
    }
    kind = builder.rpartition(".")[2]
    if has_adapters(root):
        model["peft_config"] = _adapters(section, builder)
    if kind.startswith(("qlora_", "qdora_")):
        section.note(FindingKind.ABSENT, "_component_", "frozen weights are not quantized.")
    loss = root.inside("loss")
    if str(loss.text("_component_")).endswith("DPOLoss"):
        return _preference(root, loss, model)
    return model


def has_adapters(root: Section) -> bool:
    """Return whether the model has LoRA adapters."""
    builder = str(root.inside("model").text("_component_"))
    return builder.rpartition(".")[2].startswith(("lora_", "qlora_", "dora_", "qdora_"))


def _preference(root: Section, loss: Section, policy: dict[str, Any]) -> dict[str, Any]:
    reference = root.inside("ref_checkpointer") if "ref_checkpointer" in root else None
    if reference is not None and reference.text("checkpoint_dir") != folder_of(root):
        why = "the reference is the policy's initial weights."
        reference.note(FindingKind.ABSENT, "checkpoint_dir", why)
    settings = {"beta": float(loss.number("beta", 0.1)), "loss_type": "sigmoid"}
    if policy.get("peft_config", {}).get("lora_dropout"):
        settings["disable_dropout"] = False
    return {"name": "dpo", "policy_model": policy, "dpo": settings}


def folder_of(root: Section) -> str:
    """Return the folder of the model."""
    section = root.inside("checkpointer")
    kind = str(section.text("_component_")).rpartition(".")[2]
    folder = section.text("checkpoint_dir")
    if folder is None:
        root.findings.mistake(
            "checkpointer.checkpoint_dir: is missing; the folder of the model to fine-tune."
        )
        return ""
    if kind not in _HF:
        why = (
            "weights are read from a Hugging Face folder, and written as one. Set "
            "pretrained_model_name_or_path and tokenizer to the folder of the model in that layout."
        )
        section.note(FindingKind.ABSENT, "_component_", why)
    return str(folder)


def _dtype(root: Section) -> str:
    given = str(root.take("dtype", "bf16"))
    name: str = dtype_name(given)
    if name not in _DTYPES:
        root.findings.mistake(f"dtype: {given!r} is unknown; it is {', '.join(_DTYPES.values())}.")
        return "float32"
    return name


def _adapters(section: Section, builder: str) -> dict[str, Any]:
    """Return the settings of LoRA in the names of `peft`."""
    given = section.take("lora_attn_modules", [])
    targets = []
    for name in given if isinstance(given, list) else [given]:
        if name in _ATTENTION:
            targets.append(_ATTENTION[name])
        else:
            section.findings.mistake(
                f"{section.where('lora_attn_modules')}: {name!r} is unknown; it is one of "
                f"{', '.join(_ATTENTION)}."
            )
    if section.flag("apply_lora_to_mlp", False):
        targets += _MLP
    if section.flag("apply_lora_to_output", False):
        targets.append("lm_head")
    if ".phi3" in builder:
        fused = [_FUSED.get(name, name) for name in targets]
        if fused != targets:
            why = "Phi-3 of transformers has these layers in one, which gets one adapter."
            section.note(FindingKind.DIFFERENT, "lora_attn_modules", why)
        targets = list(dict.fromkeys(fused))
    adapters: dict[str, Any] = {
        "peft_type": "LORA",
        "r": section.integer("lora_rank", 8),
        "lora_alpha": section.number("lora_alpha", 16),
        "lora_dropout": float(section.number("lora_dropout", 0.0)),
        "target_modules": targets,
    }
    is_dora = builder.rpartition(".")[2].startswith(("dora_", "qdora_"))
    if section.flag("use_dora", is_dora):
        adapters["use_dora"] = True
    return adapters
