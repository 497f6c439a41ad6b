"""Models of llm-foundry: Hugging Face models and MPT."""

from __future__ import annotations

from math import log2, sqrt
from typing import Any, Final

from modelzoo_trainer.base.dtypes import dtype_name
from modelzoo_trainer.tools.foreign_configs.findings import FindingKind
from modelzoo_trainer.tools.foreign_configs.section import Section

_NORMS: Final = {
    "low_precision_layernorm": "layernorm",
    "layernorm": "layernorm",
    "low_precision_rmsnorm": "rmsnorm",
    "rmsnorm": "rmsnorm",
    "triton_rmsnorm": "rmsnorm",
}
_ACTIVATIONS: Final = {"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"}
_GATED: Final = {"gelu": "geglu", "relu": "reglu", "silu": "swiglu"}


def convert_model(root: Section, backend: dict[str, Any]) -> dict[str, Any]:
    """Return the section `model`. `backend`: gets `sharding.meta_init`."""
    name = str(root.take("model").get("name"))
    if name == "hf_causal_lm":
        return _hugging_face(root.inside("model", "hf"))
    if name == "mpt_causal_lm":
        return _Mpt(root.inside("model", "mpt"), backend).run()
    root.findings.mistake(
        f"model.name: {name!r} has no counterpart; hf_causal_lm and mpt_causal_lm have. For "
        f"another model of transformers write `model: {{name: hf_model, auto_class: ...}}` in a "
        f"file of this package."
    )
    return {}


def _hugging_face(section: Section) -> dict[str, Any]:
    section.take("name")
    model: dict[str, Any] = {"name": "hf_causal_lm"}
    model["pretrained_model_name_or_path"] = section.text("pretrained_model_name_or_path")
    if section.flag("pretrained", True) is False:
        model["pretrained"] = False
    for key in ("config_overrides", "peft_config", "attn_implementation"):
        value = section.take(key)
        if value:
            model[key] = value
    if section.flag("use_flash_attention_2", False):
        model["attn_implementation"] = "flash_attention_2"
    if section.flag("trust_remote_code", False):
        model["trust_remote_code"] = True
    dtype = section.text("master_weights_dtype")
    if dtype:
        model["dtype"] = dtype_name(dtype)
    if section.text("init_device") == "meta":
        model["init_device"] = "meta"
    return model


