"""Read settings of a model of one side so that none is ignored in silence."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, Final, NoReturn, cast

from typing_extensions import override

from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings
from modelzoo_trainer.zoo.models.moe_settings import MoeSettings
from modelzoo_trainer.zoo.models.parametrization import attention_scale, logits_scale

_MISSING: Final = object()

HARMLESS: Final = frozenset(
    {
        *("_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path"),
        *("architectures", "attn_implementation", "bad_words_ids", "begin_suppress_tokens"),
        *("bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id", "dtype"),
        *("eos_token_id", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id"),
        *("gradient_checkpointing", "id2label", "initializer_range", "label2id", "model_type"),
        *("output_attentions", "output_hidden_states", "output_scores", "pad_token_id"),
        *("prefix", "problem_type", "pruned_heads", "return_dict", "return_dict_in_generate"),
        *("sep_token_id", "suppress_tokens", "task_specific_params", "tf_legacy_loss"),
        *("tokenizer_class", "torch_dtype", "torchscript", "transformers_version"),
        *("unk_token_id", "use_bfloat16", "use_cache"),
    },
)
"""Keys of config.json that do not change what a model computes, or only how tokens are chosen."""
_GENERATION: Final = frozenset(
    {
        *("diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size"),
        *("exponential_decay_length_penalty", "length_penalty", "max_length", "max_new_tokens"),
        *("min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams"),
        *("num_return_sequences", "remove_invalid_values", "repetition_penalty", "temperature"),
        *("top_k", "top_p", "typical_p"),
    }
)
_DISABLED: Final = ("add_cross_attention", "is_encoder_decoder", "tie_encoder_decoder")
OF_SEQ2SEQ: Final = ("add_cross_attention", "tie_encoder_decoder")


class ConfigReader:
    """The keys of a config.json; each that is not read must be known to change nothing.

    Args:
        config: Its content.
        where: The file, for messages.
        family: The name of the family, for messages.
        instead: The model here that takes any model of `transformers`, for messages.
        disabled: Keys that must be false.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        where: str,
        family: str,
        instead: str = "hf_causal_lm",
        disabled: tuple[str, ...] = _DISABLED,
    ) -> None:
        self._config = config
        self._where = where
        self._family = family
        self._instead = instead
        self._disabled = disabled
        self._taken: set[str] = set()

    def has(self, key: str) -> bool:
        """Return whether a key is given and not null."""
        return self._config.get(key) is not None

    def is_given(self, key: str) -> bool:
        """Return whether the file has a key, with any value: null may differ from no key."""
        return key in self._config

    def items(self, key: str) -> list[Any] | None:
        """Return a list, or None if the key is absent or null."""
        found = self._take(key, None, None, "a list", lambda one: isinstance(one, list))
        return None if found is None else list(found)

    def integer(
        self, key: str, default: Any = _MISSING, *, alias: str | None = None, least: int = 1
    ) -> Any:
        """Return a whole number from `least`; `alias`: another name of the key."""
        kind = f"an integer >= {least}"
        return self._take(key, default, alias, kind, lambda one: type(one) is int and one >= least)

    def number(self, key: str, default: Any = _MISSING, *, alias: str | None = None) -> Any:
        """Return a number as a float; `alias`: another name of the key."""
        found = self._take(key, default, alias, "a finite number", is_finite)
        return float(found) if type(found) is int else found

    def flag(self, key: str, default: Any = _MISSING, *, alias: str | None = None) -> Any:
        """Return a boolean; `alias`: another name of the key."""
        return self._take(key, default, alias, "a boolean", lambda one: type(one) is bool)

    def text(self, key: str, default: Any = _MISSING, *, alias: str | None = None) -> Any:
        """Return a string; `alias`: another name of the key."""
        return self._take(key, default, alias, "a string", lambda one: isinstance(one, str))

    def mapping(self, key: str, default: Any = _MISSING, *, alias: str | None = None) -> Any:
        """Return a mapping; `alias`: another name of the key."""
        return self._take(key, default, alias, "an object", lambda one: isinstance(one, dict))

    def value(self, key: str, default: Any = None) -> Any:
        """Return a value of any type."""
        self._taken.add(key)
        found = self._config.get(key)
        return default if found is None else found

    def _take(self, key: str, default: Any, alias: str | None, kind: str, fits: Any) -> Any:
        self._taken |= {key} if alias is None else {key, alias}
        name = alias if alias is not None and not self.has(key) and self.has(alias) else key
        found = self._config.get(name)
        if found is None:
            if default is _MISSING:
                raise ConfigError(
                    f"{self._where} has no {key}, which a model of the family {self._family} "
                    f"requires. Is the file complete?"
                )
            return default
        if not fits(found):
            self.reject(name, found, kind)
        return found

    def reject(self, key: str, value: object, kind: str) -> NoReturn:
        """Refuse a value of a wrong kind. `kind`: what is expected.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{self._where}: {key} is {value!r}; expected {kind}.")

    def expect(self, key: str, *values: Any) -> None:
        """Refuse a value other than these; the first is the default for a file without the key."""
        self._taken.add(key)
        found = self._config.get(key)
        if found is not None and found not in values:
            self.refuse(key, "supported: " + " or ".join(_shown(one) for one in values))

    def ignore(self, *keys: str) -> None:
        """Accept keys that do not change what the model computes."""
        self._taken |= {*keys}

    def refuse(self, key: str, why: str = "") -> NoReturn:
        """Refuse the value of a key, by name.

        Raises:
            ConfigError: Always.
        """
        reason = f" ({why})" if why else ""
        raise ConfigError(
            f"{self._where}: {key}: {_shown(self._config.get(key))} has no counterpart in the "
            f"models of modelzoo_trainer{reason}. Use this model as it is, with model.name: "
            f"{self._instead}."
        )

    def finish(self) -> None:
        """Refuse the first key that was not read and may change what the model computes."""
        for key in self._disabled:
            self.expect(key, False)
        known = self._taken | HARMLESS | _GENERATION
        for key, value in self._config.items():
            if key not in known and value is not None and value not in ([], {}):
                self.refuse(key, f"no option of the family {self._family} that is known here")


def is_finite(value: object) -> bool:
    """Return whether a value is a finite number."""
    return type(value) in (int, float) and math.isfinite(cast(float, value))


_OF_TRAINING: Final = frozenset(
    {
        *("attention_dropout_rate", "attention_kernel", "attention_softmax_fp32"),
        *("compute_eval_metrics", "dropout_rate", "embedding_dropout_rate"),
        *("embedding_initializer", "ffn_initializer", "ffn_output_layer_initializer"),
        *("fold_rope_consts", "fp16_type", "initializer", "initializer_range", "loss_scaling"),
        *("loss_weight", "mixed_precision", "output_layer_initializer"),
    }
)
"""Settings that do not change the logits of a trained model."""
_OF_SCORES: Final = ("attention_type", "scale_qk_dot_by_d", "attention_logits_alpha")
_MUST_BE_READ: Final = frozenset(
    {
        *("vocab_size", "hidden_size", "max_position_embeddings", "position_embedding_type"),
        *("share_embedding_weights", "num_hidden_layers", "norm_type", "layer_norm_epsilon"),
        *("num_heads", "use_projection_bias_in_attention", "use_ffn_bias_in_attention"),
        *("filter_size", "nonlinearity", "use_ffn_bias", "use_bias_in_output"),
        *("attention_module", "moe", "attention_type", "embeddings_scale"),
    }
)
"""Settings without a value that means the same for all families."""


class SettingsReader:
    """The settings of one of our decoders; each that a family does not read is at its default.

    `family`: the name of the family, for messages.
    """

    def __init__(self, settings: DecoderSettings, family: str) -> None:
        self.settings = settings
        self._family = family
        self._taken: set[str] = set()

    def take(self, name: str) -> Any:
        """Return a setting."""
        self._taken.add(name)
        return getattr(self.settings, name)

    def expect(self, name: str, *values: Any) -> Any:
        """Return a setting; refuse a value other than these."""
        found = self.take(name)
        if found not in values:
            self.refuse(name, "supported: " + " or ".join(_shown(one) for one in values))
        return found

    def look_up(self, name: str, values: Mapping[Any, Any]) -> Any:
        """Return the value there for a setting's value; refuse a value that has none."""
        found = self.take(name)
        if found not in values:
            self.refuse(name, "supported: " + " or ".join(_shown(one) for one in values))
        return values[found]

    def dropout(self, name: str) -> float:
        """Return a dropout rate; null means `dropout_rate`."""
        rate = self.take(name)
        return float(self.take("dropout_rate") if rate is None else rate)

    def num_kv_groups(self) -> int:
        """Return the number of heads of keys and values."""
        self._taken |= {"attention_module", "extra_attention_params"}
        return self.settings.num_kv_groups

    def experts(self) -> MoeSettings | None:
        """Return the settings of the mixture of experts, if there is one."""
        self._taken.add("moe")
        return self.settings.experts

    def expect_no_experts(self) -> None:
        """Refuse a mixture of experts."""
        if self.experts() is not None:
            self.refuse("moe")

    def scores_scale(self) -> float:
        """Return the factor on the attention scores."""
        self._taken |= {*_OF_SCORES}
        return attention_scale(self.settings)

    def expect_plain_scores(self) -> None:
        """Refuse another scale of the attention scores than the root of the head dimension."""
        if self.scores_scale() != self.settings.head_dim**-0.5:
            self.refuse(self._changed(_OF_SCORES) or "mup_base_hidden_size")

    def expect_plain_or_unscaled_scores(self) -> bool:
        """Return whether scores are divided by the root of the head dimension, or not at all.

        Raises:
            ConfigError: For another scale.
        """
        is_scaled = self.scores_scale() != 1 or self.settings.head_dim == 1
        if is_scaled:
            self.expect_plain_scores()
        return is_scaled

    def expect_plain_logits(self) -> None:
        """Refuse a factor on the logits."""
        names = ("output_logits_scale", "output_logits_alpha", "scale_output_logits_by_d")
        if logits_scale(self.settings) != 1:
            is_mup = self.settings.uses_mup
            self.refuse("mup_base_hidden_size" if is_mup else self._changed(names) or names[0])
        self._taken |= {*names, "mup_base_hidden_size", "mup_base_filter_size"}

    def expect_plain_scales(self) -> None:
        """Refuse factors on the embeddings, scores and logits."""
        self.expect("embeddings_scale", 1.0)
        self.expect_plain_scores()
        self.expect_plain_logits()

    def _changed(self, names: Iterable[str]) -> str | None:
        defaults = _defaults(self.settings)
        return next(
            (one for one in names if getattr(self.settings, one) != defaults[one]),
            None,
        )

    def refuse(self, name: str, why: str = "") -> NoReturn:
        """Refuse the value of a setting, by name.

        Raises:
            ConfigError: Always.
        """
        reason = f" ({why})" if why else ""
        raise ConfigError(
            f"{name}: {_shown(getattr(self.settings, name))} has no counterpart in models of the "
            f"family {self._family} of Hugging Face{reason}."
        )

    def finish(self) -> None:
        """Refuse the first setting that was not read and is not at its default."""
        forgotten = _MUST_BE_READ - self._taken
        if forgotten:
            raise RuntimeError(f"family {self._family}: config_of does not read {forgotten}")
        for name, default in _defaults(self.settings).items():
            if name in self._taken or name in _OF_TRAINING:
                continue
            if getattr(self.settings, name) != default and not self._is_unused(name):
                self.refuse(name)

    def _is_unused(self, name: str) -> bool:
        """Return whether a setting has no effect with the others."""
        positions = self.settings.position_embedding_type
        return (
            (name == "num_relative_attention_buckets" and positions != "relative")
            or (name in ("rope_theta", "rotary_dim") and positions != "rotary")
            or (name == "alibi_trainable_slopes" and positions != "alibi")
            or (name == "pos_scaling_factor" and positions not in ("rotary", "alibi"))
            or (name == "position_embedding_offset" and positions != "learned")
            or (
                name.startswith("sliding_window_every")
                and self.settings.attention_sliding_window_length is None
            )
        )


