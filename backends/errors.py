"""The exceptions of backends."""


class BackendError(RuntimeError):
    """A device or its runtime failed, or was asked for what it cannot do."""


class BackendUnavailable(BackendError):
    """The device that was asked for is not there."""


class HostReadError(BackendError):
    """A value was read on the host inside the traced step."""
