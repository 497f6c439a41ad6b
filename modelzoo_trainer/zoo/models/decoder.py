"""Decoder-only transformer: what the classes `Gpt2` and `GptJ` have in common.

Dimension letters: B batch, T positions, H hidden size, V vocabulary size.

    tokens -> embedding (+ learned or fixed positions) -> layers -> norm -> logits
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from modelzoo_trainer.base.constraints import NonNegative, NonNegativeSize, Size, checked
from modelzoo_trainer.base.devices import ContextParallel
from modelzoo_trainer.core.parts.training_mode import in_evaluation_mode
from modelzoo_trainer.errors import ConfigError
from modelzoo_trainer.zoo.models.context import (
    Context,
    make_position_bias,
    make_visible,
    windowed_layers,
)
from modelzoo_trainer.zoo.models.decoder_layers import DecoderLayer, reset_plain
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings
from modelzoo_trainer.zoo.models.feed_forward import GATED, make_norm
from modelzoo_trainer.zoo.models.generation import draw_next, extend_tokens
from modelzoo_trainer.zoo.models.head_chunks import HeadSettings
from modelzoo_trainer.zoo.models.initializers import Initializer
from modelzoo_trainer.zoo.models.kv_cache import KeyValueCache
from modelzoo_trainer.zoo.models.language_head import (
    LOGITS,
    WithOptionalLogits,
    logits_of,
    losses_of,
    score,
)
from modelzoo_trainer.zoo.models.language_loss import (
    counted_labels,
    num_counted,
    reduced_loss,
    share_of_hits,
    validation_means,
)
from modelzoo_trainer.zoo.models.masks import POSITIONS_KEY, SPAN_KEY, check_batch
from modelzoo_trainer.zoo.models.moe_settings import read_moe, warn_of_unused
from modelzoo_trainer.zoo.models.parametrization import (
    LrAdjustmentGroup,
    logits_scale,
    lr_adjustment_groups,
    make_initializers,
)
from modelzoo_trainer.zoo.models.position_bias import fixed_positions
from modelzoo_trainer.zoo.models.published_names import published_name
from modelzoo_trainer.zoo.models.routing import LOSS_KEY, Statistics, routing_metrics
from modelzoo_trainer.zoo.models.split_rows import (
    check_rows,
    own_places,
    taken,
    whole_scores,
    whole_statistics,
)
from modelzoo_trainer.zoo.models.visible import Visible


def _draw(module: nn.Embedding | nn.Linear, initializer: Initializer) -> None:
    initializer(module.weight)


class Decoder(WithOptionalLogits, DecoderSettings, nn.Module):
    """Decoder-only language model; a class adds its settings, which are constructor arguments."""

    builds_without_values = True
    """Whether `reset_steps` draws all initial values, so that the constructor need not."""

    SETTINGS: ClassVar[type[DecoderSettings]] = DecoderSettings
    forward_methods: ClassVar[tuple[str, ...]] = ("logits", "last_logits")
    """Methods besides `forward` for which a sharded model gathers its parameters."""
    """The constructor's arguments without the model."""

    token_embeddings: nn.Embedding
    lm_head: nn.Linear

    published_name = staticmethod(published_name)

    def __post_init__(self) -> None:
        super().__post_init__()
        nn.Module.__init__(self)
        if self.loss_weight != 1 and self.loss_scaling == "num_tokens":
            warnings.warn(
                f"loss_weight ({self.loss_weight}) has no effect with loss_scaling 'num_tokens', "
                "which averages over tokens. Set loss_scaling: batch_size, or loss_weight: 1.0.",
                stacklevel=3,
            )
        if self.output_logits_alpha not in (None, 0, 1) and not self.uses_mup:
            warnings.warn(
                f"output_logits_alpha ({self.output_logits_alpha}) has no effect without muP. Set "
                "mup_base_hidden_size and mup_base_filter_size, or remove output_logits_alpha.",
                stacklevel=3,
            )
        if self.output_logits_scale is not None and self.uses_mup:
            warnings.warn(
                f"output_logits_scale ({self.output_logits_scale}) has no effect with muP. Set "
                "output_logits_alpha instead.",
                stacklevel=3,
            )
        self._warn_of_unused_settings()
        self._warn_of_unused_settings_of_experts()
        self._build()
        self.reset_parameters()

    def _warn_of_unused_settings(self) -> None:
        window, other = (
            "attention_sliding_window_length",
            "sliding_window_every_other_decoder_layer",
        )
        positions = self.position_embedding_type
        is_rotary = "position_embedding_type: rotary", positions == "rotary"
        needs = {  # without the second, the first has no effect
            other: (window, self.attention_sliding_window_length is not None),
            f"{other}_pattern": (f"{other}: true", self.sliding_window_every_other_decoder_layer),
            "alibi_trainable_slopes": ("position_embedding_type: alibi", positions == "alibi"),
            "num_relative_attention_buckets": (
                "position_embedding_type: relative",
                positions == "relative",
            ),
            "pos_scaling_factor": (
                "position_embedding_type: rotary or alibi",
                positions in ("rotary", "alibi"),
            ),
            "position_embedding_offset": (
                "position_embedding_type: learned",
                positions == "learned",
            ),
            "rope_theta": is_rotary,
            "rotary_dim": is_rotary,
            "scale_output_logits_by_d": ("muP", self.uses_mup),
            "scale_qk_dot_by_d": (
                "attention_type: scaled_dot_product",
                self.attention_type == "scaled_dot_product" or not self.scale_qk_dot_by_d,
            ),
        }
        defaults = {field.name: field.default for field in fields(self)}
        for key, (needed, is_given) in needs.items():
            if getattr(self, key) != defaults[key] and not is_given:
                warnings.warn(
                    f"{key} ({getattr(self, key)}) has no effect without {needed}. Set that, or "
                    f"remove {key}.",
                    stacklevel=4,
                )

    def _warn_of_unused_settings_of_experts(self) -> None:
        settings = read_moe(self.moe or {})
        warn_of_unused(settings, stacklevel=4)
        is_unused = self.initializer is not None and self.initializer_rules == "gpt2"
        if settings.gate_initializer is not None and is_unused:
            warnings.warn(
                "moe.gate_initializer has no effect with initializer, which the router then has. "
                "Remove one of them.",
                stacklevel=4,
            )

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None:
        """Check the constructor's arguments without building the model.

        Raises:
            ConfigError: As the constructor.
        """
        make_initializers(cls.settings_of(**arguments))

    @classmethod
    def settings_of(cls, **arguments: Any) -> DecoderSettings:
        """Return the settings of a model with these constructor arguments, without building it.

        Raises:
            ConfigError: As the constructor.
        """
        cls.refuse_both_names([key for key, one in arguments.items() if one is not None])
        defaults = {field.name: field.default for field in fields(cls) if field.init}
        return cls.SETTINGS(**(defaults | arguments))  # type: ignore[arg-type]  # as given

    def _build(self) -> None:
        size, rate = self.hidden_size, self.embedding_dropout_rate
        self.token_embeddings = nn.Embedding(self.vocab_size, size)
        self.position_embeddings: nn.Embedding | None = None
        if self.position_embedding_type == "learned":
            num_rows = self.max_position_embeddings + self.position_embedding_offset
            self.position_embeddings = nn.Embedding(num_rows, size)
        self.embedding_norm: nn.Module | None = None
        if self.embedding_layer_norm:
            self.embedding_norm = make_norm(self.norm_type, size, self.layer_norm_epsilon)
        self.embedding_dropout = nn.Dropout(self.dropout_rate if rate is None else rate)
        self.position_bias = make_position_bias(self)
        self.layers = nn.ModuleList(
            self._make_layer(is_windowed=is_windowed) for is_windowed in windowed_layers(self)
        )
        self.final_norm = make_norm(self.norm_type, size, self.layer_norm_epsilon)
        self.lm_head = nn.Linear(size, self.vocab_size, bias=self.use_bias_in_output)
        self._experts = self.experts
        self._rotary = self.rotary()
        self._head = HeadSettings(logits_scale(self), self.final_logit_softcapping)
        self._parallel: ContextParallel | None = None

    def split_rows(self, parallel: ContextParallel) -> None:
        """Compute only this process's positions of rows from now on; see context parallelism.

        Raises:
            ConfigError: If the choice of experts depends on the states of whole rows.
        """
        check_rows(self, parallel)
        self._parallel = parallel

    def _make_layer(self, *, is_windowed: bool) -> DecoderLayer:
        return DecoderLayer(self, is_windowed=is_windowed)

    @property
    def lr_adjustment_groups(self) -> Mapping[str, LrAdjustmentGroup]:
        """Groups of parameters with learning rate factors, by name; all 1 without muP."""
        return lr_adjustment_groups(self)

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Tensor parallelism: how layers are split, by module name patterns.

        Each process has whole heads, so their number and `num_kv_groups` must be multiples of the
        number of processes. All processes use the same attention dropout masks. Experts are not
        split.
        """
        attention, ffn = "layers.*.attention.", "layers.*.ffn."
        plan = {f"{attention}{name}_proj": "colwise" for name in "qkv"}
        plan |= {f"{attention}o_proj": "rowwise", "token_embeddings": "rowwise"}
        if self.attention_qk_norm is not None:
            plan |= {f"{attention}{name}_norm": "own_part" for name in "qk"}
        if self._experts is None:
            plan |= {f"{ffn}up_proj": "colwise", f"{ffn}down_proj": "rowwise"}
            if self.nonlinearity in GATED:
                plan[f"{ffn}gate_proj"] = "colwise"
        if self.position_bias is not None:
            own = self.position_bias.tensor_plan.items()
            plan |= {f"position_bias.{name}": style for name, style in own}
        return plan | {"lm_head": "colwise_gather"}

    @property
    def sequence_plan(self) -> dict[str, str]:
        """Sequence parallelism: which modules compute on a part of the positions, by patterns.

        Attention and feed-forward networks gather all positions. Each process computes the experts
        of all tokens.
        """
        pointwise = (nn.LayerNorm, nn.RMSNorm, nn.Dropout)
        plan = {  # by full names: a pattern would also match the dropout of experts
            f"layers.{index}.{name}": "own_positions"
            for index, layer in enumerate(self.layers)
            for name, part in layer.named_children()
            if isinstance(part, pointwise)
        }
        plan |= {"layers.*.attention": "gather", "layers.*.ffn": "gather"}
        return plan | {"layers": "split", "final_norm": "own_positions_gather"}

    def reset_parameters(self) -> None:
        """Initialize all weights and tie shared ones; also after `to_empty`."""
        if self.share_embedding_weights:
            self.lm_head.weight = self.token_embeddings.weight
        for _, draw in self.reset_steps():
            draw()

    def reset_steps(self) -> Iterator[tuple[nn.Module, Callable[[], None]]]:
        """Yield the parts of the model, each with the function that initializes it.

        In this order they give the same weights as `reset_parameters`; only the part that is being
        initialized needs to be allocated.
        """
        start = make_initializers(self)
        for embedding in (self.token_embeddings, self.position_embeddings):
            if embedding is not None:
                yield embedding, partial(_draw, embedding, start.embedding)
        if self.position_bias is not None:
            yield self.position_bias, self.position_bias.reset_parameters
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer, partial(layer.draw, start)
        for norm in (self.embedding_norm, self.final_norm):
            if norm is not None:
                yield norm, partial(reset_plain, norm)
        yield self.lm_head, partial(reset_plain, self.lm_head)
        if not self.share_embedding_weights:
            yield self.lm_head, partial(_draw, self.lm_head, start.lm_head)

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the loss and the number of items that it is averaged over.

        Args:
            batch: `input_ids`, `labels` and, if some positions do not count for the loss,
                `attention_mask` with the weight of each, 0 for those that do not; it does not
                restrict attention. Labels of -100 do not count either. For packed sequences:
                `attention_span` with, for each key, the largest distance from which it is seen, and
                `position_ids`.

        Returns:
            `loss`, `num_items`; `logits` where they are requested, see `WithOptionalLogits`; in
            eval mode also `accuracy`, from which and from the loss `ModelEvalMetrics` also logs
            `lm_perplexity`. With experts, in training, what `LogExpertLoad` logs.

        Shapes:
            In batch: (B, T) integer, T at most `max_position_embeddings`.
            loss, accuracy: (), float32. logits: (B, T, V). num_items: () float32, or an int.

        Cost:
            No host read, no data-dependent shape.
        """
        if "input_ids" not in batch or "labels" not in batch:
            raise ConfigError(
                f"The model got a batch with the keys {sorted(batch)}, but requires 'input_ids' "
                f"and 'labels'. Use another data processor or model."
            )
        return self.outputs_of(batch)

    def outputs_of(
        self,
        batch: Mapping[str, Tensor],
        *,
        states: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> dict[str, Any]:
        """Return the outputs of `forward`, also for states that are no embeddings of tokens.

        Args:
            batch: As of `forward`.
            states: What the first layer gets, such as `input_states` with features of an image in
                some places; None = the embeddings of the tokens.
            padding: Nonzero for keys that no query sees; None = all are seen.

        Shapes:
            states: (B, T, H). padding: (B, T).
        """
        labels, attention_mask = batch["labels"], batch.get("attention_mask")
        check_batch(
            batch,
            has_window=self.attention_sliding_window_length is not None,
            uses_positions=self.position_embedding_type in ("learned", "fixed", "rotary"),
        )
        weights = counted_labels(labels, attention_mask)
        counted = None if self._experts is None else weights
        hidden, routed = self._run(
            batch["input_ids"],
            position_ids=batch.get(POSITIONS_KEY),
            attention_span=batch.get(SPAN_KEY),
            counted=counted,
            states=states,
            padding=padding,
            parallel=self._parallel,
        )
        parallel = self._parallel
        wants_hits = self.compute_eval_metrics and not self.training
        scored = score(
            self.lm_head,
            self.final_norm(hidden),
            taken(parallel, labels),
            taken(parallel, weights),
            self._head,
            wants_logits=self.wants_logits,
            wants_hits=wants_hits,
        )
        if parallel is not None:
            scored = whole_scores(parallel, scored)
        loss, num_items = reduced_loss(
            scored.total,
            labels,
            attention_mask,
            loss_scaling=self.loss_scaling,
            loss_weight=self.loss_weight,
        )
        routing: dict[str, Tensor] = {}
        if self._experts is not None and self.training:
            routing = routing_metrics(self._experts, routed, counted)
            if LOSS_KEY in routing:
                loss = loss + self._experts.load_balancing_loss_coef * routing[LOSS_KEY]
        outputs = {"loss": loss, "num_items": num_items}
        if scored.logits is not None:
            outputs[LOGITS] = scored.logits
        outputs |= {name: value.detach() for name, value in routing.items()}
        if scored.hits is not None:
            outputs["accuracy"] = share_of_hits(scored.hits, labels, attention_mask)
        return outputs

    def count_labels(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return how many labels of a batch count; see `zoo/models/language_loss.py`."""
        return num_counted(batch.get("labels"), batch.get("attention_mask"))

    def validation_means(
        self, outputs: Mapping[str, Any], batch: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Return the metrics that `ModelEvalMetrics` averages over tokens, with their weights."""
        return validation_means(
            outputs, batch, loss_scaling=self.loss_scaling, loss_weight=self.loss_weight
        )

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
            position_ids: Positions for embeddings and rotary angles; None = 0, 1, ...
            attention_span: For each key, the largest distance from which it is seen; None = any.

        Shapes:
            input_ids, position_ids, attention_span: (B, T) integer. Returns: (B, T, V).
        """
        return self._score(
            self._run(input_ids, position_ids=position_ids, attention_span=attention_span)[0]
        )

    def label_losses(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy of each label, 0 where it is -100, without the logits of all.

        Shapes:
            input_ids, labels: (B, T) integer. Returns: (B, T), float32.
        """
        parallel = self._parallel
        hidden, _ = self._run(input_ids, position_ids=None, attention_span=None, parallel=parallel)
        own = taken(parallel, labels)
        losses = losses_of(self.lm_head, self.final_norm(hidden), own, self._head)
        return losses if parallel is None else parallel.gather(losses)

    def _run(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None,
        attention_span: Tensor | None,
        counted: Tensor | None = None,
        states: Tensor | None = None,
        padding: Tensor | None = None,
        parallel: ContextParallel | None = None,
    ) -> tuple[Tensor, list[Statistics]]:
        """Return the states after all layers and, with experts, the statistics of routing.

        `counted`: nonzero where a token counts for these statistics; None = all count. `states`,
        `padding`: as of `outputs_of`. `parallel`: the processes that split the rows; each gets the
        states of its own positions.
        """
        hidden, context = self._begin(
            input_ids,
            position_ids,
            attention_span,
            states=states,
            padding=padding,
            parallel=parallel,
        )
        own = counted if parallel is None or counted is None else parallel.take(counted)
        hidden, routed = self._run_layers(hidden, context._replace(counted=own))
        if parallel is not None and counted is not None and own is not None:
            routed = whole_statistics(parallel, routed, own, counted)
        return hidden, routed

    def _begin(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_span: Tensor | None,
        *,
        states: Tensor | None = None,
        padding: Tensor | None = None,
        parallel: ContextParallel | None = None,
    ) -> tuple[Tensor, Context]:
        """Return the states that the first layer gets, and what all layers share.

        `parallel`: the processes that split the rows; each gets the states of its own positions.
        """
        length = input_ids.shape[1]
        positions, offset = self._positions(input_ids, position_ids)
        places = None
        if parallel is not None:
            places = own_places(parallel, input_ids)
            input_ids, states = parallel.take(input_ids), taken(parallel, states)
            positions = parallel.take(positions, -1)
        hidden = self._embed(input_ids, positions, offset) if states is None else states
        visible = make_visible(
            self, self.position_bias, length, hidden.device, spans=attention_span, padding=padding
        )
        context = self._share(input_ids, positions, visible)
        return hidden, context._replace(parallel=parallel, places=places)

    def input_states(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return the states that the first layer gets: embeddings, with positions and dropout.

        Args:
            input_ids: The tokens.
            position_ids: Positions for embeddings; None = 0, 1, ...

        Shapes:
            input_ids, position_ids: (B, T) integer. Returns: (B, T, H).

        Raises:
            ConfigError: If there are more than `max_position_embeddings` tokens.
        """
        positions, offset = self._positions(input_ids, position_ids)
        return self._embed(input_ids, positions, offset)

    def _positions(self, input_ids: Tensor, position_ids: Tensor | None) -> tuple[Tensor, int]:
        """Return the positions of tokens, and the offset of learned ones."""
        length = input_ids.shape[1]
        if length > self.max_position_embeddings:
            raise ConfigError(
                f"max_position_embeddings is {self.max_position_embeddings}, but a sequence has "
                f"{length} tokens. Increase it, or decrease max_sequence_length of the data."
            )
        if position_ids is not None:
            return position_ids, 0
        positions = torch.arange(length, device=input_ids.device)
        return positions, self.position_embedding_offset

    def _share(
        self, input_ids: Tensor, positions: Tensor, visible: tuple[Visible, Visible]
    ) -> Context:
        return Context(
            angles=None if self._rotary is None else self._rotary.angles(positions),
            visible=visible,
            token_ids=None if self._experts is None else input_ids,
        )

    def _run_layers(
        self, hidden: Tensor, context: Context, caches: Sequence[KeyValueCache] | None = None
    ) -> tuple[Tensor, list[Statistics]]:
        """Return the states after all layers and, with experts, the statistics of routing."""
        routed = []
        factors = self._layer_factors(hidden)
        for index, (layer, factor) in enumerate(zip(self.layers, factors, strict=True)):
            own = context if caches is None else context._replace(cache=caches[index])
            output = layer(hidden, own, factor)
            if self._experts is None:
                hidden = output
            else:
                hidden, *statistics = output
                routed.append(Statistics(*statistics))
        return hidden, routed

    def _score(self, hidden: Tensor) -> Tensor:
        return logits_of(self.lm_head, self.final_norm(hidden), self._head)

    def make_caches(self, length: int) -> list[KeyValueCache] | None:
        """Return the cache of each layer for up to `length` tokens.

        None where the experts of a token depend on its position in the row, which a single new
        token does not have: with uniform routing, or sinkhorn.
        """
        experts = self._experts
        if experts is not None and (
            experts.routing_algorithm == "uniform"
            or "sinkhorn"
            in (experts.router_selection_nonlinearity, experts.expert_weighting_nonlinearity)
        ):
            return None
        return [KeyValueCache(length) for _ in self.layers]

    def last_logits(
        self,
        input_ids: Tensor,
        caches: Sequence[KeyValueCache],
        position: Tensor | None = None,
    ) -> Tensor:
        """Return the logits after the last token, and store the keys and values of all tokens.

        `position`: of the one token in `input_ids`, with the tokens before it in `caches`; None =
        these are the first tokens, and `caches` is empty.

        Shapes:
            input_ids: (B, T) integer. position: (1,), int64. Returns: (B, V).
        """
        if position is None:
            hidden, context = self._begin(input_ids, None, None)
        else:
            hidden = self._embed(input_ids, position, offset=self.position_embedding_offset)
            visible = make_visible(
                self, self.position_bias, caches[0].length, hidden.device, position=position
            )
            context = self._share(input_ids, position, visible)._replace(position=position)
        hidden, _ = self._run_layers(hidden, context, caches)
        return self._score(hidden[:, -1:])[:, 0]

    def _embed(self, input_ids: Tensor, positions: Tensor, offset: int = 0) -> Tensor:
        """Return the states that the first layer gets; `offset`: of learned positions."""
        hidden: Tensor = self.token_embeddings(input_ids)
        if self.position_embeddings is not None:
            rows = positions + offset if offset else positions
            hidden = hidden + self.position_embeddings(rows)
        elif self.position_embedding_type == "fixed":
            hidden = hidden + fixed_positions(positions, self.hidden_size).to(hidden.dtype)
        if self.embedding_norm is not None:
            hidden = self.embedding_norm(hidden)
        if self.embeddings_scale != 1:
            hidden = hidden * self.embeddings_scale
        dropped: Tensor = self.embedding_dropout(hidden)
        return dropped

    def _layer_factors(self, hidden: Tensor) -> Sequence[Tensor | None]:
        """Return each layer's own factor of the scores.

        As tensors: a number of its own per layer would compile every layer again.
        """
        num = len(self.layers)
        if not self.scale_qk_dot_by_layer_idx:
            return [None] * num
        return (1 / torch.arange(1, num + 1, device=hidden.device)).unbind()

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
        """Generate tokens after the given ones, in eval mode.

        Beyond `max_position_embeddings` tokens, the oldest one is dropped at each step.

        Args:
            input_ids: The prompt; only the last `max_position_embeddings` tokens are used.
            max_new_tokens: Number of tokens to generate.
            temperature: Sampling temperature; 0 = greedy.
            top_k: Sample among the `top_k` most likely tokens; None = all.
            generator: Random generator on the device of `input_ids`; None = the global one.
            use_cache: Whether keys and values of earlier tokens are kept, as long as no token is
                dropped; False = all tokens are computed again at each step.

        Shapes:
            input_ids: (B, T) integer. Returns: (B, T + max_new_tokens), same type.

        Cost:
            With the cache, memory for 2 * layers * B * tokens * `num_kv_groups` * head dimension
            numbers, for at most `max_position_embeddings` tokens.

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
            return extend_tokens(self, input_ids, max_new_tokens, draw, use_cache=use_cache)
