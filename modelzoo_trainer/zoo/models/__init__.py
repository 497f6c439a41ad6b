"""Shipped models, found by name with `model_class`; each is a plain `torch.nn.Module`."""

from modelzoo_trainer.zoo.models.registry import MODELS, model_class

__all__ = ["MODELS", "model_class"]
