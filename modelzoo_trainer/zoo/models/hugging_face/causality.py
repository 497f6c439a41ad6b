"""Which models of `transformers` are causal; others would learn to copy the next token."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from modelzoo_trainer.errors import ConfigError

_ENCODERS: Final = frozenset(
    {
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
"""Values of `model_type` whose attention is causal only with `is_decoder: true`."""


_OTHERS: Final = frozenset({"reformer", "xlm", "xlnet"})
"""Values of `model_type` of language models that classify as encoders do."""


def check_causal(config: Any, key: str) -> None:
    """Refuse settings of an architecture with which a token sees the tokens after it.

    Args:
        config: Settings of the architecture, of `transformers`.
        key: Where a user sets them: `config` or `config_overrides`.

    Raises:
        ConfigError: If they do not make attention causal.
    """
    needed = _needed(config)
    if needed is None:
        return
    name, value = needed
    written = str(value).lower() if isinstance(value, bool) else value
    raise ConfigError(
        f"{config.model_type!r} with {name}: {getattr(config, name)!r} is no language model: each "
        f"token sees the ones after it, so it would learn to copy the next token. Set "
        f"{key}: {{{name}: {written}}}, or another architecture; for masked tokens "
        f"(AutoModelForMaskedLM), name: hf_model."
    )


def reads_last_token(config: Any) -> bool:
    """Return whether a model classifies a row by its last token that is no padding.

    That is what decoders do; encoders have a token for it, and models of both read the last EOS.
    """
    cls = type(config)
    is_decoder = cls in import_module("transformers").AutoModelForCausalLM._model_mapping
    is_other = config.model_type in _ENCODERS | _OTHERS or config.is_encoder_decoder
    return is_decoder and not is_other and not cls.sub_configs


def _needed(config: Any) -> tuple[str, bool | str] | None:
    """Return the setting that makes attention causal, and its value; None if it is."""
    if config.model_type in _ENCODERS and not config.is_decoder:
        return "is_decoder", True
    if config.model_type == "xlm" and not config.causal:
        return "causal", True
    if config.model_type == "xlnet" and config.attn_type != "uni":
        return "attn_type", "uni"
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return "use_bidirectional_attention", False
    return None