_OF_TRAINING_ELSEWHERE: Final = re.compile(
    r".*(dropout|initializer).*|.*loss.*|label_smoothing|compute_eval_metrics|mixed_precision"
    r"|attention_(kernel|softmax_fp32)|fp16_type|fold_rope_consts|freeze|stochastic_depth_.*"
    r"|initializer_range|embd_pdrop|problem_type"
)
"""Settings of other models that do not change the logits of a trained one."""


class ModelReader(SettingsReader):
    """The settings of one of our models besides the decoders, which are its attributes."""

    settings: Any

    def __init__(self, settings: Any, family: str) -> None:
        super().__init__(settings, family)

    def accept(self, *names: str) -> None:
        """Accept settings with any value: the others give their effect, or they have none."""
        self._taken |= {*names}

    def expect_all(self, values: Mapping[str, Any]) -> None:
        """Refuse the first setting that has another value."""
        for name, value in values.items():
            self.expect(name, value)

    @override
    def finish(self) -> None:
        for name, default in _defaults(self.settings).items():
            if name in self._taken or _OF_TRAINING_ELSEWHERE.fullmatch(name):
                continue
            if getattr(self.settings, name) != default and not self._has_no_effect(name):
                self.refuse(name)

    def _has_no_effect(self, name: str) -> bool:
        positions = getattr(self.settings, "position_embedding_type", None)
        return (
            (name in ("rope_theta", "rotary_dim") and positions != "rotary")
            or (name.startswith(("num_relative", "relative_")) and positions != "relative")
            or (name == "alibi_trainable_slopes" and positions != "alibi")
        )


def _defaults(settings: Any) -> dict[str, Any]:
    return {field.name: field.default for field in fields(settings)}


def _shown(value: Any) -> str:
    """Return a value as YAML and JSON write it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
