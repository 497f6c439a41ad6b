"""Run a configuration: python -m modelzoo_trainer --params params.yaml."""

import sys

from modelzoo_trainer.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
