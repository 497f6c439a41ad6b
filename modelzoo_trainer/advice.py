"""Deprecated name of `modelzoo_trainer.interceptors`."""

from modelzoo_trainer.interceptors import Interceptable as Advised
from modelzoo_trainer.interceptors import event as event

__all__ = ["Advised", "event"]
