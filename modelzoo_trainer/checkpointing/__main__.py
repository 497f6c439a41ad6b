"""Inspect checkpoints: python -m modelzoo_trainer.checkpointing --help."""

import sys

from modelzoo_trainer.checkpointing.commands import main

if __name__ == "__main__":
    sys.exit(main())
