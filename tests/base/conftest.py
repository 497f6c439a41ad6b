"""The fixtures of tests of configuration files."""

from tests.config.conftest import check, complaints, names

__all__ = ["check", "complaints", "names"]
