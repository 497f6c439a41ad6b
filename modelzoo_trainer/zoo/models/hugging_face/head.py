"""The body and the head of a language model of `transformers`, for a loss without logits.

Tests show for each family in `FAMILIES` that the head gets the first output of the body, and that
nothing but the settings here happens to its logits.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from torch import nn

from modelzoo_trainer.zoo.models.head_chunks import HeadSettings
from modelzoo_trainer.zoo.models.hugging_face.attention import FAMILIES, has_expert_loss
from modelzoo_trainer.zoo.models.language_head import is_plain, num_hooks

_LIBRARY: Final = "transformers."


class Parts(NamedTuple):
    """A language model in two parts."""

    body: Any
    """Takes the same arguments as the model; its first output is what the head gets."""
    head: nn.Module
    settings: HeadSettings


def parts_of(model: Any) -> Parts | None:
    """Return the parts of a model; None where it can only be called as a whole.

    That is one of another family, with a loss of experts or code of its own, with hooks or another
    `forward`, with adapters or hooks at its head, or with tokens that adapters add.
    """
    if model.config.model_type not in FAMILIES or has_expert_loss(model.config):
        return None
    adapters = getattr(model, "active_peft_config", None)
    if getattr(adapters, "is_prompt_learning", False):
        return None
    whole = model if adapters is None else model.get_base_model()
    body, head = getattr(whole, whole.base_model_prefix, None), whole.get_output_embeddings()
    is_known = type(whole).__module__.startswith(_LIBRARY)
    if any(num_hooks(one) or "forward" in vars(one) for one in (model, whole)):
        return None
    if body is None or not is_known or not isinstance(head, nn.Module) or not is_plain(head):
        return None
    return Parts(body, head, settings_of(whole.config))


def settings_of(config: Any) -> HeadSettings:
    """Return what happens to the logits of a model of `FAMILIES`."""
    factor = getattr(config, "logit_scale", None) or 1.0  # Cohere
    divisor = getattr(config, "logits_scaling", None) or 1.0  # Granite
    bound = getattr(config, "final_logit_softcapping", None)  # Gemma
    return HeadSettings(factor / divisor, bound)
