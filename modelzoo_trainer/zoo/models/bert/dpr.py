"""Dense passage retrieval: a question is near the passage that answers it, and far from others.

https://arxiv.org/abs/2004.04906

Dimension letters: B questions, C contexts of a question, T positions, H hidden size.
"""

# Annotations are evaluated here: they are the schema.
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from modelzoo_trainer.base.annotations import annotations_of
from modelzoo_trainer.base.constraints import (
    FinitePositiveFloat,
    Flag,
    NonNegativeSize,
    check,
    checked,
    checked_dataclass,
)
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.models.bert.encoder import Encoder, Step
from modelzoo_trainer.zoo.models.bert.engines import encoder_tensor_plan, lr_groups
from modelzoo_trainer.zoo.models.bert.engines import published_name as name_in_pretraining
from modelzoo_trainer.zoo.models.bert.settings import EncoderSettings
from modelzoo_trainer.zoo.models.parametrization import LrAdjustmentGroup

PoolerType = Literal["cls", "mean", "ffn_pooler"]

QUESTIONS: Final = "questions_"
CONTEXTS: Final = "ctx_"
_SEGMENTS: Final = "token_type_ids"
_FEATURES: Final = ("input_ids", "attention_mask", _SEGMENTS)
_POOLER: Final = "ffn_pooler"
_QUESTION_ENCODER: Final = "question_encoder."
_CONTEXT_ENCODER: Final = "ctx_encoder."
_OF_HEADS: Final = (
    *("label_smoothing", "mlm_loss_weight", "mlm_nonlinearity", "num_classes"),
    *("output_logits_alpha", "scale_output_logits_by_d", "share_embedding_weights"),
    *("use_ffn_bias_in_mlm", "use_output_bias_in_mlm"),
)
_IN_TRAINER: Final = "the section precision sets it"
_INERT: Final = dict.fromkeys(_OF_HEADS, "an encoder has no head") | {
    "add_pooling_layer": "pooler_type of the model decides whether there is a pooler",
    "compute_eval_metrics": "set it in the model, not in an encoder",
    "dtype": _IN_TRAINER,
    "embedding_pad_token_id": "set pad_token_id instead",
    "fp16_type": _IN_TRAINER,
    "mixed_precision": _IN_TRAINER,
    "nonlinearity": "set encoder_nonlinearity instead",
}
"""Settings of published encoders that have no part in a vector, each with the reason."""


@checked_dataclass(kw_only=True)
class DprEncoderSettings(EncoderSettings):
    """Settings of an encoder.

    Args:
        pad_token_id: Token whose embedding is not trained by its use as an input.
    """

    pad_token_id: NonNegativeSize = 0


class PoolingEncoderSettings(DprEncoderSettings):
    """Settings of an encoder with a pooler."""

    @property
    @override
    def has_pooler(self) -> bool:
        return True


