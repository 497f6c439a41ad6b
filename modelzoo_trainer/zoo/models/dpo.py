"""Direct preference optimization: a policy learns to prefer one of two answers.

https://arxiv.org/abs/2305.18290

Dimension letters: B pairs of answers, T positions.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any, ClassVar, Final, Literal, Self, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from modelzoo_trainer.base.annotations import annotations_of
from modelzoo_trainer.base.constraints import (
    FinitePositiveFloat,
    Flag,
    NonNegativeFloat,
    check,
    checked_dataclass,
)
from modelzoo_trainer.base.devices import ContextParallel
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.models.decoder import Decoder
from modelzoo_trainer.zoo.models.decoder_settings import DecoderSettings
from modelzoo_trainer.zoo.models.hugging_face.adapters import PlainNames
from modelzoo_trainer.zoo.models.hugging_face.causal_lm import HfCausalLm
from modelzoo_trainer.zoo.models.hugging_face.policy import (
    Adapters,
    check_policy,
    remove_dropout,
    warn_of_dropout,
)
from modelzoo_trainer.zoo.models.inner_decoder import decoder_of
from modelzoo_trainer.zoo.models.language_loss import counted_labels, num_counted
from modelzoo_trainer.zoo.models.parametrization import LrAdjustmentGroup

LossType = Literal["sigmoid", "hinge", "ipo", "dpop"]
Policy: TypeAlias = Decoder | HfCausalLm
_P = TypeVar("_P", bound=nn.Module)

_POLICY: Final = "policy_model."
_REFERENCE: Final = "ref_model."
_ANSWERS: Final = ("chosen", "rejected")
_FEATURES: Final = ("input_ids", "attention_mask", "labels")
_DROPOUT_RATES: Final = ("dropout_rate", "attention_dropout_rate", "embedding_dropout_rate")
_OF_ITS_LOSS: Final = ("loss_scaling", "loss_weight", "compute_eval_metrics")
_BALANCING: Final = "load_balancing_loss_coef"
_OTHER_RATES: Final = ("residual_dropout_rate", "embd_pdrop")
_HUGGING_FACE: Final = "hf_causal_lm"


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
    """A language model that is trained on pairs of answers, and the frozen one that it starts from.

    The reference is a copy of the initial weights, or of the checkpoint that a run starts from, if
    that has a policy alone: the weights of any run of that model. A resumed run keeps its
    reference. With `peft_config` in `policy_model` there is no copy: the reference is the same
    model with its adapters switched off.

    Args:
        policy_model: `name` of a decoder, or `hf_causal_lm`, and its settings.
        dpo: Settings of the loss, see `DpoSettings`.
        compute_eval_metrics: Whether a validation has metrics besides the loss.

    Raises:
        ConfigError: If a setting is invalid.
    """

    model_arguments: ClassVar[tuple[str, ...]] = ("policy_model",)
    """Arguments that are settings of a model, which a file has checked line by line."""
    forward_methods: ClassVar[tuple[str, ...]] = ("generate",)
    """Methods besides `forward` for which a sharded model gathers its parameters."""
    frozen_parts: ClassVar[tuple[str, ...]] = ("ref_model",)
    """Children that are never trained, and get no adapters."""

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
            self.policy_model: Policy = cls(**arguments)
        if isinstance(self.policy_model, HfCausalLm):
            self._prepare(self.policy_model, arguments)
        self.ref_model: Policy | None = None
        self._adapters: Adapters | None = None
        if self.settings.reference_free:
            return
        if arguments.get("peft_config") is not None:
            self._adapters = Adapters(self.policy_model)
        else:
            self.ref_model = _frozen_copy(self.policy_model)

    def _prepare(self, policy: HfCausalLm, given: Mapping[str, Any]) -> None:
        if self.settings.disable_dropout:
            warn_of_dropout(given)
            remove_dropout(policy.model)
        if getattr(policy.config, "output_router_logits", False):
            warnings.warn(
                "model.policy_model: output_router_logits (True) has no effect: dpo has a loss of "
                "its own, without the balancing loss of experts. Set it to false in "
                "config_overrides.",
                stacklevel=3,
            )

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
        policy, arguments = _policy_of(policy_model, _settings_of(dpo))
        with _naming_the_policy():
            policy.check_arguments(**arguments)

    @classmethod
    def limit_of(cls, name: str, arguments: Mapping[str, Any]) -> int | EllipsisType | None:
        """Return a limit that a model with these arguments will have; ... = known when built."""
        policy, own = _policy_of(arguments["policy_model"], _settings_of(arguments.get("dpo")))
        if policy is HfCausalLm:
            return HfCausalLm.limit_of(name, own)
        known = inspect.signature(policy).parameters
        given: int | None = own.get(name, known[name].default) if name in known else None
        return given

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
        """Groups of parameters with learning rate factors, as in a decoder."""
        return self._decoder("lr_adjustment_groups").lr_adjustment_groups

    @property
    def tensor_plan(self) -> dict[str, str]:
        """Tensor parallelism: both models are split as the decoder is."""
        return self._of_both(self._decoder("tensor_plan").tensor_plan)

    @property
    def sequence_plan(self) -> dict[str, str]:
        """Sequence parallelism: both models have the plan of the decoder."""
        return self._of_both(self._decoder("sequence_plan").sequence_plan)

    def _of_both(self, plan: Mapping[str, str]) -> dict[str, str]:
        models = (_POLICY,) if self.ref_model is None else (_POLICY, _REFERENCE)
        return {f"{model}{name}": style for model in models for name, style in plan.items()}

    @property
    def split_rows(self) -> Callable[[ContextParallel], None]:
        """Context parallelism: both models split their rows, if they are decoders."""
        self._decoder("split_rows")
        return self._split_rows

    def _split_rows(self, parallel: ContextParallel) -> None:
        for model in (self.policy_model, self.ref_model):
            if isinstance(model, Decoder):
                model.split_rows(parallel)

    def _decoder(self, name: str) -> Decoder:
        if isinstance(self.policy_model, Decoder):
            return self.policy_model
        raise AttributeError(f"{name} of {type(self.policy_model).__name__}")

    @property
    def weights_folder(self) -> Path | None:
        """The folder whose weights are still to be loaded, into both models."""
        policy = self.policy_model
        return policy.weights_folder if isinstance(policy, HfCausalLm) else None

    @property
    def resets_parts(self) -> bool:
        """Whether `reset_steps` initializes the policy, too."""
        return isinstance(self.policy_model, HfCausalLm)

    @override
    def train(self, mode: bool = True) -> Self:
        """Set the mode of the policy; the reference stays in eval mode."""
        super().train(mode)
        if self.ref_model is not None:
            self.ref_model.eval()
        return self

    def reset_parameters(self) -> None:
        """Initialize the policy and copy it to the reference; also after `to_empty`."""
        for one in (self.policy_model, self.ref_model):  # ties shared weights
            if isinstance(one, Decoder):
                one.reset_parameters()
            elif one is not None:
                one.model.tie_weights()
        for _, step in self.reset_steps():
            step()

    def reset_steps(self) -> Iterator[tuple[nn.Module, Callable[[], object]]]:
        """Yield parts of both models, each with the function that gives it its initial values.

        Weights of the reference are copies. A decoder is initialized by its own steps, before
        these.
        """
        if isinstance(self.policy_model, HfCausalLm):
            yield from self.policy_model.reset_steps()
        if self.ref_model is None:
            return
        for name, reference in self.ref_model.named_modules():
            policy: Any = self.policy_model.get_submodule(name)
            policy = getattr(policy, "base_layer", policy)
            if any(True for _ in _own_tensors(reference)):
                parts = nn.ModuleList([_owner(policy), _owner(reference)])
                yield parts, partial(_copy, policy, reference)

    def pretrained_state(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return an entry for each tensor of both models, of the folder of the policy.

        Args:
            found: The tensors of the folder by name.

        Raises:
            ConfigError: As for the policy.
        """
        assert isinstance(self.policy_model, HfCausalLm)
        return self._both(self.policy_model.pretrained_state(found))

    def complete_state(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of a checkpoint for both models, if it has the policy's alone.

        Args:
            found: Entries by name, with or without `policy_model.` in front; weights of
                `transformers` by their names.

        Raises:
            ConfigError: If it has adapters of another training, which would not be part of the
                reference: that is the policy without its adapters.
        """
        if any(name.startswith(_REFERENCE) for name in found):
            return dict(found)
        policy = self.policy_model
        names = PlainNames(policy.state_dict())
        if self._adapters is not None and any(name in names.added for name in found):
            raise ConfigError(
                "The checkpoint has adapters, which would not be part of the reference: with "
                "model.policy_model.peft_config this is the model without adapters. Merge them: "
                "write a folder with save_pretrained, and set pretrained_model_name_or_path of "
                "policy_model to it."
            )
        bare = {name.removeprefix(_POLICY): value for name, value in found.items()}
        if isinstance(policy, HfCausalLm):
            return self._both(policy.complete_state(bare))
        own = {plain: name for name, plain in names.plain.items()}  # of layers with adapters
        return self._both({own.get(name, name): value for name, value in bare.items()})

    def _both(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of the policy by their names here, and its copy's."""
        found = {f"{_POLICY}{name}": value for name, value in entries.items()}
        if self.ref_model is not None:
            plain = PlainNames(entries).plain
            found |= {f"{_REFERENCE}{plain[name]}": entries[name] for name in plain}
        return found

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the loss and how the two answers compare.

        Args:
            batch: `input_ids`, `attention_mask` and `labels` of both answers, with `chosen_` and
                `rejected_` in front. The mask is 1 where a label counts; one of -100 never does.

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
        if self._adapters is not None:
            with self._adapters.off():
                return self._log_probs(self.policy_model, rows)
        if self.ref_model is None:
            zeros = torch.zeros(len(rows["labels"]) // 2, device=rows["labels"].device)
            return zeros, zeros
        return self._log_probs(self.ref_model, rows)

    def _log_probs(self, model: Policy, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        losses = model.label_losses(rows["input_ids"], rows["labels"])
        mask = counted_labels(rows["labels"], rows["attention_mask"])
        # A product would keep non-finite values where the mask is 0.
        sums = (losses * mask).where(mask != 0, 0.0).sum(dim=1)
        if self.settings.loss_type == "ipo":
            sums = sums / mask.sum(dim=1).clamp(min=1)
        chosen, rejected = (-sums).view(-1, 2).unbind(dim=1)
        return chosen, rejected

    def count_labels(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return how many labels of a batch count; see `zoo/models/language_loss.py`."""
        nums = [
            num_counted(batch.get(f"{answer}_labels"), batch.get(f"{answer}_attention_mask"))
            for answer in _ANSWERS
        ]
        given = [num for num in nums if num is not None]
        return torch.stack(given).sum() if len(given) == len(nums) else None

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
                f"the data processor DpoHDF5DataProcessor, or HuggingFaceDataProcessor with task: "
                f"preference."
            )
    return torch.stack([batch[key] for key in keys], dim=1).flatten(0, 1)


def _frozen_copy(policy: _P) -> _P:
    # Of a plan, tensors have no memory, whose address their own way to copy them reads.
    copies: dict[int, Any] = {id(one): one.detach().clone() for one in policy.buffers()}
    for one in policy.parameters():
        copies[id(one)] = nn.Parameter(one.detach().clone(), requires_grad=False)
    return copy.deepcopy(policy, copies).eval()


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a module without its children."""
    for tensors in (module._parameters, module._buffers):
        yield from ((name, one) for name, one in tensors.items() if one is not None)


def _owner(module: nn.Module) -> nn.Module:
    """Return a module with the tensors of a module, also when these are replaced; no children."""
    owner = nn.Module()
    owner._parameters, owner._buffers = module._parameters, module._buffers
    return owner


@torch.no_grad()
def _copy(policy: nn.Module, reference: nn.Module) -> None:
    sources = dict(_own_tensors(policy))
    for name, target in _own_tensors(reference):
        target.copy_(sources[name])


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


def _policy_of(given: Mapping[str, Any], dpo: DpoSettings) -> tuple[type[Policy], dict[str, Any]]:
    """Return the class of the policy and its arguments."""
    name = given.get("name") or given.get("model_name") if isinstance(given, Mapping) else None
    if isinstance(name, str) and name.lower() == _HUGGING_FACE:
        arguments = {key: one for key, one in given.items() if key not in ("name", "model_name")}
        check_policy(arguments)
        return HfCausalLm, arguments
    cls, arguments = decoder_of("policy_model", given, others=(_HUGGING_FACE,))
    if dpo.disable_dropout:
        for rate in _OTHER_RATES:
            arguments.pop(rate, None)
        arguments |= dict.fromkeys(_DROPOUT_RATES, 0.0)
    return cls, arguments
