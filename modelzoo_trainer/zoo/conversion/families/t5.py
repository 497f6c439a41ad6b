"""The family t5 of Hugging Face, with tied weights (T5) or an output layer of its own (T5 v1.1)."""

from __future__ import annotations

from typing import Any, Final

from modelzoo_trainer.zoo.conversion.family import Family
from modelzoo_trainer.zoo.conversion.readers import ConfigReader, ModelReader
from modelzoo_trainer.zoo.conversion.rules import Copy, Rule

_ACTIVATIONS: Final = {
    "relu": "relu",
    "gelu": "gelu",
    "silu": "silu",
    "gated-gelu": "geglu_new",
    "gated-silu": "swiglu",
    "gated-relu": "reglu",
}
_THEIRS: Final = {here: there for there, here in _ACTIVATIONS.items()}
_BUCKETS: Final = "layer.0.SelfAttention.relative_attention_bias"


def _settings_of(config: ConfigReader) -> dict[str, Any]:
    config.expect("relative_attention_max_distance", 128)
    config.expect("is_encoder_decoder", True)
    config.expect("is_decoder", False)
    config.ignore("classifier_dropout", "is_gated_act", "n_positions", "output_past")
    act = config.text("feed_forward_proj", "relu")
    if act not in _ACTIVATIONS:
        config.refuse("feed_forward_proj", f"supported: {', '.join(_ACTIVATIONS)}")
    usual = "gelu_new" if act == "gated-gelu" else act.removeprefix("gated-")
    config.expect("dense_act_fn", usual)
    # What tells is whether the states are scaled: newer versions write `tie_word_embeddings: true`
    # for models with an output layer of their own, too.
    is_tied = config.flag("tie_word_embeddings", True)
    is_tied = config.flag("scale_decoder_outputs", is_tied)
    num_layers = config.integer("num_layers", 6)
    return {
        "src_vocab_size": config.integer("vocab_size"),
        "d_model": config.integer("d_model", 512),
        "d_kv": config.integer("d_kv", 64),
        "d_ff": config.integer("d_ff", 2048),
        "encoder_num_hidden_layers": num_layers,
        "decoder_num_hidden_layers": config.integer("num_decoder_layers", num_layers),
        "num_heads": config.integer("num_heads", 8),
        "relative_attention_num_buckets": config.integer("relative_attention_num_buckets", 32),
        "layer_norm_epsilon": config.number("layer_norm_epsilon", 1e-6),
        "dropout_rate": config.number("dropout_rate", 0.1),
        "initializer_factor": config.number("initializer_factor", 1.0),
        "encoder_nonlinearity": _ACTIVATIONS[act],
        "share_embedding_weights": is_tied,
    }


def _config_of(settings: ModelReader) -> dict[str, Any]:
    model = settings.settings
    settings.expect_all(
        {
            "norm_type": "rmsnorm",
            "position_embedding_type": "relative",
            "share_encoder_decoder_embedding": True,
            "use_ffn_bias": False,
            "use_projection_bias_in_attention": False,
            "use_pre_encoder_decoder_layer_norm": True,
            "mup_base_d_model": None,
        }
    )
    settings.expect("embeddings_alpha", None, 1.0)
    settings.expect("use_transformer_initialization", False)  # which scales the scores
    if model.num_kv_groups != settings.take("num_heads"):
        settings.refuse("attention_module")
    if model.nonlinearity(is_decoder=True) != model.nonlinearity(is_decoder=False):
        settings.refuse("decoder_nonlinearity")
    settings.accept("attention_module", "extra_attention_params", "decoder_nonlinearity")
    settings.accept("src_vocab_size", "tgt_vocab_size", "extra_ids", "decoder_num_hidden_layers")
    settings.accept("src_max_position_embeddings", "tgt_max_position_embeddings")  # any there
    settings.accept("output_logits_alpha", "scale_output_logits_by_d")  # of muP alone
    settings.accept("scale_encoder_qk_dot_by_d", "scale_decoder_qk_dot_by_d")
    return {
        "vocab_size": model.num_inputs,
        "d_model": settings.take("d_model"),
        "d_kv": settings.take("d_kv"),
        "d_ff": settings.take("d_ff"),
        "num_layers": settings.take("encoder_num_hidden_layers"),
        "num_decoder_layers": model.num_layers(is_decoder=True),
        "num_heads": model.num_heads,
        "relative_attention_num_buckets": settings.take("relative_attention_num_buckets"),
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": settings.take("layer_norm_epsilon"),
        "dropout_rate": float(settings.take("dropout_rate")),
        "initializer_factor": settings.take("initializer_factor"),
        "feed_forward_proj": settings.look_up("encoder_nonlinearity", _THEIRS),
        "tie_word_embeddings": settings.take("share_embedding_weights"),
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "use_cache": True,
    }


def _rules(model: Any) -> list[Rule]:
    rules: list[Rule] = [Copy("token_embeddings.weight", "shared.weight")]
    for stack in ("encoder", "decoder"):
        rules += _stack_rules(model, stack)
    if not model.share_embedding_weights:
        rules.append(Copy("lm_head.weight", "lm_head.weight"))
    return rules


def _stack_rules(model: Any, stack: str) -> list[Rule]:
    is_decoder = stack == "decoder"
    has_gate = model.nonlinearity(is_decoder=is_decoder) in ("geglu_new", "swiglu", "reglu")
    pairs = {
        "position_bias.buckets": f"block.0.{_BUCKETS}",
        "final_norm": "final_layer_norm",
    }
    for number in range(model.num_layers(is_decoder=is_decoder)):
        layer, block = f"layers.{number}", f"block.{number}.layer"
        for x in "qkvo":
            pairs[f"{layer}.attention.{x}_proj"] = f"{block}.0.SelfAttention.{x}"
        pairs[f"{layer}.attention_norm"] = f"{block}.0.layer_norm"
        if is_decoder:
            for x in "qkvo":
                pairs[f"{layer}.cross_attention.{x}_proj"] = f"{block}.1.EncDecAttention.{x}"
            pairs[f"{layer}.cross_attention_norm"] = f"{block}.1.layer_norm"
        ffn = f"{block}.{2 if is_decoder else 1}"
        pairs[f"{layer}.ffn_norm"] = f"{ffn}.layer_norm"
        pairs[f"{layer}.ffn.up_proj"] = f"{ffn}.DenseReluDense.{'wi_1' if has_gate else 'wi'}"
        if has_gate:
            pairs[f"{layer}.ffn.gate_proj"] = f"{ffn}.DenseReluDense.wi_0"
        pairs[f"{layer}.ffn.down_proj"] = f"{ffn}.DenseReluDense.wo"
    return [
        Copy(f"{stack}.{our}.weight", f"{stack}.{their}.weight") for our, their in pairs.items()
    ]


FAMILIES: Final = (
    Family(
        name="t5",
        architecture="T5ForConditionalGeneration",
        model_name="t5",
        settings_of=_settings_of,
        config_of=_config_of,
        rules=_rules,
        base_prefix="",
        head="lm_head.weight",
        embedding="shared.weight",
        dropped=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
        same={f"{stack}.embed_tokens.weight": "shared.weight" for stack in ("encoder", "decoder")},
        kind="seq2seq",
    ),
)
