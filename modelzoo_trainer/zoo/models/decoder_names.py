"""The decoder classes, under the names that programs import."""

from typing import Final

from modelzoo_trainer.zoo.models.gpt2 import Gpt2
from modelzoo_trainer.zoo.models.gptj import GptJ

Llama: Final = Gpt2
"""A Llama has the same class as a GPT-2 and the same defaults: give the settings that differ."""

__all__ = ["Gpt2", "GptJ", "Llama"]
