"""Deprecated name of `modelzoo_trainer.hooks.interceptors`."""

from modelzoo_trainer.hooks.interceptors import Interceptable as Advised
from modelzoo_trainer.hooks.interceptors import event as event

__all__ = ["Advised", "event"]
