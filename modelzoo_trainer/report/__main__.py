"""Write a report: python -m modelzoo_trainer.report RUN_DIR."""

import sys

from modelzoo_trainer.report.command import main

if __name__ == "__main__":
    sys.exit(main())
