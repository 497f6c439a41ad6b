"""Deprecated name of `modelzoo_trainer.interceptors`."""

from modelzoo_trainer.interceptors import Advised as Advised
from modelzoo_trainer.interceptors import event as event