class _Mpt:
    """Converts the settings of an MPT decoder."""

    def __init__(self, section: Section, backend: dict[str, Any]) -> None:
        self._section = section
        self._backend = backend
        self._attention = section.inside("attn_config")

    def run(self) -> dict[str, Any]:
        section = self._section
        section.take("name")
        width = section.integer("d_model", 2048)
        self._width, self._heads = width, section.integer("n_heads", 16)
        self._has_bias = not section.flag("no_bias", False)
        model = {
            "name": "gpt2",
            "vocab_size": section.integer("vocab_size", 50368),
            "hidden_size": width,
            "num_hidden_layers": section.integer("n_layers", 24),
            "num_heads": self._heads,
            "max_position_embeddings": section.integer("max_seq_len", 2048),
            "share_embedding_weights": section.flag("tie_word_embeddings", True),
            "dropout_rate": float(section.number("resid_pdrop", 0.0)),
            "embedding_dropout_rate": float(section.number("emb_pdrop", 0.0)),
            "attention_dropout_rate": float(self._attention.number("attn_pdrop", 0.0)),
        }
        model |= self._positions() | self._heads_of_keys() | self._feed_forward() | self._norm()
        model |= self._logits()
        self._initializers(model)
        if section.text("init_device") in ("meta", "mixed") and "parallel" in self._backend:
            self._backend.setdefault("sharding", {})["meta_init"] = True
        return model

    def _positions(self) -> dict[str, Any]:
        attention = self._attention
        learned = self._section.flag("learned_pos_emb", True)
        if attention.flag("rope", False):
            rotary = {
                "position_embedding_type": "rotary",
                "rotary_dim": self._width // self._heads,
                "rope_theta": float(attention.number("rope_theta", 10000)),
            }
            if attention.text("rope_impl", "dail") == "hf":
                return rotary | self._scaling()
            attention.inside("rope_dail_config")
            return rotary
        if attention.flag("alibi", False):
            if not log2(self._heads).is_integer():
                why = (
                    f"the slopes of {self._heads} heads, which are not a power of two, are in "
                    f"another order."
                )
                attention.differs("alibi", why)
            return {"position_embedding_type": "alibi"}
        return {"position_embedding_type": "learned" if learned else None}

    def _scaling(self) -> dict[str, Any]:
        section = self._attention.inside("rope_hf_config")
        kind = section.text("type", "no_scaling")
        if kind == "no_scaling":
            return {}
        factor = float(section.number("factor", 1.0))
        if kind == "linear":
            return {"pos_scaling_type": "linear", "pos_scaling_factor": factor}
        if kind == "llama3":
            names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            more = {name: section.number(name) for name in names if name in section}
            scaling = {"pos_scaling_type": "llama3", "pos_scaling_factor": factor}
            return scaling | ({"pos_scaling_extra_args": more} if more else {})
        section.left_out("type", "only linear and llama3 scale rotary positions here.")
        return {}

    def _heads_of_keys(self) -> dict[str, Any]:
        attention = self._attention
        kind = attention.text("attn_type", "multihead_attention")
        groups = attention.integer("kv_n_heads")
        window = attention.integer("sliding_window_size", -1)
        model: dict[str, Any] = {}
        if kind == "multiquery_attention":
            groups = 1
        if kind != "multihead_attention" and groups:
            model["attention_module"] = "multiquery_attention"
            model["extra_attention_params"] = {"num_kv_groups": groups}
        if window >= 0:
            model["attention_sliding_window_length"] = window + 1
        cap = attention.number("attn_logit_softcapping")
        return model | ({"attention_logit_softcapping": float(cap)} if cap else {})

    def _feed_forward(self) -> dict[str, Any]:
        section = self._section
        feed_forward = section.inside("ffn_config")
        kind = feed_forward.text("ffn_type", "mptmlp")
        if kind not in ("mptmlp", "mptglu"):
            why = f"{kind} is not here; the converted file has mptmlp. Experts are set in moe."
            feed_forward.left_out("ffn_type", why)
        activation = feed_forward.inside("ffn_act_fn")
        given = str(activation.text("name", "gelu"))
        name = _ACTIVATIONS.get(given)
        if name is None:
            activation.left_out("name", "set nonlinearity: docs/reference/models.md.")
            name = "gelu"
        tanh = activation.text("approximate", "none") == "tanh"
        if kind == "mptglu":
            name = "geglu_new" if name == "gelu" and tanh else _GATED[name]
        elif name == "gelu" and tanh:
            name = "gelu_new"
        size = feed_forward.integer("ffn_hidden_size")
        ratio = section.number("expansion_ratio", 4)
        return {"filter_size": size or int(self._width * ratio), "nonlinearity": name}

    def _norm(self) -> dict[str, Any]:
        section = self._section
        given = str(section.text("norm_type", "low_precision_layernorm")).lower()
        name = _NORMS.get(given)
        if name is None:
            section.left_out("norm_type", "set norm_type: docs/reference/models.md.")
            name = "layernorm"
        elif given.startswith("low_precision") and "norm_type" in section:
            section.differs("norm_type", "normalization runs in float32 under autocast.")
        if not self._has_bias and name == "layernorm":
            name = "biasless-layernorm"
        biases = (
            "use_projection_bias_in_attention",
            "use_ffn_bias_in_attention",
            "use_ffn_bias",
        )
        return {
            "norm_type": name,
            "layer_norm_epsilon": float(section.number("norm_eps", 1e-5)),
            **dict.fromkeys(biases, self._has_bias),
        }

    def _logits(self) -> dict[str, Any]:
        section = self._section
        scale = section.take("logit_scale")
        cap = section.number("final_logit_softcapping")
        model: dict[str, Any] = {}
        if scale == "inv_sqrt_d_model":
            model["output_logits_scale"] = 1 / sqrt(self._width)
        elif isinstance(scale, int | float) and not isinstance(scale, bool):
            model["output_logits_scale"] = float(scale)
        elif scale is not None:
            section.left_out("logit_scale", "it must be a number or inv_sqrt_d_model.")
        return model | ({"final_logit_softcapping": float(cap)} if cap else {})

    def _initializers(self, model: dict[str, Any]) -> None:
        section = self._section.inside("init_config")
        name = section.text("name", "kaiming_normal_")
        std = section.number("init_std")
        if name == "baseline_" and std:
            model["initializer_range"] = float(std)
            why = "the normal distribution is truncated at two standard deviations here."
            section.differs("name", why)
            return
        why = (
            f"weights begin as in GPT-2 here, not with {name}. Set initializers of the model: "
            f"docs/reference/models.md."
        )
        section.note(FindingKind.DIFFERENT, "name", why)
