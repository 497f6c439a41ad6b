"""Where the published configurations lie that are not part of the project, if they are there."""

import os
from pathlib import Path

CORPUS = Path(os.environ.get("MODELZOO_CORPUS") or "/nonexistent")
CONFIGURATIONS = CORPUS / "cerebras_modelzoo"
"""The YAML files; the other folders have recorded numbers."""
