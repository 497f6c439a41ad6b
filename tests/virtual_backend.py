"""The backend of the virtual device: `device: virtual`, in a process that calls `add_device`."""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import override

from backends import select
from backends.accelerator import AcceleratorBackend
from tests.virtual_device import NAME, install


class VirtualBackend(AcceleratorBackend):
    """An accelerator of the tests."""

    name: ClassVar[str] = NAME

    def __init__(self, **options: Any) -> None:
        super().__init__(kind=NAME, **options)

    @staticmethod
    @override
    def is_available(kind: str | None = None) -> bool:
        return True


def add_device() -> None:
    """Register the device in torch and in this package, for good. Idempotent."""
    install()
    select._KNOWN[NAME] = (__name__, VirtualBackend.__name__)
