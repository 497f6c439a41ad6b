"""The families of BERT of Hugging Face: with the heads of its pretraining, and with classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from modelzoo_trainer.zoo.conversion.family import Family
from modelzoo_trainer.zoo.conversion.readers import ConfigReader, ModelReader
from modelzoo_trainer.zoo.conversion.rules import Copy, Read, Rule, linear
from modelzoo_trainer.zoo.conversion.weights_folder import Shape
from modelzoo_trainer.zoo.models.parametrization import logits_scale

ACTIVATIONS: Final = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
"""The nonlinearity here for `hidden_act` there."""
THEIR_ACTIVATIONS: Final = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_new",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "tanh": "tanh",
}
"""`hidden_act` there for the nonlinearity here."""
_LAYER: Final = {
    "attention.q_proj": "attention.self.query",
    "attention.k_proj": "attention.self.key",
    "attention.v_proj": "attention.self.value",
    "attention.o_proj": "attention.output.dense",
    "ffn.up_proj": "intermediate.dense",
    "ffn.down_proj": "output.dense",
}
_PROBLEMS: Final = (*("single_label_classification", "multi_label_classification", "regression"),)


@dataclass(frozen=True, slots=True)
class Zeros(Rule):
    """A tensor there that is 0, as our model has none of its kind."""

    their: str
    shape: Shape
    ours: tuple[str, ...] = ()
    theirs: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "theirs", (self.their,))

    @override
    def their_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        return [self.shape]

    @override
    def to_theirs(self, read: Read) -> Iterator[Tensor]:
        yield torch.zeros(self.shape)

    @override
    def to_ours(self, read: Read, shapes: Sequence[Shape]) -> Iterator[Tensor]:
        yield from ()


def read_encoder(config: ConfigReader, *, epsilon: float = 1e-12) -> dict[str, Any]:
    """Return our settings for the keys that encoders like BERT have."""
    config.expect("is_decoder", False)
    return {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": config.integer("hidden_size"),
        "num_hidden_layers": config.integer("num_hidden_layers"),
        "num_heads": config.integer("num_attention_heads"),
        "filter_size": config.integer("intermediate_size"),
        "max_position_embeddings": config.integer("max_position_embeddings"),
        "layer_norm_epsilon": config.number("layer_norm_eps", epsilon),
        "dropout_rate": config.number("hidden_dropout_prob", 0.1),
        "attention_dropout_rate": config.number("attention_probs_dropout_prob", 0.1),
        "initializer_range": config.number("initializer_range", 0.02),
    }


def write_encoder(settings: ModelReader) -> dict[str, Any]:
    """Return the keys of config.json that encoders like BERT have; refuse other settings."""
    settings.expect_all(
        {
            "embeddings_scale": 1.0,
            "use_projection_bias_in_attention": True,
            "use_ffn_bias_in_attention": True,
            "use_ffn_bias": True,
        }
    )
    settings.expect_plain_scores()
    if logits_scale(settings.settings) != 1:
        settings.refuse("output_logits_alpha")
    for name in ("mup_base_hidden_size", "mup_base_filter_size", "output_logits_alpha"):
        settings.take(name)
    for name in ("scale_output_logits_by_d", "nonlinearity", "attention_module"):
        settings.take(name)
    if settings.num_kv_groups() != settings.take("num_heads"):
        settings.refuse("attention_module")
    return {
        "vocab_size": settings.take("vocab_size"),
        "hidden_size": settings.take("hidden_size"),
        "num_hidden_layers": settings.take("num_hidden_layers"),
        "num_attention_heads": settings.take("num_heads"),
        "intermediate_size": settings.take("filter_size"),
        "max_position_embeddings": settings.take("max_position_embeddings"),
        "layer_norm_eps": settings.take("layer_norm_epsilon"),
        "hidden_dropout_prob": float(settings.take("dropout_rate")),
        "attention_probs_dropout_prob": settings.dropout("attention_dropout_rate"),
        "initializer_range": settings.take("initializer_range"),
        "use_cache": True,
    }


def layer_rules(model: Any, prefix: str, norms: Mapping[str, str]) -> list[Rule]:
    """Return the rules of the layers of an encoder like BERT.

    Args:
        model: Ours.
        prefix: Of the names there, such as `bert`.
        norms: Our norms of a layer, each with the name there.
    """
    rules: list[Rule] = []
    for number in range(model.num_hidden_layers):
        our, their = f"encoder.layers.{number}", f"{prefix}.encoder.layer.{number}"
        for ours, theirs in (_LAYER | dict(norms)).items():
            rules += linear(f"{our}.{ours}", f"{their}.{theirs}", bias=True)
    return rules


def _read_bert(config: ConfigReader) -> dict[str, Any]:
    config.expect("position_embedding_type", "absolute")
    config.ignore("classifier_dropout")
    act = config.text("hidden_act", "gelu")
    if act not in ACTIVATIONS:
        config.refuse("hidden_act", f"supported: {', '.join(ACTIVATIONS)}")
    return read_encoder(config) | {
        "encoder_nonlinearity": ACTIVATIONS[act],
        "num_segments": config.integer("type_vocab_size", 2),
    }


def _write_bert(settings: ModelReader) -> dict[str, Any]:
    settings.expect_all(
        {
            "norm_first": False,
            "use_final_layer_norm": False,
            "embedding_layer_norm": True,
            "position_embedding_type": "learned",
            "mask_padding_in_positional_embed": False,
        }
    )
    if settings.settings.has_pooler:
        settings.expect("pooler_nonlinearity", "tanh")
    settings.take("num_segments")
    return write_encoder(settings) | {
        "hidden_act": settings.look_up("encoder_nonlinearity", THEIR_ACTIVATIONS),
        "type_vocab_size": max(1, settings.settings.segments),
    }


def _read_pretraining(config: ConfigReader, *, has_nsp: bool) -> dict[str, Any]:
    # Attention is masked, so padding is not seen.
    pad = config.integer("pad_token_id", 0, least=0)
    return _read_bert(config) | {
        "pad_token_id": pad,
        "share_embedding_weights": config.flag("tie_word_embeddings", True),
        **({"pooler_nonlinearity": "tanh"} if has_nsp else {"disable_nsp": True}),
    }


def _write_pretraining(settings: ModelReader, *, has_nsp: bool) -> dict[str, Any]:
    settings.expect("disable_nsp", not has_nsp)
    settings.expect_all({"use_ffn_bias_in_mlm": True, "use_output_bias_in_mlm": True})
    settings.expect("mlm_nonlinearity", None, settings.settings.encoder_nonlinearity)
    if has_nsp:
        settings.expect("num_classes", 2)
    settings.take("num_classes")
    return _write_bert(settings) | {
        "pad_token_id": settings.take("pad_token_id"),
        "tie_word_embeddings": settings.take("share_embedding_weights"),
    }


def _encoder_rules(model: Any) -> list[Rule]:
    rules = linear("encoder.token_embeddings", "bert.embeddings.word_embeddings", bias=False)
    rules += linear(
        "encoder.position_embeddings", "bert.embeddings.position_embeddings", bias=False
    )
    segments = "bert.embeddings.token_type_embeddings"
    if model.segments:
        rules += linear("encoder.segment_embeddings", segments, bias=False)
    else:
        rules.append(Zeros(f"{segments}.weight", (1, model.hidden_size)))
    rules += linear("encoder.embedding_norm", "bert.embeddings.LayerNorm", bias=True)
    norms = {"attention_norm": "attention.output.LayerNorm", "ffn_norm": "output.LayerNorm"}
    rules += layer_rules(model, "bert", norms)
    if model.has_pooler:
        rules += linear("encoder.pooler", "bert.pooler.dense", bias=True)
    return rules


def _pretraining_rules(model: Any) -> list[Rule]:
    head = "cls.predictions"
    rules = _encoder_rules(model)
    rules += linear("mlm_dense", f"{head}.transform.dense", bias=True)
    rules += linear("mlm_norm", f"{head}.transform.LayerNorm", bias=True)
    rules.append(Copy("lm_head.bias", f"{head}.bias"))
    if not model.share_embedding_weights:
        rules.append(Copy("lm_head.weight", f"{head}.decoder.weight"))
    if not model.disable_nsp:
        rules += linear("nsp_head", "cls.seq_relationship", bias=True)
    return rules


def _read_classifier(config: ConfigReader) -> dict[str, Any]:
    config.ignore("tie_word_embeddings")  # there is no output layer
    labels = config.mapping("id2label", {"0": "", "1": ""})
    kind = config.text("problem_type", _PROBLEMS[2 if len(labels) == 1 else 0])
    if kind not in _PROBLEMS:
        config.refuse("problem_type", f"supported: {', '.join(_PROBLEMS)}")
    found = _read_bert(config)
    dropout = config.number("classifier_dropout", found["dropout_rate"])
    return found | {
        "num_labels": len(labels),
        "problem_type": kind,
        "task_dropout": dropout,
        "pooler_nonlinearity": "tanh",
    }


def _write_classifier(settings: ModelReader) -> dict[str, Any]:
    names = {str(number): f"LABEL_{number}" for number in range(settings.take("num_labels"))}
    settings.take("share_embedding_weights")
    return _write_bert(settings) | {
        "id2label": names,
        "label2id": {name: int(number) for number, name in names.items()},
        "problem_type": settings.take("problem_type"),
        "classifier_dropout": float(settings.take("task_dropout")),
        "pad_token_id": 0,
    }


def _classifier_rules(model: Any) -> list[Rule]:
    return [*_encoder_rules(model), *linear("classifier", "classifier", bias=True)]


def _is(architecture: str, config: Mapping[str, Any]) -> bool:
    named = config.get("architectures")
    return isinstance(named, list) and architecture in named


_DROPPED: Final = (r"bert\.embeddings\.position_ids",)
_SAME: Final = {"cls.predictions.decoder.bias": "cls.predictions.bias"}
_OF_NSP: Final = (r"bert\.pooler\.dense\.\w+", r"cls\.seq_relationship\.\w+")
_EMBEDDING: Final = "bert.embeddings.word_embeddings.weight"
_HEAD: Final = "cls.predictions.decoder.weight"

FAMILIES: Final = (
    Family(
        name="bert",
        architecture="BertForPreTraining",
        model_name="bert",
        settings_of=lambda config: _read_pretraining(config, has_nsp=True),
        config_of=lambda settings: _write_pretraining(settings, has_nsp=True),
        rules=_pretraining_rules,
        base_prefix="bert.",
        head=_HEAD,
        embedding=_EMBEDDING,
        dropped=_DROPPED,
        same=_SAME,
        kind="encoder",
    ),
    Family(
        name="bert_masked_lm",
        architecture="BertForMaskedLM",
        model_name="bert",
        settings_of=lambda config: _read_pretraining(config, has_nsp=False),
        config_of=lambda settings: _write_pretraining(settings, has_nsp=False),
        rules=_pretraining_rules,
        base_prefix="bert.",
        head=_HEAD,
        embedding=_EMBEDDING,
        dropped=(*_DROPPED, *_OF_NSP),
        same=_SAME,
        model_type="bert",
        applies=lambda config: _is("BertForMaskedLM", config),
        kind="encoder",
    ),
    Family(
        name="bert_classifier",
        architecture="BertForSequenceClassification",
        model_name="bert/classifier",
        settings_of=_read_classifier,
        config_of=_write_classifier,
        rules=_classifier_rules,
        base_prefix="bert.",
        head=_HEAD,
        embedding=_EMBEDDING,
        dropped=_DROPPED,
        model_type="bert",
        applies=lambda config: _is("BertForSequenceClassification", config),
        kind="encoder",
    ),
)
