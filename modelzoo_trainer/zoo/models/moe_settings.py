"""Settings of a mixture of experts, with the names of Cerebras configurations."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from typing_extensions import TypedDict

from modelzoo_trainer.base.constraints import NonNegativeFloat, NonNegativeSize, Size, checked
from modelzoo_trainer.errors import ConfigError, suggest
from modelzoo_trainer.zoo.models.initializers import InitializerSetting

RoutingAlgorithm = Literal["learned", "hash", "uniform"]
RouterNonlinearity = Literal["softmax", "sigmoid", "sinkhorn"]
BalancedOver = Literal["sequence", "batch"]
Implementation = Literal["experimental", "functional", "optimized"]

_OF_LEARNED: Final = (
    "router_fp32",
    "router_use_bias",
    "router_selection_nonlinearity",
    "expert_weighting_nonlinearity",
    "expert_weighting_normalization",
    "sinkhorn_n_iters",
    "null_expert_bias",
    "gate_initializer",
)


class MoeParams(TypedDict, total=False):
    """Mixture of experts in every layer, instead of one feed-forward network.

    Attributes:
        num_experts: Number of routed experts; together with `num_shared_experts`, more than one
            enables the mixture.
        top_k: Number of experts of each token.
        num_shared_experts: Number of experts that all tokens use as well, with weight 1.
        routing_algorithm: `learned`; `hash` = by token id; `uniform` = by position.
        router_selection_nonlinearity: Of the scores, by which the largest are chosen.
        expert_weighting_nonlinearity: Of the scores, for the weights of the chosen experts.
        expert_weighting_normalization: Whether these weights are divided by their sum.
        null_expert_bias: Added to that sum, so that weights depend on the scores with `top_k: 1`.
        sinkhorn_n_iters: Number of iterations of `sinkhorn`.
        router_fp32: Whether the scores are computed in float32.
        router_use_bias: Whether the router has a bias.
        gate_initializer: Of the router's weights.
        probability_before_ffn: Whether weights multiply the inputs of experts, not their outputs.
        load_balancing_loss_coef: Factor on the load balancing loss, which is added to the loss in
            training; 0 = none.
        load_balancing_loss_over: Whether the loss balances the experts of each `sequence`, as in
            the Model Zoo, or of each `batch` of a process, as in the papers. Not a published key.
        moe_implementation: Of the Model Zoo: whose names and shapes of tensors
            `checkpoint convert --to cerebras` writes. No effect on the computation.
    """

    __pydantic_config__ = {"extra": "allow"}  # type: ignore[misc]  # noqa: RUF012

    num_experts: NonNegativeSize
    top_k: Size
    num_shared_experts: Size | None
    routing_algorithm: RoutingAlgorithm
    router_selection_nonlinearity: RouterNonlinearity | None
    expert_weighting_nonlinearity: RouterNonlinearity | None
    expert_weighting_normalization: bool | None
    null_expert_bias: NonNegativeFloat | None
    sinkhorn_n_iters: Size | None
    router_fp32: bool
    router_use_bias: bool
    gate_initializer: InitializerSetting | None
    probability_before_ffn: bool
    load_balancing_loss_coef: NonNegativeFloat
    load_balancing_loss_over: BalancedOver
    moe_implementation: Implementation


@checked("moe")
@dataclass(frozen=True, kw_only=True)
class MoeSettings:
    """The settings of `MoeParams`, all with their values."""

    num_experts: NonNegativeSize = 0
    top_k: Size = 1
    num_shared_experts: Size | None = None
    routing_algorithm: RoutingAlgorithm = "learned"
    router_selection_nonlinearity: RouterNonlinearity = "softmax"
    expert_weighting_nonlinearity: RouterNonlinearity = "softmax"
    expert_weighting_normalization: bool = True
    null_expert_bias: NonNegativeFloat = 0.0
    sinkhorn_n_iters: Size = 1
    router_fp32: bool = True
    router_use_bias: bool = False
    gate_initializer: InitializerSetting | None = None
    probability_before_ffn: bool = False
    load_balancing_loss_coef: NonNegativeFloat = 0.0
    load_balancing_loss_over: BalancedOver = "sequence"
    moe_implementation: Implementation = "experimental"

    @property
    def num_shared(self) -> int:
        """The number of shared experts."""
        return self.num_shared_experts or 0

    @property
    def num_in_all(self) -> int:
        """The number of experts, routed and shared."""
        return self.num_experts + self.num_shared

    @property
    def is_on(self) -> bool:
        """Whether there is a mixture at all."""
        return self.num_in_all > 1

    def __post_init__(self) -> None:
        if not self.is_on:
            return
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"moe.top_k is {self.top_k}, but moe.num_experts is {self.num_experts}. Set top_k "
                "to at least 1 and at most num_experts."
            )
        if self.routing_algorithm == "learned":
            self._check_learned()
        else:
            self._check_fixed()

    def _check_fixed(self) -> None:
        how = self.routing_algorithm
        if how == "hash" and self.top_k != 1:
            raise ConfigError(
                f"moe.top_k is {self.top_k}; moe.routing_algorithm: hash gives each token one "
                "expert. Set top_k: 1."
            )
        if self.num_shared:
            raise ConfigError(
                f"moe.num_shared_experts ({self.num_shared}) requires moe.routing_algorithm: "
                f"learned, got {how!r}."
            )
        if self.load_balancing_loss_coef:
            raise ConfigError(
                f"moe.load_balancing_loss_coef ({self.load_balancing_loss_coef}) requires "
                f"moe.routing_algorithm: learned, got {how!r}. Set it to 0."
            )

    def _check_learned(self) -> None:
        if self.null_expert_bias and not self.expert_weighting_normalization:
            raise ConfigError(
                f"moe.null_expert_bias ({self.null_expert_bias}) has no effect without "
                "moe.expert_weighting_normalization. Set that to true, or null_expert_bias to 0."
            )
        if self.expert_weighting_nonlinearity == "sinkhorn":
            raise ConfigError(
                "moe.expert_weighting_nonlinearity: sinkhorn has no gradient, so the router would "
                "not be trained. Use softmax or sigmoid."
            )
        if self.router_selection_nonlinearity == "sinkhorn" and self.load_balancing_loss_coef:
            raise ConfigError(
                f"moe.load_balancing_loss_coef ({self.load_balancing_loss_coef}) is not supported "
                "with moe.router_selection_nonlinearity: sinkhorn, which balances by itself. Set "
                "it to 0, or use softmax or sigmoid."
            )


def read_moe(given: Mapping[str, Any]) -> MoeSettings:
    """Return the settings of a mixture; a null value means the default.

    Raises:
        ConfigError: If a key is unknown, a value is out of range, or two contradict each other.
    """
    known = [field.name for field in fields(MoeSettings)]
    for key in given:
        if key not in known:
            raise ConfigError(f"moe.{key}: no such setting. {suggest(str(key), known)}")
    return MoeSettings(**{key: one for key, one in given.items() if one is not None})


def warn_of_unused(settings: MoeSettings, stacklevel: int = 2) -> None:
    """Warn of settings without effect, and of a router that is not trained."""
    unused = _unused_keys(settings)
    changed = [
        field.name
        for field in fields(settings)
        if field.name in unused and getattr(settings, field.name) != field.default
    ]
    if changed:
        warnings.warn(
            f"moe.{', moe.'.join(changed)}: no effect with {_cause(settings)}. Remove "
            f"{'it' if len(changed) == 1 else 'them'}.",
            stacklevel=stacklevel,
        )
    if settings.is_on and _leaves_router_untrained(settings):
        warnings.warn(
            "moe.top_k is 1 with normalized weights, which are then always 1: the router is not "
            "trained. Set moe.load_balancing_loss_coef or moe.null_expert_bias > 0, or "
            "moe.expert_weighting_normalization: false.",
            stacklevel=stacklevel,
        )


def _unused_keys(settings: MoeSettings) -> set[str]:
    """Return the keys that have no effect with the others."""
    if not settings.is_on:
        return {field.name for field in fields(MoeSettings)} - {"num_experts", "moe_implementation"}
    unused: set[str] = set()
    if settings.routing_algorithm != "learned":
        unused.update(_OF_LEARNED)
    if settings.routing_algorithm == "hash":
        unused.add("probability_before_ffn")
    if settings.router_selection_nonlinearity != "sinkhorn":
        unused.add("sinkhorn_n_iters")
    if not settings.load_balancing_loss_coef:
        unused.add("load_balancing_loss_over")
    return unused


def _cause(settings: MoeSettings) -> str:
    if not settings.is_on:
        return f"num_experts {settings.num_experts}, which means no mixture"
    return "the other settings of moe"


def _leaves_router_untrained(settings: MoeSettings) -> bool:
    return (
        settings.routing_algorithm == "learned"
        and settings.top_k == 1
        and settings.num_experts > 1
        and settings.expert_weighting_normalization
        and not settings.null_expert_bias
        and not settings.load_balancing_loss_coef
    )
