"""Language models of `transformers` on the batches that the decoders here take.

Dimension letters: B batch, T positions, V vocabulary size.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import EllipsisType
from typing import Any, ClassVar, Final, cast

import torch
from torch import Generator, Tensor
from torch.nn import functional

from modelzoo_trainer.base.constraints import Flag, NonNegative, NonNegativeSize, Size, checked
from modelzoo_trainer.base.dtypes import Float
from modelzoo_trainer.core.parts.training_mode import in_evaluation_mode
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.hugging_face.labels import begin_again, num_next, num_repeated
from modelzoo_trainer.zoo.models.generation import draw_next, extend_tokens
from modelzoo_trainer.zoo.models.hugging_face.attention import (
    NoCache,
    attention_masks,
    has_expert_loss,
    makes_masks,
    refuse_packing,
    spans_of_positions,
)
from modelzoo_trainer.zoo.models.hugging_face.batches import check_tokens, is_planned
from modelzoo_trainer.zoo.models.hugging_face.building import CAUSAL, check_settings
from modelzoo_trainer.zoo.models.hugging_face.generating import TokensSoFar, cache_name
from modelzoo_trainer.zoo.models.hugging_face.head import parts_of
from modelzoo_trainer.zoo.models.hugging_face.lengths import limit_of, longest_sequence
from modelzoo_trainer.zoo.models.hugging_face.settings import HfSettings, InitDevice
from modelzoo_trainer.zoo.models.hugging_face.wrapper import TransformersModel
from modelzoo_trainer.zoo.models.language_head import (
    LOGITS,
    WithOptionalLogits,
    losses_of,
    score,
)
from modelzoo_trainer.zoo.models.language_loss import (
    LossScaling,
    counted_labels,
    language_loss,
    num_counted,
    reduced_loss,
    share_of_hits,
    token_accuracy,
    token_losses,
    validation_means,
)
from modelzoo_trainer.zoo.models.masks import POSITIONS_KEY, SPAN_KEY
from modelzoo_trainer.zoo.rows.hdf5_format import IGNORED_LABEL

_NO_LIMIT: Final = 2**31 - 1
_OF_THE_LOSS: Final = ("shift_labels", "loss_scaling", "compute_eval_metrics")


class HfCausalLm(WithOptionalLogits, TransformersModel):
    """A language model of `transformers`, from a folder, the Hub, or settings.

    It takes the batches of the decoders here, or with `shift_labels` the batches of the collators
    of `transformers`.

    Args:
        pretrained_model_name_or_path: Folder with `config.json` and weights, or a name of the Hub.
        config: Settings of a model from scratch, in place of a folder: `model_type` and any others
            of that architecture.
        pretrained: Whether the folder's weights are loaded; null = true with a folder.
        revision: Branch, tag or commit of a name of the Hub.
        config_overrides: Settings of the architecture that replace settings of the folder, or of
            `config`; a mapping changes only the keys that it has.
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
        shift_labels: Whether `labels` are the tokens themselves, as the collators of `transformers`
            make them; false = `labels` are the next tokens, as the data processors here make them.
        loss_scaling: `num_tokens` = mean over tokens; `batch_size` = sum over tokens, mean over
            sequences.
        compute_eval_metrics: Whether the output has `accuracy` in eval mode.

    Raises:
        ConfigError: If a setting is invalid, or the folder or its weights do not fit.
    """

    forward_methods: ClassVar[tuple[str, ...]] = ("logits", "last_logits")
    """Methods besides `forward` for which a sharded model gathers its parameters."""

    @checked()
    def __init__(
        self,
        *,
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
        shift_labels: Flag = False,
        loss_scaling: LossScaling = "num_tokens",
        compute_eval_metrics: Flag = True,
    ) -> None:
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
        super().__init__(settings, CAUSAL, may_start_anew=False)
        self.shift_labels = shift_labels
        self.loss_scaling: LossScaling = loss_scaling
        self.compute_eval_metrics = compute_eval_metrics
        self._makes_masks = makes_masks(self.config)

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None:
        """Check the constructor's arguments without building the model, and without a network.

        Raises:
            ConfigError: As the constructor, except for what only the weights show.
        """
        own = {key: one for key, one in arguments.items() if key not in _OF_THE_LOSS}
        check_settings(HfSettings(**own), CAUSAL)

    @classmethod
    def limit_of(cls, name: str, arguments: Mapping[str, Any]) -> int | EllipsisType | None:
        """Return a limit that a model with these arguments will have; ... = known when built."""
        own = {key: one for key, one in arguments.items() if key not in _OF_THE_LOSS}
        return limit_of(name, own)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def max_position_embeddings(self) -> int:
        """Largest number of tokens in a sequence; 2**31 - 1 if there is no limit."""
        return longest_sequence(self.config) or _NO_LIMIT

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the loss and the number of items that it is averaged over.

        Args:
            batch: `input_ids`, `labels` and, if some positions do not count for the loss,
                `attention_mask` with the weight of each; it does not restrict attention. Labels of
                -100 do not count either. For packed
                documents: `attention_span` with, for each key, the largest distance from which it
                is seen, and `position_ids`. With `shift_labels`: `input_ids`, `labels` (the same,
                -100 does not count), `attention_mask` with 0 for padding, which no token sees and
                which predicts none; or `position_ids` that begin again with each document.

        Returns:
            `loss`, `num_items`; `logits` where they are requested, see `WithOptionalLogits`, and
            of architectures that are called as a whole; in eval mode also `accuracy`, from which
            and from the loss `ModelEvalMetrics` also logs `lm_perplexity`.

        Shapes:
            In batch: (B, T) integer. loss, accuracy: (), float32. logits: (B, T, V).
            num_items: () float32, or an int.

        Cost:
            No host read with the families in `attention.FAMILIES`; others of `transformers` look at
            positions and masks.

        Raises:
            ConfigError: If the batch does not fit the model.
        """
        for key in ("input_ids", "labels"):
            if key not in batch:
                raise ConfigError(
                    f"The model got a batch with the keys {sorted(map(str, batch))}, but requires "
                    f"{key!r}. Use another data processor, or name: hf_model."
                )
        given = self._shifted(batch) if self.shift_labels else self._next_tokens(batch)
        labels, weights = self._targets(batch)
        parts = None if self.wants_logits else parts_of(self.model)
        if parts is None:
            return self._outputs_of_all(batch["input_ids"], given, labels, weights)
        has_metrics = self.compute_eval_metrics and not self.training
        scored = score(
            parts.head,
            self._call(batch["input_ids"], body=parts.body, **given)[0],
            labels,
            counted_labels(labels, weights),
            parts.settings,
            wants_hits=has_metrics,
        )
        loss, num_items = reduced_loss(
            scored.total, labels, weights, loss_scaling=self.loss_scaling
        )
        outputs = {"loss": loss, "num_items": num_items}
        if scored.hits is not None:
            outputs["accuracy"] = share_of_hits(scored.hits, labels, weights)
        return outputs

    def _outputs_of_all(
        self,
        input_ids: Tensor,
        given: Mapping[str, Any],
        labels: Tensor,
        weights: Tensor | None,
    ) -> dict[str, Any]:
        """Return the outputs with the logits, from a call of the whole model."""
        output = self._call(input_ids, **given)
        loss, num_items = language_loss(
            output.logits, labels, weights, loss_scaling=self.loss_scaling
        )
        if getattr(output, "aux_loss", None) is not None:
            loss = loss + self.config.router_aux_loss_coef * output.aux_loss
        outputs = {"loss": loss, LOGITS: output.logits, "num_items": num_items}
        if self.compute_eval_metrics and not self.training:
            outputs["accuracy"] = token_accuracy(output.logits, labels, weights)
        return outputs

    def label_losses(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy of each label, 0 where it is -100, without the logits of all.

        Shapes:
            input_ids, labels: (B, T) integer. Returns: (B, T), float32.
        """
        parts = parts_of(self.model)
        if parts is None:
            return token_losses(self.logits(input_ids), labels)
        hidden = self._call(input_ids, body=parts.body)[0]
        return losses_of(parts.head, hidden, labels, parts.settings)

    def validation_means(
        self, outputs: Mapping[str, Any], batch: Mapping[str, Tensor]
    ) -> dict[str, tuple[Tensor, Tensor | int, Callable[[Tensor], Tensor] | None]]:
        """Return the metrics that `ModelEvalMetrics` averages over tokens, with their weights."""
        labels, weights = self._targets(batch)
        counted = {"labels": labels} | ({} if weights is None else {"attention_mask": weights})
        return validation_means(outputs, counted, loss_scaling=self.loss_scaling, loss_weight=1.0)

    def count_labels(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return how many labels of a batch count; see `zoo/models/language_loss.py`."""
        if not isinstance(batch.get("labels"), Tensor):
            return None
        return num_counted(*self._targets(batch))

    def check_batch(self, batch: Mapping[str, Any]) -> None:
        """Check the values of a batch in host memory, before the first step.

        Raises:
            ConfigError: If a token is beyond the vocabulary; if the labels are the tokens
                themselves, although `shift_labels` is false, or the next tokens, although it is
                true; or if positions show packed documents, which the architecture does not keep
                apart.
        """
        ids, labels = batch.get("input_ids"), batch.get("labels")
        if ids is None or labels is None or ids.shape != labels.shape:
            return
        if is_planned(ids):
            return
        check_tokens(self.model, ids)
        if self.shift_labels:
            self._check_shifted(batch)
            return
        num = num_repeated(ids, labels, batch.get("attention_mask"))
        if num:
            raise ConfigError(
                f"labels equal input_ids at all {num} positions of the first batch that count: the "
                f"model would learn to repeat each token. Data processors here return the next "
                f"tokens as labels; for batches of the collators of transformers, which the model "
                f"shifts itself, set shift_labels: true."
            )

    def _check_shifted(self, batch: Mapping[str, Any]) -> None:
        mask, positions = batch.get("attention_mask"), batch.get(POSITIONS_KEY)
        rows = mask if mask is not None and mask.dim() == 2 else None
        num = num_next(batch["input_ids"], batch["labels"], rows)
        if num:
            raise ConfigError(
                f"labels are the next tokens at {num} positions of the first batch, as the data "
                f"processors here make them, but shift_labels is true: the model would learn to "
                f"predict the token after the next. Remove shift_labels."
            )
        is_checked = not self._makes_masks and (mask is None or rows is not None)
        if is_checked and positions is not None and begin_again(positions, rows):
            raise refuse_packing(self.config, POSITIONS_KEY)

    def _next_tokens(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        given: dict[str, Any] = {
            "position_ids": batch.get(POSITIONS_KEY),
            "attention_span": batch.get(SPAN_KEY),
        }
        if has_expert_loss(self.config):
            given["attention_mask"] = _before_padding(batch["labels"], batch.get("attention_mask"))
        return given

    def _shifted(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        mask, positions = batch.get("attention_mask"), batch.get(POSITIONS_KEY)
        if not self._makes_masks and mask is None and positions is not None:
            raise refuse_packing(self.config, POSITIONS_KEY)
        if not self._makes_masks or (mask is not None and mask.dim() != 2):
            return {"position_ids": positions, "attention_mask": mask}
        spans = None if positions is None else spans_of_positions(positions)
        padding = None if mask is None else (mask == 0).int()
        return {"position_ids": positions, "attention_span": spans, "padding": padding}

    def _targets(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return the next token at each position, and its weight."""
        labels = batch["labels"]
        if not self.shift_labels:
            return labels, batch.get("attention_mask")
        labels = functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        counts, mask = labels != IGNORED_LABEL, batch.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            counts = counts & (mask != 0)  # padding on the left predicts nothing
        return labels.where(counts, 0), counts.int()

    def logits(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        attention_span: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the next token at every position.

        Args:
            input_ids: The tokens.
            position_ids: Positions of the tokens; None = 0, 1, ...
            attention_span: For each key, the largest distance from which it is seen; None = any.

        Shapes:
            input_ids, position_ids, attention_span: (B, T) integer. Returns: (B, T, V).
        """
        output = self._call(input_ids, position_ids=position_ids, attention_span=attention_span)
        scores: Tensor = output.logits
        return scores

    def _call(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        attention_span: Tensor | None = None,
        padding: Tensor | None = None,
        attention_mask: Tensor | None = None,
        body: Any = None,
    ) -> Any:
        """Call the model of `transformers`, or its body; `attention_mask`: as it takes it."""
        given: dict[str, Any] = {"input_ids": input_ids.long(), "use_cache": False}
        if position_ids is not None:
            given["position_ids"] = position_ids.long()
        if self._makes_masks:
            weight = self.model.get_input_embeddings().weight
            attention_mask = attention_masks(
                self.config, input_ids.shape[1], weight, spans=attention_span, padding=padding
            )
            given["past_key_values"] = NoCache()
        elif attention_span is not None or (position_ids is not None and not self.shift_labels):
            raise refuse_packing(
                self.config, SPAN_KEY if attention_span is not None else POSITIONS_KEY
            )
        if attention_mask is not None:
            given["attention_mask"] = attention_mask
        return (self.model if body is None else body)(**given)

    def make_caches(self, length: int) -> list[Any] | None:
        """Return what a model of `transformers` keeps of the tokens; None if it keeps nothing."""
        if cache_name(self.model) is None:
            return None
        return [TokensSoFar(self.model, self.logits)]

    def last_logits(
        self, input_ids: Tensor, caches: Sequence[Any], position: Tensor | None = None
    ) -> Tensor:
        """Return the logits after the last token, and store what the model keeps of all tokens.

        `position`: of the one token in `input_ids`; None = these are the first tokens.

        Shapes:
            input_ids: (B, T) integer. position: (1,), int64. Returns: (B, V).
        """
        so_far: TokensSoFar = caches[0]
        return so_far.last_logits(input_ids)

    @torch.no_grad()
    @checked("generate")
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: NonNegativeSize,
        temperature: NonNegative = 1.0,
        top_k: Size | None = None,
        generator: Generator | None = None,
        use_cache: bool = True,
    ) -> Tensor:
        """Generate tokens after the given ones, in eval mode, as `Decoder.generate` does.

        `self.model.generate` is the method of `transformers`.

        Args:
            input_ids: The prompt; only the last `max_position_embeddings` tokens are used.
            max_new_tokens: Number of tokens to generate.
            temperature: Sampling temperature; 0 = greedy.
            top_k: Sample among the `top_k` most likely tokens; None = all.
            generator: Random generator on the device of `input_ids`; None = the global one.
            use_cache: Whether keys and values of earlier tokens are kept, as long as no token is
                dropped.

        Shapes:
            input_ids: (B, T) integer. Returns: (B, T + max_new_tokens), same type.

        Raises:
            ConfigError: If an argument is out of range.
        """
        if input_ids.dim() != 2 or input_ids.shape[1] < 1:
            raise ConfigError(
                f"input_ids has the shape {tuple(input_ids.shape)}; generate requires (batch, "
                f"tokens) with at least one token."
            )
        draw = partial(draw_next, temperature=temperature, top_k=top_k, generator=generator)
        with in_evaluation_mode(self):
            return extend_tokens(
                cast(Any, self), input_ids, max_new_tokens, draw, use_cache=use_cache
            )


def _before_padding(labels: Tensor, weights: Tensor | None) -> Tensor:
    """Return 1 up to the last position of each row that counts, and at the first one.

    No position that counts sees the ones after it, so it does not matter what these are.

    Shapes:
        labels, weights: (B, T) integer. Returns: (B, T), int64.
    """
    counts = labels != IGNORED_LABEL
    counts = counts if weights is None else counts & (weights != 0)
    before = counts.long().flip(1).cummax(dim=1).values.flip(1)
    return functional.pad(before[:, 1:], (1, 0), value=1)
