"""Direct preference optimization: a policy learns to prefer one of two answers.

https://arxiv.org/abs/2305.18290

Dimension letters: B pairs of answers, T positions.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, Final, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from modelzoo_trainer.annotations import annotations_of
from modelzoo_trainer.constraints import (
    FinitePositiveFloat,
    Flag,
    NonNegativeFloat,
    check,
    checked_dataclass,
)
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.models.decoder import Decoder
from modelzoo_trainer.models.decoder_settings import DecoderSettings
from modelzoo_trainer.models.inner_decoder import decoder_of
from modelzoo_trainer.models.parametrization import LrAdjustmentGroup

LossType = Literal["sigmoid", "hinge", "ipo", "dpop"]

_POLICY: Final = "policy_model."
_REFERENCE: Final = "ref_model."
_ANSWERS: Final = ("chosen", "rejected")
_FEATURES: Final = ("input_ids", "attention_mask", "labels")
_DROPOUT_RATES: Final = ("dropout_rate", "attention_dropout_rate", "embedding_dropout_rate")
_OF_ITS_LOSS: Final = ("loss_scaling", "loss_weight", "compute_eval_metrics")
_BALANCING: Final = "load_balancing_loss_coef"
_OTHER_RATES: Final = ("residual_dropout_rate", "embd_pdrop")


@checked_dataclass
class DpoSettings:
    """Settings of the loss.

    Args:
        beta: How strongly the policy is held at the reference.
        loss_type: `sigmoid`, `hinge`, `ipo` or `dpop`.
        reference_free: Whether the reference prefers neither answer; then there is no copy.
        disable_dropout: Whether the policy is trained without dropout.
        dpop_penalty_weight: For `dpop`: of chosen answers that become less likely.
    """

    beta: FinitePositiveFloat = 0.1
    loss_type: LossType = "sigmoid"
    reference_free: Flag = False
    disable_dropout: Flag = True
    dpop_penalty_weight: NonNegativeFloat = 5.0


class Dpo(nn.Module):
    """A decoder that is trained on pairs of answers, and the frozen copy that it starts from.

    The copy is that of the initial weights, or of the checkpoint that a run starts from, if that
    has a policy alone: the weights of any run of the decoder. A resumed run keeps its copy.

    Args:
        policy_model: `name` of a decoder and its settings.
        dpo: Settings of the loss, see `DpoSettings`.
        compute_eval_metrics: Whether a validation has metrics besides the loss.

    Raises:
        ConfigError: If a setting is invalid.
    """

    model_arguments: ClassVar[tuple[str, ...]] = ("policy_model",)
    """Arguments that are settings of a model, which a file has checked line by line."""

    def __init__(
        self,
        *,
        policy_model: dict[str, Any],
        dpo: dict[str, Any] | None = None,
        compute_eval_metrics: bool = True,
    ) -> None:
        super().__init__()
        self.settings = _settings_of(dpo)
        self.compute_eval_metrics = compute_eval_metrics
        cls, arguments = _policy_of(policy_model, self.settings)
        _warn_of_unused(policy_model)
        with _naming_the_policy():
            self.policy_model: Decoder = cls(**arguments)
        self.ref_model: Decoder | None = None
        if not self.settings.reference_free:
            self.ref_model = copy.deepcopy(self.policy_model).requires_grad_(False).eval()

    @classmethod
    def check_arguments(
        cls,
        *,
        policy_model: dict[str, Any],
        dpo: dict[str, Any] | None = None,
        compute_eval_metrics: bool = True,
    ) -> None:
        """Check the constructor's arguments without building the model.

        Raises:
            ConfigError: As the constructor.
        """
        decoder, arguments = _policy_of(policy_model, _settings_of(dpo))
        with _naming_the_policy():
            decoder.check_arguments(**arguments)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.policy_model.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Largest number of tokens in a sequence."""
        return self.policy_model.max_position_embeddings

    @property
    def lr_adjustment_groups(self) -> Mapping[str, LrAdjustmentGroup]:
        """Groups of parameters with learning rate factors: those of the policy."""
        return self.policy_model.lr_adjustment_groups

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Tensor parallelism: both models are split as the decoder is."""
        plan = self.policy_model.tensor_plan.items()
        models = (_POLICY,) if self.ref_model is None else (_POLICY, _REFERENCE)
        return {f"{model}{name}": style for model in models for name, style in plan}

    @override
    def train(self, mode: bool = True) -> Self:
        """Set the mode of the policy; the reference stays in eval mode."""
        super().train(mode)
        if self.ref_model is not None:
            self.ref_model.eval()
        return self

    def reset_parameters(self) -> None:
        """Initialize the policy and copy it to the reference; also after `to_empty`."""
        self.policy_model.reset_parameters()
        if self.ref_model is not None:
            self.ref_model.reset_parameters()  # ties shared weights
        for _, step in self.reset_steps():
            step()

    def reset_steps(self) -> Iterator[tuple[nn.Module, Callable[[], None]]]:
        """Yield the parts of both models, each with the function that copies it to the reference.

        The policy is initialized by its own steps, before these.
        """
        if self.ref_model is None:
            return
        pairs = zip(_parts(self.policy_model), _parts(self.ref_model), strict=True)
        for policy, reference in pairs:
            yield nn.ModuleList([policy, reference]), partial(_copy, policy, reference)

    def complete_state(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a checkpoint for both models, if it has those of the policy alone.

        Args:
            found: Entries by name, with or without `policy_model.` in front.
        """
        if self.ref_model is None or any(name.startswith(_REFERENCE) for name in found):
            return dict(found)
        bare = {name.removeprefix(_POLICY): value for name, value in found.items()}
        return {f"{model}{name}": bare[name] for model in (_POLICY, _REFERENCE) for name in bare}

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the loss and how the two answers compare.

        Args:
            batch: `input_ids`, `attention_mask` and `labels` of both answers, with `chosen_` and
                `rejected_` in front. The mask is 1 where a label counts.

        Returns:
            `loss`, `num_items` (B) and, in training or with `compute_eval_metrics`, means over the
            pairs: `rewards_chosen`, `rewards_rejected`, `rewards_accuracies`, `rewards_margins`,
            `logps_chosen`, `logps_rejected`.

        Shapes:
            In batch: (B, T) integer. All others: (), float32.

        Cost:
            No host read, no data-dependent shape.
        """
        rows = {name: _interleaved(batch, name) for name in _FEATURES}
        reference = self._reference(rows)
        chosen, rejected = self._log_probs(self.policy_model, rows)
        outputs: dict[str, Any] = {
            "loss": preference_loss(chosen, rejected, *reference, self.settings).mean(),
            "num_items": len(chosen),
        }
        if self.training or self.compute_eval_metrics:
            outputs |= self._metrics(chosen.detach(), rejected.detach(), *reference)
        return outputs

    @torch.no_grad()
    def _reference(self, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the log probabilities of chosen and rejected answers; 0 without a reference."""
        if self.ref_model is None:
            zeros = torch.zeros(len(rows["labels"]) // 2, device=rows["labels"].device)
            return zeros, zeros
        return self._log_probs(self.ref_model, rows)

    def _log_probs(self, model: Decoder, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits, labels = model.logits(rows["input_ids"]), rows["labels"]
        losses = functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten().long(), reduction="none"
        )
        mask = rows["attention_mask"]
        # A product would keep non-finite values where the mask is 0.
        sums = (losses.view_as(mask) * mask).where(mask != 0, 0.0).sum(dim=1)
        if self.settings.loss_type == "ipo":
            sums = sums / mask.sum(dim=1).clamp(min=1)
        chosen, rejected = (-sums).view(-1, 2).unbind(dim=1)
        return chosen, rejected

    def _metrics(
        self, chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor
    ) -> dict[str, Tensor]:
        better = self.settings.beta * (chosen - ref_chosen)
        worse = self.settings.beta * (rejected - ref_rejected)
        found = {
            "rewards_chosen": better,
            "rewards_rejected": worse,
            "rewards_accuracies": (better > worse).float(),
            "rewards_margins": better - worse,
            "logps_chosen": chosen,
            "logps_rejected": rejected,
        }
        return {name: values.mean() for name, values in found.items()}

    def generate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Generate tokens with the policy; see `Decoder.generate`."""
        tokens: Tensor = self.policy_model.generate(*args, **kwargs)
        return tokens


def preference_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    settings: DpoSettings,
) -> Tensor:
    """Return the loss of each pair of answers, from their log probabilities.

    With d the difference of the policy's margin and the reference's: sigmoid -log s(beta d)
    (https://arxiv.org/abs/2305.18290), hinge max(0, 1 - beta d) (https://arxiv.org/abs/2305.10425),
    ipo (d - 1 / (2 beta))^2 (https://arxiv.org/abs/2310.12036), dpop -log s(beta (d - w p)) with
    p = max(0, ref_chosen - chosen) (https://arxiv.org/abs/2402.13228).

    Shapes:
        All: (B,) floating.
    """
    beta = settings.beta
    margin = (chosen - rejected) - (ref_chosen - ref_rejected)
    if settings.loss_type == "hinge":
        return functional.relu(1 - beta * margin)
    if settings.loss_type == "ipo":
        return (margin - 1 / (2 * beta)) ** 2
    if settings.loss_type == "dpop":
        margin = margin - settings.dpop_penalty_weight * functional.relu(ref_chosen - chosen)
    return -functional.logsigmoid(beta * margin)


def _interleaved(batch: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the rows of both answers, (2B, T): chosen, rejected, chosen, ..."""
    keys = [f"{answer}_{name}" for answer in _ANSWERS]
    for key in keys:
        if key not in batch:
            raise ConfigError(
                f"The model got a batch with the keys {sorted(batch)}, but requires {key!r}. Use "
                f"the data processor DpoHDF5DataProcessor."
            )
    return torch.stack([batch[key] for key in keys], dim=1).flatten(0, 1)


def _parts(model: nn.Module) -> Iterable[nn.Module]:
    """Yield the elements of every ModuleList among the children, and the other children."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield child


@torch.no_grad()
def _copy(policy: nn.Module, reference: nn.Module) -> None:
    for own, other in (
        (policy.parameters(), reference.parameters()),
        (policy.buffers(), reference.buffers()),
    ):
        for source, target in zip(own, other, strict=True):
            target.copy_(source)


def _warn_of_unused(given: Mapping[str, Any]) -> None:
    moe = given.get("moe") or given.get("moe_params")
    defaults = {field.name: field.default for field in fields(DecoderSettings)}
    unused = {
        key: given[key] for key in _OF_ITS_LOSS if given.get(key, defaults[key]) != defaults[key]
    }
    if isinstance(moe, Mapping) and moe.get(_BALANCING):
        unused[f"moe.{_BALANCING}"] = moe[_BALANCING]
    for key, value in unused.items():
        warnings.warn(
            f"model.policy_model.{key} ({value}) has no effect: dpo has a loss of its own. Remove "
            f"it.",
            stacklevel=3,
        )


@contextmanager
def _naming_the_policy() -> Iterator[None]:
    """Context manager: errors name the section of the policy's settings."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"model.policy_model: {error}") from error


def _settings_of(given: Mapping[str, Any] | None) -> DpoSettings:
    known = [field.name for field in fields(DpoSettings)]
    kinds = annotations_of(DpoSettings)
    for key, value in (given or {}).items():
        if key not in known:
            raise ConfigError(f"model.dpo.{key}: no such setting. {suggest(str(key), known)}")
        check(f"model.dpo.{key}", value, kinds[key])
    return DpoSettings(**(given or {}))


def _policy_of(given: Mapping[str, Any], dpo: DpoSettings) -> tuple[type[Decoder], dict[str, Any]]:
    """Return the class of the policy and its arguments."""
    cls, arguments = decoder_of("policy_model", given)
    if dpo.disable_dropout:
        for rate in _OTHER_RATES:
            arguments.pop(rate, None)
        arguments |= dict.fromkeys(_DROPOUT_RATES, 0.0)
    return cls, arguments
