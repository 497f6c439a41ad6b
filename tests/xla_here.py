"""Whether tests can run on torch_xla."""

import importlib.util
import os

# torch_xla patches torch for the whole process: it takes part where somebody asks for it.
HAS_XLA = importlib.util.find_spec("torch_xla") is not None and "PJRT_DEVICE" in os.environ
WHY_NOT = "no torch_xla, or PJRT_DEVICE is not set"
