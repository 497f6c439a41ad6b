"""What the server of `published.py` imports once, so that each run starts at once."""

import torch._dynamo  # noqa: F401  # by the first optimizer