class Dpr(nn.Module):
    """Two encoders whose vectors are compared by their products: of questions, and of passages.

    A passage is a negative of all other questions of its batch, so of a batch of B questions with
    C contexts each, one context is right and B * C - 1 are wrong. A batch is what one process
    computes at once: one of its micro-batches.

    Args:
        q_encoder: Settings of the encoder of questions: as for `bert` without its heads.
        ctx_encoder: Settings of the encoder of contexts.
        encoder: Settings of both, instead.
        use_biencoder: Whether there are two encoders; else `encoder` is one for both.
        pooler_type: What the vector of a text is: `cls`: the last state of its first token; `mean`:
            the mean of all its last states; `ffn_pooler`: as `cls`, after BERT's pooler.
        softmax_temperature: What the products are divided by.
        mutual_information: Whether the loss also compares contexts with the questions of the batch.
        compute_eval_metrics: Whether the output has `accuracy` in eval mode.

    Raises:
        ConfigError: If a setting is invalid.
    """

    builds_without_values = True
    """Whether `reset_steps` draws all initial values, so that the constructor need not."""

    encoder_arguments: ClassVar[tuple[str, ...]] = ("q_encoder", "ctx_encoder", "encoder")

    @checked()
    def __init__(
        self,
        *,
        q_encoder: dict[str, Any] | None = None,
        ctx_encoder: dict[str, Any] | None = None,
        encoder: dict[str, Any] | None = None,
        use_biencoder: Flag = True,
        pooler_type: PoolerType = "cls",
        softmax_temperature: FinitePositiveFloat = 1.0,
        mutual_information: Flag = False,
        compute_eval_metrics: Flag = False,
    ) -> None:
        super().__init__()
        given = {"q_encoder": q_encoder, "ctx_encoder": ctx_encoder, "encoder": encoder}
        questions, contexts = _both(
            given, use_biencoder=use_biencoder, has_pooler=pooler_type == _POOLER
        )
        _warn_of_unused(given)
        for name, settings in zip(_given_names(given), (questions, contexts), strict=False):
            assert settings is not None
            settings.warn_of_unused(stacklevel=3, section=f"model.{name}.")
        self.pooler_type = pooler_type
        self.softmax_temperature = softmax_temperature
        self.mutual_information = mutual_information
        self.compute_eval_metrics = compute_eval_metrics
        self.question_encoder = Encoder(questions)
        self.ctx_encoder: Encoder | None = None
        if contexts is not None:
            self.ctx_encoder = Encoder(contexts)
        self.reset_parameters()

    @classmethod
    def check_arguments(
        cls, *, use_biencoder: bool = True, pooler_type: PoolerType = "cls", **arguments: Any
    ) -> None:
        """Check the constructor's arguments without building the model.

        Raises:
            ConfigError: As the constructor.
        """
        given = {name: arguments.get(name) for name in cls.encoder_arguments}
        both = _both(given, use_biencoder=use_biencoder, has_pooler=pooler_type == _POOLER)
        for settings in both:
            if settings is not None:
                settings.initializers()

    @property
    def encoders(self) -> dict[str, Encoder]:
        """The encoders by their names, one if it is for both."""
        both = {_QUESTION_ENCODER: self.question_encoder, _CONTEXT_ENCODER: self.ctx_encoder}
        return {name.rstrip("."): one for name, one in both.items() if one is not None}

    @property
    def vocab_size(self) -> int:
        """Number of token ids that both encoders have."""
        return min(one.settings.vocab_size for one in self.encoders.values())

    @property
    def max_position_embeddings(self) -> int:
        """Largest number of tokens in a text for both encoders."""
        return min(one.settings.max_position_embeddings for one in self.encoders.values())

    @property
    def num_segments_of_texts(self) -> tuple[int | None, int | None]:
        """Numbers of segments of questions and of contexts; None = segments are not used."""
        both = (self.question_encoder, self.ctx_encoder or self.question_encoder)
        questions, contexts = (one.settings.segments or None for one in both)
        return questions, contexts

    @property
    def lr_adjustment_groups(self) -> Mapping[str, LrAdjustmentGroup]:
        """Groups of parameters with learning rate factors, by name; all 1 without muP."""
        return lr_groups(self.question_encoder.settings)

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Tensor parallelism: how layers are split, by module name patterns."""
        return {
            f"{name}.{place.removeprefix('encoder.')}": style
            for name, encoder in self.encoders.items()
            for place, style in encoder_tensor_plan(encoder).items()
        }

    @staticmethod
    def published_name(name: str) -> str | None:
        """Return the name of a parameter in the Cerebras Model Zoo, None if it has none."""
        for prefix in (_QUESTION_ENCODER, _CONTEXT_ENCODER):
            if name.startswith(prefix):
                found = name_in_pretraining(f"encoder.{name.removeprefix(prefix)}")
                return None if found is None else found.replace("bert_encoder.", prefix, 1)
        return None

    def reset_parameters(self) -> None:
        """Initialize all weights; also after `to_empty`."""
        for _, draw in self.reset_steps():
            draw()

    def reset_steps(self) -> Iterator[Step]:
        """Yield the parts of the model, each with the function that initializes it."""
        for encoder in self.encoders.values():
            yield from encoder.initial_steps()

    def complete_state(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a checkpoint for both encoders, if it has only one for questions.

        Args:
            found: Entries by name.
        """
        if self.ctx_encoder is None or any(name.startswith(_CONTEXT_ENCODER) for name in found):
            return dict(found)
        copies = {
            name.replace(_QUESTION_ENCODER, _CONTEXT_ENCODER, 1): value
            for name, value in found.items()
            if name.startswith(_QUESTION_ENCODER)
        }
        return {**found, **copies}

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the loss and the products of questions and contexts.

        loss = mean cross entropy of the right context, the first one of each question, over all
        contexts of the batch, with logits q c / `softmax_temperature`. With `mutual_information`:
        (1 - w) times that + w times the mean cross entropy of the right question of each right
        context over all questions, w = 1 / (1 + C).

        Args:
            batch: `input_ids`, `attention_mask` and, if the encoders have segments,
                `token_type_ids`, with `questions_` and with `ctx_` in front. An encoder without
                segments does not use them. `labels` and `context_labels` are not used: they would
                count from the first row of all processes.

        Returns:
            `loss`, `logits`, `num_items` (B); in eval mode with `compute_eval_metrics` also
            `accuracy`: the share of questions whose right context has the largest product.

        Shapes:
            questions_...: (B, T) integer. ctx_...: (B, C, T) integer, T may differ. logits:
            (B, B * C). loss, accuracy: (), float32.

        Cost:
            No host read, no data-dependent shape. B * (1 + C) texts are encoded.

        Raises:
            ConfigError: If the batch does not fit the model.
        """
        questions, contexts = _texts(batch, QUESTIONS, dims=2), _texts(batch, CONTEXTS, dims=3)
        num, num_contexts = contexts["input_ids"].shape[:2]
        if len(questions["input_ids"]) != num:
            raise ConfigError(
                f"The batch has {len(questions['input_ids'])} questions, but contexts of {num}."
            )
        flat = {name: one.flatten(0, 1) for name, one in contexts.items()}
        asked = self.question_vectors(questions)
        found = self.context_vectors(flat)
        logits = asked @ found.T / self.softmax_temperature
        targets = torch.arange(num, device=logits.device)
        rights = targets * num_contexts
        loss = functional.cross_entropy(logits.float(), rights)
        if self.mutual_information:
            firsts = found.view(num, num_contexts, -1)[:, 0]
            backwards = firsts @ asked.T / self.softmax_temperature
            weight = 1 / (1 + num_contexts)
            others = functional.cross_entropy(backwards.float(), targets)
            loss = (1 - weight) * loss + weight * others
        outputs: dict[str, Any] = {"loss": loss, "logits": logits, "num_items": num}
        if self.compute_eval_metrics and not self.training:
            outputs["accuracy"] = (logits.argmax(dim=-1) == rights).float().mean()
        return outputs

    def question_vectors(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the vectors of questions.

        Args:
            batch: `input_ids`, `attention_mask`; `token_type_ids`, which an encoder without
                segments (`num_segments: 0`) does not use.

        Shapes:
            In batch: (B, T) integer. Returns: (B, H).
        """
        return self._vectors(self.question_encoder, batch)

    def context_vectors(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the vectors of contexts, with the arguments and shapes of `question_vectors`."""
        return self._vectors(self.ctx_encoder or self.question_encoder, batch)

    def _vectors(self, encoder: Encoder, batch: Mapping[str, Tensor]) -> Tensor:
        if not encoder.settings.segments:  # data processors always give them
            batch = {name: one for name, one in batch.items() if name != _SEGMENTS}
        hidden: Tensor = encoder(batch)
        if self.pooler_type == _POOLER:
            return encoder.pool(hidden)
        if self.pooler_type == "cls":
            return hidden[:, 0]
        mask = batch["attention_mask"][..., None].to(hidden.dtype)
        return (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)


def _texts(batch: Mapping[str, Tensor], prefix: str, *, dims: int) -> dict[str, Tensor]:
    """Return the features of one kind of text, without their prefix."""
    found = {name: batch[f"{prefix}{name}"] for name in _FEATURES if f"{prefix}{name}" in batch}
    lacks = [f"{prefix}{name}" for name in _FEATURES[:2] if name not in found]
    if lacks:
        raise ConfigError(
            f"The model got a batch with the keys {sorted(batch)}, without {lacks}. Use a data "
            f"processor such as DPRHDF5DataProcessor."
        )
    shapes = {name: tuple(one.shape) for name, one in found.items()}
    if any(len(shape) != dims for shape in shapes.values()) or len(set(shapes.values())) > 1:
        expected = "(questions, tokens)" if dims == 2 else "(questions, contexts, tokens)"
        raise ConfigError(
            f"The batch has features {prefix}* of the shapes {shapes}, expected one shape for all, "
            f"{expected}."
        )
    return found


Given = Mapping[str, dict[str, Any] | None]


def _given_names(given: Given) -> list[str]:
    return [name for name, one in given.items() if one is not None]


def _both(
    given: Given, *, use_biencoder: bool, has_pooler: bool
) -> tuple[DprEncoderSettings, DprEncoderSettings | None]:
    """Return the settings of the encoders of questions and of contexts; None = the same encoder.

    Raises:
        ConfigError: If they are invalid, or do not fit each other.
    """
    names = _given_names(given)
    read = partial(_settings, given=given, has_pooler=has_pooler)
    if not use_biencoder:
        if names != ["encoder"]:
            raise ConfigError(
                f"use_biencoder is false, which requires encoder, the settings of the encoder for "
                f"both, and nothing else; given: {', '.join(names) or 'none'}."
            )
        return read("encoder"), None
    if names == ["encoder"]:
        return read("encoder"), read("encoder")
    if names != ["q_encoder", "ctx_encoder"]:
        raise ConfigError(
            f"The model requires q_encoder and ctx_encoder, the settings of two encoders, or "
            f"encoder, the settings of both; given: {', '.join(names) or 'none'}."
        )
    questions, contexts = read("q_encoder"), read("ctx_encoder")
    for what, one, other in (
        ("hidden_size", questions.hidden_size, contexts.hidden_size),
        ("the width ratios of muP", _ratios(questions), _ratios(contexts)),
    ):
        if one != other:
            raise ConfigError(
                f"{what} of q_encoder and ctx_encoder must be equal, but are {one} and {other}."
            )
    return questions, contexts


def _ratios(settings: EncoderSettings) -> tuple[float, float]:
    hidden, inner = settings.mup_base_hidden_size, settings.mup_base_filter_size
    return (
        settings.hidden_size / (hidden or settings.hidden_size),
        settings.filter_size / (inner or settings.filter_size),
    )


def _settings(name: str, given: Given, *, has_pooler: bool) -> DprEncoderSettings:
    arguments = {key: one for key, one in (given[name] or {}).items() if key not in _INERT}
    known = [field.name for field in fields(DprEncoderSettings) if field.init]
    kinds = annotations_of(DprEncoderSettings)
    if arguments.pop("disable_nsp", False):
        raise ConfigError(
            f"model.{name}.disable_nsp: this encoder predicts no next sentence anyway. Set "
            f"num_segments: 0 if it is to have no segments, and remove disable_nsp."
        )
    for key, value in arguments.items():
        if key not in known:
            raise ConfigError(f"model.{name}.{key}: no such setting. {suggest(str(key), known)}")
        check(f"model.{name}.{key}", value, kinds[key])
    lacks = {"max_position_embeddings"} - arguments.keys()
    if lacks:
        raise ConfigError(f"model.{name}: {', '.join(lacks)} is missing. Set it.")
    with _naming(name):
        made = PoolingEncoderSettings if has_pooler else DprEncoderSettings
        return made(**arguments)


def _warn_of_unused(given: Given) -> None:
    for name, settings in given.items():
        for key, reason in _INERT.items():
            if settings and settings.get(key) is not None:
                warnings.warn(
                    f"model.{name}.{key} ({settings[key]}) has no effect: {reason}. Remove it.",
                    stacklevel=3,
                )


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Context manager: errors name the section of an encoder's settings."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"model.{name}: {error}") from error
