"""Models of `transformers` for any task, called with their own batches.

Dimension letters: B batch, T positions, K classes.
"""

from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any, Final

import torch
from torch import Tensor

from modelzoo_trainer.base.constraints import Flag, Size, checked
from modelzoo_trainer.base.dtypes import Float
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.hugging_face.batches import FLOAT_LABELS, check_batch
from modelzoo_trainer.zoo.models.hugging_face.building import (
    CAUSAL,
    check_settings,
    refuse_language_model,
)
from modelzoo_trainer.zoo.models.hugging_face.lengths import limit_of, longest_sequence
from modelzoo_trainer.zoo.models.hugging_face.settings import HfSettings, InitDevice
from modelzoo_trainer.zoo.models.hugging_face.wrapper import TransformersModel
from modelzoo_trainer.zoo.rows.hdf5_format import IGNORED_LABEL

_OWN: Final = ("auto_class", "compute_eval_metrics")
_CTC: Final = "AutoModelForCTC"  # its loss is no mean over labels
_SEQ2SEQ: Final = "AutoModelForSeq2SeqLM"
_PIXELS_DIM: Final = 3
_IGNORED_KEY: Final = "semantic_loss_ignore_index"


class HfModel(TransformersModel):
    """A model of `transformers` for a task, from a folder, the Hub, or settings.

    Args:
        auto_class: The class of `transformers` that makes it, such as
            `AutoModelForSequenceClassification`.
        pretrained_model_name_or_path: Folder with `config.json` and weights, or a name of the Hub.
        config: Settings of a model from scratch, in place of a folder: `model_type` and any others
            of that architecture.
        pretrained: Whether the folder's weights are loaded; null = true with a folder. Tensors that
            they lack, such as a new head, start from initial values, with a warning.
        revision: Branch, tag or commit of a name of the Hub.
        config_overrides: Settings of the architecture that replace settings of the folder, or of
            `config`, such as `num_labels`; a mapping changes only the keys that it has.
        attn_implementation: `sdpa`, `eager` or another one of `transformers`; null = `sdpa` where
            the architecture has it, else `eager`.
        dtype: Type of the weights.
        init_device: `cpu`, or `meta`: without values, which it gets after it is sharded, so that no
            process ever has the whole model.
        peft_config: Adapters of the library `peft`, the only weights to train: `peft_type` (LORA)
            and its settings, such as `r` and `target_modules`.
        resize_token_embeddings: Number of tokens that the model of a folder is enlarged to, for a
            tokenizer with more; the new rows of its embeddings start like the others on average.
        trust_remote_code: Whether an architecture may be Python code of the repository, which then
            runs.
        compute_eval_metrics: Whether the output has `accuracy` in eval mode, for classes.

    Raises:
        ConfigError: If a setting is invalid, or the folder or its weights do not fit.
    """

    @checked()
    def __init__(
        self,
        *,
        auto_class: str,
        pretrained_model_name_or_path: str | None = None,
        config: dict[str, Any] | None = None,
        pretrained: Flag | None = None,
        revision: str | None = None,
        config_overrides: dict[str, Any] | None = None,
        attn_implementation: str | None = None,
        dtype: Float = "float32",
        init_device: InitDevice = "cpu",
        peft_config: dict[str, Any] | None = None,
        resize_token_embeddings: Size | None = None,
        trust_remote_code: Flag = False,
        compute_eval_metrics: Flag = True,
    ) -> None:
        _refuse_language_models(auto_class)
        settings = HfSettings(
            pretrained_model_name_or_path=pretrained_model_name_or_path,
            config=config,
            pretrained=pretrained,
            revision=revision,
            config_overrides=config_overrides,
            attn_implementation=attn_implementation,
            dtype=dtype,
            init_device=init_device,
            peft_config=peft_config,
            resize_token_embeddings=resize_token_embeddings,
            trust_remote_code=trust_remote_code,
        )
        super().__init__(settings, auto_class, may_start_anew=True)
        _require_first_token(auto_class, self.config)
        self._auto_class = auto_class
        self.compute_eval_metrics = compute_eval_metrics

    @classmethod
    def check_arguments(cls, *, auto_class: str, **arguments: Any) -> None:
        """Check the constructor's arguments without building the model, and without a network.

        Raises:
            ConfigError: As the constructor, except for what only the weights show.
        """
        _refuse_language_models(auto_class)
        own = {key: one for key, one in arguments.items() if key not in _OWN}
        check_settings(HfSettings(**own), auto_class)

    @classmethod
    def limit_of(cls, name: str, arguments: Mapping[str, Any]) -> int | EllipsisType | None:
        """Return a limit that a model with these arguments will have; ... = known when built."""
        skipped = (*_OWN, "auto_class")
        return limit_of(name, {key: one for key, one in arguments.items() if key not in skipped})

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids; None without tokens."""
        found = getattr(self.config.get_text_config(), "vocab_size", None)
        return found if isinstance(found, int) else None

    @property
    def max_position_embeddings(self) -> int | None:
        """Largest number of tokens in a sequence; None without a limit."""
        return longest_sequence(self.config)

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Call the model with the batch as keyword arguments, and return its loss and logits.

        Args:
            batch: Arguments of the model's forward; integers may have any size. With
                `problem_type: multi_label_classification` or `regression`, labels may be integers.

        Returns:
            What the model returns by name, such as `loss` and `logits`; `num_items`, if labels are
            classes or per position: how many of them count, that is, are not -100, or, of pixels,
            not `semantic_loss_ignore_index` of the model; in eval mode `accuracy`, of classes.

        Shapes:
            loss, accuracy, num_items: (), float32. logits: (B, K) or (B, T, K).

        Cost:
            No host read here; some models of `transformers` look at masks.

        Raises:
            ConfigError: If the batch is not a mapping.
        """
        if not isinstance(batch, Mapping):
            raise ConfigError(
                f"hf_model requires batches that are mappings of the arguments of "
                f"{type(self.model).__name__}.forward, got a {type(batch).__name__}. Use another "
                f"data processor."
            )
        given = {key: _as_int64(value) for key, value in batch.items()}
        if isinstance(given.get("labels"), Tensor) and self._has_float_labels:
            given["labels"] = given["labels"].float()
        output = self.model(**given)
        outputs = {key: output[key] for key in ("loss", "logits") if key in output}
        labels, logits = given.get("labels"), outputs.get("logits")
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return outputs
        has_classes = isinstance(logits, Tensor) and logits.shape[:-1] == labels.shape
        has_classes = has_classes and outputs["logits"].shape[-1] > 1  # else a regression
        if has_classes or (labels.dim() > 1 and self._auto_class != _CTC):
            num = _counts(labels, self._ignored_label(labels)).sum(dtype=torch.float32)
            outputs["num_items"] = num
            if "loss" in outputs:  # without labels that count, it is the mean of nothing: NaN
                outputs["loss"] = torch.where(num > 0, outputs["loss"], 0.0)
        if self.compute_eval_metrics and not self.training and has_classes:
            outputs["accuracy"] = _accuracy(outputs["logits"], labels)
        return outputs

    def count_labels(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return how many labels of a batch count; None if that is not known before the loss."""
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if self._auto_class == _CTC or self._has_float_labels or not isinstance(labels, Tensor):
            return None
        if labels.is_floating_point() or self.config.num_labels == 1:
            return None
        return _counts(labels, self._ignored_label(labels)).sum()

    def check_batch(self, batch: Mapping[str, Any]) -> None:
        """Check the values of a batch in host memory, before the first step.

        Raises:
            ConfigError: If its labels are the next tokens, documents are packed, or the model does
                not know its tokens, its classes or the padding.
        """
        if isinstance(batch, Mapping):  # else forward refuses it
            check_batch(self.model, self._auto_class, batch)

    @property
    def _has_float_labels(self) -> bool:
        return getattr(self.config, "problem_type", None) in FLOAT_LABELS

    def _ignored_label(self, labels: Tensor) -> int:
        """Return the label that does not count; for pixels (B, H, W) it is a setting."""
        is_of_pixels = labels.dim() == _PIXELS_DIM and self.config.num_labels > 1
        default = IGNORED_LABEL
        return getattr(self.config, _IGNORED_KEY, default) if is_of_pixels else default

    def validation_means(
        self, outputs: Mapping[str, Any], batch: Mapping[str, Any]
    ) -> dict[str, tuple[Tensor, Tensor | int, Callable[[Tensor], Tensor] | None]]:
        """Return the metric that `ModelEvalMetrics` averages over labels, with its weight."""
        if "accuracy" not in outputs:
            return {}
        num = _counts(batch["labels"]).sum(dtype=torch.float32)
        return {"accuracy": (outputs["accuracy"], num, None)}


def _require_first_token(auto_class: str, config: Any) -> None:
    if auto_class == _SEQ2SEQ and getattr(config, "decoder_start_token_id", None) is None:
        raise ConfigError(
            f"decoder_start_token_id is missing in the settings of {config.model_type!r}: the "
            f"token that the decoder's input starts with. Set it in config or config_overrides; in "
            f"T5 it is pad_token_id ({getattr(config, 'pad_token_id', None)})."
        )


def _refuse_language_models(auto_class: str) -> None:
    if auto_class == CAUSAL:
        refuse_language_model(auto_class)


def _as_int64(value: Any) -> Any:
    is_integer = isinstance(value, Tensor) and not (
        value.is_floating_point() or value.is_complex() or value.dtype is torch.bool
    )
    return value.long() if is_integer else value


def _counts(labels: Tensor, ignored: int = IGNORED_LABEL) -> Tensor:
    return labels != ignored


def _accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    counts = _counts(labels)
    hits = (logits.argmax(dim=-1) == labels) & counts
    return hits.sum(dtype=torch.float32) / counts.sum(dtype=torch.float32).clamp(min=1)
